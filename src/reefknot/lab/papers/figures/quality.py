"""Press & Wolf 2017, Tables 2 and 3: how well the word vectors of skip-gram and language models rank pairs of words.

An untied model has two tables of word vectors, one for the input and one for the output; in a tied model both ends
share one. Table 2 is about skip-gram, Table 3 about language models, and `_Quality` has their common code.

The measure is Spearman's correlation with human judgements on the paper's five benchmarks, for each of these tables.
Each claim compares two tables by their mean correlation over the benchmarks, with an interval over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

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
from reefknot.lab.reports.results import Result
from reefknot.lab.runs.result import Judgement
from reefknot.lab.tasks.word_vectors import open_vectors

TABLES = ("input", "output", "tied")
REPLACED_CORPORA = {"enwiki-sample": "text8"}
"""Our replacements for corpora of the paper, with the name of the paper's corpus."""

Rhos = Mapping[str, float]
"""Correlations by benchmark."""


class _Quality(Figure):
    """Bars by benchmark and table, with a panel for each corpus."""

    claims: ClassVar[Sequence[tuple[str, str, str]]]
    """The paper's claims: the better table, the other table, and the claim as a sentence."""

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measurements:
        """Measure the correlations of each table on each benchmark over seeds, by corpus, and check the claims."""
        by_corpus: dict[str, dict[str, list[Sequence[Judgement]]]] = {}
        sources: dict[tuple[str, str], list[Result]] = {}  # the runs of each corpus and table
        for result in runs:
            assert result.record is not None
            corpus = result.record.corpus.name
            for table, judgements in _read_judgements(result, data, device).items():
                sources.setdefault((corpus, table), []).append(result)
                by_corpus.setdefault(corpus, {}).setdefault(table, []).append(judgements)
        for seeds in sources.values():
            check_one_row(seeds)
        return {"texts": [self._measure_corpus(corpus, by_table) for corpus, by_table in by_corpus.items()]}

    def _measure_corpus(self, corpus: str, by_table: Mapping[str, Sequence[Sequence[Judgement]]]) -> dict[str, Any]:
        """Return the measurements on one corpus.

        Args:
            corpus: The name of the corpus.
            by_table: The judgements of each run (one per benchmark), by table.
        """
        rhos = {table: [_rhos(judgements) for judgements in runs] for table, runs in by_table.items()}
        shared = [name for name in PRESS if all(name in run for runs in rhos.values() for run in runs)]
        if not shared:
            raise DataError(f"{corpus}: none of the five benchmarks has a pair of words that all runs know")
        means = {table: [fmean(run[name] for name in shared) for run in runs] for table, runs in rhos.items()}
        paper_corpus = REPLACED_CORPORA.get(corpus, corpus)
        paper_rhos = self._read_paper_rhos(paper_corpus)
        return {
            "corpus": corpus,
            "beside": paper_corpus if paper_rhos else None,
            "benchmarks": [
                {
                    "name": name,
                    "pairs": {table: _count_pairs(judgements, name) for table, (judgements, *_) in by_table.items()},
                    "of": BENCHMARKS[name].pairs,
                    "ours": {
                        table: estimate_mean_correlation([run[name] for run in runs]).json()
                        for table, runs in rhos.items()
                    },
                    "paper": {table: values[name] for table, values in paper_rhos.items() if name in values},
                }
                for name in shared
            ],
            "mean": {table: estimate_mean_correlation(values).json() for table, values in means.items()},
            "findings": [
                {"claim": claim, "difference": _compare_tables(better, other, means).json()}
                for better, other, claim in self.claims
                if better in means and other in means
            ],
        }

    def _read_paper_rhos(self, corpus: str) -> dict[str, Mapping[str, float]]:
        """Return the paper's correlations on a corpus, by table, from the rows of the recipe."""
        recipe = load_recipe(self.recipe)
        rows = [row for row in recipe.rows if row.trained and recipe.experiments[row.name].corpus.name == corpus]
        return {table: rhos for row in rows for table, rhos in row.paper_similarity.items()}

    def draw(self, measured: Measurements) -> Drawing:
        """Draw a panel for each corpus."""
        panels = []
        for text in measured["texts"]:
            rows = text["benchmarks"]
            labels = [row["name"] for row in rows]
            estimates = {table: [row["ours"][table] for row in rows] for table in TABLES if table in rows[0]["ours"]}
            papers = {table: [row["paper"][table] for row in rows] for table in TABLES if table in rows[0]["paper"]}
            panels.append(Panel(_format_heading(text), labels, estimates, papers, y_label="Spearman's rho"))
        caption = f"{self.title}. Bars are means over seeds with 95 % intervals."
        return draw_bars(self.slug, panels, x_label="benchmark", caption=caption)

    def format_lines(self, measured: Measurements) -> list[str]:
        """Return a line for each benchmark, ours / the paper's, then the verdicts on the claims."""
        lines = []
        for text in measured["texts"]:
            tables = [table for table in TABLES if table in text["mean"]]
            rows = [
                (f"{row['name']} ({_format_coverage(row)})", _format_cells(row, tables)) for row in text["benchmarks"]
            ]
            rows.append(("mean", [format_estimate(text["mean"][table]) for table in tables]))
            width = max(len(name) for name, _ in rows)
            lines += [f"{_format_heading(text)}; ours, 95 % interval over seeds / paper"]
            lines.append(
                "  ".join([f"{'benchmark (pairs known)':<{width}}", *(f"{table:<26}" for table in tables)]).rstrip()
            )
            lines += [
                "  ".join([f"{name:<{width}}", *(f"{cell:<26}" for cell in cells)]).rstrip() for name, cells in rows
            ]
            lines += [format_verdict(finding["difference"], finding["claim"]) for finding in text["findings"]] + [""]
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
        ("input", "tied", "The input table of skip-gram ranks pairs better than the tied table"),
        ("output", "tied", "The output table of skip-gram ranks pairs better than the tied table"),
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
        ("output", "input", "The output table ranks pairs better than the input table"),
        ("tied", "input", "The tied table ranks pairs better than the input table"),
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


