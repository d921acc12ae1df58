"""A sweep's rows: ordered by validation, and without any figure of the test text."""

from __future__ import annotations

from pathlib import Path

from made_results import change, result, scored, write_evaluation, write_run
from reefknot.lab.reports.page import render
from reefknot.lab.reports.reading import read
from reefknot.lab.reports.rows import join
from reefknot.lab.reports.sweep import Trial, rank, summary
from reefknot.lab.reports.table import build


def trial(root: Path, name: str, perplexities: list[float], **changes: object) -> Trial:
    runs = []
    for seed, perplexity in enumerate(perplexities):
        protocol = {"name": "awd", "valid": {"perplexity": perplexity}, "test": {"perplexity": 4321.0}}
        record = result("Small", seed, valid=scored(perplexity), test=scored(1234.0), protocol=protocol)
        changed = [change("training.epochs", 20, 13), change("training.clip", 5, name)]
        runs.append(write_run(root / name, "Small", seed, record | {"changed": changed} | changes))
    return Trial(name, {"training.clip": name}, tuple(runs))


def test_the_best_comes_first_and_the_unfinished_last(tmp_path: Path) -> None:
    unfinished = Trial("d", {}, (write_run(tmp_path / "d", "Small"),))
    not_begun = Trial("e", {}, (tmp_path / "nowhere",))
    trials = [unfinished, trial(tmp_path, "a", [120, 122]), not_begun, trial(tmp_path, "b", [110, 100])]
    ranked = rank(trials)
    assert [one.name for one, _ in ranked] == ["b", "a", "d"]
    told = summary(ranked, tmp_path)
    assert told[0]["valid"] == {"mean": 105.0, "sd": 50**0.5, "n": 2}
    assert told[0]["epochs"] == [13, 13]
    assert told[0]["seconds"]["mean"] == 150.2
    assert told[0]["seconds_per_epoch"]["mean"] == 150.2 / 13
    assert told[2]["valid"] is None


def test_nothing_of_the_test_is_left(tmp_path: Path) -> None:
    trials = [trial(tmp_path, "a", [120]), trial(tmp_path, "b", [110])]
    write_evaluation(trials[0].runs[0], "dynamic", test=1234.0)
    rows = join([row for _, row in rank(trials)], [])
    page = render(rows, "sweep")
    assert "1,234" not in page
    assert "4,321" not in page
    assert "test perplexity" not in page
    table = build(rows)
    assert (table.decides, table.best) == ("valid", {0})
    assert not [note for note in table.notes if "diff" in note]  # there is no such column
    assert "test" not in {column.title for column in table.columns}
    assert read(rows)[0].startswith("b has the lowest validation perplexity, 110.0 with 4,651,600 parameters; a has")


def test_only_changes_of_all_trials_are_told(tmp_path: Path) -> None:
    rows = [row for _, row in rank([trial(tmp_path, "a", [120]), trial(tmp_path, "b", [110])])]
    notes = [note for note in build(rows).notes if "settings" in note]
    assert notes == ["Every row: not the recipe's settings (training.epochs: 20 -> 13)"]


def test_what_cannot_be_compared_comes_after_what_can(tmp_path: Path) -> None:
    other = trial(tmp_path, "other", [1], valid=scored(50.0, unknown=9))
    alike = [trial(tmp_path, name, [1], valid=scored(value)) for name, value in (("a", 70.0), ("b", 60.0))]
    assert [one.name for one, _ in rank([other, *alike])] == ["b", "a", "other"]
