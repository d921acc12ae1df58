"""Draw the plots of the HTML report: training curves, loss by word frequency, and model size against score.

Each public function takes the rows of the report (one per experiment of a recipe) and returns finished plots as inline
SVG. A plot shows only rows that can be compared, and its caption names the others. The common style is in `drawing.py`.

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

from reefknot.lab.reports.drawing import POINT_STYLE, Plot, add_legend, describe_left_out, render_svg, row_style
from reefknot.lab.reports.results import Result, flatten
from reefknot.lab.reports.rows import TableRow, group_by_bleu, largest_comparable_group, ranking_metric
from reefknot.lab.runs.definition import perplexity
from reefknot.lab.runs.result import Band, MetricsLine
from reefknot.lab.runs.scores import BLEU


def plot_curves(rows: Sequence[TableRow]) -> list[Plot]:
    """Plot validation perplexity, training perplexity and the loss per word pair of skip-gram models, if logged."""
    results = [result for row in rows for result in row.results]
    x_axis = "update" if results and all(result.is_limited_by_updates for result in results) else "epoch"
    return [*_plot_validation(rows, x_axis), *_plot_training(rows, x_axis), *_plot_skip_gram(rows)]


def _plot_validation(rows: Sequence[TableRow], x_axis: str) -> list[Plot]:
    logged = [row for row in rows if any(result.last_metrics("valid") for result in row.results)]
    per_word = [row for row in logged if any(_read_curve(result, "valid", x_axis) for result in row.results)]
    comparable = largest_comparable_group(rows)
    plotted = [row for row in per_word if not row.score or row in comparable]
    caption = f"Validation perplexity per word by {x_axis}."
    caption += describe_left_out(
        [row for row in per_word if row not in plotted], "they were scored differently or on another text"
    )
    caption += describe_left_out(
        [row for row in logged if row not in per_word], "perplexity per word is not known until a run is finished"
    )
    return _draw_curves("valid", x_axis, rows, plotted, caption)


def _plot_training(rows: Sequence[TableRow], x_axis: str) -> list[Plot]:
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


def _plot_skip_gram(rows: Sequence[TableRow]) -> list[Plot]:
    plotted = [row for row in rows if any(result.last_metrics("pairs") for result in row.results)]
    caption = "Skip-gram: mean loss of a pair of words and its negative samples, always over the same few pairs."
    return _draw_curves("pairs", "words read", rows, plotted, caption)


def _draw_curves(
    kind: str, x_axis: str, rows: Sequence[TableRow], plotted: Sequence[TableRow], caption: str
) -> list[Plot]:
    if not plotted:
        return []
    curves_by_row = []
    for row in plotted:
        curves = [_read_curve(result, kind, x_axis) for result in row.results]
        curves_by_row.append([points for points in curves if points])
    means = [_mean_curve(curves) for curves in curves_by_row]
    # The steep beginning of a long curve would make the differences between curves invisible.
    cut_beginning = max(len(points) for curves in curves_by_row for points in curves) > 16

    def draw(figure: Figure) -> None:
        """Draw a thick line for the mean of each row, and a thin line for each of its seeds if there are several."""
        axes = figure.add_subplot()
        for row, curves, mean in zip(plotted, curves_by_row, means, strict=True):
            style = row_style(rows.index(row)) | {"markevery": math.ceil(len(mean) / 16)}
            if len(curves) > 1:
                for points in curves:
                    axes.plot(*zip(*points, strict=True), color=style["color"], linewidth=0.6, alpha=0.45)
            axes.plot(*zip(*mean, strict=True), **style)
        if cut_beginning:
            lowest = min(y for mean in means for _, y in mean)
            highest = max(mean[len(mean) // 8][1] for mean in means)
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
    return [Plot(render_svg(f"curve-{kind}", 2.8, plotted, draw, caption), caption)]


def plot_frequency(rows: Sequence[TableRow]) -> list[Plot]:
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
        caption += describe_left_out(
            [row for row in scored if row not in plotted], "they were scored differently or on other tokens"
        )
        draw = partial(_draw_frequency, rows=rows, plotted=plotted, position=position, panels=panels)
        height = 4.2 if len(panels) > 1 else 2.8
        plots.append(Plot(render_svg(f"frequency-{position}", height, plotted, draw, caption), caption))
    return plots


def _choose_panels(position: str, num_rows: int) -> tuple[str, ...]:
    """Return which values are plotted, from top to bottom: losses, and differences from the first row."""
    if num_rows == 1:
        return ("loss",)
    if position == "previous":
        # Grouped by the previous word, the losses of all rows nearly coincide, so only differences are plotted.
        return ("difference",)
    return ("loss", "difference")


def plot_sizes(rows: Sequence[TableRow]) -> list[Plot]:
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
    return [Plot(render_svg("sizes", 2.8, plotted, draw, caption), caption)]


def _draw_frequency(
    figure: Figure, rows: Sequence[TableRow], plotted: Sequence[TableRow], position: str, panels: Sequence[str]
) -> None:
    """Draw the losses by band, their differences from the first plotted row, or both, one above the other."""
    row_bands = [_band_losses(row, position) for row in plotted]
    row_losses = [{_band_range(band): loss for band, loss in bands.items()} for bands in row_bands]
    ranges = sorted({band_range for losses in row_losses for band_range in losses})
    grid: Any = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[3, 2][: len(panels)])
    axes = dict(zip(panels, (grid_row[0] for grid_row in grid), strict=True))
    first_losses = row_losses[0]
    for row, losses in zip(plotted, row_losses, strict=True):
        style = row_style(rows.index(row)) | {"linewidth": 1.1}
        if "loss" in axes:
            xs = [x for x, band_range in enumerate(ranges) if band_range in losses]
            axes["loss"].plot(xs, [losses[ranges[x]] for x in xs], **style)
        if "difference" in axes:
            xs = [x for x, band_range in enumerate(ranges) if band_range in losses and band_range in first_losses]
            axes["difference"].plot(xs, [losses[ranges[x]] - first_losses[ranges[x]] for x in xs], **style)
    bottom = axes[panels[-1]]
    bottom.set_xticks(range(len(ranges)), _label_bands(ranges, row_bands))
    bottom.set_xlabel("times seen in training (share of tokens)")
    if "loss" in axes:
        axes["loss"].set(ylabel="nats per token", ylim=(0, None))
    if "difference" in axes:
        axes["difference"].axhline(0, color="#888888", linewidth=0.8, zorder=0)
        axes["difference"].set_ylabel("difference" if "loss" in axes else "difference, nats per token")
    add_legend(figure, rows, plotted)


def _label_bands(ranges: Sequence[tuple[int, float]], row_bands: Sequence[Mapping[Band, float]]) -> list[str]:
    """Return the labels of the bands: the training counts, and below them the share of the first row's tokens."""
    band_by_range = {_band_range(band): band for bands in row_bands for band in bands}
    tokens = {_band_range(band): band.tokens for band in row_bands[0]}
    total = sum(tokens.values())
    labels = []
    for band_range in ranges:
        share = 100 * tokens.get(band_range, 0) / total
        labels.append(f"{_short_label(band_by_range[band_range])}\n{share:.0f} %")
    return labels


