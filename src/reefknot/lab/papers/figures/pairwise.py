"""Press & Wolf 2017, Table 4: do the tables of a model agree on which words are similar?

The measure is Spearman's correlation between the pairwise cosines of two tables. The input and the output table of the
untied model are compared with each other, and both are compared with the table of the tied model. Tied and untied runs
are paired by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reefknot.errors import DataError
from reefknot.lab.evaluation.pairwise_similarity import pairwise_correlation
from reefknot.lab.papers.figures.contract import Figure, Measured
from reefknot.lab.papers.figures.intervals import format_estimate, over_correlations, over_seeds, verdict
from reefknot.lab.papers.figures.pictures import Panel, bars
from reefknot.lab.papers.figures.runs import check_one_row
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.results import Result, flatten
from reefknot.lab.tasks import load_task
from reefknot.lab.tasks.word_vectors import open_vectors
from reefknot.vectors.word_vectors import WordVectors

PAIRS = (("input", "output"), ("input", "tied"), ("output", "tied"))
PAPER = {
    "word2vec": (0.77, 0.19, 0.39),
    "NNLM, 200 units": (0.13, 0.31, 0.65),
    "NNLM, 1500 units": (0.16, 0.45, 0.77),
}
CLAIM = "The tied table is closer to the output table than to the input table"

Tables = dict[str, WordVectors]


class PairwiseSimilarity(Figure):
    """A bar for each pair of tables and each model."""

    name = "press2017/table4"
    recipe = "press2017/table4"
    also = ("press2017/table3", "press2017/table2")
    stand_in = "press2017/enwiki-vectors"
    tasks = ("language_model", "skip_gram")
    needs = "weights"
    options = ("device",)
    title = "Press & Wolf 2017, Table 4: rank correlation of pairwise similarities between tables"
    shows = (
        "Spearman's correlation between two tables, over the cosines of all pairs of words. In language models, the "
        "input and the output table have little in common, and the tied table is close to the output table. In "
        "skip-gram, the input and the output table are similar."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """Measure the correlation of each pair of tables, exact for small vocabularies, sampled for large ones."""
        by_model: dict[tuple[str, str], list[Result]] = {}
        for result in runs:
            assert result.record is not None
            by_model.setdefault((_model(result), result.record.corpus.name), []).append(result)
        return {"models": [_compare(*key, results, device) for key, results in by_model.items()]}

    def draw(self, measured: Measured) -> Drawing:
        """Draw a group of bars for each pair of tables."""
        names = [_named(model) for model in measured["models"]]
        ours = {
            name: [model["pairs"].get(_key(pair)) for pair in PAIRS]
            for name, model in zip(names, measured["models"], strict=True)
        }
        papers = {
            name: PAPER[model["model"]]
            for name, model in zip(names, measured["models"], strict=True)
            if model["model"] in PAPER
        }
        panel = Panel("", [_key(pair) for pair in PAIRS], ours, papers, measured="Spearman's rho")
        caption = "Correlation of all pairwise cosines between two tables, mean over seeds with 95 % intervals."
        return bars(self.slug, [panel], along="tables", caption=caption)

    def lines(self, measured: Measured) -> list[str]:
        """Return a line for each model and pair of tables."""
        lines = []
        for model in measured["models"]:
            lines.append(f"{_named(model)}: {model['counted']}; 95 % interval over seeds")
            papers = dict(zip(map(_key, PAIRS), PAPER.get(model["model"], ()), strict=False))
            for pair, estimate in model["pairs"].items():
                paper = f"  paper {papers[pair]:.2f}" if pair in papers else ""
                lines.append(f"  {pair:<16} {format_estimate(estimate):<22}{paper}".rstrip())
            if any(model["alone"].values()):
                alone = ", ".join(f"{form} {seed}" for form, seeds in model["alone"].items() for seed in seeds)
                lines.append(f"  not paired with the tied table, because there is no run with the same seed: {alone}")
            if model["closer"]:
                lines.append(f"  {verdict(model['closer'], CLAIM)}")
        return lines


def _model(result: Result) -> str:
    """Return the name of a run's model in the paper."""
    if not load_task(result.task).scores_text:
        return "word2vec"
    return f"NNLM, {flatten(result.settings).get('encoder.hidden_dim')} units"


def _compare(model: str, corpus: str, runs: Sequence[Result], device: str) -> dict[str, Any]:
    """Compare the untied and the tied runs of one model on one corpus, paired by seed."""
    opened = [(result, open_vectors(result.folder, device=device)) for result in runs]
    untied = _by_seed([(result, tables) for result, tables in opened if "input" in tables])
    tied = _by_seed([(result, tables) for result, tables in opened if "tied" in tables])
    if not untied:
        raise DataError(
            f"{model} on {corpus}: no run has separate input and output tables; name an untied run in addition"
        )
    rhos: dict[str, dict[int, float]] = {}
    counted: list[str] = []
    for first, second in PAIRS:
        others = tied if second == "tied" else untied
        for seed in sorted(untied.keys() & others):
            correlation = pairwise_correlation(untied[seed][first], others[seed][second])
            if correlation.rho is not None:
                rhos.setdefault(_key((first, second)), {})[seed] = correlation.rho
                counted.append(f"{'all' if correlation.exact else 'a sample of'} {correlation.pairs:,} pairs of words")
    to_input, to_output = (rhos.get(_key((end, "tied")), {}) for end in ("input", "output"))
    closer = [to_output[seed] - to_input[seed] for seed in sorted(to_output.keys() & to_input)]
    return {
        "model": model,
        "corpus": corpus,
        "counted": " or ".join(dict.fromkeys(counted)),
        "seeds": sorted(untied),
        "alone": {"untied": sorted(untied.keys() - tied) if tied else [], "tied": sorted(tied.keys() - untied)},
        "pairs": {pair: over_correlations(list(by_seed.values())).json() for pair, by_seed in rhos.items()},
        "closer": over_seeds(closer).json() if closer else None,
    }


def _by_seed(opened: Sequence[tuple[Result, Tables]]) -> dict[int, Tables]:
    check_one_row([result for result, _ in opened])
    return {result.seed: tables for result, tables in opened}


def _key(pair: tuple[str, str]) -> str:
    return ", ".join(pair)


def _named(model: Mapping[str, Any]) -> str:
    return f"{model['model']}, {model['corpus']}"
