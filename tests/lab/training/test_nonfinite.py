"""A loss or a gradient that is not finite stops training before it changes the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reefknot.errors import NonFiniteError
from reefknot.lab import experiment as experiments
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.training.display import SilentDisplay
from reefknot.lab.training.distributed import World
from reefknot.lab.training.loop import Trainer


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").iterdir()) / "model.safetensors")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[Trainer], None]], list[dict[str, Any]]]:
    """A function that calls `spoil` before the n-th step and returns a list of the weights then and after the error."""
    step = Trainer._step

    def arm(number: int, spoil: Callable[[Trainer], None]) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []

        def poisoned(self: Trainer, stop: Any) -> Any:
            if self.state.progress.step + 1 == number:
                spoil(self)
                seen.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
            try:
                return step(self, stop)
            except NonFiniteError:
                seen.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
                raise

        monkeypatch.setattr(Trainer, "_step", poisoned)
        return seen

    return arm


def spoil_weight(trainer: Trainer) -> None:
    with torch.no_grad():
        next(trainer.model.encoder.parameters())[0, 0] = math.nan


def spoil_gradient(trainer: Trainer) -> None:
    """Make the gradient of one update infinite. The following updates would be finite."""
    weight: Any = next(trainer.model.encoder.parameters())

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        hook.remove()
        return gradient * math.inf

    hook = weight.register_hook(spoil)


@pytest.mark.parametrize("spoil", [spoil_weight, spoil_gradient])
@pytest.mark.parametrize(
    ("gpu", "intervals"),
    [(False, ()), (True, ("log_every=5", "save_every=100")), (True, ("log_every=100", "save_every=5"))],
    ids=["at once", "with a line of metrics", "with a checkpoint"],
)
def test_nonfinite_update_is_not_applied(
    tmp_path: Path,
    train: Any,
    poison: Callable[[int, Callable[[Trainer], None]], list[dict[str, Any]]],
    spoil: Callable[[Trainer], None],
    gpu: bool,
    intervals: tuple[str, ...],
    request: pytest.FixtureRequest,
) -> None:
    """On a GPU the error is known only some steps later. None of these steps is applied, saved or logged."""
    if gpu:
        request.getfixturevalue("as_on_a_gpu")
    out = tmp_path / "run"
    seen = poison(8, spoil)
    with pytest.raises(NonFiniteError, match=r"at step 8; the update was not made\. The last checkpoint is kept"):
        train(out, *(f"training.{setting}" for setting in intervals))
    assert RunFolder.open(out).metrics.read()[-1]["step"] < 8
    assert max((out / "checkpoints").iterdir()).name == "step_00000006"
    before, after = seen
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
    record = json.loads((out / "nonfinite.json").read_text())
    assert record.items() >= {"step": 8, "epoch": 2, "window": 1, "seed": 0}.items()
    assert math.isfinite(float(record["loss"])) == (spoil is spoil_gradient)
    assert not math.isfinite(float(record["gradient_norm"]))
    assert all(tensor.isfinite().all() for tensor in last_weights(out).values())
    assert not (out / "result.json").exists()


@pytest.mark.parametrize("classifier", ["plain", "projected"])
def test_divergence_is_reported_and_not_saved(
    tmp_path: Path, tiny_recipe: Callable[..., Path], classifier: str
) -> None:
    """With a plain classifier, a finite gradient makes the weights infinite. They are not saved."""
    optimiser = '{kind = "sgd", learning_rate = 1e9, weight_decay = 1e9}'
    recipe = load_recipe(
        str(tiny_recipe(classifier=classifier)), (f"training.optimiser={optimiser}", "training.save_every=1")
    )
    with pytest.raises(NonFiniteError):
        experiments.train(recipe, recipe.row("tied"), tmp_path / "run", world=World(), display=SilentDisplay())
    saved = list((tmp_path / "run").glob("checkpoints/*/model.safetensors"))
    assert saved
    assert all(tensor.isfinite().all() for path in saved for tensor in load_file(path).values())
    assert (tmp_path / "run" / "nonfinite.json").exists()
