"""Draw the plots of the HTML report: training curves, loss by word frequency, and model size against score.

Each public function takes the rows of the report and returns plots. A row is one experiment of a recipe, with one run
per random seed. A plot shows only rows that can be compared, and its caption names the others. The common style is in
`drawing.py`.

A band is a range of word counts in the training text, such as 10 to 99. Plots of word frequency group words by band.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from reefknot.lab.reports.drawing import POINT_STYLE, Drawing, add_legend, describe_left_out, row_style
from reefknot.lab.reports.rows import TableRow, group_by_bleu, largest_comparable_group, ranking_metric
from reefknot.lab.runs.definition import perplexity
from reefknot.lab.runs.loading import Result, flatten
from reefknot.lab.runs.result import Band, MetricsLine
from reefknot.lab.runs.scores import BLEU


def plot_curves(rows: Sequence[TableRow]) -> list[Drawing]:
    """Plot validation perplexity, training perplexity and the loss per word pair of skip-gram models, if logged.

    The x axis shows epochs, or updates if no run has more than one epoch.
    """
    results = [result for row in rows for result in row.results]
    last_epoch = max((line.epoch for result in results for line in result.metrics), default=0)
    is_limited_by_updates = bool(results) and all(result.is_limited_by_updates for result in results)
    x_axis = "update" if is_limited_by_updates or last_epoch <= 1 else "epoch"
    return [*_plot_validation(rows, x_axis), *_plot_training(rows, x_axis), *_plot_skip_gram(rows)]


def _plot_validation(rows: Sequence[TableRow], x_axis: str) -> list[Drawing]:
    """Plot validation perplexity per word. `x_axis` is "epoch" or "update"."""
    validated = [row for row in rows if any(result.last_metrics("valid") for result in row.results)]
    has_curve = [row for row in validated if any(_read_curve(result, "valid", x_axis) for result in row.results)]
    comparable = largest_comparable_group(rows)
    plotted = [row for row in has_curve if not row.score or row in comparable]

    not_comparable = [row for row in has_curve if row not in plotted]
    not_per_word = [row for row in validated if row not in has_curve]
    caption = f"Validation perplexity per word by {x_axis}."
    caption += describe_left_out(not_comparable, "they were scored differently or on another text")
    caption += describe_left_out(not_per_word, "perplexity per word is not known until a run is finished")
    return _draw_curves("valid", x_axis, rows, plotted, caption)


def _plot_training(rows: Sequence[TableRow], x_axis: str) -> list[Drawing]:
    """Plot training perplexity per token. `x_axis` is "epoch" or "update"."""
    labelled = [_add_loss_remarks(row) for row in rows]
    plotted = [row for row in labelled if any(_read_curve(result, "train", x_axis) for result in row.results)]
    interval = "an epoch" if x_axis == "epoch" else "the updates since the last point"
    caption = (
        f"Training perplexity per token by {x_axis}. A point is a mean over {interval}, during which the weights "
        "change, so it is not comparable with validation perplexity."
    )
    if labelled != list(rows):
        caption += " A sampled loss and a loss per sub-word are not comparable with other losses."
    return _draw_curves("train", x_axis, labelled, plotted, caption)


def _plot_skip_gram(rows: Sequence[TableRow]) -> list[Drawing]:
    """Plot the loss per word pair of skip-gram models."""
    plotted = [row for row in rows if any(result.last_metrics("pairs") for result in row.results)]
    caption = "Skip-gram: mean loss of a pair of words and its negative samples, always over the same few pairs."
    return _draw_curves("pairs", "words read", rows, plotted, caption)


def _draw_curves(
    kind: str, x_axis: str, rows: Sequence[TableRow], plotted: Sequence[TableRow], caption: str
) -> list[Drawing]:
    """Draw the curves of all plotted rows in one plot; return an empty list if no curve has two points.

    Args:
        kind: The kind of metrics: `valid`, `train` or `pairs` (of skip-gram).
        x_axis: The label of the x axis: `epoch`, `update` or `words read`.
        rows: All rows of the report, which decide the colours.
        plotted: The rows with a curve.
        caption: The caption, to which remarks are added.
    """
    curves_by_row = []
    for row in plotted:
        curves = [_read_curve(result, kind, x_axis) for result in row.results]
        curves_by_row.append([curve for curve in curves if curve])
    if not any(len(curve) > 1 for curves in curves_by_row for curve in curves):
        return []
    mean_curves = [_mean_curve(curves) for curves in curves_by_row]
    # The steep beginning of a long curve would make the differences between curves invisible.
    longest = max(len(curve) for curves in curves_by_row for curve in curves)
    cut_beginning = longest > 16

    def draw(figure: Figure) -> None:
        """Draw a thick line for the mean of each row, and a thin line for each of its seeds if there are several."""
        axes = figure.add_subplot()
        for row, curves, mean_curve in zip(plotted, curves_by_row, mean_curves, strict=True):
            style = row_style(rows.index(row)) | {"markevery": math.ceil(len(mean_curve) / 16)}
            if len(curves) > 1:
                for curve in curves:
                    axes.plot(*zip(*curve, strict=True), color=style["color"], linewidth=0.6, alpha=0.45)
            axes.plot(*zip(*mean_curve, strict=True), **style)
        if cut_beginning:
            lowest = min(y for mean_curve in mean_curves for _, y in mean_curve)
            highest = max(mean_curve[len(mean_curve) // 8][1] for mean_curve in mean_curves)
            axes.set_ylim(0.97 * lowest, 1.03 * highest)

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if kind == "pairs":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            _set_log_scale(axes)
        axes.set(xlabel=x_axis, ylabel="nats per pair" if kind == "pairs" else "perplexity, log scale")
        add_legend(figure, rows, plotted)

    if cut_beginning:
        caption += " The steep beginning is cut off."
    if any(len(row.results) > 1 for row in plotted):
        caption += " Thin lines are seeds, thick lines their mean."
    return [Drawing(f"curve-{kind}", 2.8, [row.name for row in plotted], draw, caption)]


def plot_frequency(rows: Sequence[TableRow]) -> list[Drawing]:
    """Plot the loss by the training frequency of the target, and by the training frequency of the previous token.

    Only rows with the same tokens are plotted, because losses on different tokens cannot be compared.
    """
    plots = []
    for position, token in (("target", "the token to predict"), ("previous", "the previous token")):
        scored = [row for row in rows if row.score and _band_losses(row, position)]
        comparable = largest_comparable_group(scored)
        plotted = [row for row in comparable if _token_count(row) == _token_count(comparable[0])]
        if not plotted:
            continue

        panels = _choose_panels(position, len(plotted))
        caption = f"Mean test loss by the training frequency of {token}"
        if "difference" in panels:
            introduction = ". Below:" if "loss" in panels else ", as"
            caption += f"{introduction} the difference from {plotted[0].name}; lower is better"
        caption += "."
        not_plotted = [row for row in scored if row not in plotted]
        caption += describe_left_out(not_plotted, "they were scored differently or on other tokens")

        draw = partial(_draw_frequency, rows=rows, plotted=plotted, position=position, panels=panels)
        height = 4.2 if len(panels) > 1 else 2.8
        plots.append(Drawing(f"frequency-{position}", height, [row.name for row in plotted], draw, caption))
    return plots


def _choose_panels(position: str, row_count: int) -> tuple[str, ...]:
    """Return which values are plotted, from top to bottom: losses, and differences from the first row."""
    if row_count == 1:
        return ("loss",)
    if position == "previous":
        # Grouped by the previous word, the losses of all rows nearly coincide, so only differences are plotted.
        return ("difference",)
    return ("loss", "difference")


def plot_sizes(rows: Sequence[TableRow]) -> list[Drawing]:
    """Plot parameters against the test score that ranks the rows, if at least two rows can be compared."""
    metric = ranking_metric(rows)
    score_name = f"test {metric.name}"
    scored = [row for row in rows if row.mean_score(metric, "test") and row.parameter_count]
    if metric == BLEU:
        plotted = max(group_by_bleu(scored, "test"), key=len, default=[])
        reason = "their text or the definition of their score differs"
    else:
        plotted = largest_comparable_group(scored)
        reason = "they were scored differently or on another text"
    if len(plotted) < 2:
        return []
    largest = max(row.parameter_count or 0 for row in plotted)
    unit, unit_name = (1e6, "millions") if largest >= 2e6 else (1e3, "thousands")

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row in plotted:
            score = row.mean_score(metric, "test")
            assert score is not None
            style = row_style(rows.index(row)) | POINT_STYLE
            axes.errorbar((row.parameter_count or 0) / unit, score.mean, yerr=score.sd, **style)
        axes.margins(0.18)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set(xlabel=f"parameters, {unit_name}", ylabel=score_name)
        add_legend(figure, rows, plotted, points=True)

    caption = f"Parameters against {score_name}; {metric.better} and further left is better."
    caption += describe_left_out([row for row in scored if row not in plotted], reason)
    return [Drawing("sizes", 2.8, [row.name for row in plotted], draw, caption)]


def _draw_frequency(
    figure: Figure, rows: Sequence[TableRow], plotted: Sequence[TableRow], position: str, panels: Sequence[str]
) -> None:
    """Draw the losses by band, their differences from the first plotted row, or both, one above the other."""
    band_losses_by_row = [_band_losses(row, position) for row in plotted]
    losses_by_row = []
    for band_losses in band_losses_by_row:
        losses_by_row.append({_band_range(band): loss for band, loss in band_losses.items()})
    first_losses = losses_by_row[0]
    ranges = sorted({band_range for losses in losses_by_row for band_range in losses})

    grid: Any = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[3, 2][: len(panels)])
    axes = dict(zip(panels, (grid_row[0] for grid_row in grid), strict=True))
    for row, losses in zip(plotted, losses_by_row, strict=True):
        style = row_style(rows.index(row)) | {"linewidth": 1.1}
        if "loss" in axes:
            xs = [x for x, band_range in enumerate(ranges) if band_range in losses]
            ys = [losses[ranges[x]] for x in xs]
            axes["loss"].plot(xs, ys, **style)
        if "difference" in axes:
            xs = [x for x, band_range in enumerate(ranges) if band_range in losses and band_range in first_losses]
            ys = [losses[ranges[x]] - first_losses[ranges[x]] for x in xs]
            axes["difference"].plot(xs, ys, **style)

    bottom = axes[panels[-1]]
    bottom.set_xticks(range(len(ranges)), _label_bands(ranges, band_losses_by_row))
    bottom.set_xlabel("times seen in training (share of tokens)")
    if "loss" in axes:
        highest = max(loss for losses in losses_by_row for loss in losses.values())
        axes["loss"].set(ylabel="nats per token", ylim=(0, 1.06 * highest))
    if "difference" in axes:
        axes["difference"].axhline(0, color="#888888", linewidth=0.8, zorder=0)
        axes["difference"].set_ylabel("difference" if "loss" in axes else "difference, nats per token")
    add_legend(figure, rows, plotted)


def _label_bands(ranges: Sequence[tuple[int, float]], band_losses_by_row: Sequence[Mapping[Band, float]]) -> list[str]:
    """Return the labels of the bands: the training counts, and below them the share of the first row's tokens."""
    band_by_range = {_band_range(band): band for band_losses in band_losses_by_row for band in band_losses}
    tokens_by_range = {_band_range(band): band.tokens for band in band_losses_by_row[0]}
    total_tokens = sum(tokens_by_range.values())
    labels = []
    for band_range in ranges:
        percent = 100 * tokens_by_range.get(band_range, 0) / total_tokens
        labels.append(f"{_short_label(band_by_range[band_range])}\n{percent:.0f} %")
    return labels


