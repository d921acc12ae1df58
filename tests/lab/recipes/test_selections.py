"""Recipes that select rows of another recipe: the same settings, the same runs, and clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.changes import Change

EXTENDED_RECIPES = {
    "inan2017/figure2": "inan2017/table1",
    "inan2017/table4": "inan2017/table1",
    "pappas2019/figure3": "pappas2019/table4",
    "baevski2019/figure2": "baevski2019/table3",
    "baevski2019/figure3": "baevski2019/table3",
    "baevski2019/figure4": "baevski2019/table4",
    "baevski2019/figure5": "baevski2019/table4",
    "press2017/table4": "press2017/table5",
}


@pytest.mark.parametrize(("name", "extended_name"), EXTENDED_RECIPES.items())
def test_selection_has_the_rows_of_the_extended_recipe(name: str, extended_name: str) -> None:
    recipe = load_recipe(name)
    extended_recipe = load_recipe(extended_name)
    assert recipe.given_name == name
    assert recipe.name == extended_name
    assert recipe.paper == extended_recipe.paper
    assert recipe.title != extended_recipe.title
    for row in recipe.rows:
        assert row == extended_recipe.row(row.name)
        assert recipe.experiments[row.name] == extended_recipe.experiments[row.name]


def test_invalid_selection_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "selection.toml"
    head = 'title = "Selection"\nextends = "{}"\n'
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


def test_selection_accepts_overrides_and_row_patterns() -> None:
    recipe = load_recipe("inan2017/figure2", ["training.epochs=2"], ["*large"])
    assert [row.name for row in recipe.rows] == [
        "VD-LSTM large",
        "VD-LSTM+AL large",
        "VD-LSTM+RE large",
        "VD-LSTM+REAL large",
    ]
    assert recipe.changed["VD-LSTM large"] == [Change(key="training.epochs", old=100, new=2)]
