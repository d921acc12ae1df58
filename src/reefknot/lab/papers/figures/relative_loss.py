"""Pappas & Henderson 2019, Figure 3: the loss of DRILL relative to its baselines, by training count of the word.

DRILL, their deep residual output layer, is compared with three simpler classifiers. A type is a distinct word, and a
band is a range of training counts, such as 10 to 99. Two measures are shown. Below zero, DRILL is better.

    mean over types    (DRILL's loss - baseline's loss) / DRILL's loss, with losses summed over the test tokens of one
                       type; then the mean over the types of a band. This is the paper's measure.
    all tokens         (DRILL's loss - baseline's loss) / baseline's loss, with losses summed over all test tokens of
                       a band.

Start reading at `RelativeLoss`, which says why there are two. `reefknot compare --figure` also uses `band_json` and
`draw_bands`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reefknot.errors import DataError
from reefknot.lab.evaluation.comparison import block_boundaries
from reefknot.lab.evaluation.frequency import FIGURE_3, PairedLosses, TypeComparison, compare_by_target
from reefknot.lab.evaluation.pairing import pair_scores
from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.papers.figures.intervals import format_estimate
from reefknot.lab.papers.figures.pictures import Panel, draw_bars
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.rows import group_by_row
from reefknot.lab.runs.comparability import explain_in_comparison
from reefknot.lab.runs.definition import format_count_range
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.loading import Result, flatten
from reefknot.lab.tasks.language_model import open_texts

PAPER_TYPE_MEANS = {
    "weight tying": (-17.546, -2.804, -0.108, -0.759, 0.512, -0.222, -0.680, 0.188),
    "bilinear": (-9.589, -7.369, -3.336, -4.665, 0.027, -0.258, 1.205, 2.054),
    "dual nonlinear": (-4.789, -6.502, -0.567, -0.702, 0.644, -0.026, 0.367, -0.808),
}
"""The paper's means over types, by band from one occurrence on, from the authors' files."""
PAPER_ALL_TOKENS = {
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
LINEAR_LIMIT = 10.0
"""A percentage. If a mean exceeds ten times this value, the axis is logarithmic beyond it; see `Panel.linear_limit`."""
Json = dict[str, Any]
"""An estimate, or the estimates of a band."""
PaperValues = dict[str, dict[str, dict[int, float | None]]]
"""The paper's values by measure (`whole`: all tokens, `relative`: mean over types), row and lowest count of a band."""
BASELINES = {"plain": "weight tying", "bilinear": "bilinear", "dual": "dual nonlinear"}
"""The paper's names of the baselines, by the kind of their classifier."""