def _set_log_scale(axes: Any) -> None:
    """Make the y axis logarithmic, with plain numbers as labels."""
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    if top < 4 * bottom:  # a narrow range, where powers of ten would leave the axis without labels
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _read_curve(result: Result, kind: str, x_axis: str) -> list[tuple[float, float]]:
    """Return the points (x, y) of a curve.

    x is an epoch or an update. y is the validation perplexity per word or the training perplexity per token. For the
    pairs of skip-gram, x is the number of words read and y is the loss.
    """
    metrics = [line for line in result.metrics if line.kind == kind]
    if kind == "pairs":
        return [(line.tokens, line.nll) for line in metrics]
    if kind == "train" and x_axis == "update":
        return [(line.step, perplexity(line.nll)) for line in metrics]
    if kind == "train":
        return _read_epoch_means(metrics)

    # A line of epoch n has step <= n * steps_per_epoch, with equality at the end of the epoch. So the maximum of
    # step / epoch is the number of steps per epoch.
    steps_per_epoch = max((line.step / line.epoch for line in metrics if line.epoch > 0), default=0.0)
    tokens_per_word = result.tokens_per_word_in_validation
    if not steps_per_epoch or tokens_per_word is None:
        return []
    steps_per_unit = 1.0 if x_axis == "update" else steps_per_epoch
    return [(line.step / steps_per_unit, perplexity(line.nll * tokens_per_word)) for line in metrics]


