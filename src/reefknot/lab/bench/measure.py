"""Tools that all benchmarks share: measure the time, the memory and the gradients of a training step.

`Step` is one forward and backward pass of an implementation. `measure_entries` is the main function: it measures
several implementations (the competitors) and returns one row of a table for each. A competitor that fails gets a note
in its row, and the others are still measured.

Gradients are cleared between repeats, outside the measured time.
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

MAX_REPEATS, MIN_REPEATS = 30, 3
WARM_UP_RUNS = 3
"""Runs before the timing starts. They compile and tune kernels."""
SUSTAINED_SECONDS = 0.5
"""Time until the power limit lowers the clock rate of a busy GPU. Short work is repeated for at least this long."""
BURST_SIZE, BURST_BELOW_MS = 10, 20.0
"""Work that takes less than `BURST_BELOW_MS` is timed on a GPU in bursts of this many runs."""
MIB = 2**20
OUT_OF_MEMORY = "out of memory"
TimedCall = tuple[Callable[[], object], Callable[[], None]]
"""A function to time, and a cleanup function that runs after it, outside the measured time."""


@dataclass(frozen=True)
class Step:
    """One forward and backward pass of a competitor."""

    compute_loss: Callable[[], Tensor]
    """Returns the mean loss, ready for the backward pass."""
    leaves: Sequence[Tensor]
    """The tensors that get gradients."""
    get_gradients: Callable[[], dict[str, Tensor | None]]
    """Returns the gradients of the last run by name. All competitors use the same names."""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Returns the context in which forward and backward run, such as a choice of kernels."""

    def run(self) -> Tensor:
        """Run forward and backward. Gradients are left in the `grad` of the leaves. Return the loss."""
        with self.context():
            loss = self.compute_loss()
            torch.autograd.backward(loss)
        return loss.detach()

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for leaf in self.leaves:
            leaf.grad = None


class Unavailable(Exception):
    """A competitor cannot be measured here. The message gives the reason in a few words, such as "not installed"."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measurements of a competitor, or the reason why there are none. Benchmarks add their own fields."""

    competitor: str
    ms: float | None = None
    """Median time of a step, in milliseconds."""
    repeats: int = 0
    graph_ms: float | None = None
    """Median time of a step that is captured as a CUDA graph."""
    errors: dict[str, float] | None = None
    """The relative error of each gradient. None if a gradient is not finite."""
    deterministic: bool | None = None
    """Whether two runs give the same bits."""
    note: str = ""
    """The reason why something was not measured."""

    @property
    def worst_error(self) -> float | None:
        return max(self.errors.values()) if self.errors else None


Row = TypeVar("Row", bound=Measurement)


@dataclass(frozen=True)
class Entry(Generic[Row]):
    """A competitor that will be measured."""

    row: Row
    """The row to fill in."""
    build_step: Callable[[], Step]
    time_graph: bool = False
    """Whether to also time the step as a captured CUDA graph."""


def measure_entries(
    entries: Sequence[Entry[Row]],
    check_step: Callable[[Row, Step], Row],
    device: str,
    seconds: float,
    notify: Callable[[str], None],
) -> list[Row]:
    """Measure every competitor and return the filled rows. An exception becomes the note of a row.

    On a GPU, competitors run one after the other, so that each has all the memory. On a CPU, they take turns.

    Args:
        entries: The competitors.
        check_step: Fills in all measurements of a row except times.
        device: `cuda` or `cpu`.
        seconds: Duration of the timing, per competitor.
        notify: Called with lines about progress.
    """
    groups: Sequence[Sequence[Entry[Row]]] = [[entry] for entry in entries] if device == "cuda" else [entries]
    rows: list[Row] = []
    for group in groups:
        rows += _measure_group(group, check_step, device, seconds, notify)
    return rows


def _measure_group(
    group: Sequence[Entry[Row]],
    check_step: Callable[[Row, Step], Row],
    device: str,
    seconds: float,
    notify: Callable[[str], None],
) -> list[Row]:
    """Check each competitor of a group, then time them. All of them are in memory at the same time."""
    rows: list[Row] = []
    steps: dict[int, Step] = {}
    for index, entry in enumerate(group):
        notify(f"  {entry.row.competitor}")
        try:
            if device == "cuda":
                free_gpu_memory()
            step = entry.build_step()
            rows.append(check_step(entry.row, step))
            steps[index] = step
        except Exception as error:  # the other competitors are still measured
            rows.append(replace(entry.row, note=describe_error(error)))
    try:
        times = time_steps(list(steps.values()), device, seconds)
        for index, milliseconds in zip(steps, times, strict=True):
            rows[index] = replace(rows[index], ms=median(milliseconds), repeats=len(milliseconds))
    except Exception as error:
        rows = [replace(row, note=row.note or describe_error(error)) for row in rows]
    for index, step in steps.items():
        if not group[index].time_graph:
            continue
        try:
            rows[index] = replace(rows[index], graph_ms=median(time_captured_step(step, seconds)))
        except Exception as error:
            rows[index] = replace(rows[index], note=f"no graph: {describe_error(error)}")
    return rows


def describe_error(error: Exception) -> str:
    """Describe an error in a few words, for a table."""
    message = str(error)
    if isinstance(error, MemoryError) or OUT_OF_MEMORY in message or "can't allocate memory" in message:
        return OUT_OF_MEMORY
    if isinstance(error, Unavailable):
        return message
    lines = message.strip().splitlines()
    first_line = lines[0] if lines else ""
    return f"{type(error).__name__}: {first_line[:100]}"


def get_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def divide(numerator: float | None, denominator: float | None) -> float | None:
    """Divide two measurements. The result is None if either was not measured."""
    if numerator is None or denominator is None:
        return None
    return numerator / denominator


