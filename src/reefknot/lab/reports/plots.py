"""Plots of the report as inline SVG: training curves, loss by word frequency, size against perplexity or BLEU.

Their common style is in `drawing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from reefknot.lab.reports.drawing import POINT, Plot, left_out, legend, style_of, svg
from reefknot.lab.reports.results import Result, flatten
from reefknot.lab.reports.rows import TableRow, comparable, judged_by, rivals
from reefknot.lab.runs.definition import perplexity
from reefknot.lab.runs.result import Band, MetricsLine
from reefknot.lab.runs.scores import BLEU


def curves(rows: Sequence[TableRow]) -> list[Plot]:
    """Plot validation perplexity, training perplexity and the loss per pair of skip-gram, if they were logged."""
    results = [result for row in rows for result in row.results]
    x_axis = "update" if results and all(result.by_updates for result in results) else "epoch"
    return [*_validation(rows, x_axis), *_training(rows, x_axis), *_pairs(rows)]


def _validation(rows: Sequence[TableRow], x_axis: str) -> list[Plot]:
    logged = [row for row in rows if any(result.last("valid") for result in row.results)]
    per_word = [row for row in logged if any(_curve(result, "valid", x_axis) for result in row.results)]
    fair = comparable(rows)
    plotted = [row for row in per_word if not row.score or row in fair]
    caption = f"Validation perplexity per word by {x_axis}."
    caption += left_out(
        [row for row in per_word if row not in plotted], "they were scored differently or on another text"
    )
    caption += left_out(
        [row for row in logged if row not in per_word], "perplexity per word is not known until a run is finished"
    )
    return _plot_curves("valid", x_axis, rows, plotted, caption)


def _training(rows: Sequence[TableRow], x_axis: str) -> list[Plot]:
    named = [_named_by_loss(row) for row in rows]
    plotted = [row for row in named if any(_curve(result, "train", x_axis) for result in row.results)]
    interval = "an epoch" if x_axis == "epoch" else "the updates since the last point"
    caption = (
        f"Training perplexity per token by {x_axis}. A point is a mean over {interval}, while the weights change, so "
        "it is not comparable with validation perplexity."
    )
    if named != list(rows):
        caption += " A sampled loss and a loss per sub-word are not comparable with other losses."
    return _plot_curves("train", x_axis, named, plotted, caption)


def _pairs(rows: Sequence[TableRow]) -> list[Plot]:
    plotted = [row for row in rows if any(result.last("pairs") for result in row.results)]
    caption = "Skip-gram: mean loss of a pair of words and its negative samples, always over the same few pairs."
    return _plot_curves("pairs", "words read", rows, plotted, caption)


def _plot_curves(
    kind: str, x_axis: str, rows: Sequence[TableRow], plotted: Sequence[TableRow], caption: str
) -> list[Plot]:
    if not plotted:
        return []
    # The steep beginning of a long curve would make the differences between curves invisible.
    long = max(len(_curve(result, kind, x_axis)) for row in plotted for result in row.results) > 16

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        means = []
        for row in plotted:
            seeds = [points for result in row.results if (points := _curve(result, kind, x_axis))]
            mean = _mean(seeds)
            means.append(mean)
            style = style_of(rows.index(row)) | {"markevery": math.ceil(len(mean) / 16)}
            for points in seeds if len(seeds) > 1 else []:
                axes.plot(*zip(*points, strict=True), color=style["color"], linewidth=0.6, alpha=0.45)
            axes.plot(*zip(*mean, strict=True), **style)
        if long:
            lowest, early = min(y for mean in means for _, y in mean), max(mean[len(mean) // 8][1] for mean in means)
            axes.set_ylim(0.97 * lowest, 1.03 * early)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if kind == "pairs":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            _log_scale(axes)
        axes.set(xlabel=x_axis, ylabel="nats per pair" if kind == "pairs" else "perplexity, log scale")
        legend(figure, rows, plotted)

    if long:
        caption += " The steep beginning is cut off."
    if any(len(row.results) > 1 for row in plotted):
        caption += " Thin lines are seeds, thick lines their mean."
    return [Plot(svg(f"curve-{kind}", 2.8, plotted, draw, caption), caption)]


def frequency(rows: Sequence[TableRow]) -> list[Plot]:
    """Plot the loss by the training frequency of the target, and by the training frequency of the previous token.

    Only rows with the same tokens are plotted, because losses on different tokens cannot be compared.
    """
    plots = []
    for end, token in (("target", "the token to predict"), ("previous", "the previous token")):
        scored = [row for row in rows if row.score and _bands(row, end)]
        fair = comparable(scored)
        alike = [row for row in fair if _tokens(row) == _tokens(fair[0])]
        losses = {rows.index(row): _bands(row, end) for row in alike}
        if not losses:
            continue
        # Grouped by the previous word, the losses of all rows nearly coincide, so only their differences are plotted.
        panels = ("loss",) if len(losses) == 1 else ("loss", "difference") if end == "target" else ("difference",)

        def draw(figure: Figure, losses: dict[int, dict[Band, float]] = losses, panels: Sequence[str] = panels) -> None:
            _draw_frequency(figure, rows, losses, panels)

        caption = f"Mean test loss by the training frequency of {token}"
        if "difference" in panels:
            below = ". Below:" if "loss" in panels else ", as"
            caption += f"{below} the difference from {rows[min(losses)].name}; lower is better"
        caption += "."
        caption += left_out(
            [row for row in scored if row not in alike], "they were scored differently or on other tokens"
        )
        plotted = [rows[n] for n in losses]
        height = 4.2 if len(panels) > 1 else 2.8
        plots.append(Plot(svg(f"frequency-{end}", height, plotted, draw, caption), caption))
    return plots


def sizes(rows: Sequence[TableRow]) -> list[Plot]:
    """Plot parameters against the test score that ranks the rows, if at least two rows can be compared."""
    metric = judged_by(rows)
    what = f"test {metric.name}"
    scored = [row for row in rows if row.mean_score(metric, "test") and row.size]
    if metric == BLEU:
        plotted = max(rivals(scored, "test"), key=len, default=[])
        reason = "their text or the definition of their score differs"
    else:
        plotted = comparable(scored)
        reason = "they were scored differently or on another text"
    if len(plotted) < 2:
        return []
    unit, units = (1e6, "millions") if max(row.size or 0 for row in plotted) >= 2e6 else (1e3, "thousands")

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row in plotted:
            score = row.mean_score(metric, "test")
            assert score is not None
            style = style_of(rows.index(row)) | POINT
            axes.errorbar((row.size or 0) / unit, score.mean, yerr=score.sd, **style)
        axes.margins(0.18)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set(xlabel=f"parameters, {units}", ylabel=what)
        legend(figure, rows, plotted, points=True)

    caption = f"Parameters against {what}; {metric.better} and further left is better."
    caption += left_out([row for row in scored if row not in plotted], reason)
    return [Plot(svg("sizes", 2.8, plotted, draw, caption), caption)]


def _draw_frequency(
    figure: Figure, rows: Sequence[TableRow], losses: dict[int, dict[Band, float]], panels: Sequence[str]
) -> None:
    by_ends = {(band.low, band.high or math.inf): band for row_losses in losses.values() for band in row_losses}
    bands = sorted(by_ends.items())
    ends = [key for key, _ in bands]
    grid: Any = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[3, 2][: len(panels)])
    axes = dict(zip(panels, (row[0] for row in grid), strict=True))
    first = _by_ends(losses[min(losses)])
    for n, row_losses in losses.items():
        loss = _by_ends(row_losses)
        xs = [ends.index(key) for key in ends if key in loss]
        style = style_of(n) | {"linewidth": 1.1}
        if "loss" in axes:
            axes["loss"].plot(xs, [loss[ends[x]] for x in xs], **style)
        if "difference" in axes:
            both = [x for x in xs if ends[x] in first]
            axes["difference"].plot(both, [loss[ends[x]] - first[ends[x]] for x in both], **style)
    shares = {(band.low, band.high): band.tokens for band in losses[min(losses)]}
    total = sum(shares.values())
    labels = [f"{_short(band)}\n{100 * shares.get((band.low, band.high), 0) / total:.0f} %" for _, band in bands]
    lowest = axes[panels[-1]]
    lowest.set_xticks(range(len(bands)), labels)
    lowest.set_xlabel("times seen in training (share of tokens)")
    if "loss" in axes:
        axes["loss"].set(ylabel="nats per token", ylim=(0, None))
    if "difference" in axes:
        axes["difference"].axhline(0, color="#888888", linewidth=0.8, zorder=0)
        axes["difference"].set_ylabel("difference" if "loss" in axes else "difference, nats per token")
    legend(figure, rows, [rows[n] for n in losses])


def _log_scale(axes: Any) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # Use even ticks for a narrow range, where powers of ten would leave the axis without labels.
    even = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    axes.yaxis.set_major_locator(even if high < 4 * low else LogLocator(subs=(1, 2, 3, 5), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _curve(result: Result, kind: str, x_axis: str) -> list[tuple[float, float]]:
    """Return the points of a curve.

    A point has the validation perplexity per word, or the training perplexity per token, by epoch or by update. For
    the pairs of skip-gram, it has the loss by the number of words read.
    """
    metrics = [metric for metric in result.metrics if metric.kind == kind]
    if kind == "pairs":
        return [(metric.tokens, metric.nll) for metric in metrics]
    if kind == "train" and x_axis == "update":
        return [(metric.step, perplexity(metric.nll)) for metric in metrics]
    if kind == "train":
        epochs: dict[float, list[MetricsLine]] = {}
        for metric in metrics:
            epochs.setdefault(math.ceil(metric.epoch), []).append(metric)
        means = {n: fmean([m.nll for m in lines], weights=[m.tokens for m in lines]) for n, lines in epochs.items()}
        return [(epoch, perplexity(mean)) for epoch, mean in means.items()]
    # By any step in epoch n, at most n epochs have passed, so the largest step / epoch is the length of an epoch.
    length = max((metric.step / metric.epoch for metric in metrics if metric.epoch > 0), default=0.0)
    tokens_per_word = result.tokens_per_word_in_validation
    if not length or tokens_per_word is None:
        return []
    unit = 1.0 if x_axis == "update" else length
    return [(metric.step / unit, perplexity(metric.nll * tokens_per_word)) for metric in metrics]


def _mean(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean curve of several seeds, up to the end of the shortest curve."""
    return [(points[0][0], fmean(y for _, y in points)) for points in zip(*curves, strict=False)]


