"""Draw bar charts with intervals, which most figures use.

`draw_bars` draws one or more `Panel`s. A panel has several series, each with its own colour. Our values are bars with
95 % intervals, and the paper's values are open markers:

    panel = Panel("PTB", ["MEN", "WS-353"], {"tied": [estimate, estimate]}, {"tied": [0.52, 0.6]})
    draw_bars("quality", [panel], x_label="benchmark", caption="...").svg_file
"""

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

PAPER_LABEL = "the paper's"
_PAPER_MARKER: dict[str, Any] = {"marker": "D", "linestyle": "none", "markersize": 5, "fillstyle": "none"}


@dataclass(frozen=True)
class Panel:
    """A panel with a group of bars for each label. A group has one bar for each series."""

    title: str
    labels: Sequence[str]
    estimates: Mapping[str, Sequence[Mapping[str, Any] | None]]
    """Our estimates (mean, low, high) by series, in the order of the labels; None means no bar."""
    paper_values: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """The paper's values by series, in the order of the labels; None means no marker."""
    y_label: str = ""
    logarithmic: bool = False
    """Use a logarithmic axis, for values that span powers of ten. Values must not be negative; zero is not visible."""
    linear_limit: float | None = None
    """If a value is more than ten times this number, the axis is linear up to this number and logarithmic beyond it.

    This applies on both sides of zero. It has no effect on a `logarithmic` panel.
    """


def draw_bars(name: str, panels: Sequence[Panel], *, x_label: str, caption: str) -> Drawing:
    """Draw the panels one below the other, with one legend. A series has the same colour in all panels."""
    series = list(dict.fromkeys(name for panel in panels for name in (*panel.estimates, *panel.paper_values)))
    has_paper_values = any(panel.paper_values for panel in panels)
    legend = [*series, PAPER_LABEL] if has_paper_values else series

    def draw(figure: Figure) -> None:
        have_same_labels = len({tuple(panel.labels) for panel in panels}) == 1
        grid: Any = figure.subplots(len(panels), 1, sharex=have_same_labels, squeeze=False)
        for panel, (axes,) in zip(panels, grid, strict=True):  # the grid has one column
            _draw_series(axes, panel, series)
            _set_y_scale(axes, panel)
            _label_groups(axes, panel)
        axes.set_xlabel(x_label)

        handles: list[Any] = [Patch(color=_series_colour(index)) for index in range(len(series))]
        if has_paper_values:
            handles.append(Line2D([], [], **_PAPER_MARKER, markeredgecolor=_text_colour()))
        figure.legend(handles, legend, loc="outside lower center", ncols=2)

    return Drawing(name, 0.4 + 2.2 * len(panels), legend, draw, caption)


def _draw_series(axes: Axes, panel: Panel, series: Sequence[str]) -> None:
    """Draw the bars and markers of a panel. `series` has the names of all panels, which decide the colours."""
    panel_series = [name for name in series if name in panel.estimates or name in panel.paper_values]
    width = 0.8 / len(panel_series)
    for position, name in enumerate(panel_series):
        colour = _series_colour(series.index(name))
        offset = (position - (len(panel_series) - 1) / 2) * width
        for x, estimate in enumerate(panel.estimates.get(name, ())):
            if estimate is not None:
                axes.bar(x + offset, estimate["mean"], width=0.92 * width, color=colour)
                if estimate["low"] is not None:
                    interval = [estimate["low"], estimate["high"]]
                    axes.plot([x + offset] * 2, interval, color=_text_colour(), linewidth=1)
        for x, paper_value in enumerate(panel.paper_values.get(name, ())):
            if paper_value is not None:
                axes.plot(x + offset, paper_value, **_PAPER_MARKER, markeredgecolor=_text_colour())


def _set_y_scale(axes: Axes, panel: Panel) -> None:
    """Set the scale of the vertical axis, and draw a line at zero if the axis has a zero."""
    if panel.logarithmic:
        axes.set_yscale("log")
        # Plain numbers, because the default formatter uses formulas, which are not rendered in pages.
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    else:
        if panel.linear_limit is not None:
            _limit_linear_range(axes, panel.linear_limit)
        axes.axhline(0, color="#888888", linewidth=0.8)


def _limit_linear_range(axes: Axes, linear_limit: float) -> None:
    """Make the axis logarithmic beyond `linear_limit` if a value is ten times as large."""
    lowest, highest = axes.dataLim.intervaly
    largest = max(-lowest, highest)
    if largest <= 10 * linear_limit:
        return
    decades = math.ceil(math.log10(largest / linear_limit))
    axes.set_yscale("symlog", linthresh=linear_limit, linscale=max(1.0, decades / 2))

    # Place ticks at half the limit, at the limit, and at its multiples by powers of ten, on both sides of zero.
    positive_ticks = [linear_limit / 2, *(linear_limit * 10**power for power in range(1 + decades))]
    negative_ticks = [-tick for tick in reversed(positive_ticks)]
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in (*negative_ticks, 0.0, *positive_ticks) if bottom <= tick <= top]
    axes.set_yticks(ticks, [f"{tick:,g}".replace("-", "\N{MINUS SIGN}") for tick in ticks])
    axes.minorticks_off()


def _label_groups(axes: Axes, panel: Panel) -> None:
    """Label the groups of bars and the vertical axis. Labels that would overlap are rotated."""
    longest_line = max(len(line) for label in panel.labels for line in label.split("\n"))
    is_crowded = len(panel.labels) * longest_line > 60
    rotation, alignment = (30, "right") if is_crowded else (0, "center")
    axes.set_xticks(range(len(panel.labels)), panel.labels, rotation=rotation, ha=alignment)
    axes.set(ylabel=panel.y_label, title=panel.title)


def _text_colour() -> str:
    """Return the colour of the text around the figure."""
    return str(mpl.rcParams["text.color"])


def _series_colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
