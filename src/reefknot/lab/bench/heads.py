"""Measure output ends in one run: `reefknot bench heads`.

For every end and shape, four things are measured: the time relative to the floor (the time of the necessary matrix
products at the rate that this machine reaches), the working memory, the worst gradient error against float64 on the
same inputs, and whether two runs are bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reefknot.errors import ResourceError
from reefknot.lab.bench.competitors import PACKAGES, our_step, peers
from reefknot.lab.bench.measure import (
    MIB,
    OUT_OF_MEMORY,
    Competitor,
    Measured,
    Step,
    equal_twice,
    measure_group,
    memory_over,
    ratio,
    reason,
    relative_errors,
    version,
)
from reefknot.lab.bench.plain_ends import exact_gradients
from reefknot.lab.bench.problems import Problem, Shape, make_problem

FAMILIES = ("reefknot", "eager", "compile", "torch", *PACKAGES)
LEAN = {"cuda": 256.0, "cpu": 32.0}
"""Default memory budget of our low-memory row, in MiB."""
VOCABULARIES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
SWEPT = ("plain", "adaptive", "drill")
"""Ends that are measured over a range of vocabulary sizes."""
_WIKITEXT103, _LARGE, _LARGER = Shape(8192, 1024, 267_735), Shape(8192, 2048, 128_256), Shape(16_384, 4096, 128_256)
_WIKITEXT2, _PENN = Shape(5600, 400, 33_278), Shape(1400, 400, 10_000)
_ON_GPU = {
    "plain": (_WIKITEXT103, _LARGE, _LARGER, _WIKITEXT2, _PENN),
    "adaptive": (_WIKITEXT103, _LARGE, _WIKITEXT2),
    "augmented": (_WIKITEXT2, _WIKITEXT103, _PENN),
    "augmented-detached": (_WIKITEXT2, _WIKITEXT103, _PENN),
    "mixture": (_PENN, _WIKITEXT2),
    "drill": (_WIKITEXT2, _WIKITEXT103, _PENN),
}


@dataclass(frozen=True)
class Row(Measured):
    """The measurements of a competitor for one end and shape."""

    end: str
    shape: Shape
    family: str
    weights: str
    floor_ms: float
    over_mib: float | None = None

    @property
    def over_floor(self) -> float | None:
        return ratio(self.ms, self.floor_ms)

    def record(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self) | {
            "shape": list(self.shape),
            "over_floor": self.over_floor,
            "worst_error": self.worst_error,
        }


@dataclass(frozen=True)
class Bench:
    """The settings of the benchmark."""

    device: str
    families: Sequence[str] = FAMILIES
    weights: str | None = None
    """The type of all weights. The default on a GPU is bfloat16, plus one row of ours with float32 weights."""
    memory: Sequence[float] = ()
    """Budgets of working memory in MiB. There is a row of ours for every budget."""
    seconds: float = 2.0
    """Duration of the timing, per competitor."""
    graph: bool = False
    """Whether to time a captured CUDA graph as well."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the computation and of the hidden states."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.dtype if self.weights is None else getattr(torch, self.weights)


def cases(device: str, ends: Sequence[str], shapes: Sequence[Shape], vocabulary: bool) -> list[tuple[str, Shape]]:
    """Return the ends and shapes to measure. If no ends or shapes are chosen, defaults are used.

    Args:
        device: `cuda` or `cpu`.
        ends: The chosen ends, or all if it is empty.
        shapes: The chosen shapes, or the default shapes of each end if it is empty.
        vocabulary: Whether to measure over a range of vocabulary sizes instead of `shapes`.
    """
    if vocabulary:
        rows, dim = (4096, 512) if device == "cuda" else (256, 64)
        shapes = [Shape(rows, dim, words) for words in VOCABULARIES]
        ends = [end for end in SWEPT if not ends or end in ends]
    usual = _ON_GPU if device == "cuda" else dict.fromkeys(_ON_GPU, (Shape(700, 200, 10_000),))
    return [(end, shape) for end in ends or usual for shape in shapes or usual[end]]