def _set_log_scale(axes: Any) -> None:
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    if top < 4 * bottom:  # a narrow range, where powers of ten would leave the axis without labels
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _read_curve(result: Result, kind: str, x_axis: str) -> list[tuple[float, float]]:
    """Return the points of a curve.

    The x of a point is an epoch or an update. Its y is the validation perplexity per word or the training perplexity
    per token. For the pairs of skip-gram, x is the number of words read and y is the loss.
    """
    lines = [line for line in result.metrics if line.kind == kind]
    if kind == "pairs":
        return [(line.tokens, line.nll) for line in lines]
    if kind == "train" and x_axis == "update":
        return [(line.step, perplexity(line.nll)) for line in lines]
    if kind == "train":
        return _read_epoch_means(lines)
    # A line of epoch n has step <= n * steps_per_epoch, with equality at the end of the epoch. So the maximum of
    # step / epoch is the number of steps per epoch.
    steps_per_epoch = max((line.step / line.epoch for line in lines if line.epoch > 0), default=0.0)
    tokens_per_word = result.tokens_per_word_in_validation
    if not steps_per_epoch or tokens_per_word is None:
        return []
    unit = 1.0 if x_axis == "update" else steps_per_epoch
    return [(line.step / unit, perplexity(line.nll * tokens_per_word)) for line in lines]


def _read_epoch_means(lines: Sequence[MetricsLine]) -> list[tuple[float, float]]:
    """Return the training perplexity of each epoch, from the mean loss over its tokens."""
    by_epoch: dict[float, list[MetricsLine]] = {}
    for line in lines:
        by_epoch.setdefault(math.ceil(line.epoch), []).append(line)
    points = []
    for epoch, epoch_lines in by_epoch.items():
        mean = fmean([line.nll for line in epoch_lines], weights=[line.tokens for line in epoch_lines])
        points.append((epoch, perplexity(mean)))
    return points


def _mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean curve of several seeds, up to the end of the shortest curve."""
    return [(points[0][0], fmean(y for _, y in points)) for points in zip(*curves, strict=False)]


def _add_loss_remarks(row: TableRow) -> TableRow:
    """Add a remark to the name of a row whose training loss is sampled or per sub-word."""
    if not row.results:
        return row
    remarks = ["sampled loss"] if flatten(row.results[0].settings).get("output.kind") == "sampled" else []
    remarks += ["per sub-word"] if row.results[0].uses_subwords else []
    return replace(row, name=f"{row.name} ({', '.join(remarks)})") if remarks else row


def _token_count(row: TableRow) -> int | None:
    return row.score.tokens if row.score else None


def _band_losses(row: TableRow, position: str) -> dict[Band, float]:
    """Return the mean loss over seeds for each band that has tokens.

    Args:
        row: The row.
        position: The token whose training count selects the band: `target` or `previous`.
    """
    by_range: dict[tuple[int, int | None], list[Band]] = {}
    for record in row.records:
        for band in getattr(record.frequency, position):
            if band.tokens:
                by_range.setdefault((band.low, band.high), []).append(band)
    return {bands[0]: fmean(band.nll for band in bands) for bands in by_range.values()}


def _band_range(band: Band) -> tuple[int, float]:
    """Return the smallest and the largest training count of a band."""
    return band.low, band.high or math.inf


def _short_label(band: Band) -> str:
    """Return a short label with the lower end of a band. The upper end follows from the next band."""
    for unit, suffix in ((10**6, "M"), (10**3, "k")):
        if band.low >= unit:
            return f"{band.low / unit:g}{suffix}+"
    return band.label if band.high is not None and band.high < 1000 else f"{band.low}+"
