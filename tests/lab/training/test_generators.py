"""Random generators continue exactly where they were saved, even between two numbers of a Gaussian pair."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from reefknot.lab.training.generators import capture_states, restore_states, seed_everything, set_determinism
from reefknot.storage import files as durable

CPU = torch.device("cpu")


def draw() -> list[float]:
    """Draw numbers of every kind from every generator."""
    numbers = [random.random(), random.gauss(), float(np.random.rand()), float(np.random.randn())]
    return [*numbers, float(torch.rand(())), float(torch.randn(())), *torch.randn(40).tolist()]


@pytest.mark.parametrize("drawn", range(4))
def test_generators_are_restored_from_a_file(tmp_path: Path, drawn: int) -> None:
    seed_everything(3)
    for _ in range(drawn):
        draw()
    path = tmp_path / "states.safetensors"
    durable.write_tensors(path, capture_states(CPU))
    expected = draw() + draw()
    seed_everything(4)
    restore_states(durable.read_tensors(path), CPU)
    assert draw() + draw() == expected


def test_seeds_and_ranks_give_different_numbers() -> None:
    numbers = set()
    for seed in range(3):
        for rank in range(3):
            seed_everything(seed, rank)
            numbers.update(draw()[:3])
    assert len(numbers) == 3 * 3 * 3


def test_largest_seed_is_accepted() -> None:
    seed_everything(2**31 - 1, rank=7)
    assert all(np.isfinite(draw()))


def test_determinism_levels_set_the_options_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        set_determinism("exact")
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cuda.matmul.allow_tf32
        set_determinism("fast")
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        set_determinism("seeded")
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.benchmark


def test_set_determinism_does_not_import_the_compiler() -> None:
    script = (
        "import sys, reefknot.lab.tasks.language_model\n"
        "from reefknot.lab.training.generators import set_determinism\n"
        "set_determinism('exact'); print('torch._dynamo' in sys.modules)"
    )
    completed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert completed.stdout.strip() == "False"