# -- time ------------------------------------------------------------------------------------------------------------


def time_steps(steps: Sequence[Step], device: str, seconds: float) -> list[list[float]]:
    """Return the milliseconds of every repeat of every step.

    A step is repeated for about `seconds`, and at least three times.
    """
    return _time_calls([(step.run, step.zero_grad) for step in steps], device, seconds)


def time_function(function: Callable[[], object], device: str, seconds: float) -> list[float]:
    """Return the milliseconds of every repeat of a function that needs no cleanup."""
    (milliseconds,) = _time_calls([(function, lambda: None)], device, seconds)
    return milliseconds


def time_captured_step(step: Step, seconds: float) -> list[float]:
    """Return the milliseconds of every repeat of a step that is captured as a CUDA graph."""
    device = torch.device("cuda")
    with side_stream(device):
        for _ in range(WARM_UP_RUNS):
            step.zero_grad()
            step.run()
        step.zero_grad()
        graph = capture(step.run, device=device)
    milliseconds = time_function(graph.replay, "cuda", seconds)
    step.zero_grad()
    return milliseconds


def _time_calls(calls: Sequence[TimedCall], device: str, seconds: float) -> list[list[float]]:
    """Return the milliseconds of every repeat of every call, after a warm-up."""
    for run, cleanup in calls:
        for _ in range(WARM_UP_RUNS):
            run()
            cleanup()
    if device == "cuda":
        return [_time_on_gpu(run, cleanup, seconds) for run, cleanup in calls]
    return _time_on_cpu(calls, seconds)


def _time_on_gpu(run: Callable[[], object], cleanup: Callable[[], None], seconds: float) -> list[float]:
    """Time a function by CUDA events.

    Short functions run in bursts, so that the host runs ahead of the GPU as it does in training.
    """
    milliseconds: list[float] = []
    timing_started = time.perf_counter()
    while True:
        elapsed = time.perf_counter() - timing_started
        if len(milliseconds) >= MIN_REPEATS and elapsed >= seconds:
            break
        if len(milliseconds) >= MAX_REPEATS and elapsed > SUSTAINED_SECONDS:
            break
        is_short = bool(milliseconds) and milliseconds[-1] < BURST_BELOW_MS
        events = []
        for _ in range(BURST_SIZE if is_short else 1):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            run()
            stop.record()
            cleanup()
            events.append((start, stop))
        torch.cuda.synchronize()
        milliseconds += [start.elapsed_time(stop) for start, stop in events]
    return milliseconds


def _time_on_cpu(calls: Sequence[TimedCall], seconds: float) -> list[list[float]]:
    """Time functions by the clock. They take turns, so that a machine that becomes slower affects all of them."""
    times: list[list[float]] = [[] for _ in calls]
    timing_started = time.perf_counter()
    for repeat in range(MAX_REPEATS):
        if repeat >= MIN_REPEATS and time.perf_counter() - timing_started > seconds * len(calls):
            break
        for (run, cleanup), milliseconds in zip(calls, times, strict=True):
            started = time.perf_counter()
            run()
            milliseconds.append(1e3 * (time.perf_counter() - started))
            cleanup()
    return times


# -- memory ----------------------------------------------------------------------------------------------------------


def free_gpu_memory() -> None:
    """Return unused memory to the GPU, including tensors that the traceback of an exception kept alive."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def measure_working_memory(step: Step, device: str) -> int:
    """Return the working memory of a step in bytes: its peak, not counting inputs, weights and gradients."""
    step.zero_grad()
    if device == "cuda":
        free_gpu_memory()
        torch.cuda.reset_peak_memory_stats()
        allocated_before = torch.cuda.memory_allocated()
        step.run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - allocated_before
    else:
        peak = _measure_peak_on_cpu(step)
    gradient_bytes = sum(leaf.nbytes for leaf in step.leaves)
    step.zero_grad()
    return max(0, peak - gradient_bytes)


def _measure_peak_on_cpu(step: Step) -> int:
    """Return the peak of the memory that torch allocated, from the profiler's record of every allocation.

    The resident memory of the process is not used, because it includes pages that the step has already freed.
    """
    from torch.profiler import ProfilerActivity, profile

    with _silence_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.run()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    memory_events = [event for event in events if event["name"] == "[memory]"]
    allocated = peak = 0
    for event in sorted(memory_events, key=lambda event: event["ts"]):
        allocated += event["args"]["Bytes"]
        peak = max(peak, allocated)
    return peak


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Suppress what some builds of torch's profiler write to the terminal from C++, bypassing Python's streams."""
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


# -- gradients -------------------------------------------------------------------------------------------------------


def compute_relative_errors(gradients: Mapping[str, Tensor | None], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ||g - exact|| / ||exact|| of every gradient g. A missing gradient counts as zero."""
    errors = {}
    for name, exact_gradient in exact.items():
        gradient = gradients.get(name)
        exact_norm = exact_gradient.norm()
        error = exact_norm if gradient is None else (gradient.double() - exact_gradient).norm()
        errors[name] = float(error / exact_norm) if exact_norm > 0 else float(error)
    return errors


def is_deterministic(step: Step) -> bool:
    """Run a step twice, and return whether the loss and all gradients are equal bit for bit."""
    first_run, second_run = (_run_and_collect(step) for _ in range(2))
    step.zero_grad()
    return all(_are_equal(first, second) for first, second in zip(first_run, second_run, strict=True))


def _run_and_collect(step: Step) -> list[Tensor | None]:
    step.zero_grad()
    return [step.run(), *(leaf.grad for leaf in step.leaves)]


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
