"""Press & Wolf 2017, Tables 2 and 3: how well the word vectors of skip-gram and language models rank pairs of words.

An untied model has two tables of word vectors, one for the input and one for the output. A tied model uses one table
for both. The measure (rho) is Spearman's correlation of cosines with human judgements, for each of these tables, on the
paper's five benchmarks. Each claim compares two tables by their mean rho over the benchmarks, with an interval over
seeds.

Table 2 is about skip-gram, Table 3 about language models, and `_Quality` has their common code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from reefknot.errors import DataError
from reefknot.lab.evaluation.benchmarks import BENCHMARKS, PRESS
from reefknot.lab.evaluation.similarity import find_benchmarks, score_benchmark
from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.papers.figures.intervals import (
    Estimate,
    estimate_difference,
    estimate_mean,
    estimate_mean_correlation,
    format_estimate,
    format_verdict,
)
from reefknot.lab.papers.figures.pictures import Panel, draw_bars
from reefknot.lab.papers.figures.runs import check_one_row
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.runs.loading import Result
from reefknot.lab.runs.result import Judgement
from reefknot.lab.tasks.word_vectors import open_vectors

TABLES = ("input", "output", "tied")
"""The tables of word vectors, in the order of the columns."""
REPLACED_CORPORA = {"enwiki-sample": "text8"}
"""Our replacements for corpora of the paper, with the name of the paper's corpus."""

Rhos = Mapping[str, float]
"""Correlations by benchmark."""


class Claim(NamedTuple):
    """A claim of the paper: one table ranks pairs of words better than another."""

    better: str
    other: str
    sentence: str


