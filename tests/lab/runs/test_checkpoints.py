"""Checkpoints load exactly as saved; damaged and malicious ones are rejected, named and skipped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from reefknot.errors import DataError, ResourceError
from reefknot.lab.runs.checkpoints import Checkpoints
from reefknot.storage import files as durable

FILES = ["model.safetensors", "state.safetensors", "state.json", "MANIFEST.json"]


def contents(step: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    model = {"words.weight": torch.randn(7, 5, generator=generator)}
    return (
        model,
        {"rng.torch": generator.get_state()[:64].clone()},
        {"step": step, "best": None, "loss": 0.1 * step},
    )


def save(checkpoints: Checkpoints, step: int) -> Path:
    model, state, values = contents(step)
    return checkpoints.save(step, model, state, values, fingerprint="config")


def assert_latest_is(checkpoints: Checkpoints, step: int) -> list[str]:
    """Check that the newest intact checkpoint is `step`, exactly as saved, and return the messages."""
    messages: list[str] = []
    checkpoint = checkpoints.load_latest(messages.append)
    assert checkpoint is not None
    model, state, values = contents(step)
    assert (checkpoint.step, checkpoint.state_values, checkpoint.fingerprint) == (step, values, "config")
    assert checkpoint.path == checkpoints.step_path(step)
    assert torch.equal(checkpoint.weights["words.weight"], model["words.weight"])
    assert torch.equal(checkpoint.state_tensors["rng.torch"], state["rng.torch"])
    return messages


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def two_steps(tmp_path: Path) -> Checkpoints:
    """Return checkpoints with steps 1 and 2 saved."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    return checkpoints


def test_saved_checkpoint_has_the_layout_and_loads_exactly(two_steps: Checkpoints) -> None:
    assert file_names(two_steps.folder) == ["step_00000001", "step_00000002"]
    assert file_names(two_steps.folder / "step_00000002") == sorted(FILES)
    assert assert_latest_is(two_steps, 2) == []


def test_latest_and_best_are_none_before_the_first_save(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).load_latest(pytest.fail) is None
    assert Checkpoints(tmp_path).best_path() is None


def test_equal_states_give_equal_bytes(tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        model, state, values = contents(3)
        model["bias"] = torch.ones(2)
        if name == "a":
            model = dict(reversed(model.items()))
        folders.append(Checkpoints(tmp_path / name).save(3, model, state, values, fingerprint="f"))
    for name in FILES:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(_DTYPES)))
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=st.dictionaries(_NAMES, tensors(), max_size=4),
    state=st.dictionaries(_NAMES, tensors(), max_size=4),
    values=st.dictionaries(_NAMES, _JSON, max_size=4),
)
def test_any_state_loads_exactly(
    tmp_path: Path, model: dict[str, Tensor], state: dict[str, Tensor], values: dict[str, Any]
) -> None:
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    checkpoints = Checkpoints(tmp_path)
    checkpoint = checkpoints.load(checkpoints.save(5, model, state, values, fingerprint="f"))
    assert checkpoint.state_values == values
    for saved, loaded in ((model, checkpoint.weights), (state, checkpoint.state_tensors)):
        assert saved.keys() == loaded.keys()
        for name, tensor in saved.items():
            assert (tensor.dtype, tensor.shape) == (loaded[name].dtype, loaded[name].shape)
            assert torch.equal(tensor, loaded[name])


def test_loaded_checkpoint_does_not_need_its_files(two_steps: Checkpoints) -> None:
    checkpoint = two_steps.load(two_steps.step_path(2))
    shutil.rmtree(two_steps.folder)
    assert torch.equal(checkpoint.weights["words.weight"], contents(2)[0]["words.weight"])


def test_best_of_a_run_copied_with_resolved_links_can_be_marked_again(two_steps: Checkpoints, tmp_path: Path) -> None:
    two_steps.mark_best(1)
    shutil.copytree(tmp_path, tmp_path / "copy", symlinks=False)
    copy = Checkpoints(tmp_path / "copy")
    assert copy.best_path() == tmp_path / "copy" / "best"
    copy.mark_best(2)
    assert copy.best_path() == copy.step_path(2)


def test_prune_keeps_the_newest_and_the_best(two_steps: Checkpoints) -> None:
    two_steps.mark_best(1)
    for step in (3, 4, 5):
        save(two_steps, step)
    assert file_names(two_steps.folder) == ["step_00000001", "step_00000004", "step_00000005"]
    assert two_steps.best_path() == two_steps.step_path(1)
    two_steps.mark_best(5)
    save(two_steps, 6)
    assert file_names(two_steps.folder) == ["step_00000005", "step_00000006"]


