"""Train word vectors by skip-gram with negative sampling (Mikolov et al. 2013), in place, as word2vec does it.

`train_range` is the function to start from: it checks its arguments and trains two tables on a range of a text. The
loop that it runs, with u and v rows of the two tables:

    for every kept word (the centre) and every other kept word in its window (the context):
        v = input[context]
        for the centre (y = 1) and each negative that is not the centre (y = 0), row u of output:
            g = rate (y - sigmoid(u . v))        e += g u        u += g v
        input[context] += e

A kept word is a word that subsampling does not remove. Negatives are random words. The sigmoid is 0 below -6 and 1
above 6. The rate falls linearly with the position in the text. If both tables are the same (tied), a row may be input
and target of the same pair. Its update as a target is then added to e and applied at the end of the pair.

    reference    this loop in float64 (`skip_gram_reference`)
    numba        the same loop compiled, on any number of threads that share the tables without locks (Hogwild). With
                 one worker it equals the reference up to float32 rounding (`numba_skip_gram`)
    torch        computes the gradients of a batch of pairs at the same weights and adds them up, which is nearly the
                 same as long as few pairs of a batch share a row (`torch_skip_gram`)
    triton       Hogwild on a GPU, with one or two thousand centres at once and atomic updates (`triton_skip_gram`)

All implementations get the same random numbers (`skip_gram_draws`), so they train on the same pairs.

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
from reefknot.extras import missing_packages
from reefknot.kernels.choice import log_once, should_use_triton
from reefknot.kernels.skip_gram_draws import PairSampler

CLIP = 6.0
"""The sigmoid is taken as 1 for scores above this value, and as 0 for scores below its negative."""
Impl = Literal["auto", "reference", "torch", "numba", "triton"]
"""The implementations, described above. `auto` chooses one for the device."""


def train_range(
    input_VD: Tensor,
    output_VD: Tensor,
    ids: NDArray[np.int32],
    start: int,
    stop: int,
    sampler: PairSampler,
    epoch: int,
    rates: RateSchedule,
    *,
    workers: int = 1,
    impl: Impl = "auto",
) -> None:
    """Train with the words from `start` to `stop` as centres. Their contexts may lie outside this range.

    Args:
        input_VD: The vectors of the contexts, changed in place.
        output_VD: The vectors of centres and negatives, changed in place. The same tensor as `input_VD` if the tables
            are tied.
        ids: Word ids of the whole text.
        start: The first position of the range.
        stop: The position after the end of the range.
        sampler: Samples the training pairs, on the device of the tables.
        epoch: Number of the epoch. The random numbers depend on it.
        rates: The learning rate.
        workers: Number of threads of `numba`. Results of several threads are not reproducible.
        impl: The implementation. `auto` chooses one for the device.
    """
    _check_arguments(input_VD, output_VD, ids, start, stop, workers)
    impl = resolve_impl(input_VD, impl)
    log_once("skip-gram", impl, input_VD.device.type, input_VD.dtype)
    key = sampler.key(epoch)
    training_range = TrainingRange(
        inputs=input_VD.detach(),
        outputs=output_VD.detach(),
        ids=ids,
        start=start,
        stop=stop,
        sampler=sampler,
        key=key,
        rates=rates,
    )
    if impl == "numba":
        from reefknot.kernels.numba_skip_gram import train_on_threads

        train_on_threads(training_range, workers)
    elif impl == "triton":
        from reefknot.kernels.triton_skip_gram import train_on_gpu

        train_on_gpu(training_range)
    elif impl == "torch":
        from reefknot.kernels.torch_skip_gram import train_in_batches

        train_in_batches(training_range)
    else:
        from reefknot.kernels.skip_gram_reference import train_pair_by_pair

        train_pair_by_pair(training_range)


@dataclass(frozen=True)
class RateSchedule:
    """A learning rate that falls linearly from `initial` towards 0 over all positions, but not below `lowest`."""

    initial: float
    lowest: float
    positions: int
    """Number of positions in all epochs together."""
    positions_before: int = 0
    """Number of positions in earlier epochs."""

    def rate_at(self, position: int) -> float:
        """Return the learning rate at a position of this epoch."""
        return max(self.lowest, self.initial * (1.0 - (self.positions_before + position) / self.positions))

    @property
    def start_and_decrease(self) -> tuple[float, float]:
        """The rate at position 0 of this epoch and its decrease per position, ignoring `lowest`."""
        return self.initial * (1.0 - self.positions_before / self.positions), self.initial / self.positions


@dataclass(frozen=True, eq=False)
class TrainingRange:
    """What an implementation trains: two tables, and a range of the text whose words are the centres."""

    inputs: Tensor
    """input_VD, changed in place."""
    outputs: Tensor
    """output_VD, changed in place."""
    ids: NDArray[np.int32]
    """The word ids of the whole text."""
    start: int
    """The first position of the range."""
    stop: int
    """The position after the end of the range."""
    sampler: PairSampler
    key: int
    """The key of the epoch's random numbers."""
    rates: RateSchedule

    @property
    def tied(self) -> bool:
        """Whether both tables are the same."""
        return self.inputs.data_ptr() == self.outputs.data_ptr()


def resolve_impl(table: Tensor, impl: Impl = "auto") -> Impl:
    """Return the implementation for a table. The result is never `auto`."""
    if impl not in get_args(Impl):
        raise ArgumentError(f"impl = {impl!r}: must be one of {', '.join(get_args(Impl))}")
    is_on_cpu = table.device.type == "cpu"
    if impl == "auto":
        if should_use_triton(table.device, table.dtype):
            return "triton"
        return "numba" if is_on_cpu and numba_available() else "torch"
    if impl == "numba":
        if not numba_available():
            raise missing_packages(["numba"], "impl = 'numba'")
        if not is_on_cpu:
            raise ArgumentError(f"impl = 'numba' runs on the CPU, not on {table.device.type}; use impl = 'auto'")
    return impl


@cache
def numba_available() -> bool:
    """Return whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def _check_arguments(
    input_VD: Tensor, output_VD: Tensor, ids: NDArray[np.int32], start: int, stop: int, workers: int
) -> None:
    if input_VD.shape != output_VD.shape or input_VD.dtype != output_VD.dtype or input_VD.device != output_VD.device:
        raise ArgumentError(
            f"skip-gram: tables of shape {tuple(input_VD.shape)} and {tuple(output_VD.shape)}; they must have the same "
            "shape, type and device"
        )
    if not (input_VD.is_contiguous() and output_VD.is_contiguous()):
        raise ArgumentError("skip-gram changes its tables in place, so they must be contiguous")
    if not 0 <= start <= stop <= len(ids):
        raise ArgumentError(
            f"skip-gram: the range from {start} to {stop} is not within the {len(ids)} words of the text"
        )
    if workers < 1:
        raise ArgumentError(f"workers = {workers}: must be at least 1")
