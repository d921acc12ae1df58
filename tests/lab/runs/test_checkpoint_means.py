"""Means of the last steps are right and never resumed from; a pause is in no mean; the best is a link."""

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


def latest(checkpoints: Checkpoints) -> Path:
    found = checkpoints.latest(pytest.fail)
    assert found is not None
    return found.path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mean_of(*steps: int) -> Tensor:
    return torch.stack([weights(step).double() for step in steps]).mean(0).float()


@pytest.fixture
def two(tmp_path: Path) -> Checkpoints:
    """Steps 1 and 2 are saved."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    return checkpoints


@pytest.fixture
def five(tmp_path: Path) -> Checkpoints:
    """Steps 1 to 5 are saved, and step 2 is the best."""
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in range(1, 6):
        save(checkpoints, step)
    checkpoints.mark_best(2)
    return checkpoints


def test_the_mean_of_the_last_steps_is_the_best(five: Checkpoints, tmp_path: Path) -> None:
    path = five.average(3)
    assert (path, five.best()) == (five.folder / "mean_00000005", path)
    assert str((tmp_path / "best").readlink()) == "checkpoints/mean_00000005"
    found = five.load(path)
    assert (found.step, found.state, found.fingerprint) == (5, {}, "config")
    assert found.values == {"mean_of": ["step_00000003", "step_00000004", "step_00000005"]}
    assert torch.equal(found.model["words.weight"], mean_of(3, 4, 5))
    assert names(path) == ["MANIFEST.json", "model.safetensors", "state.json", "state.safetensors"]


def test_what_the_best_is_a_mean_of_is_known(five: Checkpoints, tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "empty").averaged() == five.averaged() == []
    five.average(2)
    assert five.averaged() == ["step_00000004", "step_00000005"]


def test_fewer_steps_than_asked_for_are_all(five: Checkpoints) -> None:
    assert torch.equal(five.load(five.average(100)).model["words.weight"], mean_of(1, 2, 3, 4, 5))


def test_a_mean_of_one_step_is_the_step(five: Checkpoints) -> None:
    assert torch.equal(five.load(five.average(1)).model["words.weight"], weights(5))


def test_nothing_resumes_from_a_mean_and_none_is_pruned(five: Checkpoints) -> None:
    five.average(2)
    assert latest(five) == five.path_of(5)
    for step in range(6, 12):
        save(five, step)
    assert names(five.folder) == ["mean_00000005", *(f"step_{step:08d}" for step in range(7, 12))]
    five.mark_best(11)
    save(five, 12)
    assert "mean_00000005" in names(five.folder)
    assert latest(five) == five.path_of(12)


def test_a_mean_is_made_once_unless_it_is_damaged(five: Checkpoints) -> None:
    path = five.average(3)
    inode = path.stat().st_ino
    five.mark_best(2)
    assert five.average(3) == path == five.best()
    assert path.stat().st_ino == inode
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"mean_00000005/model\.safetensors has 0 bytes"):
        five.load(path)
    five.average(3)
    assert torch.equal(five.load(path).model["words.weight"], mean_of(3, 4, 5))


def test_sums_are_wide_types_stay_and_whole_numbers_are_the_last(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step, value in enumerate([1.0, 2.0**-30, -1.0], start=1):
        model = {
            "wide": torch.tensor([value]),
            "half": torch.tensor([float(step)], dtype=torch.bfloat16),
            "count": torch.tensor([step]),
            "mask": torch.tensor([step == 3]),
        }
        checkpoints.save(step, model, {}, {}, fingerprint="f")
    found = checkpoints.load(checkpoints.average(3)).model
    assert found["wide"].item() == pytest.approx(2.0**-30 / 3)  # in float32 the sum would be zero
    assert found["half"].dtype == torch.bfloat16
    assert [found[name].item() for name in ("half", "count", "mask")] == [2.0, 3, True]


def test_a_damaged_step_is_in_no_mean(five: Checkpoints) -> None:
    (five.path_of(4) / "model.safetensors").write_bytes(b"x")
    with pytest.raises(DataError, match=r"step_00000004/model\.safetensors .* remove step_00000004 and all later ones"):
        five.average(3)
    assert five.best() == five.path_of(2)
    five.average(1)


@pytest.mark.parametrize(
    ("model", "fingerprint"), [({"words.weight": torch.ones(7, 5)}, "other"), ({"other": torch.ones(2)}, "config")]
)
def test_steps_of_two_runs_have_no_mean(five: Checkpoints, model: dict[str, Tensor], fingerprint: str) -> None:
    five.save(6, model, {}, {}, fingerprint=fingerprint)
    with pytest.raises(DataError, match=r"step_00000005 belongs to another run than .*step_00000006"):
        five.average(2)


def test_there_must_be_something_to_average(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no checkpoint to average: train it first"):
        Checkpoints(tmp_path).average(3)
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(tmp_path).average(0)


def test_a_pause_is_resumed_from_and_goes_with_the_next(two: Checkpoints) -> None:
    """Where training is asked to stop must not decide which steps are kept and averaged."""
    for step in (3, 4):
        path = save(two, step, pause=True)
        assert latest(two) == path == two.folder / f"pause_{step:08d}"
        assert two.load(path).step == step
        assert names(two.folder) == [path.name, "step_00000001", "step_00000002"]
    assert two.load(two.average(2)).values == {"mean_of": ["step_00000001", "step_00000002"]}
    save(two, 5)
    assert names(two.folder) == ["mean_00000002", "step_00000002", "step_00000005"]


def test_best_is_a_relative_link_that_moves_with_the_run(two: Checkpoints, tmp_path: Path) -> None:
    two.mark_best(1)
    two.mark_best(2)
    assert str((tmp_path / "best").readlink()) == "checkpoints/step_00000002"
    assert two.load(tmp_path / "best").step == 2
    with pytest.raises(DataError, match="step_00000007 is missing"):
        two.mark_best(7)
    shutil.copytree(tmp_path, tmp_path / "copy")  # follows the link: best becomes a folder
    copied = Checkpoints(tmp_path / "copy")
    best = copied.best()
    assert best is not None
    assert copied.load(best).step == 2


@pytest.mark.parametrize(
    "target", ["/etc", "..", "checkpoints/../checkpoints/step_00000001", "checkpoints/step_00000099"]
)
def test_best_may_only_point_at_a_checkpoint(two: Checkpoints, tmp_path: Path, target: str) -> None:
    (tmp_path / "best").symlink_to(target)
    with pytest.raises(DataError, match="not a checkpoint of this run"):
        two.best()