def _named_by_loss(row: TableRow) -> TableRow:
    """Add a remark to the name of a row whose training loss is sampled or per sub-word."""
    if not row.results:
        return row
    remarks = ["sampled loss"] if flatten(row.results[0].settings).get("output.kind") == "sampled" else []
    remarks += ["per sub-word"] if row.results[0].cuts_words else []
    return replace(row, name=f"{row.name} ({', '.join(remarks)})") if remarks else row


def _tokens(row: TableRow) -> int | None:
    return row.score.tokens if row.score else None


def _bands(row: TableRow, end: str) -> dict[Band, float]:
    """Return the mean loss over seeds for each band that has tokens."""
    losses: dict[tuple[int, int | None], list[Band]] = {}
    for record in row.records:
        for band in getattr(record.frequency, end):
            if band.tokens:
                losses.setdefault((band.low, band.high), []).append(band)
    return {bands[0]: fmean(band.nll for band in bands) for bands in losses.values()}


def _by_ends(losses: dict[Band, float]) -> dict[tuple[int, float], float]:
    return {(band.low, band.high or math.inf): loss for band, loss in losses.items()}


def _short(band: Band) -> str:
    """Return a short label with the lower end of a band. The upper end follows from the next band."""
    for unit, name in ((10**6, "M"), (10**3, "k")):
        if band.low >= unit:
            return f"{band.low / unit:g}{name}+"
    return band.label if band.high is not None and band.high < 1000 else f"{band.low}+"
