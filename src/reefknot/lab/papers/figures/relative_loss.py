"""Pappas & Henderson 2019, Figure 3: the loss of DRILL relative to its baselines, by training count of the word.

Two measures are shown. Below zero, DRILL is better.

    mean over types    the paper's measure: for each word type, the difference of the summed losses of both models on
                       the test text in percent of DRILL's loss, averaged over the types of a band of training counts;
                       the interval comes from resampling types
    all tokens         the difference of the summed losses of all tokens of a band, in percent of the baseline's loss;
                       the interval comes from resampling the text

We added the second measure, because the first measure divides by almost zero for a type that DRILL predicts with near
certainty, such as the second half of a name. A few such types can dominate the mean of their band. On rare words, the
paper prints a gain of 17.5 % over weight tying, but the summed loss falls only by 2.2 %. We also computed the second
measure from the losses that the authors published.

<unk> and <eos> belong to bands like any other type. The authors count <unk> but not <eos>, so their band from 5,000
occurrences on has 16 types of the Penn Treebank, and ours has 17.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reefknot.errors import DataError
from reefknot.lab.evaluation.comparison import blocks
from reefknot.lab.evaluation.frequency import FIGURE_3, Pair, TypeComparison, compare_by_target
from reefknot.lab.evaluation.pairing import pair
from reefknot.lab.papers.figures.contract import Figure, Measured
from reefknot.lab.papers.figures.intervals import format_estimate
from reefknot.lab.papers.figures.pictures import Panel, bars
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.results import Result, flatten
from reefknot.lab.reports.rows import group
from reefknot.lab.runs.comparability import explain_in_comparison
from reefknot.lab.runs.definition import format_count_range
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks.language_model import open_texts

PAPER = {
    "weight tying": (-17.546, -2.804, -0.108, -0.759, 0.512, -0.222, -0.680, 0.188),
    "bilinear": (-9.589, -7.369, -3.336, -4.665, 0.027, -0.258, 1.205, 2.054),
    "dual nonlinear": (-4.789, -6.502, -0.567, -0.702, 0.644, -0.026, 0.367, -0.808),
}
"""The paper's means over types, by band from one occurrence on, from the authors' files."""
PAPER_WHOLE = {
    "weight tying": (-2.237, -1.362, 0.023, 0.420, 0.245, -0.048, -0.767, 0.278),
    "bilinear": (-3.878, -3.888, -2.133, -0.495, 0.114, -0.018, 0.603, 2.731),
    "dual nonlinear": (0.393, 0.363, 0.869, 0.623, 0.400, 0.119, 0.351, -3.968),
}
"""Differences over all tokens of a band. We computed them from the losses of every word that the authors published with
their code; they are not in the paper."""
CAPTION = (
    "Above: the loss of all tokens of a band. Below: the mean over its word types, the measure of Pappas and "
    "Henderson. A few types that a model predicts with near certainty can dominate this mean. Intervals are 95 %."
)
LINEAR_TO = 10.0
"""Percent. If a mean exceeds ten times this, the axis is logarithmic beyond it; see `Panel.linear_to`."""
Json = dict[str, Any]
"""An estimate, or the estimates of a band."""
BASELINES = {"plain": "weight tying", "bilinear": "bilinear", "dual": "dual nonlinear"}
"""The paper's names of the baselines, by the kind of their classifier."""


