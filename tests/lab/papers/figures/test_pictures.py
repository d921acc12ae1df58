"""Grouped bars: positions, colours and axis scale."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from reefknot.lab.papers.figures.pictures import Panel, draw_bars


def test_bars_are_centred_on_their_labels_in_every_panel() -> None:
    point = {"mean": 1.0, "low": None, "high": None}
    panels = [Panel("few", ["a"], {"one": [point]}), Panel("many", ["a"], {"two": [point], "three": [point]})]
    figure = Figure()
    draw_bars("name", panels, x_label="x", caption="").draw(figure)
    few, many = (list(axes.patches) for axes in figure.axes)
    assert [bar.get_x() + bar.get_width() / 2 for bar in few] == pytest.approx([0.0])
    assert [bar.get_x() + bar.get_width() / 2 for bar in many] == pytest.approx([-0.2, 0.2])
    assert len({bar.get_facecolor() for bar in (*few, *many)}) == 3


@pytest.mark.parametrize(
    ("means", "scale", "ticks"),
    [
        ((-3.0, 8.0), "linear", None),
        ((-3.0, 2_000.0), "symlog", [0, 5, 10, 100, 1_000]),
        ((-40.0, 2.0), "linear", None),
        ((-400.0, -2.0), "symlog", [-100, -10, -5, 0]),
    ],
)
def test_outlier_switches_to_a_symlog_axis(means: tuple[float, ...], scale: str, ticks: list[float] | None) -> None:
    estimates = [{"mean": mean, "low": None, "high": None} for mean in means]
    panel = Panel("", ["a", "b"], {"one": estimates}, linear_limit=10.0)
    figure = Figure()
    draw_bars("name", [panel], x_label="x", caption="").draw(figure)
    (axes,) = figure.axes
    assert axes.get_yscale() == scale
    if ticks is not None:
        assert list(axes.get_yticks()) == ticks
        assert [label.get_text() for label in axes.get_yticklabels()] == [f"{n:,}".replace("-", "−") for n in ticks]
        low, high = axes.get_ylim()
        transform = axes.transScale.transform
        height = transform((0, min(high, 10.0)))[1] - transform((0, max(low, -10.0)))[1]
        assert height > 0.3 * (transform((0, high))[1] - transform((0, low))[1])
