"""The plain reading of a table says what the figures say and no more."""

from __future__ import annotations

from pathlib import Path

from reefknot.reports.reading import read
from reefknot.reports.results import collect
from reefknot.reports.table import TableRow, join

from .conftest import ROWS, result, write_run


def reading(root: Path) -> str:
    return " ".join(read(join([], collect([root])))).replace("\u00a0", " ")


def test_three_rows(runs: Path) -> None:
    text = reading(runs)
    assert "Small + WT + PR has the lowest test perplexity, 102.7 ± 0.7 with 2,691,800 parameters" in text
    assert "Small has the highest, 117.2 ± 0.7" in text
    assert "saves 2,000,000 parameters (43 %)" in text
    assert "+2.4 % (Small: 117.2 against 114.5). The order of the rows is the paper's." in text
    assert "Rows with one seed have none: their differences may be noise." in text


def test_one_seed_may_be_noise(tmp_path: Path) -> None:
    for row in ROWS:
        write_run(tmp_path, row, 0, result(row, 0))
    assert "One seed for each row: differences between rows may be noise." in reading(tmp_path)


def test_another_order_than_the_papers_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, paper={"test": 90.0}))
    write_run(tmp_path, "Small + WT", 0, result("Small + WT", 0))
    assert "The order of the rows is not the paper's." in reading(tmp_path)


def test_one_row_is_compared_with_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, paper={}))
    assert reading(tmp_path) == "Small reaches a test perplexity of 116.7 with 4,651,600 parameters."


def test_a_wrong_parameter_count_is_said(tmp_path: Path) -> None:
    record = result("Small", 0, parameters={"total": 5, "expected": 6})
    write_run(tmp_path, "Small", 0, record)
    assert "Small has 5 parameters where 6 were expected." in reading(tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, "Small")
    text = " ".join(read(join([TableRow("Small"), TableRow("Other")], collect([tmp_path]))))
    assert text == "Not finished, shown with the last metrics: Small. Not run: Other."
    assert read([]) == []
