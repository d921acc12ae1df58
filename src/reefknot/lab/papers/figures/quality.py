"""Press & Wolf 2017, Tables 2 and 3: how well the tables of skip-gram and of language models rank pairs of words.

Spearman's correlation with people's judgements on the paper's five benchmarks, for the input and output tables of the
untied model and for the one of the tied. A finding is a difference in the mean over the benchmarks, with an interval
over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from reefknot.errors import DataError
from reefknot.lab.evaluation.benchmarks import BENCHMARKS, PRESS
from reefknot.lab.evaluation.similarity import find_benchmarks, judge
from reefknot.lab.papers.figures.contract import Figure, Measured
from reefknot.lab.papers.figures.intervals import Estimate, apart, over_correlations, over_seeds, told, verdict
from reefknot.lab.papers.figures.pictures import Panel, bars
from reefknot.lab.papers.figures.runs import refuse_mixtures
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.results import Result
from reefknot.lab.runs.result import Judgement
from reefknot.lab.tasks.word_vectors import open_vectors

ENDS = ("input", "output", "tied")
STANDS_IN = {"enwiki-sample": "text8"}
"""A text of ours beside the one whose figures in the paper it is shown with."""

Rhos = Mapping[str, float]


class _Quality(Figure):
    """Bars by benchmark and table, a panel for each text."""

    claims: ClassVar[Sequence[tuple[str, str, str]]]
    """What the paper finds: the table that does better, the other, and a sentence."""

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """By text, the correlations of each table on each benchmark over seeds, and whether the findings hold."""
        found: dict[str, dict[str, list[Sequence[Judgement]]]] = {}
        origins: dict[tuple[str, str], list[Result]] = {}
        for result in runs:
            assert result.record is not None
            corpus = result.record.corpus.name
            for end, judgements in _judged(result, data, device).items():
                origins.setdefault((corpus, end), []).append(result)
                found.setdefault(corpus, {}).setdefault(end, []).append(judgements)
        for seeds in origins.values():
            refuse_mixtures(seeds)
        return {"texts": [self._text(corpus, by_end) for corpus, by_end in found.items()]}

    def _text(self, corpus: str, by_end: Mapping[str, Sequence[Sequence[Judgement]]]) -> dict[str, Any]:
        rhos = {end: [_rhos(judgements) for judgements in runs] for end, runs in by_end.items()}
        shared = [name for name in PRESS if all(name in run for runs in rhos.values() for run in runs)]
        if not shared:
            raise DataError(f"{corpus}: none of the five benchmarks has pairs of words that these runs know")
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
        """The paper's figures on a text, by table, as the rows of the recipe have them."""
        recipe = load_recipe(self.recipe)
        own = [row for row in recipe.rows if row.trained and recipe.experiments[row.name].corpus.name == corpus]
        return {end: rhos for row in own for end, rhos in row.paper_similarity.items()}

    def draw(self, measured: Measured) -> Drawing:
        """A panel for each text."""
        panels = []
        for text in measured["texts"]:
            rows = text["benchmarks"]
            ours = {end: [row["ours"][end] for row in rows] for end in ENDS if end in rows[0]["ours"]}
            papers = {end: [row["paper"][end] for row in rows] for end in ENDS if end in rows[0]["paper"]}
            panels.append(Panel(_heading(text), [row["name"] for row in rows], ours, papers, measured="Spearman's rho"))
        caption = f"{self.title}. Bars are means over seeds with 95 % intervals."
        return bars(self.slug, panels, along="benchmark", caption=caption)

    def lines(self, measured: Measured) -> list[str]:
        """A line for each benchmark, ours with the paper's after a stroke, then the findings."""
        lines = []
        for text in measured["texts"]:
            ends = [end for end in ENDS if end in text["mean"]]
            rows = [(f"{row['name']} ({_coverage(row)})", _cells(row, ends)) for row in text["benchmarks"]]
            rows.append(("mean", [told(text["mean"][end]) for end in ends]))
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
        "Spearman's correlation with people's judgements for the input, output and tied tables of skip-gram, trained "
        "on text8. Input and output do about equally well, and tying does worse than either."
    )
    claims = (
        ("input", "tied", "Skip-gram's input table ranks pairs better than the tied one"),
        ("output", "tied", "Its output table ranks pairs better than the tied one"),
    )


class LanguageModelQuality(_Quality):
    """Table 3."""

    name = "press2017/table3"
    recipe = "press2017/table3"
    title = "Press & Wolf 2017, Table 3: word similarity by a language model's tables"
    shows = (
        "Spearman's correlation with people's judgements for the input, output and tied tables of the small language "
        "model, on the Penn Treebank and on text8. The output and the tied table do better than the input one."
    )
    claims = (
        ("output", "input", "The output table ranks pairs better than the input one"),
        ("tied", "input", "The tied table ranks pairs better than the input one"),
    )


def _judged(result: Result, data: Path | None, device: str) -> Mapping[str, Sequence[Judgement]]:
    """What the run's record says, or what its vectors say now where it was not asked to judge them."""
    assert result.record is not None
    if result.record.similarity:
        return result.record.similarity
    benchmarks = find_benchmarks(data)
    return {
        end: [judge(vectors, benchmarks[name]) for name in PRESS if name in benchmarks]
        for end, vectors in open_vectors(result.folder, device=device).items()
    }


def _rhos(judgements: Sequence[Judgement]) -> Rhos:
    return {each.name: each.rho for each in judgements if each.rho is not None}


def _pairs(judgements: Sequence[Judgement], name: str) -> int:
    """How many pairs of a benchmark a run knows; all seeds of a row know the same words."""
    return next(each.pairs for each in judgements if each.name == name)


def _coverage(row: Mapping[str, Any]) -> str:
    """The pairs known, by table where rows know different words."""
    pairs = row["pairs"]
    if len(set(pairs.values())) == 1:
        known = f"{next(iter(pairs.values())):,}"
    else:
        known = ", ".join(f"{end} {count:,}" for end, count in pairs.items())
    return f"{known} of {row['of']:,}"


def _difference(better: str, other: str, means: Mapping[str, Sequence[float]]) -> Estimate:
    """Input and output are of the same runs, so that each run gives a difference; the tied one has runs of its own."""
    if "tied" in (better, other):
        return apart(means[better], means[other])
    return over_seeds([one - two for one, two in zip(means[better], means[other], strict=True)])


def _cells(row: Mapping[str, Any], ends: Sequence[str]) -> list[str]:
    papers = {end: f" / {row['paper'][end]:.2f}" if end in row["paper"] else "" for end in ends}
    return [told(row["ours"][end]) + papers[end] for end in ends]


def _heading(text: Mapping[str, Any]) -> str:
    if text["beside"] in (None, text["corpus"]):
        return str(text["corpus"])
    return f"{text['corpus']}, in the place of {text['beside']}"
