"""How a step is measured: time, memory beyond what must exist, gradient error, equality of two runs.

A step is one forward and backward pass. Its gradients are thrown away between repeats, outside what is timed.
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
"""Seconds after which a GPU's clock has fallen to what its power limit allows: shorter work is repeated so long."""
MIB = 2**20
OUT_OF_MEMORY = "out of memory"
Work = tuple[Callable[[], object], Callable[[], None]]
"""What is timed, and what is done after it outside the time."""


@dataclass(frozen=True)
class Step:
    """One forward and backward pass of a competitor."""

    loss: Callable[[], Tensor]
    """The mean loss."""
    leaves: Sequence[Tensor]
    """What gradients are asked for."""
    gradients: Callable[[], dict[str, Tensor | None]]
    """Those of the last run, by the problem's names."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """What forward and backward run inside."""

    def run(self) -> Tensor:
        with self.around():
            loss = self.loss()
            torch.autograd.backward(loss)
        return loss.detach()

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


class Absent(Exception):
    """A competitor that does not take part, and why in a few words."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one competitor, or why nothing was."""

    competitor: str
    ms: float | None = None
    repeats: int = 0
    graph_ms: float | None = None
    errors: dict[str, float] | None = None
    """Relative error of each gradient; None where one is not finite."""
    deterministic: bool | None = None
    note: str = ""
    """Why something was not measured."""

    @property
    def worst_error(self) -> float | None:
        return max(self.errors.values()) if self.errors else None


Row = TypeVar("Row", bound=Measured)


@dataclass(frozen=True)
class Competitor(Generic[Row]):
    """One row to be: how to make its step, and whether a captured graph of it is timed too."""

    row: Row
    make: Callable[[], Step]
    capture: bool = False


def measure_group(
    group: Sequence[Competitor[Row]],
    examine: Callable[[Row, Step], Row],
    device: str,
    seconds: float,
    say: Callable[[str], None],
) -> list[Row]:
    """What each of the group is like, as `examine` finds it; then their times in turns. Whatever a competitor raises is
    the note of its row."""
    rows: list[Row] = []
    steps: dict[int, Step] = {}
    for number, each in enumerate(group):
        say(f"  {each.row.competitor}")
        try:
            if device == "cuda":
                give_back()
            step = each.make()
            rows.append(examine(each.row, step))
            steps[number] = step
        except Exception as error:  # the run goes on
            rows.append(replace(each.row, note=reason(error)))
    try:
        timed = times(list(steps.values()), device, seconds)
        for number, spent in zip(steps, timed, strict=True):
            rows[number] = replace(rows[number], ms=median(spent), repeats=len(spent))
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
    """A few words for a table."""
    told = str(error)
    if isinstance(error, MemoryError) or OUT_OF_MEMORY in told or "can't allocate memory" in told:
        return OUT_OF_MEMORY
    if isinstance(error, Absent):
        return told
    first, *_ = [*told.strip().splitlines(), ""]
    return f"{type(error).__name__}: {first[:100]}"


def version(package: str) -> str | None:
    """Of a package, where it is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def times(steps: Sequence[Step], device: str, seconds: float) -> list[list[float]]:
    """Milliseconds of every repeat of every step, `seconds` of repeats for each but at least three."""
    return work_times(device, [(step.run, step.clear) for step in steps], seconds)


def graph_times(step: Step, seconds: float) -> list[float]:
    """The same for a captured CUDA graph of the step, in which the host takes no part."""
    device = torch.device("cuda")
    with side_stream(device):
        for _ in range(WARM_UP):
            step.clear()
            step.run()
        step.clear()
        graph = capture(step.run, device=device)
    (spent,) = work_times("cuda", [(graph.replay, lambda: None)], seconds)
    step.clear()
    return spent


def work_times(device: str, works: Sequence[Work], seconds: float) -> list[list[float]]:
    """Milliseconds of every repeat of every work, after some to warm up."""
    for work, tidy in works:
        for _ in range(WARM_UP):
            work()
            tidy()
    if device == "cuda":
        return [_times_on_gpu(work, tidy, seconds) for work, tidy in works]
    return _times_on_host(works, seconds)


def _times_on_gpu(work: Callable[[], object], tidy: Callable[[], None], seconds: float) -> list[float]:
    """Between two events in the GPU's own stream; short work in bursts, as in training, where the host runs ahead."""
    spent: list[float] = []
    started = time.perf_counter()
    while len(spent) < FEWEST or (passed := time.perf_counter() - started) < seconds:
        if len(spent) >= REPEATS and passed > SUSTAINED:
            break
        events = []
        for _ in range(10 if spent and spent[-1] < 20.0 else 1):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            stop.record()
            tidy()
            events.append((start, stop))
        torch.cuda.synchronize()
        spent += [start.elapsed_time(stop) for start, stop in events]
    return spent


def _times_on_host(works: Sequence[Work], seconds: float) -> list[list[float]]:
    """By the clock, in turns, so that a drift of the machine hits all alike."""
    spent: list[list[float]] = [[] for _ in works]
    began = time.perf_counter()
    for repeat in range(REPEATS):
        if repeat >= FEWEST and time.perf_counter() - began > seconds * len(works):
            break
        for (work, tidy), found in zip(works, spent, strict=True):
            started = time.perf_counter()
            work()
            found.append(1e3 * (time.perf_counter() - started))
            tidy()
    return spent


def give_back() -> None:
    """Return what nobody holds to the GPU, what an exception's traceback held too."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def memory_over(step: Step, device: str) -> int:
    """Bytes at the peak of a step beyond what stood before and beyond the gradients that must exist after it."""
    step.clear()
    if device == "cuda":
        give_back()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step.run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        peak = _peak_on_host(step)
    must = sum(leaf.nbytes for leaf in step.leaves)
    step.clear()
    return max(0, peak - must)


def _peak_on_host(step: Step) -> int:
    """The peak of what torch's allocator handed out, from the profiler's account of every allocation.

    The process's resident memory would tell of pages that the system keeps, not of what the step holds.
    """
    from torch.profiler import ProfilerActivity, profile

    with _silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step.run()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        record.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    held = peak = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


@contextmanager
def _silence() -> Iterator[None]:
    """Without what some builds of torch's profiler write to the terminal from C++, past Python's streams."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def relative_errors(found: Mapping[str, Tensor | None], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """||g - reference|| / ||reference|| of every gradient; one that is missing counts as zero."""
    errors = {}
    for name, exact in reference.items():
        gradient = found.get(name)
        size = exact.norm()
        off = size if gradient is None else (gradient.double() - exact).norm()
        errors[name] = float(off / size) if size > 0 else float(off)
    return errors


def equal_twice(step: Step) -> bool:
    """Whether two runs give the same loss and gradients to the bit."""
    outcomes = []
    for _ in range(2):
        step.clear()
        outcomes.append([step.run(), *(leaf.grad for leaf in step.leaves)])
    step.clear()
    return all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(*outcomes, strict=True)
    )
