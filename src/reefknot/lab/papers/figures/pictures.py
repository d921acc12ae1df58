"""Bar charts with intervals, which most figures use. Our values are bars, and the paper's values are open marks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter

from reefknot.lab.reports.drawing import COLOURS, Drawing

PAPER = "the paper's"


@dataclass(frozen=True)
class Panel:
    """A panel with a group of bars for each label. A group has one bar for each series.

    `ours` has the estimates of a series (mean, low, high) in the order of the labels; None means no bar.
    """

    title: str
    labels: Sequence[str]
    ours: Mapping[str, Sequence[Mapping[str, Any] | None]]
    papers: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    measured: str = ""
    """Label of the vertical axis: what the bars measure."""
    logarithmic: bool = False
    """Use a logarithmic axis, for values that span powers of ten. Values must not be negative; zero is not visible."""
    linear_to: float | None = None
    """If a value is more than ten times this number, the axis is linear up to it and logarithmic beyond it.

    This applies on both sides of zero. It has no effect on a `logarithmic` panel.
    """


def bars(name: str, panels: Sequence[Panel], *, along: str, caption: str) -> Drawing:
    """Draw the panels below each other, with one legend. A series has the same colour in all panels."""
    series = list(dict.fromkeys(name for panel in panels for name in (*panel.ours, *panel.papers)))
    legend = [*series, PAPER] if any(panel.papers for panel in panels) else series

    def draw(figure: Figure) -> None:
        alike = len({tuple(panel.labels) for panel in panels}) == 1
        grid: Any = figure.subplots(len(panels), 1, sharex=alike, squeeze=False)
        for panel, (axes,) in zip(panels, grid, strict=True):
            _draw(axes, panel, series)
        axes.set_xlabel(along)
        handles: list[Any] = [Patch(color=_colour(n)) for n in range(len(series))]
        handles += [Line2D([], [], **_MARK, markeredgecolor=_ink())] * (len(legend) - len(series))
        figure.legend(handles, legend, loc="outside lower center", ncols=2)

    return Drawing(name, 0.4 + 2.2 * len(panels), legend, draw, caption)


_MARK: dict[str, Any] = {"marker": "D", "linestyle": "none", "markersize": 5, "fillstyle": "none"}


def _draw(axes: Axes, panel: Panel, series: Sequence[str]) -> None:
    names = [name for name in series if name in panel.ours or name in panel.papers]
    width = 0.8 / len(names)
    for position, name in enumerate(names):
        n, shift = series.index(name), (position - (len(names) - 1) / 2) * width
        for at, estimate in enumerate(panel.ours.get(name, ())):
            if estimate is not None:
                axes.bar(at + shift, estimate["mean"], width=0.92 * width, color=_colour(n))
                if estimate["low"] is not None:
                    axes.plot([at + shift] * 2, [estimate["low"], estimate["high"]], color=_ink(), linewidth=1)
        for at, value in enumerate(panel.papers.get(name, ())):
            if value is not None:
                axes.plot(at + shift, value, **_MARK, markeredgecolor=_ink())
    if panel.logarithmic:
        axes.set_yscale("log")
        # Plain numbers, because the default formatter uses formulas, which are not rendered in pages.
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    else:
        if panel.linear_to is not None:
            _logarithmic_beyond(axes, panel.linear_to)
        axes.axhline(0, color="#888888", linewidth=0.8)
    crowded = len(panel.labels) * max(len(line) for label in panel.labels for line in label.split("\n")) > 60
    axes.set_xticks(
        range(len(panel.labels)), panel.labels, rotation=30 if crowded else 0, ha="right" if crowded else "center"
    )
    axes.set(ylabel=panel.measured, title=panel.title)


def _logarithmic_beyond(axes: Axes, linear_to: float) -> None:
    """Make the axis logarithmic beyond `linear_to` if a value is ten times as large."""
    low, high = axes.dataLim.intervaly
    if max(-low, high) <= 10 * linear_to:
        return
    decades = math.ceil(math.log10(max(-low, high) / linear_to))
    axes.set_yscale("symlog", linthresh=linear_to, linscale=max(1.0, decades / 2))
    sizes = [linear_to / 2, *(linear_to * 10**n for n in range(1 + decades))]
    low, high = axes.get_ylim()
    ticks = [tick for tick in (*(-size for size in reversed(sizes)), 0.0, *sizes) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:,g}".replace("-", "\N{MINUS SIGN}") for tick in ticks])
    axes.minorticks_off()


def _ink() -> str:
    """Return the colour of the text around the figure."""
    return str(mpl.rcParams["text.color"])


def _colour(n: int) -> str:
    return COLOURS[n % len(COLOURS)]
