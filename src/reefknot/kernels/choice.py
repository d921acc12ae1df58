"""Choose the implementation of losses and LSTMs (plain torch or Triton kernels) and its working memory.

Users call `using`. The kernels call `current_choice` to learn what the user asked for. Then `resolve_impl` (for LSTMs:
`should_use_triton`) decides what runs on the device. On a GPU on which the kernels have not been tested, they are
checked first (`self_check`). Without `using`, the environment variables REEFKNOT_KERNELS and REEFKNOT_KERNEL_MEMORY
apply.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch

from reefknot.errors import ArgumentError
from reefknot.kernels import self_check

Impl = Literal["auto", "reference", "chunked", "triton"]
"""The implementations of a loss, which `using` describes."""

_LOG = logging.getLogger("reefknot.kernels")

DEFAULT_MEMORY = {"cuda": 2048, "cpu": 128}
"""The default working memory in MiB. On a GPU, larger blocks are faster. On a CPU they are not, because its caches are
small."""


@dataclass(frozen=True)
class Choice:
    """An implementation and its working memory."""

    impl: Impl = "auto"
    memory: float | None = None
    """MiB, not counting inputs and gradients. None stands for the default of the device."""

    def __post_init__(self) -> None:
        if self.impl not in get_args(Impl):
            raise ArgumentError(f"impl = {self.impl!r}: must be one of {', '.join(get_args(Impl))}")
        if self.memory is not None and not (isinstance(self.memory, int | float) and self.memory > 0):
            raise ArgumentError(f"memory = {self.memory!r}: must be a number of MiB above 0")

    def budget(self, device: torch.device) -> int:
        """Return the bytes of working memory on this device."""
        mebibytes = DEFAULT_MEMORY.get(device.type, DEFAULT_MEMORY["cuda"]) if self.memory is None else self.memory
        return int(min(mebibytes, 2**40) * 2**20)


def _read_environment() -> Choice:
    """Read `REEFKNOT_KERNELS` and `REEFKNOT_KERNEL_MEMORY`, for programs that users cannot edit."""
    mebibytes = os.environ.get("REEFKNOT_KERNEL_MEMORY")
    try:
        memory = None if mebibytes is None else float(mebibytes)
        return Choice(os.environ.get("REEFKNOT_KERNELS", "auto"), memory)  # type: ignore[arg-type]
    except ValueError as error:
        raise ArgumentError(f"REEFKNOT_KERNELS or REEFKNOT_KERNEL_MEMORY: {error}") from None


_DEFAULT = _read_environment()
# Not a ContextVar: `torch.compile` can read a thread-local, and recompiles when it changes.
_THREAD = threading.local()


@contextmanager
def using(impl: Impl = "auto", memory: float | None = None) -> Iterator[None]:
    """Compute all losses inside the context with this implementation and working memory.

        with rk.using("chunked", memory=512):
            loss = rk.linear_cross_entropy(hidden, weight, targets)

    The choice also applies to LSTMs with dropout on their state: `triton` selects our kernel, and `reference` and
    `chunked` select a loop in plain torch. Other recurrent layers use torch's own implementation, except that `auto`
    and `triton` may run a weight-dropped LSTM (`AWDLSTM`) in our kernel.

    Args:
        impl: `reference` stores all scores at once. `chunked` computes blocks of scores in plain torch. `triton`
            computes blocks in Triton kernels, on a GPU. `auto` chooses `triton` or `chunked` by device and type, and
            checks the kernels first on a GPU on which they have not been tested. On a GPU, `auto` also stores the
            scores of small problems, within `memory`, because that takes less time.
        memory: Working memory in MiB, not counting inputs and gradients. The default is 2048 on a GPU and 128 on a
            CPU.
    """
    previous = current_choice()
    _THREAD.choice = Choice(impl, memory)
    try:
        yield
    finally:
        _THREAD.choice = previous


def current_choice() -> Choice:
    """Return the choice that `using` made, or else the choice of the environment variables, or else the default."""
    choice: Choice = getattr(_THREAD, "choice", _DEFAULT)
    return choice


def resolve_impl(choice: Choice, device: torch.device, dtype: torch.dtype) -> Impl:
    """Return the implementation for a device and for the dtype of the matrix products. The result is never `auto`."""
    if choice.impl == "triton":
        _check_triton(device, dtype, "losses")
    impl = choice.impl
    if impl == "auto":
        is_supported = dtype in (torch.bfloat16, torch.float32) and _supports_triton(device, dtype, "losses")
        impl = "triton" if is_supported else "chunked"
    if not torch.compiler.is_compiling():  # a graph cannot log
        log_once("cross-entropy", impl, device.type, dtype)
    return impl


def should_use_triton(device: torch.device, dtype: torch.dtype, kernels: self_check.Kernels | None = None) -> bool:
    """Return whether to use a Triton kernel.

    It is used if `using` selects it, or if the choice is `auto` and the device supports it.

    Args:
        device: The device of the tensors.
        dtype: The type of the matrix products.
        kernels: The kernels to check on a GPU on which they have not been tested. None skips the check.
    """
    if current_choice().impl == "triton":
        _check_triton(device, dtype, kernels)
        return True
    return current_choice().impl == "auto" and _supports_triton(device, dtype, kernels)


def rounds_to_tf32() -> bool:
    """Return whether torch's settings allow a GPU to round float32 operands of matrix products to TF32."""
    matmul = torch.backends.cuda.matmul
    # Since torch 2.9. Once it has been set, the older switch cannot be read.
    precision: str | None = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if precision is None else precision == "tf32"


@cache
def log_once(operation: str, impl: str, device: str, dtype: torch.dtype) -> None:
    """Log which implementation runs, the first time only."""
    _LOG.info("%s on %s in %s: %s", operation, device, str(dtype).removeprefix("torch."), impl)


def _supports_triton(device: torch.device, dtype: torch.dtype, kernels: self_check.Kernels | None) -> bool:
    """Return whether the triton kernels are available, written for this device, and work on it."""
    if not _is_written_for(device):
        return False
    return kernels is None or _skips_check() or self_check.works(kernels, device, dtype)


def _is_written_for(device: torch.device) -> bool:
    """Return whether triton is available and the kernels are written for this kind of device."""
    return device.type == "cuda" and _has_tensor_cores(device) and triton_available()


def _skips_check() -> bool:
    """Return whether the user has set REEFKNOT_KERNELS=triton, which also skips the check of the kernels."""
    return _DEFAULT.impl == "triton"


@cache
def triton_available() -> bool:
    """Return whether our Triton kernels and Triton 3.4 or newer are installed."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("reefknot.kernels.triton_scores") is None:
        return False
    # Triton 3.4 is the first version with tensor descriptors, by which a GPU's copy engine (TMA) loads tiles.
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def _check_triton(device: torch.device, dtype: torch.dtype, kernels: self_check.Kernels | None) -> None:
    if not triton_available():
        raise ArgumentError("impl = 'triton' needs triton 3.4 or newer, which is not installed; use impl = 'auto'")
    if dtype == torch.float64:
        raise ArgumentError("impl = 'triton' does not compute in float64; use impl = 'auto'")
    if device.type != "cuda" and not _is_interpreted():
        raise ArgumentError(f"impl = 'triton' runs on CUDA devices, not on {device.type}; use impl = 'auto'")
    if kernels is not None and not _skips_check():
        self_check.require(kernels, device, dtype)


def _is_interpreted() -> bool:
    """Return whether Triton interprets its kernels. They then run slowly on any device. Tests use this on a CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