def test_prune_does_not_count_damaged_checkpoints(two_steps: Checkpoints) -> None:
    (two_steps.step_path(2) / "state.json").write_text("{}")
    save(two_steps, 3)
    assert file_names(two_steps.folder) == ["step_00000001", "step_00000003"]


@pytest.fixture
def hash_counts(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """Count how often the bytes of each file are hashed, including when they are written."""
    counts: Counter[bytes] = Counter()
    original = hashlib.sha256

    def sha256(data: bytes) -> Any:
        counts[data] += 1
        return original(data)

    monkeypatch.setattr(hashlib, "sha256", sha256)
    return counts


def test_pruning_reads_each_checkpoint_once(tmp_path: Path, hash_counts: Counter[bytes]) -> None:
    """Ten saves with keep=5: from the fifth on, each save reads one old checkpoint."""
    checkpoints = Checkpoints(tmp_path, keep=5)
    models = [(save(checkpoints, step) / "model.safetensors").read_bytes() for step in range(1, 11)]
    assert file_names(checkpoints.folder) == [f"step_{step:08d}" for step in range(6, 11)]
    assert [hash_counts[model] for model in models] == [2] * 6 + [1] * 4


def test_new_process_reads_existing_checkpoints_again(tmp_path: Path, hash_counts: Counter[bytes]) -> None:
    earlier = Checkpoints(tmp_path, keep=5)
    models = [(save(earlier, step) / "model.safetensors").read_bytes() for step in range(1, 6)]
    hash_counts.clear()
    checkpoints = Checkpoints(tmp_path, keep=5)
    assert_latest_is(checkpoints, 5)
    for step in range(6, 16):
        save(checkpoints, step)
    assert [hash_counts[model] for model in models] == [0, 1, 2, 2, 2]


def flip_bit_silently(path: Path) -> None:
    """Flip a bit like a failing disk: the modification time does not change."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_silent_damage_does_not_make_pruning_delete_an_intact_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in range(1, 8):
        save(checkpoints, step)
        if step in (3, 4, 5):
            flip_bit_silently(checkpoints.step_path(step) / "model.safetensors")
        if step > 2:
            oldest = min(checkpoints.folder.iterdir())
            assert checkpoints.load(oldest).step == int(oldest.name[-8:])
    assert file_names(checkpoints.folder) == ["step_00000002", "step_00000006", "step_00000007"]


@pytest.mark.parametrize("name", FILES)
def test_changed_file_is_read_again(tmp_path: Path, name: str) -> None:
    """An unchanged checkpoint between the oldest and the newest is not read again."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(checkpoints, step)
    path = checkpoints.step_path(3) / name
    flip_bit_silently(path)
    os.utime(path, ns=(0, 0))
    save(checkpoints, 4)
    assert file_names(checkpoints.folder) == ["step_00000001", "step_00000002", "step_00000004"]
    (checkpoints.step_path(4) / name).unlink()
    save(checkpoints, 5)
    assert file_names(checkpoints.folder) == ["step_00000001", "step_00000002", "step_00000005"]


def test_saving_again_replaces_only_a_damaged_step(two_steps: Checkpoints) -> None:
    inode = two_steps.step_path(2).stat().st_ino
    save(two_steps, 2)
    assert two_steps.step_path(2).stat().st_ino == inode
    (two_steps.step_path(2) / "model.safetensors").write_bytes(b"")
    save(two_steps, 2)
    assert assert_latest_is(two_steps, 2) == []


def test_steps_are_ordered_numerically_and_other_names_ignored(two_steps: Checkpoints) -> None:
    save(two_steps, 123_456_789)
    (two_steps.folder / "step_old").mkdir()
    (two_steps.folder / "step_00000009.tmp-1").mkdir()
    assert_latest_is(two_steps, 123_456_789)


def assert_skipped(checkpoints: Checkpoints, damaged: Path) -> None:
    [message] = assert_latest_is(checkpoints, 1)
    assert str(damaged) in message
    assert message.endswith("; using step_00000001")


@pytest.mark.parametrize("name", FILES)
def test_truncated_file_is_skipped(two_steps: Checkpoints, name: str) -> None:
    path = two_steps.step_path(2) / name
    content = path.read_bytes()
    lengths = sorted({len(content) * index // 40 for index in range(40)} | {len(content) - 1})
    for length in lengths:
        path.write_bytes(content[:length])
        assert_skipped(two_steps, path)
    path.unlink()
    assert_skipped(two_steps, path)
    path.write_bytes(content)
    assert_latest_is(two_steps, 2)


@pytest.mark.parametrize("name", FILES)
def test_flipped_byte_is_skipped(two_steps: Checkpoints, name: str) -> None:
    path = two_steps.step_path(2) / name
    content = path.read_bytes()
    positions = sorted({len(content) * index // 120 for index in range(120)})
    assert len(positions) >= min(100, len(content))
    for position in positions:
        for mask in (0x01, 0x29, 0x80):  # 0x29 turns a space into a tab, which is still valid JSON
            damaged = bytearray(content)
            damaged[position] ^= mask
            path.write_bytes(damaged)
            assert_skipped(two_steps, path)


def test_no_intact_checkpoint_is_a_data_error(two_steps: Checkpoints) -> None:
    for step in (1, 2):
        (two_steps.step_path(step) / "MANIFEST.json").unlink()
    with pytest.raises(DataError, match=r"step_00000002/MANIFEST.json is missing"):
        two_steps.load_latest(pytest.fail)


def test_renamed_step_is_rejected(two_steps: Checkpoints) -> None:
    two_steps.step_path(2).rename(two_steps.step_path(3))
    assert "is for step 2" in assert_latest_is(two_steps, 1)[0]


def reseal(folder: Path, **changes: Any) -> None:
    """Write a manifest that matches the current files, as an attacker would."""
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    del manifest["sha256"]
    body = {**manifest, **changes}
    body["sha256"] = hashlib.sha256(durable.encode_json(body)).hexdigest()
    (folder / "MANIFEST.json").write_bytes(durable.encode_json(body))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",  # a pickle that runs a command
        b"",
        b"\xff" * 64,
        (2**40).to_bytes(8, "little") + b"{}",
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'.ljust(60) + b"1",
        (70).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[999999999],"data_offsets":[0,4]}}'.ljust(70)
        + b"1234",
    ],
)
def test_malicious_tensor_file_with_valid_manifest_is_rejected(two_steps: Checkpoints, data: bytes) -> None:
    path = two_steps.step_path(2) / "model.safetensors"
    path.write_bytes(data)
    reseal(path.parent)
    with pytest.raises(DataError, match=r"model\.safetensors is truncated or not a safetensors file"):
        two_steps.load(path.parent)


@pytest.mark.parametrize("data", [b"[]", b"3", b"[" * 100_000, b'{"a": NaN}', b"\xff"])
def test_malformed_state_with_valid_manifest_is_rejected(two_steps: Checkpoints, data: bytes) -> None:
    path = two_steps.step_path(2) / "state.json"
    path.write_bytes(data)
    reseal(path.parent)
    with pytest.raises(DataError, match=r"state\.json"):
        two_steps.load(path.parent)


_SEAL = {"size": 0, "sha256": ""}


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../../../../etc/passwd": _SEAL}},
        {"files": {**dict.fromkeys(FILES[:3], _SEAL), "/etc/passwd": _SEAL}},
        {"files": {"model.safetensors": _SEAL}},
        {"files": {}},
        {"files": []},
        {"files": dict.fromkeys(FILES[:3], 7)},
        {"files": {name: {"size": True, "sha256": None} for name in FILES[:3]}},
        {"step": "2"},
        {"step": 1},
        {"step": 10**400},
        {"format": 1},
        {"fingerprint": None},
        {"extra": 1},
    ],
)
def test_malicious_manifest_is_rejected(two_steps: Checkpoints, changes: dict[str, Any]) -> None:
    folder = two_steps.step_path(2)
    reseal(folder, **changes)
    with pytest.raises(DataError, match=r"MANIFEST\.json") as caught:
        two_steps.load(folder)
    assert "\n" not in str(caught.value)


