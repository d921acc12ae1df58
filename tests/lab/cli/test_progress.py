"""Progress is printed on stderr, where it does not mix with the result."""

from __future__ import annotations

import pytest

from reefknot.lab.cli.progress import LineProgress, live_progress
from reefknot.lab.training import display


@pytest.fixture(autouse=True)
def report_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_UPDATE_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("total", "line"),
    [(200, "translating  ━━╌╌╌╌╌╌╌╌ 25%, 0s left  50 of 200 lines\n"), (None, "translating  50 lines\n")],
)
def test_number_of_lines_is_printed(capsys: pytest.CaptureFixture[str], total: int | None, line: str) -> None:
    LineProgress("translating", total).report(50)
    print("a result")
    assert tuple(capsys.readouterr()) == ("a result\n", line)


def test_fraction_of_work_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with live_progress() as progress:
        progress("scoring", 0.0)
        progress("scoring", 0.5)
    assert tuple(capsys.readouterr()) == ("", "scoring  ━━━━━╌╌╌╌╌ 50%, 0s left\n")
