"""Seed the random number generators of Python, NumPy and torch together, and save and restore their states.

Checkpoints hold the states that `capture_states` returns, so that a resumed run continues with the same random numbers.
"""

from __future__ import annotations

import os
import random
from typing import Literal

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed all generators. Every rank gets a different seed, so that dropout masks differ between ranks."""
    rank_seed = (seed + 1_000_003 * rank) % 2**32
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    torch.manual_seed(rank_seed)


def set_determinism(level: Literal["exact", "seeded", "fast"]) -> None:
    """Set how reproducible computations are, as `training.determinism` describes.

    `exact` gives bit-identical results on the same device with the same versions. No level guarantees this across
    different devices.
    """
    if level == "exact":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # `use_deterministic_algorithms` sets the same switch, but it imports the compiler too, which takes a second.
    torch.set_deterministic_debug_mode("error" if level == "exact" else "default")
    torch.backends.cudnn.benchmark = level == "fast"
    torch.backends.cudnn.allow_tf32 = level == "fast"
    torch.backends.cuda.matmul.allow_tf32 = level == "fast"


def capture_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of all generators as tensors.

    The generators of Python and NumPy produce two Gaussian numbers at a time. `gauss` holds the second number if it has
    not been used yet.
    """
    _, numpy_state, position, has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    version, python_state, python_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(numpy_state).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss]),
        "python": torch.tensor([version, *python_state]),
        "gauss": torch.tensor([numpy_gauss, 0.0 if python_gauss is None else python_gauss], dtype=torch.float64),
        "python_has_gauss": torch.tensor(python_gauss is not None),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the generators. The generator of a GPU is left unchanged if the state was captured on a CPU."""
    torch.set_rng_state(states["torch"])
    position, has_gauss = states["numpy_position"].tolist()
    numpy_gauss, python_gauss = states["gauss"].tolist()
    np.random.set_state(("MT19937", states["numpy"].numpy().astype(np.uint32), position, has_gauss, numpy_gauss))
    version, *python_state = states["python"].tolist()
    random.setstate((version, tuple(python_state), python_gauss if states["python_has_gauss"] else None))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
