"""Press & Wolf 2017, Tables 2 and 3: how well the tables of skip-gram and of language models rank pairs of words.

The measure is Spearman's correlation with human judgements on the paper's five benchmarks, for the input and output
tables of the untied model and for the table of the tied model. Each claim compares two tables by their mean correlation
over the benchmarks, with an interval over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from reefknot.errors import DataError
from reefknot.lab.evaluation.benchmarks import BENCHMARKS, PRESS
from reefknot.lab.evaluation.similarity import find_benchmarks, score_benchmark
from reefknot.lab.papers.figures.contract import Figure, Measured
from reefknot.lab.papers.figures.intervals import (
    Estimate,
    apart,
    format_estimate,
    over_correlations,
    over_seeds,
    verdict,
)
from reefknot.lab.papers.figures.pictures import Panel, bars
from reefknot.lab.papers.figures.runs import check_one_row
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.results import Result
from reefknot.lab.runs.result import Judgement
from reefknot.lab.tasks.word_vectors import open_vectors

ENDS = ("input", "output", "tied")
STANDS_IN = {"enwiki-sample": "text8"}
"""Corpora of ours that replace a corpus of the paper, and the name of the paper's corpus."""

Rhos = Mapping[str, float]


class _Quality(Figure):
    """Bars by benchmark and table, with a panel for each corpus."""

    claims: ClassVar[Sequence[tuple[str, str, str]]]
    """The paper's claims: the better table, the other table, and the claim as a sentence."""

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """Measure the correlations of each table on each benchmark over seeds, by corpus, and check the claims."""
        by_corpus: dict[str, dict[str, list[Sequence[Judgement]]]] = {}
        origins: dict[tuple[str, str], list[Result]] = {}
        for result in runs:
            assert result.record is not None
            corpus = result.record.corpus.name
            for end, judgements in _judged(result, data, device).items():
                origins.setdefault((corpus, end), []).append(result)
                by_corpus.setdefault(corpus, {}).setdefault(end, []).append(judgements)
        for seeds in origins.values():
            check_one_row(seeds)
        return {"texts": [self._text(corpus, by_end) for corpus, by_end in by_corpus.items()]}

    def _text(self, corpus: str, by_end: Mapping[str, Sequence[Sequence[Judgement]]]) -> dict[str, Any]:
        rhos = {end: [_rhos(judgements) for judgements in runs] for end, runs in by_end.items()}
        shared = [name for name in PRESS if all(name in run for runs in rhos.values() for run in runs)]
        if not shared:
            raise DataError(f"{corpus}: none of the five benchmarks has a pair of words that all runs know")
        means = {end: [fmean(run[name] for name in shared) for run in runs] for end, runs in rhos.items()}
        papers = self._papers(STANDS_IN.get(corpus, corpus))
        return {
            "corpus": corpus,
            "beside": STANDS_IN.get(corpus, corpus) if papers else None,
            "benchmarks": [
                {
                    "name": name,
                    "pairs": {end: _pairs(judgements, name) for end, (judgements, *_) in by_end.items()},
                    "of": BENCHMARKS[name].pairs,
                    "ours": {end: over_correlations([run[name] for run in runs]).json() for end, runs in rhos.items()},
                    "paper": {end: rhos[name] for end, rhos in papers.items() if name in rhos},
                }
                for name in shared
            ],
            "mean": {end: over_correlations(values).json() for end, values in means.items()},
            "findings": [
                {"claim": claim, "difference": _difference(better, other, means).json()}
                for better, other, claim in self.claims
                if better in means and other in means
            ],
        }

    def _papers(self, corpus: str) -> dict[str, Mapping[str, float]]:
        """Return the paper's correlations on a corpus, by table, from the rows of the recipe."""
        recipe = load_recipe(self.recipe)
        rows = [row for row in recipe.rows if row.trained and recipe.experiments[row.name].corpus.name == corpus]
        return {end: rhos for row in rows for end, rhos in row.paper_similarity.items()}

    def draw(self, measured: Measured) -> Drawing:
        """Draw a panel for each corpus."""
        panels = []
        for text in measured["texts"]:
            rows = text["benchmarks"]
            ours = {end: [row["ours"][end] for row in rows] for end in ENDS if end in rows[0]["ours"]}
            papers = {end: [row["paper"][end] for row in rows] for end in ENDS if end in rows[0]["paper"]}
            panels.append(Panel(_heading(text), [row["name"] for row in rows], ours, papers, measured="Spearman's rho"))
        caption = f"{self.title}. Bars are means over seeds with 95 % intervals."
        return bars(self.slug, panels, along="benchmark", caption=caption)

    def lines(self, measured: Measured) -> list[str]:
        """Return a line for each benchmark, ours / the paper's, then the verdicts on the claims."""
        lines = []
        for text in measured["texts"]:
            ends = [end for end in ENDS if end in text["mean"]]
            rows = [(f"{row['name']} ({_coverage(row)})", _cells(row, ends)) for row in text["benchmarks"]]
            rows.append(("mean", [format_estimate(text["mean"][end]) for end in ends]))
            width = max(len(name) for name, _ in rows)
            lines += [f"{_heading(text)}; ours, 95 % interval over seeds / paper"]
            lines.append("  ".join([f"{'benchmark (pairs known)':<{width}}", *(f"{end:<26}" for end in ends)]).rstrip())
            lines += [
                "  ".join([f"{name:<{width}}", *(f"{cell:<26}" for cell in cells)]).rstrip() for name, cells in rows
            ]
            lines += [verdict(finding["difference"], finding["claim"]) for finding in text["findings"]] + [""]
        return lines[:-1]