class RelativeLoss(Figure):
    """A bar for each band and baseline, for both measures.

    We added the measure over all tokens, because the paper's measure divides by almost zero for a type that DRILL
    predicts with near certainty, such as the second half of a name. A few such types can dominate the mean of their
    band. On rare words, the paper prints a gain of 17.5 % over weight tying, but the summed loss falls only by 2.2 %.
    We also computed the measure over all tokens from the losses that the authors published.

    The interval of the mean over types comes from resampling types, and the interval over all tokens from resampling
    the text. <unk> and <eos> belong to bands like any other type. The authors count <unk> but not <eos>, so their band
    from 5,000 occurrences on has 16 types of the Penn Treebank, and ours has 17.
    """

    name = "pappas2019/3"
    recipe = "pappas2019/figure3"
    needs = "token losses and the text"
    options = ("data",)
    title = "Pappas & Henderson 2019, Figure 3: DRILL against its baselines by word frequency"
    description = (
        "The mean relative difference in cross-entropy between DRILL and three baselines (weight tying, bilinear "
        "mapping, dual nonlinear mapping) on the Penn Treebank, for word types in bands of their training frequency. "
        "DRILL gains most on rare words."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measurements:
        """Measure both differences in every band, for each baseline. The losses of several seeds are averaged.

        Baselines that were not scored on the same tokens as DRILL, in the same streams or windows, are listed and left
        out.
        """
        # Find the deepest DRILL and the baselines.
        runs_by_row = group_by_row(runs)
        kinds = {name: _classifier_kind(results[0]) for name, results in runs_by_row.items()}
        drill_rows = [name for name, kind in kinds.items() if kind == "drill"]
        if not drill_rows:
            raise DataError("none of these runs has the classifier DRILL; pass runs of DRILL and of its baselines")
        drill = max(drill_rows, key=lambda name: _classifier_depth(runs_by_row[name][0]))
        baselines = {name: results for name, results in runs_by_row.items() if kinds[name] in BASELINES}
        if not baselines:
            raise DataError(
                "none of these runs is a baseline: a plain classifier tied to the table of the input, a bilinear or a "
                "dual classifier; pass a run of a baseline as well"
            )

        # Leave out baselines that cannot be compared.
        first_run, *other_seeds = runs_by_row[drill]
        texts = open_texts(RunFolder.open(first_run.folder), data)
        left_out = {}
        for name, results in baselines.items():
            reason = _find_obstacle(first_run, [*other_seeds, *results], data)
            if reason:
                left_out[name] = f"no fair comparison with {drill}: {reason}"
        baselines = {name: results for name, results in baselines.items() if name not in left_out}
        if not baselines:
            raise DataError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))

        # Compare each baseline with DRILL, band by band.
        drill_losses = [_read_losses(result) for result in runs_by_row[drill]]
        boundaries = block_boundaries(len(drill_losses[0]))
        compared = []
        for name, results in baselines.items():
            baseline_losses = [_read_losses(result) for result in results]
            paired_losses = PairedLosses(baseline_losses, drill_losses, boundaries)
            bands = compare_by_target(paired_losses, texts.splits["test"], texts.vocabulary)
            compared.append(
                {
                    "row": name,
                    "baseline": BASELINES[str(kinds[name])],
                    "seeds": [result.seed for result in results],
                    "bands": [band_json(band) for band in bands],
                }
            )
        return {
            "drill": drill,
            "seeds": [result.seed for result in runs_by_row[drill]],
            "compared": compared,
            "left_out": left_out,
        }

    def draw(self, measured: Measurements) -> Drawing:
        """Draw the bands side by side, with the paper's values as marks."""
        bands_by_row = {baseline["row"]: baseline["bands"] for baseline in measured["compared"]}
        paper_values: PaperValues = {"whole": {}, "relative": {}}
        for baseline in measured["compared"]:
            row = baseline["row"]
            name = baseline["baseline"]
            counts = [band["low"] for band in baseline["bands"]]
            paper_values["whole"][row] = {low: _find_paper_value(PAPER_ALL_TOKENS, name, low) for low in counts}
            paper_values["relative"][row] = {low: _find_paper_value(PAPER_TYPE_MEANS, name, low) for low in counts}
        caption = (
            f"Loss of {measured['drill']} relative to each baseline; below zero, DRILL is better. {CAPTION} The marks "
            "above are computed from the losses that the authors published; the paper does not show them."
        )
        return draw_bands(
            self.slug,
            bands_by_row,
            caption,
            y_labels=("% of baseline's loss", "% of DRILL's loss"),
            title_suffix=": DRILL minus baseline",
            paper_values=paper_values,
        )

    def format_lines(self, measured: Measurements) -> list[str]:
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
                count_range = format_count_range(band["low"], band["high"])
                counts = f"{count_range:>12} {band['tokens']:>7,} {band['types']:>6,}"
                all_tokens = format_estimate(band["whole"], 1) if band["whole"] else ""
                authors = _format_paper_value(PAPER_ALL_TOKENS, baseline["baseline"], band["low"])
                type_mean = format_estimate(band["relative"], 1) if band["relative"] else ""
                paper = _format_paper_value(PAPER_TYPE_MEANS, baseline["baseline"], band["low"])
                lines.append(f"  {counts}  {all_tokens:<20} {authors:>8}   {type_mean:<24} {paper:>6}".rstrip())
        for name, reason in measured.get("left_out", {}).items():
            lines.append(f"left out: {name}: {reason}")
        return lines


def band_json(band: TypeComparison) -> Json:
    """Return both measures of a band in percent; None where there is no loss to divide by.

    `whole` is the measure over all tokens, and `relative` is the mean over types. The interval over all tokens is the
    interval of the difference divided by the baseline's loss, which is treated as a constant.
    """
    all_tokens = None
    if band.nll_a > 0:
        percent = 100 / band.nll_a
        interval = None
        if band.interval:
            low, high = band.interval
            interval = (percent * low, percent * high)
        all_tokens = _build_estimate(percent * band.difference, interval)
    type_mean = None
    if band.relative is not None:
        type_mean = _build_estimate(band.relative, band.relative_interval)
    return {
        "low": band.low,
        "high": band.high,
        "types": band.types,
        "tokens": band.tokens,
        "whole": all_tokens,
        "relative": type_mean,
    }


