"""Skip-gram with negative sampling (Mikolov et al. 2013) over a stretch of text, in place, as word2vec does it.

    for every kept word (the centre) and every other kept word in its window (the context):
        v = input[context]
        for the centre (y = 1) and each negative that is not the centre (y = 0), row u of output:
            g = rate (y - sigmoid(u . v))        e += g u        u += g v
        input[context] += e

The sigmoid is 0 below -6 and 1 above 6. The rate falls linearly with the place in the text. If both tables are one
(tied), a row may be input and target at the same time: what it gets as a target is then added to e and applied when the
pair is done.

`reference` is this loop in float64. `numba` is the same loop compiled, on any number of threads that share the tables
without locks (Hogwild); with one worker it equals the reference up to float32 rounding. `torch` computes the gradients
of a batch of pairs at the same weights and adds them up, which is nearly the same as long as few pairs of a batch share
a row. `triton` is Hogwild on a GPU: a thousand or two centres at once, with atomic updates. All implementations draw
the same random numbers (`skip_gram_draws`), so they train on the same pairs.

Shapes: V words, D dimensions.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.choice import say_once, triton_chosen
from reefknot.kernels.skip_gram_draws import Draws

CLIP = 6.0
"""Scores beyond this value have a sigmoid of 0 or 1."""
Impl = Literal["auto", "reference", "torch", "numba", "triton"]


@dataclass(frozen=True)
class Rates:
    """A learning rate that falls linearly from `first` towards 0 over all places, but not below `lowest`."""

    first: float
    lowest: float
    places: int
    """The places of all epochs together."""
    before: int = 0
    """The places of earlier epochs."""

    def at(self, place: int) -> float:
        return max(self.lowest, self.first * (1.0 - (self.before + place) / self.places))

    @property
    def line(self) -> tuple[float, float]:
        """The rate at place 0 of this epoch and its decrease per place, without regard to `lowest`."""
        return self.first * (1.0 - self.before / self.places), self.first / self.places


@dataclass(frozen=True, eq=False)
class Stretch:
    """The work of an implementation: two tables, and the part of a text whose words are the centres."""

    inputs: Tensor
    """input_VD, changed in place."""
    outputs: Tensor
    """output_VD, changed in place."""
    ids: NDArray[np.int32]
    """The whole text."""
    start: int
    stop: int
    draws: Draws
    key: int
    """The key of the epoch's random numbers."""
    rates: Rates

    @property
    def tied(self) -> bool:
        """Whether both tables are one."""
        return self.inputs.data_ptr() == self.outputs.data_ptr()


def train_stretch(
    input_VD: Tensor,
    output_VD: Tensor,
    ids: NDArray[np.int32],
    start: int,
    stop: int,
    draws: Draws,
    epoch: int,
    rates: Rates,
    *,
    workers: int = 1,
    impl: Impl = "auto",
) -> None:
    """Train with the words from `start` to `stop` as centres. Their contexts may lie outside.

    Args:
        input_VD: The vectors of the contexts, changed in place.
        output_VD: The vectors of centres and negatives, changed in place. The same tensor if both ends are tied.
        ids: The whole text.
        start: The first place of the stretch.
        stop: The place after the last.
        draws: The random draws, on the device of the tables.
        epoch: The epoch, on which the random numbers depend.
        rates: The learning rate.
        workers: Threads, for `numba`. The result of several threads is not reproducible.
        impl: The implementation. `auto` chooses one for the device.
    """
    _check(input_VD, output_VD, ids, start, stop, workers)
    chosen = resolve(input_VD, impl)
    say_once("skip-gram", chosen, input_VD.device.type, input_VD.dtype)
    stretch = Stretch(input_VD.detach(), output_VD.detach(), ids, start, stop, draws, draws.key(epoch), rates)
    if chosen == "numba":
        from reefknot.kernels.numba_skip_gram import train_compiled

        train_compiled(stretch, workers)
    elif chosen == "triton":
        from reefknot.kernels.triton_skip_gram import train_at_once

        train_at_once(stretch)
    elif chosen == "torch":
        from reefknot.kernels.torch_skip_gram import train_batches

        train_batches(stretch)
    else:
        from reefknot.kernels.skip_gram_reference import train_pair_by_pair

        train_pair_by_pair(stretch)


def resolve(table: Tensor, impl: Impl = "auto") -> Impl:
    """Return the implementation for a table: never `auto`."""
    if impl not in get_args(Impl):
        raise ArgumentError(f"impl = {impl!r}: must be one of {', '.join(get_args(Impl))}")
    if impl == "numba" and not numba_available():
        raise ArgumentError("impl = 'numba' needs numba, which is not installed: pip install 'reefknot[numba]'")
    if impl == "numba" and table.device.type != "cpu":
        raise ArgumentError(f"impl = 'numba' runs on the CPU, not on {table.device.type}; use impl = 'auto'")
    if impl != "auto":
        return impl
    if triton_chosen(table.device, table.dtype):
        return "triton"
    return "numba" if table.device.type == "cpu" and numba_available() else "torch"


@cache
def numba_available() -> bool:
    return importlib.util.find_spec("numba") is not None


def _check(input_VD: Tensor, output_VD: Tensor, ids: NDArray[np.int32], start: int, stop: int, workers: int) -> None:
    if input_VD.shape != output_VD.shape or input_VD.dtype != output_VD.dtype or input_VD.device != output_VD.device:
        raise ArgumentError(
            f"skip-gram: tables of shape {tuple(input_VD.shape)} and {tuple(output_VD.shape)}; they must have the same "
            "shape, type and device"
        )
    if not (input_VD.is_contiguous() and output_VD.is_contiguous()):
        raise ArgumentError("skip-gram changes its tables in place, so they must be contiguous")
    if not 0 <= start <= stop <= len(ids):
        raise ArgumentError(
            f"skip-gram: the stretch from {start} to {stop} is not within the {len(ids)} words of the text"
        )
    if workers < 1:
        raise ArgumentError(f"workers = {workers}: must be at least 1")