class SkipGramQuality(_Quality):
    """Table 2."""

    name = "press2017/table2"
    recipe = "press2017/table2"
    stand_in = "press2017/enwiki-vectors"
    tasks = ("skip_gram",)
    title = "Press & Wolf 2017, Table 2: word similarity by skip-gram's tables"
    shows = (
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
    shows = (
        "Spearman's correlation with human judgements for the input, output and tied tables of the small language "
        "model, on the Penn Treebank and on text8. The output and the tied table are better than the input table."
    )
    claims = (
        ("output", "input", "The output table ranks pairs better than the input table"),
        ("tied", "input", "The tied table ranks pairs better than the input table"),
    )


def _judged(result: Result, data: Path | None, device: str) -> Mapping[str, Sequence[Judgement]]:
    """Return the judgements in a run's result, or compute them from its vectors if the result has none."""
    assert result.record is not None
    if result.record.similarity:
        return result.record.similarity
    benchmarks = find_benchmarks(data)
    return {
        end: [score_benchmark(vectors, benchmarks[name]) for name in PRESS if name in benchmarks]
        for end, vectors in open_vectors(result.folder, device=device).items()
    }


def _rhos(judgements: Sequence[Judgement]) -> Rhos:
    return {judgement.name: judgement.rho for judgement in judgements if judgement.rho is not None}


def _pairs(judgements: Sequence[Judgement], name: str) -> int:
    """Return how many pairs of a benchmark are in a run's vocabulary, which is the same for all seeds of a row."""
    return next(judgement.pairs for judgement in judgements if judgement.name == name)


def _coverage(row: Mapping[str, Any]) -> str:
    """Return the number of pairs that were used, by table if the tables have different words."""
    pairs = row["pairs"]
    if len(set(pairs.values())) == 1:
        known = f"{next(iter(pairs.values())):,}"
    else:
        known = ", ".join(f"{end} {count:,}" for end, count in pairs.items())
    return f"{known} of {row['of']:,}"


def _difference(better: str, other: str, means: Mapping[str, Sequence[float]]) -> Estimate:
    """Return the difference between two tables.

    The input and the output table come from the same runs, so each run gives one difference. The tied table comes from
    other runs.
    """
    if "tied" in (better, other):
        return apart(means[better], means[other])
    return over_seeds([first - second for first, second in zip(means[better], means[other], strict=True)])


def _cells(row: Mapping[str, Any], ends: Sequence[str]) -> list[str]:
    papers = {end: f" / {row['paper'][end]:.2f}" if end in row["paper"] else "" for end in ends}
    return [format_estimate(row["ours"][end]) + papers[end] for end in ends]


def _heading(text: Mapping[str, Any]) -> str:
    if text["beside"] in (None, text["corpus"]):
        return str(text["corpus"])
    return f"{text['corpus']}, in place of {text['beside']}"
