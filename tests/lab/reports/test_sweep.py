"""Rows of a sweep: ordered by validation, without any score of the test text."""

from __future__ import annotations

from pathlib import Path

from made_results import change, result, scored, write_evaluation, write_run
from reefknot.lab.reports.page import render
from reefknot.lab.reports.rows import join_runs
from reefknot.lab.reports.sentences import summarise_rows
from reefknot.lab.reports.sweep import Trial, rank_trials, summarise_trials
from reefknot.lab.reports.table import build_table


def make_trial(root: Path, name: str, perplexities: list[float], **changes: object) -> Trial:
    runs = []
    for seed, perplexity in enumerate(perplexities):
        protocol = {"name": "awd", "valid": {"perplexity": perplexity}, "test": {"perplexity": 4321.0}}
        record = result("Small", seed, valid=scored(perplexity), test=scored(1234.0), protocol=protocol)
        changed = [change("training.epochs", 20, 13), change("training.clip", 5, name)]
        runs.append(write_run(root / name, "Small", seed, record | {"changed": changed} | changes))
    return Trial(name, {"training.clip": name}, tuple(runs))


def test_best_trial_comes_first_and_unfinished_last(tmp_path: Path) -> None:
    unfinished = Trial("d", {}, (write_run(tmp_path / "d", "Small"),))
    not_begun = Trial("e", {}, (tmp_path / "nowhere",))
    trials = [unfinished, make_trial(tmp_path, "a", [120, 122]), not_begun, make_trial(tmp_path, "b", [110, 100])]
    ranked = rank_trials(trials)
    assert [ranked_trial.name for ranked_trial, _ in ranked] == ["b", "a", "d"]
    records = summarise_trials(ranked, tmp_path)
    assert records[0]["valid"] == {"mean": 105.0, "sd": 50**0.5, "n": 2}
    assert records[0]["epochs"] == [13, 13]
    assert records[0]["seconds"]["mean"] == 150.2
    assert records[0]["seconds_per_epoch"]["mean"] == 150.2 / 13
    assert records[2]["valid"] is None


def test_sweep_shows_no_test_scores(tmp_path: Path) -> None:
    trials = [make_trial(tmp_path, "a", [120]), make_trial(tmp_path, "b", [110])]
    write_evaluation(trials[0].runs[0], "dynamic", test=1234.0)
    rows = join_runs([row for _, row in rank_trials(trials)], [])
    page = render(rows, "sweep")
    assert "1,234" not in page
    assert "4,321" not in page
    assert "test perplexity" not in page
    table = build_table(rows)
    assert (table.ranking_column, table.best) == ("valid", {0})
    assert not [note for note in table.notes if "diff " in note]  # there is no diff column
    assert "test" not in {column.title for column in table.columns}
    assert summarise_rows(rows)[0].startswith(
        "b has the lowest validation perplexity, 110.0 with 4,651,600 parameters; a has"
    )


def test_notes_list_only_changes_of_all_trials(tmp_path: Path) -> None:
    rows = [row for _, row in rank_trials([make_trial(tmp_path, "a", [120]), make_trial(tmp_path, "b", [110])])]
    notes = [note for note in build_table(rows).notes if "settings" in note]
    assert notes == ["Every row: settings differ from the recipe (training.epochs: 20 -> 13)"]


def test_incomparable_trials_come_last(tmp_path: Path) -> None:
    other = make_trial(tmp_path, "other", [1], valid=scored(50.0, unknown=9))
    comparable_trials = [
        make_trial(tmp_path, name, [1], valid=scored(value)) for name, value in (("a", 70.0), ("b", 60.0))
    ]
    assert [ranked_trial.name for ranked_trial, _ in rank_trials([other, *comparable_trials])] == ["b", "a", "other"]
