"""The summary of PAPERS.md: which rows count, and in which list a table appears."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from made_results import ROWS, change, result, scored, write_run
from reefknot.errors import DataError
from reefknot.lab.papers import summary
from reefknot.lab.papers.measured_figures import RecordedFigure
from reefknot.lab.papers.summary import TableNote, format_summary, summarise_tables
from reefknot.lab.recipes.file import list_shipped_recipes
from reefknot.lab.reports.rows import TableRow, join_runs
from reefknot.lab.runs.loading import collect_runs

NAME = "press2017/table6"
PAPER = {name: {"test": row["paper"]["test"]} for name, row in ROWS.items()}


def rows_with(folder: Path, tests: dict[str, float], **fields: Any) -> list[TableRow]:
    """Return the three rows and a quoted row, of which those with a test perplexity were run."""
    for name, perplexity in tests.items():
        write_run(folder, name, 0, result(name, 0, test=scored(perplexity), **fields))
    rows = [TableRow(name, paper=PAPER[name], recipe=NAME) for name in ROWS]
    rows.append(TableRow("KN 5-gram", paper={"test": 141.0}, recipe=NAME, quoted=True))
    return join_runs(rows, collect_runs([folder]))


def lists(rows: Sequence[TableRow]) -> dict[str, str]:
    """Return the text of each list of the summary, by its title."""
    sections = "\n".join(format_summary({NAME: rows})).split("**")
    return dict(zip(sections[1::2], sections[2::2], strict=True))


def counts(rows: Sequence[TableRow]) -> list[str]:
    (line,) = [line for line in format_summary({NAME: rows}) if line.startswith(f"| `{NAME}`")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_rows_within_two_percent_are_reproduced(tmp_path: Path) -> None:
    rows = rows_with(tmp_path, {"Small": 115.0, "Small + WT": 110.5, "Small + WT + PR": 101.0})
    assert f"`{NAME}`: all 3 rows" in lists(rows)["Reproduced"]
    assert lists(rows)["Not run"].startswith(" (and why): none.")
    assert counts(rows) == ["3", "", "3", "3", "3", "2 of 2"]


def test_rows_that_are_off_are_listed_with_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "NOTES", {NAME: TableNote("no time", tried="three seeds")})
    rows = rows_with(tmp_path, {"Small": 120.0, "Small + WT": 112.0})
    sections = lists(rows)
    assert "- `press2017/table6`: Small (test +4.8 %). Tried: three seeds" in sections["Not reproduced"]
    assert "- `press2017/table6`: Small + WT" in sections["Reproduced"]
    assert "`press2017/table6` (1 of 3 rows): no time" in sections["Not run"]
    assert counts(rows) == ["2", "", "3", "3", "1", ""]


@pytest.mark.parametrize(("small", "title"), [(130.0, "Reproduced in trend"), (95.0, "Not reproduced")])
def test_shorter_training_counts_by_its_order_only(tmp_path: Path, small: float, title: str) -> None:
    changed = [change("training.epochs", 1000, 13)]
    rows = rows_with(tmp_path, {"Small": small, "Small + WT + PR": 120.0}, changed=changed)
    same_order = int(small > 120)
    text = f"`{NAME}`: {same_order} of 1 pairs in the paper's order; 2 rows trained for 13 of 1000 epochs"
    assert text in lists(rows)[title]
    assert lists(rows)["Reproduced"].strip().endswith("none.")
    assert counts(rows) == ["2", "2", "3", "3", "", f"{same_order} of 1"]


def test_rows_beyond_the_hardware_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "NOTES", {NAME: TableNote("too large", beyond=("*PR",))})
    assert counts(rows_with(tmp_path, {"Small": 115.0}))[2:4] == ["2", "3"]
    monkeypatch.setattr(summary, "NOTES", {NAME: TableNote("too large", beyond=("huge*",))})
    with pytest.raises(DataError, match=r"note on press2017/table6: no row matches 'huge\*'"):
        summarise_tables({NAME: [TableRow("Small", paper=PAPER["Small"])]})


def test_recipes_without_scores_of_a_paper_are_left_out() -> None:
    assert summarise_tables({"own": [TableRow("a"), TableRow("b", paper={"hours": 3.0})]}) == []


def test_verdicts_of_figures_are_counted() -> None:
    lines = ["Near 1: confirmed, 0.95.", "Low: confirmed, 0.2.", "About 0.06: contradicted, 0.1."]
    figure = RecordedFigure("Figure 1", "", lines, "", {"figure": "inan2017/1", "runs": []})
    text = "\n".join(format_summary({}, [figure]))
    assert "2 are confirmed, 1 contradicted (in [inan2017/1](#figure-1)) and 0 undecided" in text


def test_every_note_belongs_to_a_shipped_recipe() -> None:
    assert summary.NOTES.keys() <= list_shipped_recipes().keys()
