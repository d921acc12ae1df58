"""Press & Wolf 2017, Table 4: do the tables of word vectors of a model agree on which words are similar?

An untied model has two tables, one for the input and one for the output. A tied model uses one table for both. The
measure (rho) is Spearman's correlation between the pairwise cosines of two tables. The input and the output table of
the untied model are compared with each other, and both are compared with the table of the tied model. Tied and untied
runs are paired by seed.

Start reading at `PairwiseSimilarity`; `_compare_runs` does the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reefknot.errors import DataError
from reefknot.lab.evaluation.pairwise_similarity import pairwise_correlation
from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.papers.figures.intervals import (
    estimate_mean,
    estimate_mean_correlation,
    format_estimate,
    format_verdict,
)
from reefknot.lab.papers.figures.pictures import Panel, draw_bars
from reefknot.lab.papers.figures.runs import check_one_row
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.runs.loading import Result, flatten
from reefknot.lab.tasks import load_task
from reefknot.lab.tasks.word_vectors import open_vectors
from reefknot.vectors.word_vectors import WordVectors

TABLE_PAIRS = (("input", "output"), ("input", "tied"), ("output", "tied"))
"""The pairs of tables that are compared."""
PAPER_RHOS = {
    "word2vec": (0.77, 0.19, 0.39),
    "NNLM, 200 units": (0.13, 0.31, 0.65),
    "NNLM, 1500 units": (0.16, 0.45, 0.77),
}
"""The paper's correlations by model, in the order of `TABLE_PAIRS`."""
CLAIM = "The tied table is closer to the output table than to the input table"

Tables = dict[str, WordVectors]
"""The tables of a run: `input` and `output`, or `tied`."""