def test_pipe_or_device_is_not_read(two_steps: Checkpoints) -> None:
    path = two_steps.step_path(2) / "state.json"
    path.unlink()
    os.mkfifo(path)
    assert "state.json is not a file" in assert_latest_is(two_steps, 1)[0]
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "state.json is not a file" in assert_latest_is(two_steps, 1)[0]


def test_lack_of_space_is_reported_before_writing(two_steps: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(two_steps.folder)
    full = os.statvfs_result((real.f_bsize, 1, real.f_blocks, 1, 1, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(ResourceError, match=r"needs \d+ bytes and .* has 1 free"):
        save(two_steps, 3)
    assert_latest_is(two_steps, 2)
    assert file_names(two_steps.folder) == ["step_00000001", "step_00000002"]


def test_full_disk_leaves_the_last_checkpoint_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system needs root")
    try:
        checkpoints = Checkpoints(disk)
        save(checkpoints, 1)
        large = {"words.weight": torch.zeros(80_000)}
        with pytest.raises(ResourceError, match="free some space"):
            checkpoints.save(2, large, {}, {}, fingerprint="f")
        monkeypatch.setattr(
            Checkpoints, "_prepare_folder", lambda *_: None
        )  # the file system reports free space it does not have
        with pytest.raises(ResourceError, match="No space left on device; free some space"):
            checkpoints.save(2, large, {}, {}, fingerprint="f")
        assert file_names(checkpoints.folder) == ["step_00000001"]
        assert_latest_is(checkpoints, 1)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
