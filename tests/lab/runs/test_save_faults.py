"""Each system call of a save fails in turn; an intact checkpoint always remains.

The failure points are counted during a clean save, so a call added to the protocol is tested too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.errors import ResourceError
from reefknot.lab.runs.checkpoints import Checkpoint, Checkpoints

CALLS = ("open", "write", "fsync", "close", "replace", "mkdir", "symlink", "unlink", "rmdir", "statvfs")
KILLED = 77


def contents(step: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    return (
        {"w": torch.full((3, 4), float(step))},
        {"rng": torch.full((8,), step, dtype=torch.uint8)},
        {"step": step},
    )


def save(checkpoints: Checkpoints, step: int) -> None:
    model, state, values = contents(step)
    checkpoints.save(step, model, state, values, fingerprint="f")
    checkpoints.mark_best(step)


def is_intact(checkpoint: Checkpoint | None) -> bool:
    assert checkpoint is not None
    model, state, values = contents(checkpoint.step)
    same = torch.equal(checkpoint.weights["w"], model["w"]) and torch.equal(
        checkpoint.state_tensors["rng"], state["rng"]
    )
    return same and checkpoint.state_values == values


def inject(monkeypatch: pytest.MonkeyPatch, point: int | None, fault: Callable[[], None]) -> Callable[[], int]:
    """Call `fault` instead of system call number `point`; a failing write first writes half of its data."""
    count = 0

    def wrap(name: str) -> None:
        original = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count - 1 == point:
                if name == "write":
                    original(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                fault()
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in CALLS:
        wrap(name)
    return lambda: count


def raise_error(number: int) -> None:
    raise OSError(number, os.strerror(number))


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def prepare(folder: Path, scene: str) -> Checkpoints:
    """Save steps 1 and 2, with a best one; in the scene "damaged", also write a broken step 3."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    checkpoints = Checkpoints(folder)
    save(checkpoints, 1)
    save(checkpoints, 2)
    if scene == "damaged":
        shutil.copytree(checkpoints.step_path(2), checkpoints.step_path(3))
        (checkpoints.step_path(3) / "state.json").write_text("{}")
    return checkpoints


def count_points(folder: Path, scene: str) -> int:
    checkpoints = prepare(folder, scene)
    with pytest.MonkeyPatch.context() as patch:
        count = inject(patch, None, lambda: None)
        save(checkpoints, 3)
        points = count()
    assert points > 30
    return points


def assert_survived(checkpoints: Checkpoints) -> None:
    messages: list[str] = []
    checkpoint = checkpoints.load_latest(messages.append)
    assert is_intact(checkpoint)
    assert checkpoint is not None
    assert checkpoint.step in (2, 3)
    best = checkpoints.best_path()
    assert best is not None
    assert is_intact(checkpoints.load(best))
    save(checkpoints, 3)  # the same command again
    checkpoint = checkpoints.load_latest(pytest.fail)
    assert is_intact(checkpoint)
    assert checkpoint is not None
    assert checkpoint.step == 3
    assert checkpoints.best_path() == checkpoints.step_path(3)
    save(checkpoints, 4)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_00000003", "step_00000004"]
    assert sorted(path.name for path in checkpoints.run_folder.iterdir()) == ["best", "checkpoints"]


@pytest.mark.parametrize(("scene", "number"), [("new", errno.ENOSPC), ("damaged", errno.EIO)])
def test_checkpoints_survive_an_error_at_every_system_call(tmp_path: Path, scene: str, number: int) -> None:
    folder = tmp_path / "run"
    messages = []
    for point in range(count_points(folder, scene)):
        checkpoints = prepare(folder, scene)
        with pytest.MonkeyPatch.context() as patch:
            inject(patch, point, lambda: raise_error(number))
            try:
                save(checkpoints, 3)
            except ResourceError as error:
                messages.append(str(error))
        assert not list(checkpoints.folder.glob("*.tmp-*"))
        assert_survived(checkpoints)
    assert len(messages) > 20  # other points fail while cleaning up, which does not stop a run
    assert all(os.strerror(number) in message for message in messages)


def test_checkpoints_survive_an_interrupt_at_every_system_call(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for point in range(count_points(folder, "new")):
        checkpoints = prepare(folder, "new")
        with pytest.MonkeyPatch.context() as patch:
            inject(patch, point, raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                save(checkpoints, 3)
        assert_survived(checkpoints)


def assert_averaged(checkpoints: Checkpoints) -> None:
    """Check that steps and best are intact, and that averaging again gives the mean."""
    checkpoint = checkpoints.load_latest(pytest.fail)
    assert is_intact(checkpoint)
    best = checkpoints.best_path()
    assert best is not None
    assert checkpoints.load(best).weights["w"][0, 0].item() in (2.0, 1.5)
    checkpoints.save_average(2)
    assert torch.equal(checkpoints.load(checkpoints.run_folder / "best").weights["w"], torch.full((3, 4), 1.5))
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
        "mean_00000002",
        "step_00000001",
        "step_00000002",
    ]
    assert sorted(path.name for path in checkpoints.run_folder.iterdir()) == ["best", "checkpoints"]


def test_checkpoints_survive_a_failed_average_at_every_system_call(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoints = prepare(folder, "new")
    with pytest.MonkeyPatch.context() as patch:
        count = inject(patch, None, lambda: None)
        checkpoints.save_average(2)
        points = count()
    assert points > 20
    for point in range(points):
        checkpoints = prepare(folder, "new")
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ResourceError):
            inject(patch, point, lambda: raise_error(errno.ENOSPC))
            checkpoints.save_average(2)
        assert_averaged(checkpoints)
        checkpoints = prepare(folder, "new")
        assert dies_in_child(point, partial(checkpoints.save_average, 2))
        assert_averaged(checkpoints)


def dies_in_child(point: int, call: Callable[[], object]) -> bool:
    """Return whether a forked process dies at system call number `point`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child only saves and exits
        child = os.fork()
    if child == 0:
        try:
            inject(pytest.MonkeyPatch(), point, lambda: os._exit(KILLED))
            call()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


@pytest.mark.parametrize("scene", ["new", "damaged"])
def test_checkpoints_survive_a_kill_at_every_system_call(tmp_path: Path, scene: str) -> None:
    folder = tmp_path / "run"
    for point in range(count_points(folder, scene)):
        checkpoints = prepare(folder, scene)
        assert dies_in_child(point, partial(save, checkpoints, 3))
        if scene == "new":
            for step_folder in checkpoints.folder.glob("step_????????"):
                assert is_intact(checkpoints.load(step_folder))  # no folder is half deleted
        assert_survived(checkpoints)