def _read_epoch_means(metrics: Sequence[MetricsLine]) -> list[tuple[float, float]]:
    """Return the training perplexity of each epoch, from the mean loss over its tokens."""
    metrics_by_epoch: dict[float, list[MetricsLine]] = {}
    for line in metrics:
        metrics_by_epoch.setdefault(math.ceil(line.epoch), []).append(line)
    points = []
    for epoch, epoch_metrics in metrics_by_epoch.items():
        losses = [line.nll for line in epoch_metrics]
        token_counts = [line.tokens for line in epoch_metrics]
        points.append((epoch, perplexity(fmean(losses, weights=token_counts))))
    return points


def _mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean curve of several seeds, up to the end of the shortest curve."""
    mean_curve = []
    for seed_points in zip(*curves, strict=False):
        x, _ = seed_points[0]
        mean_curve.append((x, fmean(y for _, y in seed_points)))
    return mean_curve


def _add_loss_remarks(row: TableRow) -> TableRow:
    """Add a remark to the name of a row whose training loss is sampled or per sub-word."""
    if not row.results:
        return row
    remarks = []
    if flatten(row.results[0].settings).get("output.kind") == "sampled":
        remarks.append("sampled loss")
    if row.results[0].uses_subwords:
        remarks.append("per sub-word")
    if not remarks:
        return row
    return replace(row, name=f"{row.name} ({', '.join(remarks)})")


def _token_count(row: TableRow) -> int | None:
    """Return the number of tokens that the row was scored on."""
    return row.score.tokens if row.score else None


def _band_losses(row: TableRow, position: str) -> dict[Band, float]:
    """Return the mean loss over seeds for each band that has tokens.

    Args:
        row: The row.
        position: The token whose training count selects the band: `target` or `previous`.
    """
    bands_by_range: dict[tuple[int, int | None], list[Band]] = {}  # one band per seed
    for record in row.records:
        for band in getattr(record.frequency, position):
            if band.tokens:
                bands_by_range.setdefault((band.low, band.high), []).append(band)
    return {bands[0]: fmean(band.nll for band in bands) for bands in bands_by_range.values()}


def _band_range(band: Band) -> tuple[int, float]:
    """Return the smallest and the largest training count of a band."""
    return band.low, band.high or math.inf


def _short_label(band: Band) -> str:
    """Return a short label with the lower end of a band. The upper end follows from the next band."""
    for unit, suffix in ((10**6, "M"), (10**3, "k")):
        if band.low >= unit:
            return f"{band.low / unit:g}{suffix}+"
    if band.high is not None and band.high < 1000:
        return band.label
    return f"{band.low}+"
