"""Updates replayed as CUDA graphs equal eager updates. These tests need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reefknot.errors import NonFiniteError, Stopped
from reefknot.lab import experiment as experiments
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.training.display import SilentDisplay
from reefknot.lab.training.distributed import World
from reefknot.lab.training.loop import Trainer
from tiny import DROPOUT_SETTINGS, encoder

pytestmark = pytest.mark.gpu

AVERAGED = 'training.averaging={start = "at_once"}'
RANDOM = "training.random_steps={probability = 0.7, deviation = 1.0, least = 3}"
ADAMW = 'training.optimiser={kind = "adamw", learning_rate = 0.01}'
NESTEROV = 'training.optimiser={kind = "sgd", learning_rate = 0.1, momentum = 0.9, nesterov = true}'
TRANSFORMER = 'encoder={kind = "transformer", layers = 2, heads = 2, ffn_dim = 8, dropout = 0.3}'
BLOCKS = ("training.batching=blocks", "training.divisor=tokens")


@pytest.fixture
def train(tiny_recipe: Callable[..., Path]) -> Callable[..., Any]:
    recipe = tiny_recipe()

    def run(out: Path, *overrides: str) -> Any:
        loaded = load_recipe(str(recipe), ("training.determinism=exact", *overrides), "tied")
        world = World(device=torch.device("cuda"))
        return experiments.train(loaded, loaded.row("tied"), out, world=world, display=SilentDisplay())

    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").iterdir()) / "model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        *((encoder(kind), RANDOM) for kind in DROPOUT_SETTINGS),
        (encoder("awd_lstm"), AVERAGED),
        ("training.accumulate=2",),
        ("training.precision=bfloat16", encoder("variational_lstm")),
        ("training.precision=float16", "training.log_every=1", NESTEROV),
        (ADAMW, AVERAGED),
        ('training.optimiser={kind = "adam", learning_rate = 0.01}', "output.smoothing=0.1"),
        ('training.optimiser={kind = "adadelta"}',),
        (TRANSFORMER, *BLOCKS, "training.precision=float16", NESTEROV),
        (TRANSFORMER, "training.batching=sentences", "training.divisor=tokens", "training.accumulate=3", ADAMW),
        (encoder("awd_lstm"), *BLOCKS),
        ('output={kind = "augmented", table = "words", gamma = 0.5, classifier = {kind = "plain", table = "words"}}',),
        ('output={kind = "mixture", experts = 3, classifier = {kind = "plain", table = "words"}}',),
        ('input={kind = "char_cnn", dim = 8, byte_dim = 4, filters = [[1, 4], [2, 4]]}',),
    ],
)
def test_captured_run_equals_eager_run(tmp_path: Path, train: Callable[..., Any], change: tuple[str, ...]) -> None:
    results = [train(tmp_path / str(capture), f"training.capture={capture}", *change) for capture in ("true", "false")]
    assert results[0].test.perplexity == results[1].test.perplexity
    captured, eager = (weights(tmp_path / capture) for capture in ("true", "false"))
    assert all(torch.equal(captured[name], eager[name]) for name in captured)


@pytest.mark.parametrize(
    "settings", [(RANDOM,), *(("training.precision=float16", optimiser) for optimiser in (ADAMW, NESTEROV))]
)
def test_captured_run_resumes_bit_for_bit(
    tmp_path: Path, train: Callable[..., Any], signal_in_step: Callable[[int], None], settings: tuple[str, ...]
) -> None:
    train(tmp_path / "whole", *settings)
    signal_in_step(7)
    with pytest.raises(Stopped):
        train(tmp_path / "cut", *settings)
    train(tmp_path / "cut", *settings)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_captured_nonfinite_update_is_not_applied(
    tmp_path: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    step = Trainer._step

    def step_with_nan(self: Trainer, stop: Any) -> Any:
        weight = next(self.model.encoder.parameters())
        if self.state.progress.step + 1 == 6:
            with torch.no_grad():
                weight[0, 0] = float("nan")
            seen.append(weight.detach().clone())
        try:
            return step(self, stop)
        except NonFiniteError:
            seen.append(weight.detach().clone())
            raise

    monkeypatch.setattr(Trainer, "_step", step_with_nan)
    with pytest.raises(NonFiniteError, match="at step 6; the update was not made"):
        train(tmp_path / "run", "training.log_every=3")
    assert all(torch.equal(seen[0].nan_to_num(), later.nan_to_num()) for later in seen[1:])
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


def test_captured_overflowing_update_is_skipped(
    tmp_path: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates 4 to 6 overflow. The first update is not captured, but these are."""
    step, seen = Trainer._step, []

    def overflowing_step(self: Trainer, stop: Any) -> Any:
        weight = next(self.model.encoder.parameters())
        scale = self.state.scaler._scale
        number = self.state.progress.step + 1
        if number in (4, 7) and scale is not None:
            # A scale that overflows float16 for three updates, and then one that does not.
            scale.fill_(2.0**100 if number == 4 else 2.0**10)
        seen.append(weight.detach().clone())
        return step(self, stop)

    monkeypatch.setattr(Trainer, "_step", overflowing_step)
    settings = ("training.precision=float16", TRANSFORMER, *BLOCKS, NESTEROV, "training.log_every=2")
    train(tmp_path / "run", *settings)
    unchanged = [number for number in range(1, len(seen)) if torch.equal(seen[number - 1], seen[number])]
    assert unchanged == [4, 5, 6]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


def test_captured_update_uses_compiled_blocks(tmp_path: Path, train: Callable[..., Any]) -> None:
    """Without dropout, a run with compiled blocks has nearly the losses of a run without them."""
    dry = TRANSFORMER.replace("0.3", "0.0")
    settings = (dry, *BLOCKS, "training.precision=bfloat16", "training.determinism=seeded")
    compiled, eager = (train(tmp_path / name, *settings, f"training.compile={name}") for name in ("true", "false"))
    assert "compiled the blocks of the encoder in" in (tmp_path / "true" / "log.txt").read_text()
    assert compiled.test.perplexity == pytest.approx(eager.test.perplexity, rel=0.02)
    assert weights(tmp_path / "true").keys() == weights(tmp_path / "false").keys()
