"""Which implementation of the per-row primitive runs, and how much memory it may take; and whether the recurrence of an
LSTM has a kernel."""

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

Impl = Literal["auto", "reference", "chunked", "triton"]

_LOG = logging.getLogger("reefknot.kernels")

DEFAULT_MEMORY = {"cuda": 2048, "cpu": 128}
"""MiB of working memory where nothing is said. A GPU has room, and larger blocks are faster there; a CPU's caches are
small, and larger blocks gain nothing."""


@dataclass(frozen=True)
class Choice:
    """An implementation, and the MiB that its working memory may take beside inputs and gradients."""

    impl: Impl = "auto"
    memory: float | None = None

    def __post_init__(self) -> None:
        if self.impl not in get_args(Impl):
            raise ArgumentError(f"impl = {self.impl!r}: must be one of {', '.join(get_args(Impl))}")
        if self.memory is not None and not (isinstance(self.memory, int | float) and self.memory > 0):
            raise ArgumentError(f"memory = {self.memory!r}: must be a number of MiB above 0")

    def budget(self, device: torch.device) -> int:
        """Bytes of working memory on this device."""
        mebibytes = DEFAULT_MEMORY.get(device.type, DEFAULT_MEMORY["cuda"]) if self.memory is None else self.memory
        return int(min(mebibytes, 2**40) * 2**20)


def _from_environment() -> Choice:
    """What `REEFKNOT_KERNELS` and `REEFKNOT_KERNEL_MEMORY` say, for programs that are not ours to edit."""
    stated = os.environ.get("REEFKNOT_KERNEL_MEMORY")
    try:
        memory = None if stated is None else float(stated)
        return Choice(os.environ.get("REEFKNOT_KERNELS", "auto"), memory)  # type: ignore[arg-type]
    except ValueError as fault:
        raise ArgumentError(f"REEFKNOT_KERNELS or REEFKNOT_KERNEL_MEMORY: {fault}") from None


_DEFAULT = _from_environment()
# Not a ContextVar: `torch.compile` reads this one, and compiles again when it has changed.
_CHOSEN = threading.local()


@contextmanager
def using(impl: Impl = "auto", memory: float | None = None) -> Iterator[None]:
    """Within it, every output end computes its losses so: an implementation, and MiB of working memory. A recurrence of
    ours has a kernel or a loop in plain torch; `reference` and `chunked` mean the loop, or torch's own layer where that
    will do."""
    before, _CHOSEN.choice = current(), Choice(impl, memory)
    try:
        yield
    finally:
        _CHOSEN.choice = before


def current() -> Choice:
    """What `using` has set, or the environment, or the defaults."""
    chosen: Choice = getattr(_CHOSEN, "choice", _DEFAULT)
    return chosen


def resolve(choice: Choice, device: torch.device, dtype: torch.dtype) -> Impl:
    """The implementation for a device and the type that products are made in: never `auto`."""
    if choice.impl == "triton":
        _check_triton(device, dtype)
    impl = choice.impl
    if impl == "auto":
        suits = dtype in (torch.bfloat16, torch.float32) and _kernels_run_on(device)
        impl = "triton" if suits else "chunked"
    if not torch.compiler.is_compiling():  # a graph cannot log
        say_once("cross-entropy", impl, device.type, dtype)
    return impl


def triton_chosen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel of a recurrence runs: where `using` says so, or the device suits it."""
    if current().impl == "triton":
        _check_triton(device, dtype)
        return True
    return current().impl == "auto" and _kernels_run_on(device)


def rounds_to_tf32() -> bool:
    """Whether products of float32 numbers on a GPU may be TF32's, whichever of torch's switches says so."""
    matmul = torch.backends.cuda.matmul
    # Of torch 2.9 and newer: there the older switch cannot be read once this one has been set.
    precision: str | None = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if precision is None else precision == "tf32"


@cache
def say_once(what: str, impl: str, device: str, dtype: torch.dtype) -> None:
    """Tell the log, the first time."""
    _LOG.info("%s on %s in %s: %s", what, device, str(dtype).removeprefix("torch."), impl)


def _kernels_run_on(device: torch.device) -> bool:
    """Whether a device is one that the triton kernels are written for, and they are here."""
    return device.type == "cuda" and _has_tensor_cores(device) and triton_available()


@cache
def triton_available() -> bool:
    """Whether the triton kernels are here and a triton they can use is installed: 3.4 or newer."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("reefknot.kernels.triton_scores") is None:
        return False
    # The first version that describes matrices to the copy engine from the host.
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def _check_triton(device: torch.device, dtype: torch.dtype) -> None:
    if not triton_available():
        raise ArgumentError("impl = 'triton' needs triton 3.4 or newer, which is not installed here; use impl = 'auto'")
    if dtype == torch.float64:
        raise ArgumentError("impl = 'triton' does not compute in float64; use impl = 'auto'")
    if device.type != "cuda" and not _interpreted():
        raise ArgumentError(f"impl = 'triton' runs on CUDA devices, not on {device.type}; use impl = 'auto'")


def _interpreted() -> bool:
    """Whether triton interprets its kernels, which makes them run anywhere, slowly: how the tests run them on a CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
