"""Measure a training step: time, working memory, gradient errors, and whether two runs are equal.

A competitor is an implementation that is compared with others. A step is one forward and backward pass. Its gradients
are discarded between repeats, outside the measured time.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Generic, TypeVar

import torch
from torch import Tensor

from reefknot.kernels.capture import capture, side_stream

REPEATS, FEWEST, WARM_UP = 30, 3, 3
SUSTAINED = 0.5
"""Seconds until the power limit lowers the clock rate of a busy GPU. Short work is repeated for this long."""
MIB = 2**20
OUT_OF_MEMORY = "out of memory"
Work = tuple[Callable[[], object], Callable[[], None]]
"""A function to time, and a function to call after it, outside the measured time."""


@dataclass(frozen=True)
class Step:
    """One forward and backward pass of a competitor."""

    loss: Callable[[], Tensor]
    """Computes the mean loss."""
    leaves: Sequence[Tensor]
    """The tensors that get gradients."""
    gradients: Callable[[], dict[str, Tensor | None]]
    """Returns the gradients of the last run by parameter name, as in `Problem`."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """The context in which forward and backward run."""

    def run(self) -> Tensor:
        with self.around():
            loss = self.loss()
            torch.autograd.backward(loss)
        return loss.detach()

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


class Absent(Exception):
    """A competitor cannot be measured. The message gives the reason in a few words."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a competitor, or the reason why there are none."""

    competitor: str
    ms: float | None = None
    repeats: int = 0
    graph_ms: float | None = None
    errors: dict[str, float] | None = None
    """The relative error of each gradient. None if a gradient is not finite."""
    deterministic: bool | None = None
    note: str = ""
    """The reason why something was not measured."""

    @property
    def worst_error(self) -> float | None:
        return max(self.errors.values()) if self.errors else None


Row = TypeVar("Row", bound=Measured)


@dataclass(frozen=True)
class Competitor(Generic[Row]):
    """A row to fill in, a function that makes its step, and whether to time a captured graph of the step as well."""

    row: Row
    make: Callable[[], Step]
    capture: bool = False


def measure_group(
    group: Sequence[Competitor[Row]],
    examine: Callable[[Row, Step], Row],
    device: str,
    seconds: float,
    notify: Callable[[str], None],
) -> list[Row]:
    """Examine each competitor of a group, then time them all. An exception becomes the note of a row.

    Args:
        group: The competitors.
        examine: Fills in all measurements of a row except times.
        device: `cuda` or `cpu`.
        seconds: Duration of the timing, per competitor.
        notify: Called with lines about progress.
    """
    rows: list[Row] = []
    steps: dict[int, Step] = {}
    for number, competitor in enumerate(group):
        notify(f"  {competitor.row.competitor}")
        try:
            if device == "cuda":
                free_gpu_memory()
            step = competitor.make()
            rows.append(examine(competitor.row, step))
            steps[number] = step
        except Exception as error:  # the other competitors are still measured
            rows.append(replace(competitor.row, note=reason(error)))
    try:
        timed = times(list(steps.values()), device, seconds)
        for number, milliseconds in zip(steps, timed, strict=True):
            rows[number] = replace(rows[number], ms=median(milliseconds), repeats=len(milliseconds))
    except Exception as error:
        rows = [replace(row, note=row.note or reason(error)) for row in rows]
    for number, step in steps.items():
        if not group[number].capture:
            continue
        try:
            rows[number] = replace(rows[number], graph_ms=median(graph_times(step, seconds)))
        except Exception as error:
            rows[number] = replace(rows[number], note=f"no graph: {reason(error)}")
    return rows


def reason(error: Exception) -> str:
    """Describe an error in a few words, for a table."""
    message = str(error)
    if isinstance(error, MemoryError) or OUT_OF_MEMORY in message or "can't allocate memory" in message:
        return OUT_OF_MEMORY
    if isinstance(error, Absent):
        return message
    first, *_ = [*message.strip().splitlines(), ""]
    return f"{type(error).__name__}: {first[:100]}"


def version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def ratio(number: float | None, other: float | None) -> float | None:
    """Divide two measurements. The result is None if either was not measured."""
    return None if number is None or other is None else number / other


# -- time ------------------------------------------------------------------------------------------------------------