class _Quality(Figure):
    """Bars by benchmark and table, with a panel for each corpus."""

    claims: ClassVar[Sequence[Claim]]

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measurements:
        """Measure the correlations of each table on each benchmark over seeds, by corpus, and check the claims."""
        judgements_by_corpus: dict[str, dict[str, list[Sequence[Judgement]]]] = {}  # by corpus and table, one per run
        runs_by_table: dict[tuple[str, str], list[Result]] = {}  # by corpus and table
        for result in runs:
            assert result.record is not None
            corpus = result.record.corpus.name
            for table, judgements in _read_judgements(result, data, device).items():
                runs_by_table.setdefault((corpus, table), []).append(result)
                judgements_by_corpus.setdefault(corpus, {}).setdefault(table, []).append(judgements)

        for table_runs in runs_by_table.values():
            check_one_row(table_runs)
        return {
            "texts": [self._measure_corpus(corpus, by_table) for corpus, by_table in judgements_by_corpus.items()],
        }

    def _measure_corpus(
        self, corpus: str, judgements_by_table: Mapping[str, Sequence[Sequence[Judgement]]]
    ) -> dict[str, Any]:
        """Return the measurements on one corpus.

        Args:
            corpus: The name of the corpus.
            judgements_by_table: The judgements of each run (one per benchmark), by table.
        """
        rhos_by_table: dict[str, list[Rhos]] = {}
        for table, judgements_of_runs in judgements_by_table.items():
            rhos_by_table[table] = [_read_rhos(judgements) for judgements in judgements_of_runs]

        # Use the benchmarks that all runs have, so that their means can be compared.
        all_rhos = [rhos for rhos_of_runs in rhos_by_table.values() for rhos in rhos_of_runs]
        shared_benchmarks = [name for name in PRESS if all(name in rhos for rhos in all_rhos)]
        if not shared_benchmarks:
            raise DataError(f"{corpus}: none of the five benchmarks has a pair of words that all runs know")
        means_by_table = {}
        for table, rhos_of_runs in rhos_by_table.items():
            means_by_table[table] = [fmean(rhos[name] for name in shared_benchmarks) for rhos in rhos_of_runs]

        paper_corpus = REPLACED_CORPORA.get(corpus, corpus)
        paper_rhos = self._read_paper_rhos(paper_corpus)
        benchmarks = []
        for name in shared_benchmarks:
            pairs = {}
            our_rhos = {}
            for table, rhos_of_runs in rhos_by_table.items():
                pairs[table] = _count_pairs(judgements_by_table[table][0], name)
                our_rhos[table] = estimate_mean_correlation([rhos[name] for rhos in rhos_of_runs]).json()
            benchmarks.append(
                {
                    "name": name,
                    "pairs": pairs,
                    "of": BENCHMARKS[name].pairs,
                    "ours": our_rhos,
                    "paper": {table: rhos[name] for table, rhos in paper_rhos.items() if name in rhos},
                }
            )

        return {
            "corpus": corpus,
            "beside": paper_corpus if paper_rhos else None,
            "benchmarks": benchmarks,
            "mean": {table: estimate_mean_correlation(means).json() for table, means in means_by_table.items()},
            "findings": self._check_claims(means_by_table),
        }

    def _check_claims(self, means_by_table: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
        """Return the measured difference for each claim whose two tables were measured."""
        findings = []
        for claim in self.claims:
            if claim.better in means_by_table and claim.other in means_by_table:
                difference = _compare_tables(claim.better, claim.other, means_by_table)
                findings.append({"claim": claim.sentence, "difference": difference.json()})
        return findings

    def _read_paper_rhos(self, corpus: str) -> dict[str, Rhos]:
        """Return the paper's correlations on a corpus, by table, from the rows of the recipe."""
        recipe = load_recipe(self.recipe)
        paper_rhos: dict[str, Rhos] = {}
        for row in recipe.rows:
            if row.trained and recipe.experiments[row.name].corpus.name == corpus:
                for table, rhos in row.paper_similarity.items():
                    paper_rhos[table] = rhos
        return paper_rhos

    def draw(self, measured: Measurements) -> Drawing:
        """Draw a panel for each corpus."""
        panels = []
        for corpus_result in measured["texts"]:
            benchmarks = corpus_result["benchmarks"]
            labels = [benchmark["name"] for benchmark in benchmarks]
            estimates = {}
            paper_values = {}
            for table in TABLES:
                if table in benchmarks[0]["ours"]:
                    estimates[table] = [benchmark["ours"][table] for benchmark in benchmarks]
                if table in benchmarks[0]["paper"]:
                    paper_values[table] = [benchmark["paper"][table] for benchmark in benchmarks]
            heading = _format_heading(corpus_result)
            panels.append(Panel(heading, labels, estimates, paper_values, y_label="Spearman's rho"))
        caption = f"{self.title}. Bars are means over seeds with 95 % intervals."
        return draw_bars(self.slug, panels, x_label="benchmark", caption=caption)

    def format_lines(self, measured: Measurements) -> list[str]:
        """Return a line for each benchmark, ours / the paper's, then the verdicts on the claims."""
        lines = []
        for corpus_result in measured["texts"]:
            tables = [table for table in TABLES if table in corpus_result["mean"]]

            # The rows of the text table: titles, benchmarks and the mean.
            cell_rows = [["benchmark (pairs known)", *tables]]
            for benchmark in corpus_result["benchmarks"]:
                label = f"{benchmark['name']} ({_format_coverage(benchmark)})"
                cell_rows.append([label, *_format_cells(benchmark, tables)])
            cell_rows.append(["mean", *(format_estimate(corpus_result["mean"][table]) for table in tables)])

            lines.append(f"{_format_heading(corpus_result)}; ours, 95 % interval over seeds / paper")
            label_width = max(len(label) for label, *_ in cell_rows[1:])
            for label, *cells in cell_rows:
                aligned_cells = [f"{cell:<26}" for cell in cells]
                lines.append("  ".join([f"{label:<{label_width}}", *aligned_cells]).rstrip())

            for finding in corpus_result["findings"]:
                lines.append(format_verdict(finding["difference"], finding["claim"]))
            lines.append("")
        return lines[:-1]


class SkipGramQuality(_Quality):
    """Table 2."""

    name = "press2017/table2"
    recipe = "press2017/table2"
    fallback_recipe = "press2017/enwiki-vectors"
    tasks = ("skip_gram",)
    title = "Press & Wolf 2017, Table 2: word similarity by skip-gram's tables"
    description = (
        "Spearman's correlation with human judgements for the input, output and tied tables of skip-gram, trained on "
        "text8. The input and the output table are about equally good, and the tied table is worse than both."
    )
    claims = (
        Claim("input", "tied", "The input table of skip-gram ranks pairs better than the tied table"),
        Claim("output", "tied", "The output table of skip-gram ranks pairs better than the tied table"),
    )


class LanguageModelQuality(_Quality):
    """Table 3."""

    name = "press2017/table3"
    recipe = "press2017/table3"
    title = "Press & Wolf 2017, Table 3: word similarity by a language model's tables"
    description = (
        "Spearman's correlation with human judgements for the input, output and tied tables of the small language "
        "model, on the Penn Treebank and on text8. The output and the tied table are better than the input table."
    )
    claims = (
        Claim("output", "input", "The output table ranks pairs better than the input table"),
        Claim("tied", "input", "The tied table ranks pairs better than the input table"),
    )


def _read_judgements(result: Result, data: Path | None, device: str) -> Mapping[str, Sequence[Judgement]]:
    """Return the judgements in a run's result, or compute them from its vectors if the result has none."""
    assert result.record is not None
    if result.record.similarity:
        return result.record.similarity
    benchmarks = find_benchmarks(data)
    return {
        table: [score_benchmark(vectors, benchmarks[name]) for name in PRESS if name in benchmarks]
        for table, vectors in open_vectors(result.folder, device=device).items()
    }


def _read_rhos(judgements: Sequence[Judgement]) -> Rhos:
    """Return the correlations by benchmark, without benchmarks that have no correlation."""
    return {judgement.name: judgement.rho for judgement in judgements if judgement.rho is not None}


def _count_pairs(judgements: Sequence[Judgement], name: str) -> int:
    """Return how many pairs of a benchmark are in a run's vocabulary, which is the same for all seeds of a row."""
    return next(judgement.pairs for judgement in judgements if judgement.name == name)


def _format_coverage(benchmark: Mapping[str, Any]) -> str:
    """Return the number of pairs that were used, by table if the tables have different words."""
    pair_counts = benchmark["pairs"]
    if len(set(pair_counts.values())) == 1:
        counts = f"{next(iter(pair_counts.values())):,}"
    else:
        counts = ", ".join(f"{table} {count:,}" for table, count in pair_counts.items())
    return f"{counts} of {benchmark['of']:,}"


def _compare_tables(better: str, other: str, means_by_table: Mapping[str, Sequence[float]]) -> Estimate:
    """Return the difference between two tables.

    The input and the output table come from the same runs, so each run gives one difference. The tied table comes from
    other runs.
    """
    better_means = means_by_table[better]
    other_means = means_by_table[other]
    if "tied" in (better, other):
        return estimate_difference(better_means, other_means)
    gaps = [better_mean - other_mean for better_mean, other_mean in zip(better_means, other_means, strict=True)]
    return estimate_mean(gaps)


def _format_cells(benchmark: Mapping[str, Any], tables: Sequence[str]) -> list[str]:
    """Format our estimate and the paper's value for each table: "0.31 [0.28, 0.34] / 0.30"."""
    cells = []
    for table in tables:
        cell = format_estimate(benchmark["ours"][table])
        if table in benchmark["paper"]:
            cell += f" / {benchmark['paper'][table]:.2f}"
        cells.append(cell)
    return cells


def _format_heading(corpus_result: Mapping[str, Any]) -> str:
    """Return the name of a corpus, with the paper's corpus if it is another."""
    corpus = str(corpus_result["corpus"])
    paper_corpus = corpus_result["beside"]
    if paper_corpus in (None, corpus):
        return corpus
    return f"{corpus}, in place of {paper_corpus}"
