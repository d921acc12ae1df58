"""Measure the time, the memory and the gradient errors of a training step. All benchmarks use these functions.

Start with `Step`, one forward and backward pass of an implementation, and with `measure_entries`, which measures
several implementations (the competitors) and returns one row of a table for each:

    entries = [Entry(Measurement(competitor="torch"), build_torch_step)]
    rows = measure_entries(entries, check_step, device="cpu", seconds=2.0, notify=print)

A competitor that fails gets a note in its row, and the others are still measured.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from reefknot.kernels.capture import capture, side_stream
from reefknot.kernels.small import general_kernels
from reefknot.lab.runs.environment import peak_memory_bytes

MAX_REPEATS = 30
MIN_REPEATS = 3
WARM_UP_RUNS = 3
"""Runs before the timing starts. They compile and tune kernels."""
SUSTAINED_SECONDS = 0.5
"""Time until the power limit lowers the clock rate of a busy GPU. Short work is repeated for at least this long."""
BURST_BELOW_MS = 20.0
"""A function that takes less time than this is timed on a GPU in bursts of `BURST_SIZE` runs."""
BURST_SIZE = 10
MIB = 2**20
OUT_OF_MEMORY = "out of memory"
"""The note of a competitor that needs more memory than the machine has."""


@dataclass(frozen=True)
class Step:
    """One forward and backward pass of a competitor."""

    compute_loss: Callable[[], Tensor]
    """Runs the forward pass and returns the mean loss."""
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
    """The relative error of each gradient, by name. None if a gradient is not finite."""
    deterministic: bool | None = None
    """Whether two runs give the same bits."""
    note: str = ""
    """The reason why something was not measured."""

    @property
    def worst_error(self) -> float | None:
        """The largest error of a gradient."""
        if not self.errors:
            return None
        return max(self.errors.values())


Row = TypeVar("Row", bound=Measurement)
"""A row of a benchmark's table: its subclass of `Measurement`."""


@dataclass(frozen=True)
class Entry(Generic[Row]):
    """A competitor that will be measured."""

    row: Row
    """The row to fill in. It already has the name of the competitor."""
    build_step: Callable[[], Step]
    """Returns the training step of the competitor. It may raise any error, which becomes the note of the row."""
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
        check_step: Takes a row and its step. It returns the row with all measurements except times.
        device: `cuda` or `cpu`.
        seconds: Duration of the timing, per competitor.
        notify: Called with lines about progress.
    """
    groups: Sequence[Sequence[Entry[Row]]] = [entries]
    if device == "cuda":
        groups = [[entry] for entry in entries]

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
    # Build and check every step. A competitor that fails here is not timed.
    rows: list[Row] = []
    steps: dict[int, Step] = {}  # by the index of the competitor in the group
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

    # Time the steps.
    try:
        times = time_steps(list(steps.values()), device, seconds)
        for index, milliseconds in zip(steps, times, strict=True):
            rows[index] = replace(rows[index], ms=median(milliseconds), repeats=len(milliseconds))
    except Exception as error:
        rows = [replace(row, note=row.note or describe_error(error)) for row in rows]

    # Time the captured CUDA graphs.
    for index, step in steps.items():
        if not group[index].time_graph:
            continue
        try:
            milliseconds = time_captured_step(step, seconds)
            rows[index] = replace(rows[index], graph_ms=median(milliseconds))
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


def describe_versions(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return the versions of torch, triton and other packages; None for a package that is not installed."""
    versions = {package.replace("-", "_"): get_version(package) for package in ("triton", *packages)}
    return {"torch": str(torch.__version__), **versions}


def divide(numerator: float | None, denominator: float | None) -> float | None:
    """Divide two measurements. The result is None if either was not measured."""
    if numerator is None or denominator is None:
        return None
    return numerator / denominator


# -- time ------------------------------------------------------------------------------------------------------------


def time_steps(steps: Sequence[Step], device: str, seconds: float) -> list[list[float]]:
    """Return one list per step, with the milliseconds of every repeat.

    A step is repeated for about `seconds`, and at least three times. Gradients are cleared between the repeats, outside
    the measured time.
    """
    calls = [_TimedCall(step.run, step.zero_grad) for step in steps]
    return _time_calls(calls, device, seconds)


def time_function(function: Callable[[], object], device: str, seconds: float) -> list[float]:
    """Return the milliseconds of every repeat of a function that needs no cleanup."""
    (milliseconds,) = _time_calls([_TimedCall(function, _clean_nothing)], device, seconds)
    return milliseconds


def time_with_memory(function: Callable[[], object], device: str, seconds: float) -> tuple[list[float], int | None]:
    """Return the milliseconds of every repeat of a function, and the peak of the allocated GPU memory in bytes.

    The warm-up counts for the peak, because a graph that is replayed allocates nothing that could be counted. The peak
    is None on a CPU.
    """
    if device != "cuda":
        return time_function(function, device, seconds), None
    torch.cuda.reset_peak_memory_stats()
    milliseconds = time_function(function, device, seconds)
    return milliseconds, peak_memory_bytes(device)


