"""Averaged checkpoints are exact and never resumed from; pauses are not averaged; `best` is a link."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reefknot.errors import DataError
from reefknot.lab.runs.checkpoints import Checkpoints


def weights(step: int) -> Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(step))


def save(checkpoints: Checkpoints, step: int, *, pause: bool = False) -> Path:
    state = {"rng.torch": torch.ones(3)}
    return checkpoints.save(step, {"words.weight": weights(step)}, state, {}, fingerprint="config", pause=pause)


def latest_path(checkpoints: Checkpoints) -> Path:
    """Return the path of the newest intact checkpoint, and fail on any message."""
    checkpoint = checkpoints.load_latest(pytest.fail)
    assert checkpoint is not None
    return checkpoint.path


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mean_of(*steps: int) -> Tensor:
    return torch.stack([weights(step).double() for step in steps]).mean(0).float()


@pytest.fixture
def two_steps(tmp_path: Path) -> Checkpoints:
    """Return checkpoints with steps 1 and 2 saved."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    return checkpoints


@pytest.fixture
def five_steps(tmp_path: Path) -> Checkpoints:
    """Return checkpoints with steps 1 to 5 saved, where step 2 is the best."""
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in range(1, 6):
        save(checkpoints, step)
    checkpoints.mark_best(2)
    return checkpoints


def test_average_of_the_last_steps_becomes_the_best(five_steps: Checkpoints, tmp_path: Path) -> None:
    path = five_steps.save_average(3)
    assert (path, five_steps.best_path()) == (five_steps.folder / "mean_00000005", path)
    assert str((tmp_path / "best").readlink()) == "checkpoints/mean_00000005"
    averaged = five_steps.load(path)
    assert (averaged.step, averaged.state_tensors, averaged.fingerprint) == (5, {}, "config")
    assert averaged.state_values == {"mean_of": ["step_00000003", "step_00000004", "step_00000005"]}
    assert torch.equal(averaged.weights["words.weight"], mean_of(3, 4, 5))
    assert file_names(path) == ["MANIFEST.json", "model.safetensors", "state.json", "state.safetensors"]


def test_averaged_lists_the_steps_of_the_mean(five_steps: Checkpoints, tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "empty").averaged_steps() == five_steps.averaged_steps() == []
    five_steps.save_average(2)
    assert five_steps.averaged_steps() == ["step_00000004", "step_00000005"]


def test_average_of_more_steps_than_saved_uses_all(five_steps: Checkpoints) -> None:
    assert torch.equal(five_steps.load(five_steps.save_average(100)).weights["words.weight"], mean_of(1, 2, 3, 4, 5))


def test_average_of_one_step_equals_the_step(five_steps: Checkpoints) -> None:
    assert torch.equal(five_steps.load(five_steps.save_average(1)).weights["words.weight"], weights(5))


def test_mean_is_neither_resumed_from_nor_pruned(five_steps: Checkpoints) -> None:
    five_steps.save_average(2)
    assert latest_path(five_steps) == five_steps.step_path(5)
    for step in range(6, 12):
        save(five_steps, step)
    assert file_names(five_steps.folder) == ["mean_00000005", *(f"step_{step:08d}" for step in range(7, 12))]
    five_steps.mark_best(11)
    save(five_steps, 12)
    assert "mean_00000005" in file_names(five_steps.folder)
    assert latest_path(five_steps) == five_steps.step_path(12)


def test_mean_is_computed_once_unless_damaged(five_steps: Checkpoints) -> None:
    path = five_steps.save_average(3)
    inode = path.stat().st_ino
    five_steps.mark_best(2)
    assert five_steps.save_average(3) == path == five_steps.best_path()
    assert path.stat().st_ino == inode
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"mean_00000005/model\.safetensors has 0 bytes"):
        five_steps.load(path)
    five_steps.save_average(3)
    assert torch.equal(five_steps.load(path).weights["words.weight"], mean_of(3, 4, 5))


def test_average_sums_in_float64_and_keeps_dtypes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step, value in enumerate([1.0, 2.0**-30, -1.0], start=1):
        model = {
            "wide": torch.tensor([value]),
            "half": torch.tensor([float(step)], dtype=torch.bfloat16),
            "count": torch.tensor([step]),
            "mask": torch.tensor([step == 3]),
        }
        checkpoints.save(step, model, {}, {}, fingerprint="f")
    averaged = checkpoints.load(checkpoints.save_average(3)).weights
    assert averaged["wide"].item() == pytest.approx(2.0**-30 / 3)  # in float32 the sum would be zero
    assert averaged["half"].dtype == torch.bfloat16
    assert [averaged[name].item() for name in ("half", "count", "mask")] == [2.0, 3, True]


def test_damaged_step_is_not_averaged(five_steps: Checkpoints) -> None:
    (five_steps.step_path(4) / "model.safetensors").write_bytes(b"x")
    with pytest.raises(
        DataError,
        match=r"step_00000004/model\.safetensors .* remove it and all later checkpoints",
    ):
        five_steps.save_average(3)
    assert five_steps.best_path() == five_steps.step_path(2)
    five_steps.save_average(1)


@pytest.mark.parametrize(
    ("model", "fingerprint"), [({"words.weight": torch.ones(7, 5)}, "other"), ({"other": torch.ones(2)}, "config")]
)
def test_steps_of_two_runs_are_not_averaged(
    five_steps: Checkpoints, model: dict[str, Tensor], fingerprint: str
) -> None:
    five_steps.save(6, model, {}, {}, fingerprint=fingerprint)
    with pytest.raises(DataError, match=r"step_00000005 and .*step_00000006 belong to different runs"):
        five_steps.save_average(2)


def test_average_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no checkpoint to average: train it first"):
        Checkpoints(tmp_path).save_average(3)
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(tmp_path).save_average(0)


def test_pause_is_resumed_from_and_removed_by_the_next_save(two_steps: Checkpoints) -> None:
    """A pause must not change which steps are kept and averaged."""
    for step in (3, 4):
        path = save(two_steps, step, pause=True)
        assert latest_path(two_steps) == path == two_steps.folder / f"pause_{step:08d}"
        assert two_steps.load(path).step == step
        assert file_names(two_steps.folder) == [path.name, "step_00000001", "step_00000002"]
    assert two_steps.load(two_steps.save_average(2)).state_values == {"mean_of": ["step_00000001", "step_00000002"]}
    save(two_steps, 5)
    assert file_names(two_steps.folder) == ["mean_00000002", "step_00000002", "step_00000005"]


def test_best_link_is_relative_and_survives_a_copy(two_steps: Checkpoints, tmp_path: Path) -> None:
    two_steps.mark_best(1)
    two_steps.mark_best(2)
    assert str((tmp_path / "best").readlink()) == "checkpoints/step_00000002"
    assert two_steps.load(tmp_path / "best").step == 2
    with pytest.raises(DataError, match="step_00000007 is missing"):
        two_steps.mark_best(7)
    shutil.copytree(tmp_path, tmp_path / "copy")  # follows the link: best becomes a folder
    copied = Checkpoints(tmp_path / "copy")
    best = copied.best_path()
    assert best is not None
    assert copied.load(best).step == 2


@pytest.mark.parametrize(
    "target", ["/etc", "..", "checkpoints/../checkpoints/step_00000001", "checkpoints/step_00000099"]
)
def test_best_link_outside_the_checkpoints_is_rejected(two_steps: Checkpoints, tmp_path: Path, target: str) -> None:
    (tmp_path / "best").symlink_to(target)
    with pytest.raises(DataError, match="not a checkpoint of this run"):
        two_steps.best_path()