def _rhos(judgements: Sequence[Judgement]) -> Rhos:
    return {judgement.name: judgement.rho for judgement in judgements if judgement.rho is not None}


def _count_pairs(judgements: Sequence[Judgement], name: str) -> int:
    """Return how many pairs of a benchmark are in a run's vocabulary, which is the same for all seeds of a row."""
    return next(judgement.pairs for judgement in judgements if judgement.name == name)


def _format_coverage(row: Mapping[str, Any]) -> str:
    """Return the number of pairs that were used, by table if the tables have different words."""
    pairs = row["pairs"]
    if len(set(pairs.values())) == 1:
        counts = f"{next(iter(pairs.values())):,}"
    else:
        counts = ", ".join(f"{table} {count:,}" for table, count in pairs.items())
    return f"{counts} of {row['of']:,}"


def _compare_tables(better: str, other: str, means: Mapping[str, Sequence[float]]) -> Estimate:
    """Return the difference between two tables.

    The input and the output table come from the same runs, so each run gives one difference. The tied table comes from
    other runs.
    """
    if "tied" in (better, other):
        return estimate_difference(means[better], means[other])
    gaps = [better_mean - other_mean for better_mean, other_mean in zip(means[better], means[other], strict=True)]
    return estimate_mean(gaps)


def _format_cells(row: Mapping[str, Any], tables: Sequence[str]) -> list[str]:
    """Format our estimate and the paper's value for each table: "0.31 [0.28, 0.34] / 0.30"."""
    cells = []
    for table in tables:
        paper = f" / {row['paper'][table]:.2f}" if table in row["paper"] else ""
        cells.append(format_estimate(row["ours"][table]) + paper)
    return cells


def _format_heading(text: Mapping[str, Any]) -> str:
    if text["beside"] in (None, text["corpus"]):
        return str(text["corpus"])
    return f"{text['corpus']}, in place of {text['beside']}"
