"""Press & Wolf 2017, section 3: which rows of the tables a step changes and by how much, how likely a word is to follow
itself, and how long the vectors of a skip-gram become, tied and untied.

The paper argues it with formulas, for a step of one token. Here it is measured in trained models, for steps as they are
made in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reefknot.errors import DataError
from reefknot.lab.evaluation.updates import by_frequency, update_rule
from reefknot.lab.papers.figures.contract import Figure, Measured
from reefknot.lab.papers.figures.intervals import over_seeds, told
from reefknot.lab.papers.figures.pictures import Panel, bars
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.results import Result
from reefknot.lab.reports.rows import group
from reefknot.lab.tasks import load_task
from reefknot.lab.tasks.language_model import open_language_model
from reefknot.lab.tasks.word_vectors import open_vectors

SIDES = {"input": "by way of the input", "output": "by way of the output"}


class UpdateRule(Figure):
    """Language models by what a step changes, skip-grams by the norms of their vectors."""

    name = "press2017/section3"
    recipe = "press2017/table3"
    also = ("press2017/table2",)
    title = "Press & Wolf 2017, section 3: the update rules of input, output and tied embeddings"
    shows = (
        "A step changes the input vectors of the words that went in and all output vectors; a tied table gets both, so "
        "that rare words learn mostly as output vectors do. A word is given almost no probability to follow itself. In "
        "a tied skip-gram that keeps vectors short: the score of a word with itself is the square of its norm."
    )
    stand_in = "press2017/enwiki-vectors"
    tasks = ("language_model", "skip_gram")
    needs = "weights"

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """Means over the seeds of each row."""
        models, norms = [], []
        for row, results in group(runs).items():
            if load_task(results[0].task).scores_text:
                models.append({"row": row, **over_runs([_rule(result, data, device) for result in results])})
            else:
                norms.append({"row": row, "tables": over_runs([_norms(result, device) for result in results])})
        if not norms and not any(_moved(sides) for model in models for sides in model["tables"].values()):
            raise DataError("no step changes a table of these runs, all of which are frozen; name runs that train one")
        return {"models": models, "norms": norms}

    def draw(self, measured: Measured) -> Drawing:
        """A panel for each table of a model: how far a step moves its rows, by frequency; then the norms."""
        panels = [
            replace(
                _panel(
                    f"{model['row']}: {_called(table)}", {SIDES[side]: sides[side]["bands"] for side in SIDES}, "change"
                ),
                logarithmic=True,
            )
            for model in measured["models"]
            for table, sides in model["tables"].items()
            if _moved(sides)
        ]
        if measured["norms"]:
            series = {
                f"{each['row']}: {_called(table)}": bands
                for each in measured["norms"]
                for table, bands in each["tables"].items()
            }
            panels.append(_panel("norms of skip-gram vectors", series, "norm"))
        caption = (
            "How far a step at rate 1 moves the rows of a table (mean norm of the change, on a logarithmic scale; no "
            "bar where it moves none), and the norms of the vectors of skip-grams, by how often the word was seen in "
            "training; means over seeds with 95 % intervals."
        )
        return bars(self.slug, panels, along="times seen in training", caption=caption)

    def lines(self, measured: Measured) -> list[str]:
        """Per model its tables by band and p(i_t); then the norms."""
        lines: list[str] = []
        for model in measured["models"]:
            lines += _told_of(model)
        for each in measured["norms"]:
            for table, bands in each["tables"].items():
                norms = ", ".join(f"{_name(band)}: {told(band['mean'])}" for band in bands)
                lines.append(f"{each['row']}: norms in the {_called(table)} by training count: {norms}")
        return lines


def over_runs(found: Sequence[Any]) -> Any:
    """JSON of several runs as one: what was measured, fractions, becomes a mean with its interval; whole numbers and
    names are facts, which the runs share."""
    first = found[0]
    if isinstance(first, float):
        return over_seeds(found).json()
    if isinstance(first, dict):
        return {key: over_runs([each[key] for each in found]) for key in first}
    if isinstance(first, list):
        return [over_runs(each) for each in zip(*found, strict=True)]
    return first


def _rule(result: Result, data: Path | None, device: str) -> dict[str, Any]:
    run = open_language_model(result.folder, device)
    training = run.experiment.training
    text = run.dataset(data).splits["train"].ids
    return update_rule(run.model, text, run.vocabulary.counts, streams=training.batch, steps=training.steps)


def _norms(result: Result, device: str) -> dict[str, Any]:
    """The mean norm by frequency in each table of a skip-gram."""
    found = {}
    for table, vectors in open_vectors(result.folder, device=device).items():
        assert vectors.counts is not None  # a run's words are counted
        found[table] = by_frequency(np.linalg.norm(vectors.vectors_VD.astype(np.float64), axis=1), vectors.counts)
    return found


def _told_of(model: Mapping[str, Any]) -> list[str]:
    """What a step changes in one model, as text."""
    words, types = model["words_in"]["mean"], model["types"]
    lines = [f"{model['row']}: steps of {words:.0f} distinct words of {types:,}, {model['windows']} windows"]
    for table, sides in model["tables"].items():
        if not _moved(sides):
            lines.append(f"  {_called(table)}: no step changes it, as it is frozen; it is left out of the picture")
            continue
        whole = {side: 100 * found["changed"]["mean"] for side, found in sides.items()}
        lines.append(
            f"  {_called(table)}: a step changes {whole['both']:.1f} % of the rows; "
            f"{whole['input']:.1f} % by way of the input, {whole['output']:.1f} % by way of the output"
        )
        lines.append(f"    {'seen':>14} {'types':>7} {'change, input':>14} {'output':>10} {'rows that go in':>16}")
        for way_in, way_out in zip(sides["input"]["bands"], sides["output"]["bands"], strict=True):
            lines.append(
                f"    {_name(way_in):>14} {way_in['types']:>7,} {way_in['mean']['mean']:>14.2e} "
                f"{way_out['mean']['mean']:>10.2e} {100 * way_in['changed']['mean']:>14.1f} %"
            )
    return [*lines, *_told_of_current(model["current"])]


def _moved(sides: Mapping[str, Any]) -> bool:
    """Whether a step changes any row of a table: none of a frozen one."""
    return bool(sides["both"]["changed"]["mean"])


def _told_of_current(current: Mapping[str, Any]) -> list[str]:
    shares = ", ".join(f"{100 * float(at):g} %: {value['mean']:.1e}" for at, value in current["quantiles"].items())
    mean, uniform, unigram, repeats, below = (
        current[key]["mean"] for key in ("mean", "uniform", "unigram", "repeats", "below_unigram")
    )
    return [
        f"  p(i_t), the current word as the next one: mean {mean:.1e} (words do follow themselves: {repeats:.1e}; "
        f"unigram {unigram:.1e}, uniform {uniform:.1e}); below the unigram for {100 * below:.0f} % of the tokens",
        f"    quantiles {shares}",
    ]


def _panel(title: str, series: Mapping[str, Sequence[Mapping[str, Any]]], measured: str) -> Panel:
    """Series side by side, band by band, though a text may lack one that another has."""
    names = {band["low"]: _name(band) for bands in series.values() for band in bands}
    lows = sorted(names)
    ours = {}
    for name, bands in series.items():
        means = {band["low"]: band["mean"] for band in bands}
        ours[name] = [means.get(low) for low in lows]
    return Panel(title, [names[low] for low in lows], ours, measured=measured)


def _called(table: str) -> str:
    return f"{table} table"


def _name(band: Mapping[str, Any]) -> str:
    return f"{band['low']:,}+" if band["high"] is None else f"{band['low']:,}–{band['high']:,}"