def times(steps: Sequence[Step], device: str, seconds: float) -> list[list[float]]:
    """Return the milliseconds of every repeat of every step.

    A step is repeated for about `seconds`, and at least three times.
    """
    return work_times(device, [(step.run, step.clear) for step in steps], seconds)


def graph_times(step: Step, seconds: float) -> list[float]:
    """Return the milliseconds of every repeat of a step that is captured as a CUDA graph."""
    device = torch.device("cuda")
    with side_stream(device):
        for _ in range(WARM_UP):
            step.clear()
            step.run()
        step.clear()
        graph = capture(step.run, device=device)
    (milliseconds,) = work_times("cuda", [(graph.replay, lambda: None)], seconds)
    step.clear()
    return milliseconds


def work_times(device: str, works: Sequence[Work], seconds: float) -> list[list[float]]:
    """Return the milliseconds of every repeat of every function, after a warm-up."""
    for work, tidy in works:
        for _ in range(WARM_UP):
            work()
            tidy()
    if device == "cuda":
        return [_times_on_gpu(work, tidy, seconds) for work, tidy in works]
    return _times_on_host(works, seconds)


def _times_on_gpu(work: Callable[[], object], tidy: Callable[[], None], seconds: float) -> list[float]:
    """Time work by events in the stream of the GPU.

    Short work runs in bursts, so that the host runs ahead of the GPU as it does in training.
    """
    milliseconds: list[float] = []
    started = time.perf_counter()
    while len(milliseconds) < FEWEST or (passed := time.perf_counter() - started) < seconds:
        if len(milliseconds) >= REPEATS and passed > SUSTAINED:
            break
        events = []
        for _ in range(10 if milliseconds and milliseconds[-1] < 20.0 else 1):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            stop.record()
            tidy()
            events.append((start, stop))
        torch.cuda.synchronize()
        milliseconds += [start.elapsed_time(stop) for start, stop in events]
    return milliseconds


def _times_on_host(works: Sequence[Work], seconds: float) -> list[list[float]]:
    """Time functions by the clock. They take turns, so that a slowdown of the machine affects all of them alike."""
    milliseconds: list[list[float]] = [[] for _ in works]
    began = time.perf_counter()
    for repeat in range(REPEATS):
        if repeat >= FEWEST and time.perf_counter() - began > seconds * len(works):
            break
        for (work, tidy), repeats in zip(works, milliseconds, strict=True):
            started = time.perf_counter()
            work()
            repeats.append(1e3 * (time.perf_counter() - started))
            tidy()
    return milliseconds


# -- memory ----------------------------------------------------------------------------------------------------------


def free_gpu_memory() -> None:
    """Return unused memory to the GPU, including what the traceback of an exception held."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def memory_over(step: Step, device: str) -> int:
    """Return the working memory of a step in bytes: its peak, not counting earlier tensors or gradients."""
    step.clear()
    if device == "cuda":
        free_gpu_memory()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step.run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        peak = _peak_on_host(step)
    gradients = sum(leaf.nbytes for leaf in step.leaves)
    step.clear()
    return max(0, peak - gradients)


def _peak_on_host(step: Step) -> int:
    """Return the peak of the memory that torch allocated, from the profiler's record of every allocation.

    The resident memory of the process is not used, because it includes pages that the step has already freed.
    """
    from torch.profiler import ProfilerActivity, profile

    with _silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step.run()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        record.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    allocated = peak = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        allocated += event["args"]["Bytes"]
        peak = max(peak, allocated)
    return peak


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress what some builds of torch's profiler write to the terminal from C++, bypassing Python's streams."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


# -- results ---------------------------------------------------------------------------------------------------------


def relative_errors(gradients: Mapping[str, Tensor | None], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ||g - exact|| / ||exact|| of every gradient g. A missing gradient counts as zero."""
    errors = {}
    for name, expected in exact.items():
        gradient = gradients.get(name)
        size = expected.norm()
        error = size if gradient is None else (gradient.double() - expected).norm()
        errors[name] = float(error / size) if size > 0 else float(error)
    return errors


def equal_twice(step: Step) -> bool:
    """Return whether two runs give the same loss and gradients, bit for bit."""
    outcomes = []
    for _ in range(2):
        step.clear()
        outcomes.append([step.run(), *(leaf.grad for leaf in step.leaves)])
    step.clear()
    return all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(*outcomes, strict=True)
    )