def _clean_nothing() -> None:
    pass


def time_captured_step(step: Step, seconds: float) -> list[float]:
    """Return the milliseconds of every repeat of a step that is captured as a CUDA graph."""
    device = torch.device("cuda")
    with side_stream(device), general_kernels():
        for _ in range(WARM_UP_RUNS):
            step.zero_grad()
            step.run()
        step.zero_grad()
        graph = capture(step.run, device=device)
    milliseconds = time_function(graph.replay, "cuda", seconds)
    step.zero_grad()
    return milliseconds


class _TimedCall(NamedTuple):
    """A function to time, and a cleanup function that runs after it, outside the measured time."""

    run: Callable[[], object]
    clean_up: Callable[[], None]


def _time_calls(calls: Sequence[_TimedCall], device: str, seconds: float) -> list[list[float]]:
    """Return one list per call, with the milliseconds of every repeat. The warm-up is not timed."""
    for call in calls:
        for _ in range(WARM_UP_RUNS):
            call.run()
            call.clean_up()
    if device == "cuda":
        return [_time_on_gpu(call, seconds) for call in calls]
    return _time_on_cpu(calls, seconds)


def _time_on_gpu(call: _TimedCall, seconds: float) -> list[float]:
    """Time a function by CUDA events, and return the milliseconds of every repeat.

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
        num_runs = BURST_SIZE if is_short else 1
        events = []
        for _ in range(num_runs):
            started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stopped = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            started.record()
            call.run()
            stopped.record()
            call.clean_up()
            events.append((started, stopped))
        torch.cuda.synchronize()
        milliseconds += [started.elapsed_time(stopped) for started, stopped in events]
    return milliseconds


def _time_on_cpu(calls: Sequence[_TimedCall], seconds: float) -> list[list[float]]:
    """Time functions by the clock. They take turns, so that a machine that becomes slower affects all of them."""
    times: list[list[float]] = [[] for _ in calls]
    timing_started = time.perf_counter()
    for repeat in range(MAX_REPEATS):
        elapsed = time.perf_counter() - timing_started
        if repeat >= MIN_REPEATS and elapsed > seconds * len(calls):
            break
        for call, milliseconds in zip(calls, times, strict=True):
            started = time.perf_counter()
            call.run()
            milliseconds.append(1e3 * (time.perf_counter() - started))
            call.clean_up()
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

    # The profiler gives its record of allocations only as a trace file.
    with TemporaryDirectory() as folder:
        trace_path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace_path))
        trace = json.loads(trace_path.read_text(encoding="utf-8"))
    memory_events = [event for event in trace["traceEvents"] if event["name"] == "[memory]"]
    memory_events.sort(key=itemgetter("ts"))

    allocated = 0
    peak = 0
    for event in memory_events:
        allocated += event["args"]["Bytes"]  # negative if memory is freed
        peak = max(peak, allocated)
    return peak


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Suppress what some builds of torch's profiler write to the terminal from C++, bypassing Python's streams."""
    stderr_descriptor = 2
    saved_stderr = os.dup(stderr_descriptor)
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, stderr_descriptor)
        yield
    finally:
        os.dup2(saved_stderr, stderr_descriptor)
        os.close(saved_stderr)
        os.close(devnull)


# -- gradients -------------------------------------------------------------------------------------------------------


def compute_relative_errors(
    gradients: Mapping[str, Tensor | None], exact_gradients: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return ||gradient - exact|| / ||exact|| of every gradient, by name. A missing gradient counts as zero."""
    errors = {}
    for name, exact_gradient in exact_gradients.items():
        gradient = gradients.get(name)
        exact_norm = exact_gradient.norm()
        if gradient is None:
            error = exact_norm
        else:
            error = (gradient.double() - exact_gradient).norm()
        if exact_norm > 0:
            error = error / exact_norm
        errors[name] = float(error)
    return errors


def check_gradients(row: Row, step: Step, exact_gradients: Mapping[str, Tensor]) -> Row:
    """Return the row with the errors of the gradients of the last run, or with a note if a gradient is not finite."""
    errors = compute_relative_errors(step.get_gradients(), exact_gradients)
    if not all(map(math.isfinite, errors.values())):
        return replace(row, note="gradients are not finite")
    return replace(row, errors=errors)


def is_deterministic(step: Step) -> bool:
    """Run a step twice, and return whether the loss and all gradients are equal bit for bit."""
    first_run = _run_and_collect(step)
    second_run = _run_and_collect(step)
    step.zero_grad()
    return all(_are_equal(first, second) for first, second in zip(first_run, second_run, strict=True))


def _run_and_collect(step: Step) -> list[Tensor | None]:
    """Run a step and return the loss and the gradients of all leaves."""
    step.zero_grad()
    loss = step.run()
    return [loss, *(leaf.grad for leaf in step.leaves)]


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
