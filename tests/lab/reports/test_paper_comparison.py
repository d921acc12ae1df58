"""Scores next to the paper's: shorter training, the authors' learning curves, and scores of the last epoch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from made_results import change, metrics, result, write_evaluation, write_run
from reefknot.lab.reports.rows import TableRow, join_runs
from reefknot.lab.reports.table import build_table
from reefknot.lab.runs.loading import collect_runs

PAPER = {"train": 38.0, "valid": 120.7, "test": 114.5}


def make_row(folder: Path, record: dict[str, Any], **fields: Any) -> TableRow:
    write_run(folder, "Small", 0, record)
    return join_runs([TableRow("Small", **({"paper": PAPER} | fields))], collect_runs([folder]))[0]


def cells(row: TableRow) -> dict[str, str]:
    table = build_table([row])
    return {f"{column.group} {column.title}": column.cells[0] for column in table.columns}


def test_full_training_is_compared_with_the_paper(tmp_path: Path) -> None:
    row = make_row(tmp_path, result("Small", 0))
    assert not row.is_shortened
    assert row.relative_difference("test") == pytest.approx(116.7 / 114.5 - 1)


def test_training_shorter_than_the_papers_is_not_compared(tmp_path: Path) -> None:
    row = make_row(tmp_path, result("Small", 0), paper=PAPER | {"epochs": 1000})
    assert row.is_shortened
    assert row.relative_difference("test") is None
    assert cells(row)["time epochs"] == "13 of 1000"
    assert not any(title.endswith("diff") for title in cells(row))


def test_evaluation_of_a_shortened_row_names_its_epochs(tmp_path: Path) -> None:
    run = write_run(tmp_path, "Small", 0, result("Small", 0, changed=[change("training.epochs", 1000, 13)]))
    write_evaluation(run, "cache", test=90.0)
    _, evaluated = join_runs([TableRow("Small", paper=PAPER)], collect_runs([tmp_path]))
    assert evaluated.mode == "cache"
    assert cells(evaluated)["time epochs"] == "13 of 1000"


def test_authors_perplexity_is_that_of_the_scored_epoch(tmp_path: Path) -> None:
    ours = [line["perplexity"] for line in metrics("Small") if line["kind"] == "valid"]
    curve = tuple(perplexity / 1.02 for perplexity in ours)
    row = make_row(tmp_path, result("Small", 0), paper_curve=curve)
    assert row.authors_perplexity == curve[8], "the best epoch is the ninth"
    assert row.mean_curve_difference == pytest.approx(0.02)
    assert cells(row)["validation authors, same epoch"] == f"{curve[8]:.1f}"


def test_authors_curve_that_ended_earlier_gives_no_perplexity(tmp_path: Path) -> None:
    row = make_row(tmp_path, result("Small", 0), paper_curve=(300.0,) * 8)
    assert row.authors_perplexity is None


def test_last_epoch_is_scored_by_the_log_and_test_is_not_invented(tmp_path: Path) -> None:
    row = make_row(tmp_path, result("Small", 0), paper_epoch="last")
    log = metrics("Small")
    table_cells = cells(row)
    assert row.protocol_perplexity("train").mean == pytest.approx(math.exp(log[-2]["nll"]))  # type: ignore[union-attr]
    assert row.protocol_perplexity("valid").mean == log[-1]["perplexity"]  # type: ignore[union-attr]
    assert row.comparison_perplexity("test") is None
    assert row.relative_difference("test") is None
    assert table_cells["test paper protocol"] == "not recorded"
    assert table_cells["test test"] == "116.7"
    assert any(note.startswith("not recorded: ") for note in build_table([row]).notes)


@pytest.mark.parametrize("fields", [{"best": {"step": 30_199, "epoch": 13}}, {"averaged": ["step-30199"]}])
def test_scored_weights_of_the_last_epoch_are_used(tmp_path: Path, fields: dict[str, Any]) -> None:
    protocol = {"name": "zaremba", "valid": {"perplexity": 120.0}, "test": {"perplexity": 115.0}}
    row = make_row(tmp_path, result("Small", 0, protocol=protocol, **fields), paper_epoch="last")
    assert row.relative_difference("test") == pytest.approx(115.0 / 114.5 - 1)
    assert row.relative_difference("valid") == pytest.approx(120.0 / 120.7 - 1)


def test_running_perplexity_weights_the_lines_by_their_tokens(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "Small", 0, result("Small", 0))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 1, "epoch": 14, "nll": 4.0, "tokens": 30}\n')
        file.write('{"kind": "train", "step": 2, "epoch": 14, "nll": 2.0, "tokens": 10}\n')
        file.write('{"kind": "valid", "step": 2, "epoch": 14, "nll": 5.0, "perplexity": 148.4}\n')
    (run,) = collect_runs([tmp_path])
    assert run.running_perplexity == pytest.approx(math.exp(3.5))