class PairwiseSimilarity(Figure):
    """A bar for each pair of tables and each model."""

    name = "press2017/table4"
    recipe = "press2017/table4"
    extra_recipes = ("press2017/table3", "press2017/table2")
    fallback_recipe = "press2017/enwiki-vectors"
    tasks = ("language_model", "skip_gram")
    needs = "weights"
    options = ("device",)
    title = "Press & Wolf 2017, Table 4: rank correlation of pairwise similarities between tables"
    description = (
        "Spearman's correlation between two tables, over the cosines of all pairs of words. In language models, the "
        "input and the output table have little in common, and the tied table is close to the output table. In "
        "skip-gram, the input and the output table are similar."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measurements:
        """Measure the correlation of each pair of tables, exact for small vocabularies, sampled for large ones."""
        runs_by_model: dict[tuple[str, str], list[Result]] = {}  # by model and corpus
        for result in runs:
            assert result.record is not None
            runs_by_model.setdefault((_model_name(result), result.record.corpus.name), []).append(result)
        models = [
            _compare_runs(model, corpus, model_runs, device) for (model, corpus), model_runs in runs_by_model.items()
        ]
        return {"models": models}

    def draw(self, measured: Measurements) -> Drawing:
        """Draw a group of bars for each pair of tables."""
        labels = [_format_pair(pair) for pair in TABLE_PAIRS]
        estimates = {}
        paper_values = {}
        for model in measured["models"]:
            series = _format_model(model)
            estimates[series] = [model["pairs"].get(label) for label in labels]
            if model["model"] in PAPER_RHOS:
                paper_values[series] = PAPER_RHOS[model["model"]]
        panel = Panel("", labels, estimates, paper_values, y_label="Spearman's rho")
        caption = "Correlation of all pairwise cosines between two tables, mean over seeds with 95 % intervals."
        return draw_bars(self.slug, [panel], x_label="tables", caption=caption)

    def format_lines(self, measured: Measurements) -> list[str]:
        """Return a line for each model and pair of tables."""
        lines = []
        for model in measured["models"]:
            lines.append(f"{_format_model(model)}: {model['counted']}; 95 % interval over seeds")
            # The paper has no values for some models.
            paper_rhos = dict(zip(map(_format_pair, TABLE_PAIRS), PAPER_RHOS.get(model["model"], ()), strict=False))
            for pair, estimate in model["pairs"].items():
                paper_rho = f"  paper {paper_rhos[pair]:.2f}" if pair in paper_rhos else ""
                lines.append(f"  {pair:<16} {format_estimate(estimate):<22}{paper_rho}".rstrip())
            unpaired_runs = [f"{tying} {seed}" for tying, seeds in model["alone"].items() for seed in seeds]
            if unpaired_runs:
                lines.append(
                    "  not paired with the tied table, because there is no run with the same seed: "
                    f"{', '.join(unpaired_runs)}"
                )
            if model["closer"]:
                lines.append(f"  {format_verdict(model['closer'], CLAIM)}")
        return lines


def _model_name(result: Result) -> str:
    """Return the name of a run's model in the paper."""
    if not load_task(result.task).scores_text:
        return "word2vec"
    return f"NNLM, {flatten(result.settings).get('encoder.hidden_dim')} units"


def _compare_runs(model: str, corpus: str, runs: Sequence[Result], device: str) -> dict[str, Any]:
    """Compare the untied and the tied runs of one model on one corpus, paired by seed."""
    tables_of_runs = [(result, open_vectors(result.folder, device=device)) for result in runs]
    untied = _tables_by_seed([(result, tables) for result, tables in tables_of_runs if "input" in tables])
    tied = _tables_by_seed([(result, tables) for result, tables in tables_of_runs if "tied" in tables])
    if not untied:
        raise DataError(f"{model} on {corpus}: no run has separate input and output tables; pass an untied run as well")

    # Correlate each pair of tables for every seed that has both.
    rhos: dict[str, dict[int, float]] = {}  # by pair of tables and seed
    word_pair_counts: list[str] = []
    for first, second in TABLE_PAIRS:
        second_by_seed = tied if second == "tied" else untied
        for seed in sorted(untied.keys() & second_by_seed):
            correlation = pairwise_correlation(untied[seed][first], second_by_seed[seed][second])
            if correlation.rho is not None:
                rhos.setdefault(_format_pair((first, second)), {})[seed] = correlation.rho
                extent = "all" if correlation.exact else "a sample of"
                word_pair_counts.append(f"{extent} {correlation.pairs:,} pairs of words")

    # Check the claim: is the tied table closer to the output table?
    input_rhos = rhos.get(_format_pair(("input", "tied")), {})
    output_rhos = rhos.get(_format_pair(("output", "tied")), {})
    gaps = [output_rhos[seed] - input_rhos[seed] for seed in sorted(output_rhos.keys() & input_rhos)]

    return {
        "model": model,
        "corpus": corpus,
        "counted": " or ".join(dict.fromkeys(word_pair_counts)),
        "seeds": sorted(untied),
        "alone": {"untied": sorted(untied.keys() - tied) if tied else [], "tied": sorted(tied.keys() - untied)},
        "pairs": {
            pair: estimate_mean_correlation(list(rhos_by_seed.values())).json() for pair, rhos_by_seed in rhos.items()
        },
        "closer": estimate_mean(gaps).json() if gaps else None,
    }


def _tables_by_seed(tables_of_runs: Sequence[tuple[Result, Tables]]) -> dict[int, Tables]:
    """Return the tables of some runs by seed, after checking that the runs are repetitions of one row."""
    check_one_row([result for result, _ in tables_of_runs])
    return {result.seed: tables for result, tables in tables_of_runs}


def _format_pair(table_pair: tuple[str, str]) -> str:
    """Return the name of a pair of tables: "input, output"."""
    return ", ".join(table_pair)


def _format_model(model: Mapping[str, Any]) -> str:
    """Return the name of a model with its corpus: "word2vec, text8"."""
    return f"{model['model']}, {model['corpus']}"
