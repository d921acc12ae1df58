"""bfloat16 autocast: weights stay float32, the loss falls."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def test_bfloat16_trains(tmp_path: Path, train: Any, metrics: Callable[[Path], list[dict[str, Any]]]) -> None:
    fixed = ("encoder.dropout=0.0", "init.uniform=0.5", "training.schedule.factor=1.0")
    settings = ("training.epochs=20", "training.optimiser.learning_rate=0.1", *fixed)
    losses = {}
    for precision in ("float32", "bfloat16"):
        train(tmp_path / precision, *settings, f"training.precision={precision}")
        losses[precision] = [line["nll"] for line in metrics(tmp_path / precision) if line["kind"] == "train"]
    assert all(map(math.isfinite, losses["bfloat16"]))
    assert sum(losses["bfloat16"][-3:]) < sum(losses["bfloat16"][:3]) - 0.3
    assert losses["bfloat16"] != losses["float32"]
    saved = load_file(max((tmp_path / "bfloat16" / "checkpoints").iterdir()) / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
