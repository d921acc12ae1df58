"""Grouped bars: where they stand, and in which colour."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from reefknot.figures.pictures import Panel, bars


def test_bars_stand_over_their_label_however_many_series_other_panels_have() -> None:
    point = {"mean": 1.0, "low": None, "high": None}
    panels = [Panel("few", ["a"], {"one": [point]}), Panel("many", ["a"], {"two": [point], "three": [point]})]
    figure = Figure()
    bars("name", panels, along="x", caption="").draw(figure)
    few, many = (list(axes.patches) for axes in figure.axes)
    assert [bar.get_x() + bar.get_width() / 2 for bar in few] == pytest.approx([0.0])
    assert [bar.get_x() + bar.get_width() / 2 for bar in many] == pytest.approx([-0.2, 0.2])
    assert len({bar.get_facecolor() for bar in (*few, *many)}) == 3