def measure_all(
    bench: Bench, rate: float, chosen: Sequence[tuple[str, Shape]], notify: Callable[[str], None]
) -> Iterator[list[Row]]:
    """Yield the rows of every case. On a GPU, each competitor is timed on its own; on a CPU, they take turns.

    Args:
        bench: The settings of the benchmark.
        rate: Floating-point operations per second that the device reaches in large matrix products.
        chosen: Ends and shapes.
        notify: Called with lines about progress.
    """
    for end, shape in chosen:
        notify(f"{end}, {shape}")
        if not {"reefknot", *(peer.family for peer in peers(end))} & set(bench.families):
            notify("  none of the chosen competitors has this end")
            continue
        try:
            problem = make_problem(end, shape, bench.device, bench.dtype)
            exact = exact_gradients(problem)
        except (MemoryError, RuntimeError) as error:
            if reason(error) != OUT_OF_MEMORY:
                raise
            raise ResourceError(
                f"{end}, {shape}: the float64 reference does not fit in the memory of this machine; "
                "choose a smaller --shape"
            ) from error
        field = competitors(bench, problem, 1e3 * problem.floor / rate)
        groups = [[competitor] for competitor in field] if bench.device == "cuda" else [field]
        examine = partial(_examine, device=bench.device, exact=exact)
        yield [row for group in groups for row in measure_group(group, examine, bench.device, bench.seconds, notify)]


def competitors(bench: Bench, problem: Problem, floor_ms: float) -> list[Competitor[Row]]:
    """Return our rows, then the rows of the other chosen families."""
    weights = str(bench.weight_dtype).removeprefix("torch.")
    blank = Row(problem.end, problem.shape, "reefknot", weights, floor_ms, competitor="reefknot")
    field: list[tuple[Row, Callable[[], Step]]] = []
    if "reefknot" in bench.families:
        make = partial(our_step, problem, bench.weight_dtype)
        field.append((blank, make))
        for memory in bench.memory:
            field.append((replace(blank, competitor=f"reefknot, {memory:g} MiB"), partial(make, memory=memory)))
        field.append((replace(blank, competitor="reefknot, chunked"), partial(make, impl="chunked")))
        if bench.device == "cuda" and bench.weights is None:
            wide = replace(blank, competitor="reefknot, fp32 weights", weights="float32")
            field.append((wide, partial(our_step, problem, torch.float32)))
    for peer in peers(problem.end):
        if peer.family in bench.families:
            row = replace(blank, competitor=peer.label, family=peer.family)
            field.append((row, partial(peer.make_step, problem, bench.weight_dtype)))
    return [Competitor(row, make, bench.graph and _can_be_captured(row)) for row, make in field]


def _can_be_captured(row: Row) -> bool:
    """Return whether a competitor can be captured as a CUDA graph.

    A competitor that makes the host wait cannot be captured. The failed attempt would leave the random generator of the
    device unusable for the next competitors.
    """
    return row.family == "reefknot" or (row.competitor.startswith("eager") and row.end != "adaptive")


def _examine(row: Row, step: Step, device: str, exact: dict[str, Tensor]) -> Row:
    """Measure everything except time. Memory is measured after the first run, which compiles and tunes kernels."""
    step.run()
    errors = relative_errors(step.gradients(), exact)
    finite = all(map(math.isfinite, errors.values()))
    same = equal_twice(step)
    over = memory_over(step, device) / MIB
    note = "" if finite else "gradients are not finite"
    return replace(row, errors=errors if finite else None, deterministic=same, over_mib=over, note=note)


def facts(bench: Bench, rate: float) -> dict[str, Any]:
    """Return the versions, the type and the matrix rate that the measurements depend on."""
    return {
        "torch": str(torch.__version__),
        "triton": version("triton"),
        "liger_kernel": version("liger-kernel"),
        "cut_cross_entropy": version("cut-cross-entropy"),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "matrix_tflops": rate / 1e12,
    }