class RelativeLoss(Figure):
    """A bar for each band and baseline."""

    name = "pappas2019/3"
    recipe = "pappas2019/figure3"
    needs = "token losses and the text"
    options = ("data",)
    title = "Pappas & Henderson 2019, Figure 3: DRILL against its baselines by word frequency"
    shows = (
        "The mean relative difference in cross-entropy between DRILL and three baselines (weight tying, bilinear "
        "mapping, dual nonlinear mapping) on the Penn Treebank, for word types in bands of their training frequency. "
        "DRILL gains most on rare words."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """Measure both differences in every band, for each baseline. The losses of several seeds are averaged.

        Baselines that were scored on other tokens than DRILL, or in other streams or windows, are listed and left out.
        """
        systems = group(runs)
        ours = [name for name, results in systems.items() if _classifier(results[0]) == "drill"]
        if not ours:
            raise DataError("none of these runs has the classifier DRILL; name a run of DRILL and of its baselines")
        drill = max(ours, key=lambda name: _depth(systems[name][0]))
        baselines = {name: results for name, results in systems.items() if _classifier(results[0]) in BASELINES}
        if not baselines:
            raise DataError(
                "none of these runs is a baseline: a plain classifier tied to the table of the input, a bilinear or a "
                "dual classifier; name a run of a baseline as well"
            )
        first, *seeds = systems[drill]
        texts = open_texts(RunFolder.open(first.folder), data)
        left_out = {
            name: f"no fair comparison with {drill}: {reason}"
            for name, results in baselines.items()
            if (reason := _why_unfair(first, [*seeds, *results], data))
        }
        baselines = {name: results for name, results in baselines.items() if name not in left_out}
        if not baselines:
            raise DataError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
        losses = {name: [_losses(result) for result in systems[name]] for name in (drill, *baselines)}
        boundaries = blocks(len(losses[drill][0]))
        compared = []
        for name, results in baselines.items():
            pair = Pair(losses[name], losses[drill], boundaries)
            bands = compare_by_target(pair, texts.splits["test"], texts.vocabulary)
            compared.append(
                {
                    "row": name,
                    "baseline": BASELINES[str(_classifier(results[0]))],
                    "seeds": [result.seed for result in results],
                    "bands": [band_json(band) for band in bands],
                }
            )
        return {
            "drill": drill,
            "seeds": [result.seed for result in systems[drill]],
            "compared": compared,
            "left_out": left_out,
        }

    def draw(self, measured: Measured) -> Drawing:
        """Draw the bands side by side, with the paper's values as marks."""
        compared = {baseline["row"]: baseline["bands"] for baseline in measured["compared"]}
        papers = {
            measure: {
                baseline["row"]: {
                    band["low"]: _paper_value(values, baseline["baseline"], band["low"]) for band in baseline["bands"]
                }
                for baseline in measured["compared"]
            }
            for measure, values in (("whole", PAPER_WHOLE), ("relative", PAPER))
        }
        caption = (
            f"Loss of {measured['drill']} relative to each baseline; below zero, DRILL is better. {CAPTION} The marks "
            "above are computed from the losses that the authors published; the paper does not show them."
        )
        shares = "% of baseline's loss", "% of DRILL's loss"
        return draw_bands(self.slug, compared, caption, shares, against=": DRILL minus baseline", papers=papers)

    def lines(self, measured: Measured) -> list[str]:
        """Return a line for each band and baseline."""
        lines = [
            f"loss of {measured['drill']} minus the baseline's loss, in %",
            "  all tokens: summed over the tokens of a band, relative to the baseline's loss [95 %, text resampled]",
            "  authors: the same measure, from the losses that the authors published",
            "  mean over types: mean over the word types of a band, relative to DRILL's loss [95 %, types resampled]",
            "  paper: the same measure, from the paper",
            "<unk> and <eos> are counted as types of their bands; the paper counts <unk> but leaves <eos> out",
        ]
        for baseline in measured["compared"]:
            lines.append(f"against {baseline['row']}")
            titles = f"{'all tokens':<20} {'authors':>8}   {'mean over types':<24} {'paper':>6}"
            lines.append(f"  {'seen':>12} {'tokens':>7} {'types':>6}  {titles}")
            for band in baseline["bands"]:
                whole, relative = (
                    format_estimate(estimate, 1) if estimate else "" for estimate in (band["whole"], band["relative"])
                )
                authors, paper = (
                    _paper_cell(values, baseline["baseline"], band["low"]) for values in (PAPER_WHOLE, PAPER)
                )
                counts = f"{format_count_range(band['low'], band['high']):>12} {band['tokens']:>7,} {band['types']:>6,}"
                lines.append(f"  {counts}  {whole:<20} {authors:>8}   {relative:<24} {paper:>6}".rstrip())
        return [*lines, *(f"left out: {name}: {reason}" for name, reason in measured.get("left_out", {}).items())]


def band_json(band: TypeComparison) -> Json:
    """Return both measures of a band in percent; None where there is no loss to divide by.

    The interval over all tokens is the interval of the difference divided by the baseline's loss, which is treated as
    a constant.
    """
    whole = None
    if band.nll_a > 0:
        share = 100 / band.nll_a
        interval = band.interval and (share * band.interval[0], share * band.interval[1])
        whole = _estimate(share * band.difference, interval)
    return {
        "low": band.low,
        "high": band.high,
        "types": band.types,
        "tokens": band.tokens,
        "whole": whole,
        "relative": None if band.relative is None else _estimate(band.relative, band.relative_interval),
    }


def draw_bands(
    name: str,
    compared: Mapping[str, Sequence[Json]],
    caption: str,
    measured: tuple[str, str],
    *,
    against: str = "",
    papers: Mapping[str, Mapping[str, Mapping[int, float | None]]] | None = None,
) -> Drawing:
    """Draw a panel for all tokens and a panel for the mean over types, with a bar for each band and row.

    Args:
        name: The name of the picture.
        compared: The bands of each row, from `band_json`.
        caption: The text below the picture.
        measured: The labels of the vertical axes of both panels.
        against: A suffix for the titles of both panels, such as ": DRILL minus baseline".
        papers: The paper's values, by measure (`whole`, `relative`), row and first count of the band.
    """
    bands = sorted({(band["low"], band["high"] or 0) for row_bands in compared.values() for band in row_bands})
    labels = [format_count_range(low, high or None) for low, high in bands]

    def bars_of(measure: str) -> dict[str, list[Json | None]]:
        by_low = {row: {band["low"]: band[measure] for band in row_bands} for row, row_bands in compared.items()}
        return {row: [estimates.get(low) for low, _ in bands] for row, estimates in by_low.items()}

    def marks_of(measure: str) -> dict[str, list[float | None]]:
        by_row = (papers or {}).get(measure, {})
        return {row: [values.get(low) for low, _ in bands] for row, values in by_row.items()}

    panels = [
        Panel(f"all tokens of a band{against}", labels, bars_of("whole"), marks_of("whole"), measured[0]),
        Panel(
            f"mean over word types{against}",
            *(labels, bars_of("relative"), marks_of("relative"), measured[1]),
            linear_to=LINEAR_TO,
        ),
    ]
    return bars(name, panels, along="times seen in training", caption=caption)


def _classifier(result: Result) -> str | None:
    """Return the kind of a run's classifier. It is None for a plain untied classifier, which is not a baseline."""
    kind = flatten(result.settings).get("output.classifier.kind")
    settings = flatten(result.settings)
    untied = kind == "plain" and settings.get("output.classifier.table") != settings.get("input.table")
    return None if untied or not isinstance(kind, str) else kind


def _depth(result: Result) -> int:
    return int(flatten(result.settings).get("output.classifier.depth") or 0)


def _losses(result: Result) -> Any:
    return np.asarray(RunFolder.open(result.folder).read_scores()["test"])


def _why_unfair(first: Result, others: Sequence[Result], data: Path | None) -> str | None:
    """Return why the token losses of some runs cannot be compared with the first run's, or None if they can."""
    ours = RunFolder.open(first.folder)
    for run in (RunFolder.open(result.folder) for result in others):
        pairing = pair(ours, run, "test", lambda run: open_texts(run, data))
        if pairing.difference:
            advice = "" if pairing.difference.prevents else "; train both with the same evaluation.windows"
            return explain_in_comparison(pairing.difference, "test") + advice
        if not pairing.same_tokens:
            return "their tokens differ; name runs with the same vocabulary"
    return None


def _estimate(mean: float, interval: tuple[float, float] | None) -> Json:
    low, high = interval or (None, None)
    return {"mean": mean, "low": low, "high": high}


def _paper_value(values: Mapping[str, Sequence[float]], baseline: str, low: int) -> float | None:
    edges = FIGURE_3[1:]
    return values[baseline][edges.index(low)] if low in edges else None


def _paper_cell(values: Mapping[str, Sequence[float]], baseline: str, low: int) -> str:
    number = _paper_value(values, baseline, low)
    return "" if number is None else f"{number:+.1f}".replace("-", "\N{MINUS SIGN}")
