"""Seed the random number generators of Python, NumPy and torch together, and save and restore their states.

Checkpoints hold the states that `capture_states` returns, so that a resumed run continues with the same random numbers:

    seed_everything(seed=1)
    states = capture_states(device)
    restore_states(states, device)    # the next random numbers are the same as after `capture_states`
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

    The generators of Python and NumPy produce two Gaussian numbers at a time. `gauss` holds the second number of NumPy
    and of Python. `numpy_position` and `python_has_gauss` say whether it is still to be used.
    """
    _, numpy_state, numpy_position, numpy_has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    python_version, python_state, python_gauss = random.getstate()
    python_has_gauss = python_gauss is not None
    if python_gauss is None:
        python_gauss = 0.0  # a tensor cannot hold None
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(numpy_state).astype(np.int64)),
        "numpy_position": torch.tensor([numpy_position, numpy_has_gauss]),
        "python": torch.tensor([python_version, *python_state]),
        "gauss": torch.tensor([numpy_gauss, python_gauss], dtype=torch.float64),
        "python_has_gauss": torch.tensor(python_has_gauss),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the generators. The generator of a GPU is left unchanged if the state was captured on a CPU."""
    torch.set_rng_state(states["torch"])
    numpy_gauss, python_gauss = states["gauss"].tolist()

    numpy_state = states["numpy"].numpy().astype(np.uint32)
    numpy_position, numpy_has_gauss = states["numpy_position"].tolist()
    np.random.set_state(("MT19937", numpy_state, numpy_position, numpy_has_gauss, numpy_gauss))

    python_version, *python_state = states["python"].tolist()
    if not states["python_has_gauss"]:
        python_gauss = None
    random.setstate((python_version, tuple(python_state), python_gauss))

    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