def draw_bands(
    name: str,
    bands_by_row: Mapping[str, Sequence[Json]],
    caption: str,
    y_labels: tuple[str, str],
    *,
    title_suffix: str = "",
    paper_values: PaperValues | None = None,
) -> Drawing:
    """Draw a panel for all tokens and a panel for the mean over types, with a bar for each band and row.

    Args:
        name: The name of the picture.
        bands_by_row: The bands of each row, from `band_json`.
        caption: The text below the picture.
        y_labels: The labels of the vertical axes of both panels.
        title_suffix: A suffix for the titles of both panels, such as ": DRILL minus baseline".
        paper_values: The paper's values.
    """
    all_bands = [band for row_bands in bands_by_row.values() for band in row_bands]
    ranges = sorted({(band["low"], band["high"] or 0) for band in all_bands})  # 0 instead of None, to be sorted
    labels = [format_count_range(low, high or None) for low, high in ranges]

    def list_estimates(measure: str) -> dict[str, list[Json | None]]:
        """Return the estimates of each row in the order of the ranges."""
        estimates = {}
        for row, row_bands in bands_by_row.items():
            estimates_by_low = {band["low"]: band[measure] for band in row_bands}
            estimates[row] = [estimates_by_low.get(low) for low, _ in ranges]
        return estimates

    def list_paper_values(measure: str) -> dict[str, list[float | None]]:
        """Return the paper's values of each row in the order of the ranges."""
        values_by_row = paper_values[measure] if paper_values else {}
        return {row: [values.get(low) for low, _ in ranges] for row, values in values_by_row.items()}

    panels = [
        Panel(
            f"all tokens of a band{title_suffix}",
            labels,
            list_estimates("whole"),
            list_paper_values("whole"),
            y_label=y_labels[0],
        ),
        Panel(
            f"mean over word types{title_suffix}",
            labels,
            list_estimates("relative"),
            list_paper_values("relative"),
            y_label=y_labels[1],
            linear_limit=LINEAR_LIMIT,
        ),
    ]
    return draw_bars(name, panels, x_label="times seen in training", caption=caption)


def _classifier_kind(result: Result) -> str | None:
    """Return the kind of a run's classifier. It is None for a plain untied classifier, which is not a baseline."""
    settings = flatten(result.settings)
    kind = settings.get("output.classifier.kind")
    is_tied = settings.get("output.classifier.table") == settings.get("input.table")
    if not isinstance(kind, str) or (kind == "plain" and not is_tied):
        return None
    return kind


def _classifier_depth(result: Result) -> int:
    return int(flatten(result.settings).get("output.classifier.depth") or 0)


def _read_losses(result: Result) -> Any:
    """Return the loss of every test token."""
    return np.asarray(RunFolder.open(result.folder).read_scores()["test"])


def _find_obstacle(first: Result, others: Sequence[Result], data: Path | None) -> str | None:
    """Return why the token losses of some runs cannot be compared with the first run's, or None if they can."""
    first_run = RunFolder.open(first.folder)
    for result in others:
        pairing = pair_scores(first_run, RunFolder.open(result.folder), "test", lambda run: open_texts(run, data))
        if pairing.difference:
            reason = explain_in_comparison(pairing.difference, "test")
            if not pairing.difference.prevents:
                reason += "; train both with the same evaluation.windows"
            return reason
        if not pairing.same_tokens:
            return "their tokens differ; pass runs with the same vocabulary"
    return None


def _build_estimate(mean: float, interval: tuple[float, float] | None) -> Json:
    low, high = interval or (None, None)
    return {"mean": mean, "low": low, "high": high}


def _find_paper_value(values: Mapping[str, Sequence[float]], baseline: str, low: int) -> float | None:
    """Return the value of the band that begins at the count `low`, or None if the paper has no such band."""
    paper_lows = FIGURE_3[1:]
    if low not in paper_lows:
        return None
    return values[baseline][paper_lows.index(low)]


def _format_paper_value(values: Mapping[str, Sequence[float]], baseline: str, low: int) -> str:
    """Return the value with its sign, or an empty string if the paper has no such band."""
    value = _find_paper_value(values, baseline, low)
    if value is None:
        return ""
    return f"{value:+.1f}".replace("-", "\N{MINUS SIGN}")
