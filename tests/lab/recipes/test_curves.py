"""Learning curves that authors published: the file, the rows that name its columns, and mistakes in both."""

from __future__ import annotations

from pathlib import Path

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.recipes.curves import read_curves
from reefknot.lab.recipes.file import find_recipe, read_recipe_file

RECIPE = """
title = "Curves"
[base]
[[rows]]
name = "long"
paper_curve = "a"
[[rows]]
name = "other"
"""


def curve_of(recipe: str, row_name: str) -> tuple[float, ...]:
    recipe_file = read_recipe_file(find_recipe(recipe)[0], recipe)
    (row,) = [row for row in recipe_file.rows if row.name == row_name]
    return row.curve


def test_curve_may_end_before_the_others(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    path.write_text("# Source: a log\nepoch,a,b\n1,300,200.5\n2,150,\n")
    assert read_curves(path) == {"a": (300.0, 150.0), "b": (200.5,)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line"),
        ("epoch,a,a\n1,2,3\n", "all different"),
        ("epoch,a\n2,3\n", "epoch 1: expected the epoch and 1 values"),
        ("epoch,a\n1,3,4\n", "epoch 1: expected"),
        ("epoch,a\n1,nan\n", "epoch 1: 'nan' is not a perplexity"),
        ("epoch,a\n1,x\n", "epoch 1: 'x' is not a perplexity"),
        ("epoch,a\n1,\n2,5\n", "epoch 2: a has no value for an earlier epoch"),
    ],
)
def test_mistakes_name_the_file_and_the_epoch(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "curves.csv"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        read_curves(path)
    assert str(path) in str(caught.value)


def test_row_gets_the_curve_next_to_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    with pytest.raises(SettingsError, match=r"curves\.csv: cannot be read"):
        read_recipe_file(tmp_path / "recipe.toml", "recipe")
    (tmp_path / "curves.csv").write_text("epoch,b\n1,300\n")
    with pytest.raises(
        SettingsError, match=r'row "long":\n  paper_curve: curves.csv has no column \'a\'; there are: b'
    ):
        read_recipe_file(tmp_path / "recipe.toml", "recipe")
    (tmp_path / "curves.csv").write_text("epoch,a\n1,300\n")
    rows = read_recipe_file(tmp_path / "recipe.toml", "recipe").rows
    assert [row.curve for row in rows] == [(300.0,), ()]


def test_shipped_rows_have_the_authors_curves() -> None:
    for recipe, row, epoch, perplexity in (
        ("pappas2019/table1", "AWD-LSTM w/o finetune", 100, 64.36),
        ("pappas2019/table1", "AWD-LSTM-DRILL w/o finetune", 600, 59.64),
        ("pappas2019/table1", "AWD-LSTM-MoS w/o finetune", 600, 58.43),
        ("pappas2019/table2", "AWD-LSTM-DRILL w/o finetune", 600, 66.68),
        ("pappas2019/table2", "AWD-LSTM-MoS w/o finetune", 390, 66.11),
        ("pappas2019/table4", "Weight tying [PW17]", 25, 78.82),
    ):
        assert curve_of(recipe, row)[epoch - 1] == perplexity
    assert len(curve_of("pappas2019/table2", "AWD-LSTM-MoS w/o finetune")) == 390
