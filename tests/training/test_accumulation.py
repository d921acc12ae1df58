"""Streams cut into pieces give the update of the whole batch: losses are sums, divided once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reefknot import experiments
from reefknot.errors import SettingsError
from reefknot.recipe import load_recipe
from reefknot.training.display import Silent
from reefknot.training.distributed import World

Metrics = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def last_weights(tiny_recipe: Callable[..., Path]) -> Callable[..., dict[str, torch.Tensor]]:
    """Trains with 32 streams and without dropout; the weights at the end. The text leaves a ragged last window."""

    def train(out: Path, *overrides: str, labels: str = "projected") -> dict[str, torch.Tensor]:
        recipe = str(tiny_recipe(tokens=400, labels=labels))
        fixed = ("training.batch=32", "encoder.dropout=0.0", "training.log_every=1", *overrides)
        loaded = load_recipe(recipe, fixed)
        result = experiments.train(loaded, loaded.row("tied"), out, world=World(), display=Silent())
        assert result is not None
        assert result["training"]["tokens"] == 2 * 32 * 11  # windows of 5, 5 and 1
        return load_file(max((out / "checkpoints").iterdir()) / "model.safetensors")

    return train


@pytest.mark.parametrize("divisor", ["tokens", "batch"])
@pytest.mark.parametrize("labels", ["plain", "projected", "drill"])
def test_eight_pieces_are_one_batch(
    tmp_path: Path,
    last_weights: Callable[..., dict[str, torch.Tensor]],
    metrics: Metrics,
    divisor: str,
    labels: str,
) -> None:
    whole = last_weights(tmp_path / "whole", f"training.divisor={divisor}", labels=labels)
    pieces = last_weights(tmp_path / "pieces", f"training.divisor={divisor}", "training.accumulate=8", labels=labels)
    assert whole.keys() == pieces.keys()
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=0, atol=1e-6)
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "pieces"), strict=True):
        assert one["step"] == other["step"]
        assert one["nll"] == pytest.approx(other["nll"], abs=1e-6)
        if one["kind"] == "train":
            assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-5)
            assert one["penalties"] == pytest.approx(other["penalties"], rel=1e-5)
            assert bool(one["penalties"]) == (labels == "projected")


def test_pieces_must_be_equal(tmp_path: Path, last_weights: Callable[..., dict[str, torch.Tensor]]) -> None:
    with pytest.raises(SettingsError, match=r"training: accumulate = 5 does not divide batch = 32"):
        last_weights(tmp_path / "run", "training.accumulate=5")
    assert not (tmp_path / "run").exists()
