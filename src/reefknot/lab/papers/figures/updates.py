"""Press & Wolf 2017, section 3: how a training step updates the input, output and tied tables of word vectors.

The paper derives formulas for a step of one token. This figure measures trained models, with steps of the size that
training uses. Three things are measured:

    which word vectors a step changes, and by how much
    how likely a word is to follow itself
    the norms of the vectors of tied and untied skip-gram

A table holds the vectors of all words; a tied model has one table for input and output. A band is a range of training
counts, such as 10 to 99. Start reading at `UpdateRule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reefknot.errors import DataError
from reefknot.lab.evaluation.updates import mean_by_frequency, measure_updates
from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.papers.figures.intervals import estimate_mean, format_estimate
from reefknot.lab.papers.figures.pictures import Panel, draw_bars
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.rows import group_by_row
from reefknot.lab.runs.loading import Result
from reefknot.lab.tasks import load_task
from reefknot.lab.tasks.language_model import open_language_model
from reefknot.lab.tasks.word_vectors import open_vectors

GRADIENT_PATHS = {"input": "through the input", "output": "through the output"}
"""The two paths of a gradient to a table, and their names in the picture."""


class UpdateRule(Figure):
    """What a step changes in language models, and the norms of the vectors of skip-gram."""

    name = "press2017/section3"
    recipe = "press2017/table3"
    extra_recipes = ("press2017/table2",)
    title = "Press & Wolf 2017, section 3: the update rules of input, output and tied embeddings"
    description = (
        "A step changes the input vectors of the words that were read, and all output vectors. A tied table gets both "
        "changes, so its rare words are trained mostly as output vectors. A model gives almost no probability to the "
        "current word as the next word. In tied skip-gram this keeps vectors short, because the score of a word with "
        "itself is the square of its norm."
    )
    fallback_recipe = "press2017/enwiki-vectors"
    tasks = ("language_model", "skip_gram")
    needs = "weights"
    options = ("data", "device")

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measurements:
        """Measure the updates of language models and the norms of skip-gram, as means over the seeds of each row."""
        models = []
        norms = []
        for row, results in group_by_row(runs).items():
            is_language_model = load_task(results[0].task).scores_text
            if is_language_model:
                updates = merge_runs([_measure_updates(result, data, device) for result in results])
                models.append({"row": row, **updates})
            else:
                tables = merge_runs([_measure_norms(result, device) for result in results])
                norms.append({"row": row, "tables": tables})

        has_trained_table = any(_is_trained(paths) for model in models for paths in model["tables"].values())
        if not norms and not has_trained_table:
            raise DataError("all tables of these runs are frozen, so no step changes them; pass a run that trains one")
        return {"models": models, "norms": norms}

    def draw(self, measured: Measurements) -> Drawing:
        """Draw how far a step moves the rows of each table, by frequency; then the norms."""
        panels = []
        for model in measured["models"]:
            for table, paths in model["tables"].items():
                if _is_trained(paths):
                    path_bands = {title: paths[path]["bands"] for path, title in GRADIENT_PATHS.items()}
                    panel = _build_panel(f"{model['row']}: {table} table", path_bands, "change")
                    panels.append(replace(panel, logarithmic=True))

        if measured["norms"]:
            table_bands = {}
            for row in measured["norms"]:
                for table, bands in row["tables"].items():
                    table_bands[f"{row['row']}: {table} table"] = bands
            panels.append(_build_panel("norms of skip-gram vectors", table_bands, "norm"))

        caption = (
            "The change of a table's rows by a step with learning rate 1 (mean norm, on a logarithmic scale; no bar "
            "means no change), and the norms of skip-gram vectors, by the training count of the word; means over seeds "
            "with 95 % intervals."
        )
        return draw_bars(self.slug, panels, x_label="times seen in training", caption=caption)

    def format_lines(self, measured: Measurements) -> list[str]:
        """Return lines on the tables and p(i_t) of each model, then on the norms."""
        lines: list[str] = []
        for model in measured["models"]:
            lines += _model_lines(model)
        for row in measured["norms"]:
            for table, bands in row["tables"].items():
                norms = ", ".join(f"{_format_range(band)}: {format_estimate(band['mean'])}" for band in bands)
                lines.append(f"{row['row']}: norms in the {table} table by training count: {norms}")
        return lines


def merge_runs(run_values: Sequence[Any]) -> Any:
    """Merge the JSON of several runs, which all have the same keys.

    Floats are measurements: each becomes a mean with its interval. Integers and strings are the same in all runs.
    """
    first = run_values[0]
    if isinstance(first, float):
        return estimate_mean(run_values).json()
    if isinstance(first, dict):
        return {key: merge_runs([value[key] for value in run_values]) for key in first}
    if isinstance(first, list):
        return [merge_runs(entries) for entries in zip(*run_values, strict=True)]
    return first


def _measure_updates(result: Result, data: Path | None, device: str) -> dict[str, Any]:
    """Measure what training steps change in a language model."""
    run = open_language_model(result.folder, device)
    training = run.experiment.training
    train_ids = run.dataset(data).splits["train"].ids
    return measure_updates(run.model, train_ids, run.vocabulary.counts, streams=training.batch, steps=training.steps)


def _measure_norms(result: Result, device: str) -> dict[str, Any]:
    """Return the mean norm by frequency in each table of a run of skip-gram."""
    means_by_table = {}
    for table, word_vectors in open_vectors(result.folder, device=device).items():
        assert word_vectors.counts is not None  # a run's words are counted
        norms = np.linalg.norm(word_vectors.vectors_VD.astype(np.float64), axis=1)
        means_by_table[table] = mean_by_frequency(norms, word_vectors.counts)
    return means_by_table


def _model_lines(model: Mapping[str, Any]) -> list[str]:
    """Return what a step changes in one model, as text."""
    words_read = model["words_in"]["mean"]
    lines = [
        f"{model['row']}: a step reads {words_read:.0f} of {model['types']:,} words "
        f"(mean over {model['windows']} windows)"
    ]
    for table, paths in model["tables"].items():
        if not _is_trained(paths):
            lines.append(f"  {table} table: frozen, so no step changes it; it is not in the picture")
            continue

        # The share of changed rows, by the path of the gradient.
        percent = {path: 100 * changes["changed"]["mean"] for path, changes in paths.items()}
        lines.append(
            f"  {table} table: a step changes {percent['both']:.1f} % of the rows; "
            f"{percent['input']:.1f} % {GRADIENT_PATHS['input']}, {percent['output']:.1f} % {GRADIENT_PATHS['output']}"
        )

        # The size of the changes, by training count.
        lines.append(f"    {'seen':>14} {'types':>7} {'change, input':>14} {'output':>10} {'rows read':>16}")
        for input_band, output_band in zip(paths["input"]["bands"], paths["output"]["bands"], strict=True):
            percent_read = 100 * input_band["changed"]["mean"]
            lines.append(
                f"    {_format_range(input_band):>14} {input_band['types']:>7,} {input_band['mean']['mean']:>14.2e} "
                f"{output_band['mean']['mean']:>10.2e} {percent_read:>14.1f} %"
            )
    return [*lines, *_self_following_lines(model["current"])]


def _is_trained(paths: Mapping[str, Any]) -> bool:
    """Return whether a step changes any vector of a table. It changes no vector of a frozen table.

    `paths` has the changes by the path of the gradient: `input`, `output` and `both`.
    """
    return bool(paths["both"]["changed"]["mean"])


def _self_following_lines(current: Mapping[str, Any]) -> list[str]:
    """Return lines about the probability that a model gives to the current word as the next word."""
    mean = current["mean"]["mean"]
    uniform = current["uniform"]["mean"]
    unigram = current["unigram"]["mean"]
    repeated_share = current["repeats"]["mean"]
    percent_below = 100 * current["below_unigram"]["mean"]
    quantiles = ", ".join(
        f"{100 * float(fraction):g} %: {quantile['mean']:.1e}" for fraction, quantile in current["quantiles"].items()
    )
    return [
        f"  p(i_t), the current word as the next word: mean {mean:.1e} (in the text: {repeated_share:.1e}; "
        f"unigram {unigram:.1e}, uniform {uniform:.1e}); below the unigram for {percent_below:.0f} % of the tokens",
        f"    quantiles {quantiles}",
    ]


def _build_panel(title: str, bands_by_series: Mapping[str, Sequence[Mapping[str, Any]]], y_label: str) -> Panel:
    """Return a panel with the bars of all series in each band. A series without a band has no bar there."""
    labels_by_low = {band["low"]: _format_range(band) for bands in bands_by_series.values() for band in bands}
    lows = sorted(labels_by_low)
    estimates = {}
    for series, bands in bands_by_series.items():
        means_by_low = {band["low"]: band["mean"] for band in bands}
        estimates[series] = [means_by_low.get(low) for low in lows]
    labels = [labels_by_low[low] for low in lows]
    return Panel(title, labels, estimates, y_label=y_label)


def _format_range(band: Mapping[str, Any]) -> str:
    """Format the training counts of a band: "10–99", or "1,000+" for the last band."""
    if band["high"] is None:
        return f"{band['low']:,}+"
    return f"{band['low']:,}–{band['high']:,}"
