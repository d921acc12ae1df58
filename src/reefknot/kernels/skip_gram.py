"""Skip-gram with negative sampling (Mikolov et al. 2013) over a stretch of text, in place, as word2vec does it.

    for every kept word (the centre) and every other one in its window (the context):
        v = input[context]
        for the centre (y = 1) and each negative that is not the centre (y = 0), row u of output:
            g = rate (y - sigmoid(u . v))        e += g u        u += g v
        input[context] += e

The sigmoid is 0 below -6 and 1 above 6. The rate falls linearly with the place in the text. Where both tables are one
(tied), a row may be input and target at once: what it gets as a target waits with e until the pair is done.

`reference` is that loop in float64. `numba` is the same loop compiled, on any number of threads that share the tables
without locks (Hogwild); with one worker it is the reference up to float32. `torch` takes the gradients of a batch of
pairs at the same weights and adds them up: nearly the same, as long as not too many pairs of a batch share a row.
`triton` is a GPU's Hogwild: a thousand centres or two at once, whose updates are added atomically. All of them draw the
same numbers (`skip_gram_draws`), so that they train on the same pairs.

Shapes: V words, D width.
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
"""Scores beyond it have a sigmoid of 0 or 1."""
Impl = Literal["auto", "reference", "torch", "numba", "triton"]


@dataclass(frozen=True)
class Rates:
    """A rate that falls in a straight line from `first` towards 0 over all places, and stays at `lowest`."""

    first: float
    lowest: float
    places: int
    """Of all epochs together."""
    before: int = 0
    """Places of earlier epochs."""

    def at(self, place: int) -> float:
        return max(self.lowest, self.first * (1.0 - (self.before + place) / self.places))

    @property
    def line(self) -> tuple[float, float]:
        """The rate at place 0 of this epoch and what each place takes off, before `lowest` is looked at."""
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
    """Train on the words from `start` to `stop` as centres; their contexts may lie outside.

    Arguments:
        input_VD: the contexts' vectors; changed in place.
        output_VD: the centres' and negatives' vectors; the same tensor where both ends are tied.
        ids: the whole text.
        draws: on the device of the tables.
        epoch: whose random numbers are drawn.
        workers: threads, for `numba`; more than one are not repeatable.
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
    """The implementation for a table: never `auto`."""
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
            f"skip-gram: tables of shape {tuple(input_VD.shape)} and {tuple(output_VD.shape)} must be alike in shape, "
            "type and device"
        )
    if not (input_VD.is_contiguous() and output_VD.is_contiguous()):
        raise ArgumentError("skip-gram changes its tables where they lie: they must be contiguous")
    if not 0 <= start <= stop <= len(ids):
        raise ArgumentError(f"skip-gram: the stretch from {start} to {stop} is not one of a text of {len(ids)} words")
    if workers < 1:
        raise ArgumentError(f"workers = {workers}: must be at least 1")
