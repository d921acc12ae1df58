"""Recipes that extend another recipe: the same settings, the same runs, and clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.changes import Change

PARTS = {
    "inan2017/figure2": "inan2017/table1",
    "inan2017/table4": "inan2017/table1",
    "pappas2019/figure3": "pappas2019/table4",
    "baevski2019/figure2": "baevski2019/table3",
    "baevski2019/figure3": "baevski2019/table3",
    "baevski2019/figure4": "baevski2019/table4",
    "baevski2019/figure5": "baevski2019/table4",
    "press2017/table4": "press2017/table5",
}


@pytest.mark.parametrize(("part", "whole"), PARTS.items())
def test_part_has_the_rows_of_the_extended_recipe(part: str, whole: str) -> None:
    loaded_part, loaded_whole = load_recipe(part), load_recipe(whole)
    assert (loaded_part.given_name, loaded_part.name, loaded_part.paper) == (part, whole, loaded_whole.paper)
    assert loaded_part.title != loaded_whole.title
    for row in loaded_part.rows:
        assert row == loaded_whole.row(row.name)
        assert loaded_part.experiments[row.name] == loaded_whole.experiments[row.name]


def test_invalid_part_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "part.toml"
    head = 'title = "Part"\nextends = "{}"\n'
    for text, message in (
        (head.format("demo") + 'rows = ["zebra"]', 'demo has no row "zebra"; there are: "'),
        (head.format("demo") + "rows = []", "rows: "),
        (head.format("zebra") + 'rows = ["tied"]', "no recipe 'zebra'"),
        (head.format("inan2017/figure2") + 'rows = ["VD-LSTM large"]', "itself selects rows of another recipe"),
        (head.format("demo") + 'rows = ["tied"]\n[base.corpus]\nname = "ptb"', "base: "),
    ):
        path.write_text(text)
        with pytest.raises(SettingsError) as caught:
            load_recipe(str(path))
        assert message in str(caught.value)


def test_part_accepts_overrides_and_row_patterns() -> None:
    part = load_recipe("inan2017/figure2", ["training.epochs=2"], ["*large"])
    assert [row.name for row in part.rows] == [
        "VD-LSTM large",
        "VD-LSTM+AL large",
        "VD-LSTM+RE large",
        "VD-LSTM+REAL large",
    ]
    assert part.changed["VD-LSTM large"] == [Change(key="training.epochs", old=100, new=2)]
