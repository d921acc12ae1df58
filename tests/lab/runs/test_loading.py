"""Reading result folders: finished, unfinished and damaged runs, and several seeds of a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from made_results import result, write_run, write_runs
from reefknot.errors import DataError
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.loading import (
    OLD_RUN_DEFAULTS,
    Spread,
    collect_runs,
    differing_keys,
    distinguishing_settings,
    flatten,
    load_run,
)
from reefknot.lab.runs.result import Band
from reefknot.lab.tasks import check_experiment

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "runs")


def test_finished_run_is_read_completely(runs: Path) -> None:
    run = load_run(runs / "press2017" / "table6" / "small-wt" / "seed0")
    assert run.record is not None
    assert (run.recipe, run.row, run.seed) == ("press2017/table6", "Small + WT", 0)
    assert run.record.parameters.total == 2_651_600
    assert run.record.test is not None
    assert run.record.test.perplexity == pytest.approx(112.6)
    assert run.record.neighbors.tied
    assert run.record.frequency.target[-1].high is None
    assert run.settings["training"]["epochs"] == 13
    last = run.last_metrics("valid")
    assert last is not None
    assert last.step == 13 * 2323


def test_runs_are_found_once_at_any_depth_in_order_of_seed(runs: Path) -> None:
    one = runs / "press2017" / "table6" / "small" / "seed1"
    results = collect_runs([runs, one])
    assert [(run.row, run.seed) for run in results] == [
        ("Small", 0),
        ("Small", 1),
        ("Small + WT", 0),
        ("Small + WT + PR", 0),
        ("Small + WT + PR", 1),
    ]


def test_seeds_are_ordered_numerically(tmp_path: Path) -> None:
    for seed in (10, 2, 1):
        write_run(tmp_path, "Small", seed, result("Small", seed))
    assert [run.seed for run in collect_runs([tmp_path])] == [1, 2, 10]


def test_unfinished_run_is_read_with_its_last_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "Small + WT", 3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 999')
    run = load_run(folder)
    assert run.record is None
    assert (run.row, run.seed) == ("Small + WT", 3)
    assert run.metrics[-1].kind == "valid"


def test_run_without_metrics_file_has_no_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "Small")
    (folder / "metrics.jsonl").unlink()
    run = load_run(folder)
    assert run.metrics == ()
    assert run.last_metrics("valid") is None


def test_result_file_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result("Small", 4)))
    run = load_run(tmp_path)
    assert (run.seed, run.settings, run.metrics) == (4, {}, ())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", '{"format": 2, "rec', "result.json"),
        ("result.json", "[]", "result.json"),
        ("result.json", '{"format": 3}', "unknown format 3"),
        ("result.json", '{"format": 2}', r"\(task: Field required\)"),
        ("result.json", '{"format": 1, "recipe": "\\ud800"}', "result.json"),
        ("config.json", "{", "config.json"),
        ("config.json", "[1]", "config.json"),
        ("config.json", '{"settings": 3}', "settings"),
        ("metrics.jsonl", '{"kind": "valid"}\n', "metrics.jsonl, line 1"),
        ("evaluations/dynamic.json", '{"format": 3, "kind": "dynamic"}', "evaluations/dynamic.json"),
        ("metrics.jsonl", '\n\n{"kind": "valid", "step": 1, "epoch": 1, "nll": NaN}\n', "line 3"),
    ],
)
def test_damaged_file_is_named(runs: Path, name: str, content: str, message: str) -> None:
    folder = runs / "press2017" / "table6" / "small" / "seed0"
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        collect_runs([runs])
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_without_runs_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        collect_runs([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="no runs in this folder"):
        collect_runs([tmp_path])
    with pytest.raises(DataError, match="is not a run folder"):
        load_run(tmp_path)
    with pytest.raises(DataError, match="no folders were given"):
        collect_runs([])


def test_spread_is_mean_and_standard_deviation() -> None:
    assert Spread.from_values([]) is None
    assert Spread.from_values([None, 3.0]) == Spread(3.0, None, 1)
    assert Spread.from_values([1.0, 3.0]) == Spread(2.0, pytest.approx(2**0.5), 2)


def test_differing_settings_have_dotted_keys() -> None:
    a = {"x": {"kind": "plain", "dim": 1}, "same": []}
    b = {"x": {"kind": "projected", "dim": 1, "penalty": 0.1}, "same": []}
    assert differing_keys([a, b]) == ["x.kind", "x.penalty"]
    assert differing_keys([a, a]) == []
    assert flatten({"a": {}, "b": {"c": None}}) == {"a": {}, "b.c": None}


def test_unused_new_settings_do_not_distinguish_old_runs() -> None:
    old = {"training": {"seed": 0, "rate": 1.0}, "table": {"dim": 4}}
    new = {"training": {"seed": 1, "rate": 1.0}, "table": {"dim": 4, "frozen": False, "vectors": None, "noise": 0.0}}
    used = {"training": {"seed": 1, "rate": 1.0}, "table": {"dim": 4, "frozen": True, "vectors": None}}
    assert (
        distinguishing_settings(old)
        == distinguishing_settings(new)
        == OLD_RUN_DEFAULTS | {"training.rate": 1.0, "table.dim": 4}
    )
    assert distinguishing_settings(old | {"evaluation": {"protocol": "awd"}}) != distinguishing_settings(new), (
        "a setting that is used counts"
    )
    assert differing_keys([distinguishing_settings(old), distinguishing_settings(used)]) == ["table.frozen"]


@pytest.mark.parametrize(
    "folder", sorted(RESULTS.glob("*/*")), ids=lambda folder: f"{folder.parent.name}/{folder.name}"
)
def test_committed_records_match_todays_settings(folder: Path) -> None:
    for path in folder.rglob("config.json"):
        settings = RunFolder.open(path.parent).config["settings"]
        today = check_experiment(settings, str(path)).model_dump(mode="json")
        assert distinguishing_settings(settings) == distinguishing_settings(today), path


def test_band_labels_show_their_range() -> None:
    assert [Band(low=low, high=high, tokens=1, nll=1).label for low, high in ((0, 9), (1, 1), (1000, None))] == [
        "0–9",
        "1",
        "1,000+",
    ]


def test_seconds_per_epoch_ignore_pauses(tmp_path: Path) -> None:
    """One epoch of 13 includes a long pause, and the first epoch is slow. Only epoch ends count."""
    folder = write_run(tmp_path, "Small", 0, result("Small", 0))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train_lines = [line for line in lines if line["kind"] == "train"]
    for line in train_lines:
        epoch = line["epoch"]
        line["wall"]["seconds"] = (
            20.0 * (epoch > 1) + 5.0 * epoch + 3_600.0 * (epoch > 6) - (line["step"] % 2323 < 1600)
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load_run(folder).seconds_per_epoch == 5.0
    pairs = [{"kind": "train", "step": n, "epoch": n, "loss": 1.0, "wall": {"seconds": 7.0 * n}} for n in range(1, 14)]
    skip_gram = write_run(tmp_path, "Small + WT", 0, result("Small + WT", 0))
    (skip_gram / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
    assert load_run(skip_gram).seconds_per_epoch == 7.0
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines if line not in train_lines[:3])
    )
    assert load_run(folder).seconds_per_epoch == 150.2 / 13, "if an epoch is missing, the mean of the record is used"
