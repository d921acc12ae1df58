"""Run folders: locking, rejected settings, and files that survive a kill."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from made_results import result
from reefknot.errors import DataError, ResourceError, SettingsError
from reefknot.lab.runs.changes import find_changes
from reefknot.lab.runs.checkpoints import Checkpoints
from reefknot.lab.runs.folder import Metrics, RunFolder, config_hash
from reefknot.lab.runs.result import RunResult, SavedEvaluation

RESULT = RunResult.model_validate(result("Small", 0))
CONFIG = {
    "recipe": "demo",
    "task": "language_model",
    "settings": {"seed": 0, "training": {"rate": 1.0, "sizes": [1, 2]}},
}


def test_run_folder_can_be_started_resumed_and_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with RunFolder.open_for_training(path, CONFIG) as run:
        assert run.config == CONFIG
        assert run.result is None
        assert run.environment is None
        run.write_environment({"torch": "2"})
    reordered = dict(reversed(CONFIG.items()))
    with RunFolder.open_for_training(path, reordered) as run:
        run.write_result(RESULT)
    reading = RunFolder.open(path)
    assert reading.config == CONFIG
    assert reading.result == RESULT
    assert reading.environment == {"torch": "2"}
    assert isinstance(reading.checkpoints, Checkpoints)
    assert reading.checkpoints.run_folder == path
    assert reading.vocabulary_path == path / "vocabulary.json"


def test_evaluations_are_saved_in_their_own_folder(tmp_path: Path) -> None:
    with RunFolder.open_for_training(tmp_path, CONFIG) as run:
        assert run.evaluation("mc") is None
        (tmp_path / "evaluations").mkdir()
        (tmp_path / "evaluations" / "mc.json.tmp-999999999").write_text("torn")
        saved = SavedEvaluation(format=2, kind="mc", settings={"passes": 3})
        assert run.write_evaluation(saved) == tmp_path / "evaluations" / "mc.json"
        assert run.evaluation("mc") == saved
        assert [path.name for path in (tmp_path / "evaluations").iterdir()] == ["mc.json"]


def test_leftovers_of_a_killed_process_are_removed_from_all_folders_of_a_run(tmp_path: Path) -> None:
    RunFolder.open_for_training(tmp_path, CONFIG).close()
    for name in ("source", "translations", "evaluations", "checkpoints"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocabulary.json.tmp-999999999").write_text("torn")
        (tmp_path / name / "keep.json").write_text("{}")
    (tmp_path / "checkpoints" / "step_00000001.tmp-999999999").mkdir()
    RunFolder.open_for_training(tmp_path, CONFIG).close()
    for name in ("source", "translations", "evaluations", "checkpoints"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["keep.json"]


def test_other_settings_are_rejected_with_their_differences(tmp_path: Path) -> None:
    RunFolder.open_for_training(tmp_path, CONFIG).close()
    before = (tmp_path / "config.json").read_bytes()
    other = {"recipe": "demo", "settings": {"seed": 1, "training": {"rate": 1, "clip": None}}}
    with pytest.raises(SettingsError) as caught:
        RunFolder.open_for_training(tmp_path, other)
    text = str(caught.value)
    assert "; training.rate: 1.0 -> 1; " in text
    assert "seed: 0 -> 1" in text
    assert "training.sizes: [1, 2] -> not set" in text
    assert "training.clip: not set -> null" in text
    assert "settings." not in text
    assert "use another --out" in text
    assert (tmp_path / "config.json").read_bytes() == before
    RunFolder.open_for_training(tmp_path, CONFIG).close()  # the lock was released


def test_accumulate_may_change_until_the_run_is_finished(tmp_path: Path) -> None:
    one, four = (
        {"recipe": "demo", "task": "language_model", "settings": {"training": {"accumulate": parts}}}
        for parts in (1, 4)
    )
    RunFolder.open_for_training(tmp_path, one).close()
    with RunFolder.open_for_training(tmp_path, four) as run:
        assert run.config == one
        run.write_result(RESULT)
    with pytest.raises(SettingsError, match=r"\(training\.accumulate: 1 -> 4"):
        RunFolder.open_for_training(tmp_path, four)


def test_long_list_of_differences_is_shortened(tmp_path: Path) -> None:
    RunFolder.open_for_training(tmp_path, {f"k{index:02}": index for index in range(20)}).close()
    with pytest.raises(SettingsError, match=r"k07: 7 -> 8; and 12 more\); use another --out") as caught:
        RunFolder.open_for_training(tmp_path, {f"k{index:02}": index + 1 for index in range(20)})
    assert "k08" not in str(caught.value)


def test_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SettingsError, match=r"not a run folder \(it contains thesis\.tex but no config\.json\)"):
        RunFolder.open_for_training(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(SettingsError, match="is a file"):
        RunFolder.open_for_training(tmp_path / "thesis.tex", CONFIG)
    with pytest.raises(SettingsError, match="cannot train in"):
        RunFolder.open_for_training(tmp_path / "thesis.tex" / "run", CONFIG)


def test_killed_start_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1\n")
    (tmp_path / "config.json.tmp-999999999").write_text("{")
    with RunFolder.open_for_training(tmp_path, CONFIG) as run:
        assert run.config == CONFIG
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "MANIFEST.json", "config.json"]


def test_open_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no config\.json"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match=r"config\.json does not hold a JSON object"):
        _ = RunFolder.open(tmp_path).config


def test_second_trainer_is_rejected_with_the_process_id(tmp_path: Path) -> None:
    hold = (
        "import sys; from pathlib import Path; from reefknot.lab.runs.folder import RunFolder\n"
        "run = RunFolder.open_for_training(Path(sys.argv[1]), {})\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(SettingsError, match=f"process {holder.pid} is training in"):
            RunFolder.open_for_training(tmp_path, {})
        assert RunFolder.open(tmp_path).config == {}  # reading needs no lock
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with RunFolder.open_for_training(tmp_path, {}):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_log_has_the_time_on_every_line(tmp_path: Path) -> None:
    run = RunFolder.open_for_training(tmp_path, CONFIG)
    run.log("first")
    run.log("second\nthird ü")
    lines = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["first", "second", "third ü"]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)


def test_scores_load_exactly_and_truncation_is_rejected(tmp_path: Path) -> None:
    run = RunFolder.open_for_training(tmp_path, CONFIG)
    with pytest.raises(DataError, match=r"scores\.safetensors is missing"):
        run.read_scores()
    run.write_scores({"valid": torch.rand(10), "test": torch.rand(3, dtype=torch.float64)})
    run.write_scores({"test": torch.arange(3.0)})
    assert torch.equal(run.read_scores()["test"], torch.arange(3.0))
    path = tmp_path / "scores.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"scores\.safetensors is damaged: it has \d+ bytes instead of \d+"):
        run.read_scores()


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(tmp_path / "metrics.jsonl")


def test_metrics_are_empty_before_the_first_line(metrics: Metrics) -> None:
    assert metrics.read() == []
    assert metrics.lines == 0
    metrics.sync()
    metrics.truncate(0)
    assert not metrics.path.exists()


def test_metrics_lines_are_read_back_and_can_be_cut(metrics: Metrics) -> None:
    lines: list[dict[str, Any]] = [
        {"step": step, "nll": step / 3, "text": "a\nb\r\u2028", "wall": {"s": 0.5}} for step in range(5)
    ]
    for line in lines:
        metrics.append(line)
    metrics.sync()
    assert metrics.read() == lines
    assert metrics.lines == 5
    metrics.truncate(5)
    metrics.truncate(3)
    assert metrics.read() == lines[:3]
    with pytest.raises(DataError, match="has 3 lines, but the checkpoint was saved after 4"):
        metrics.truncate(4)
    with pytest.raises(ValueError, match="JSON"):
        metrics.append({"nll": float("inf")})
    metrics.truncate(0)
    assert metrics.path.read_bytes() == b""


def test_truncated_metrics_line_is_dropped_only_at_the_end(metrics: Metrics) -> None:
    metrics.append({"step": 1})
    with metrics.path.open("a") as file:
        file.write('{"step": 2')
    assert metrics.read() == [{"step": 1}]
    assert metrics.lines == 1
    metrics.truncate(1)
    assert metrics.path.read_text() == '{"step": 1}\n'
    with metrics.path.open("a") as file:
        file.write('{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2, is truncated"):
        metrics.read()


def test_full_disk_is_reported(metrics: Metrics) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    metrics.path.symlink_to("/dev/full")
    with pytest.raises(ResourceError, match=r"metrics\.jsonl: No space left on device; free some space"):
        metrics.append({"step": 1})


_CONFIGS = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab.", max_size=2), inner, max_size=2),
    max_leaves=6,
).map(lambda value: {"settings": value})


@given(old=_CONFIGS, new=_CONFIGS)
def test_configs_differ_exactly_if_their_hashes_differ(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert (find_changes(old, new) == []) == (config_hash(old) == config_hash(new))
    assert find_changes(old, old) == []


def test_config_hash_is_the_hash_of_canonical_json() -> None:
    canonical = b'{"a":{"c":[1,2.5]},"b":"\\u00fc"}'
    assert config_hash({"b": "ü", "a": {"c": [1, 2.5]}}) == hashlib.sha256(canonical).hexdigest()
