"""Measure the output layers of language models, in reefknot and in other packages: `reefknot bench heads`.

An output end is a classifier with its loss. `measure_all` yields one table for every end at a shape, with one row per
competitor (implementation). `competitors.py` lists the competitors, and `problems.py` builds the inputs that they
share. A row has four measurements:

- the time, also relative to two others: the floor, which is the computed time of the necessary matrix products at the
  rate that this machine reaches, and the products, which is the measured time of the matrix products alone;
- the working memory;
- the worst error of a gradient against float64 on the same inputs;
- whether two runs are equal bit for bit.

The matrix products have a row of their own, and take turns with the competitors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from reefknot.errors import ResourceError
from reefknot.lab.bench.competitors import (
    FAMILIES,
    PACKAGES,
    build_products_step,
    build_reefknot_step,
    competitors_for,
)
from reefknot.lab.bench.measure import (
    MIB,
    OUT_OF_MEMORY,
    Entry,
    Measurement,
    Step,
    check_gradients,
    describe_error,
    describe_versions,
    divide,
    is_deterministic,
    measure_entries,
    measure_working_memory,
)
from reefknot.lab.bench.plain_ends import compute_exact_gradients
from reefknot.lab.bench.problems import NUM_PRODUCTS, Problem, Shape, make_problem

LOW_MEMORY_MIB = {"cuda": 256.0, "cpu": 32.0}
"""Default memory budget of reefknot's low-memory row."""
PRODUCTS_FAMILY = "products"
"""The family of the row with the matrix products alone."""
SWEEP_SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
"""Vocabulary sizes that `--vocabulary` measures."""
SWEEP_ENDS = ("plain", "adaptive", "drill")
"""Ends that `--vocabulary` measures."""
_WIKITEXT_103 = Shape(8192, 1024, 267_735)
_WIKITEXT_2 = Shape(5600, 400, 33_278)
_PENN_TREEBANK = Shape(1400, 400, 10_000)
# Shapes of current language models with sub-words.
_LLM_SMALL = Shape(8192, 2048, 128_256)
_LLM_LARGE = Shape(16_384, 4096, 128_256)
_GEMMA_2 = Shape(8192, 2304, 256_000)
_QWEN_3 = Shape(8192, 4096, 151_936)
GPU_SHAPES = {
    "plain": (_WIKITEXT_103, _LLM_SMALL, _LLM_LARGE, _WIKITEXT_2, _PENN_TREEBANK),
    "adaptive": (_WIKITEXT_103, _LLM_SMALL, _WIKITEXT_2),
    "augmented": (_WIKITEXT_2, _WIKITEXT_103, _PENN_TREEBANK),
    "augmented-detached": (_WIKITEXT_2, _WIKITEXT_103, _PENN_TREEBANK),
    "mixture": (_PENN_TREEBANK, _WIKITEXT_2),
    "drill": (_WIKITEXT_2, _WIKITEXT_103, _PENN_TREEBANK),
    "softcap": (_GEMMA_2, _LLM_SMALL),
    "log_probs": (_QWEN_3, _LLM_SMALL),
    "distil": (_QWEN_3, _LLM_SMALL),
}
"""The default shapes of each end on a GPU."""
CPU_SHAPE = Shape(700, 200, 10_000)
"""The default shape of all ends on a CPU."""


@dataclass(frozen=True)
class Row(Measurement):
    """The measurements of a competitor for one end and shape."""

    end: str
    shape: Shape
    family: str
    """The value of `--competitor` that chooses the competitor, or `PRODUCTS_FAMILY`."""
    weights: str
    """The data type of the weights."""
    floor_ms: float
    """The time of the matrix products that no exact method avoids, computed from the matrix rate of the machine."""
    products_ms: float | None = None
    """The measured time of the matrix products of a method that stores no scores (`NUM_PRODUCTS`), if the end has no
    other products."""
    over_mib: float | None = None
    """Working memory in MiB: the peak, not counting inputs, weights and gradients."""

    @property
    def over_floor(self) -> float | None:
        """The time of a step, divided by the floor."""
        return divide(self.ms, self.floor_ms)

    @property
    def over_products(self) -> float | None:
        """The time of a step, divided by the time of the matrix products alone."""
        return divide(self.ms, self.products_ms)

    def record(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self) | {
            "shape": list(self.shape),
            "over_floor": self.over_floor,
            "over_products": self.over_products,
            "worst_error": self.worst_error,
        }


@dataclass(frozen=True)
class Bench:
    """The settings of the benchmark."""

    device: str
    families: Sequence[str] = FAMILIES
    """The values of `--competitor`."""
    weights: str | None = None
    """The data type of all weights. The default on a GPU is bfloat16, plus a row of reefknot with float32 weights."""
    memory: Sequence[float] = ()
    """Budgets of working memory in MiB. Reefknot has a row for every budget."""
    seconds: float = 2.0
    """Duration of the timing, per competitor."""
    graph: bool = False
    """Whether to time a captured CUDA graph as well."""

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the computation and of the hidden states."""
        if self.device == "cuda":
            return torch.bfloat16
        return torch.float32

    @property
    def weight_dtype(self) -> torch.dtype:
        """The data type of the weights."""
        if self.weights is None:
            return self.dtype
        weight_dtype: torch.dtype = getattr(torch, self.weights)
        return weight_dtype


def choose_cases(
    device: str, ends: Sequence[str], shapes: Sequence[Shape], vocabulary: bool
) -> list[tuple[str, Shape]]:
    """Return the pairs of an end and a shape to measure.

    Args:
        device: `cuda` or `cpu`.
        ends: The requested ends, or all if it is empty.
        shapes: The requested shapes, or the default shapes of each end if it is empty.
        vocabulary: Whether to measure over a range of vocabulary sizes instead of `shapes`.
    """
    if vocabulary:
        tokens, dim = (4096, 512) if device == "cuda" else (256, 64)
        shapes = [Shape(tokens, dim, size) for size in SWEEP_SIZES]
        ends = [end for end in SWEEP_ENDS if not ends or end in ends]

    default_shapes: Mapping[str, Sequence[Shape]] = GPU_SHAPES
    if device != "cuda":
        default_shapes = dict.fromkeys(GPU_SHAPES, (CPU_SHAPE,))
    cases = []
    for end in ends or default_shapes:
        for shape in shapes or default_shapes[end]:
            cases.append((end, shape))
    return cases


def measure_all(
    bench: Bench, rate: float, cases: Sequence[tuple[str, Shape]], notify: Callable[[str], None]
) -> Iterator[list[Row]]:
    """Yield the rows of every case.

    On a CPU, the competitors and the matrix products take turns. On a GPU, each competitor is timed on its own, and the
    matrix products are timed before each of them.

    Args:
        bench: The settings of the benchmark.
        rate: Floating-point operations per second that the device reaches in large matrix products.
        cases: Pairs of an end and a shape.
        notify: Called with lines about progress.
    """
    for end, shape in cases:
        notify(f"{end}, {shape}")
        available_families = {"reefknot", *(competitor.family for competitor in competitors_for(end))}
        if available_families.isdisjoint(bench.families):
            notify("  none of the chosen competitors has this end")
            continue

        problem, exact_gradients = _prepare_case(bench, end, shape)
        floor_ms = 1e3 * problem.floor_flops / rate
        entries = _build_entries(bench, problem, floor_ms)
        check_step = partial(_check_step, device=bench.device, exact_gradients=exact_gradients)
        yield merge_products_rows(measure_entries(entries, check_step, bench.device, bench.seconds, notify))


def _prepare_case(bench: Bench, end: str, shape: Shape) -> tuple[Problem, dict[str, Tensor]]:
    """Return the inputs of a case, and its gradients in float64 by name."""
    try:
        problem = make_problem(end, shape, bench.device, bench.dtype)
        return problem, compute_exact_gradients(problem)
    except (MemoryError, RuntimeError) as error:
        if describe_error(error) != OUT_OF_MEMORY:
            raise
        raise ResourceError(
            f"{end}, {shape}: the float64 reference does not fit in the memory of this machine; "
            "choose a smaller --shape"
        ) from error


def _build_entries(bench: Bench, problem: Problem, floor_ms: float) -> list[Entry[Row]]:
    """Return the rows to measure: first the variants of reefknot, then the competitors of the requested families."""
    entries: list[Entry[Row]] = []

    def add_entry(row: Row, build_step: Callable[[], Step]) -> None:
        entries.append(Entry(row, build_step, time_graph=bench.graph and _can_be_captured(row)))

    weight_dtype_name = str(bench.weight_dtype).removeprefix("torch.")
    empty_row = Row(problem.end, problem.shape, "reefknot", weight_dtype_name, floor_ms, competitor="reefknot")

    # Reefknot: default settings, one row per memory budget, the chunked implementation, and float32 weights.
    if "reefknot" in bench.families:
        build_step = partial(build_reefknot_step, problem, bench.weight_dtype)
        add_entry(empty_row, build_step)
        for mib in bench.memory:
            add_entry(replace(empty_row, competitor=f"reefknot, {mib:g} MiB"), partial(build_step, memory=mib))
        add_entry(replace(empty_row, competitor="reefknot, chunked"), partial(build_step, impl="chunked"))
        if bench.device == "cuda" and bench.weights is None:
            float32_row = replace(empty_row, competitor="reefknot, fp32 weights", weights="float32")
            add_entry(float32_row, partial(build_reefknot_step, problem, torch.float32))

    for competitor in competitors_for(problem.end):
        if competitor.family in bench.families:
            row = replace(empty_row, competitor=competitor.label, family=competitor.family)
            add_entry(row, partial(competitor.build_step, problem, bench.weight_dtype))
    if problem.end in NUM_PRODUCTS:
        return _insert_products(bench, problem, empty_row, entries)
    return entries


def _insert_products(bench: Bench, problem: Problem, empty_row: Row, entries: Sequence[Entry[Row]]) -> list[Entry[Row]]:
    """Add the matrix products alone: before each competitor on a GPU, and once on a CPU, where all take turns."""
    row = replace(
        empty_row,
        competitor=f"{NUM_PRODUCTS[problem.end]} matrix products",
        family=PRODUCTS_FAMILY,
        weights=str(bench.dtype).removeprefix("torch."),
    )
    products = Entry(row, partial(build_products_step, problem), time_graph=bench.graph)
    if bench.device != "cuda":
        return [products, *entries]
    return [turn for entry in entries for turn in (products, entry)]


def merge_products_rows(rows: Sequence[Row]) -> list[Row]:
    """Merge the rows of the matrix products into one, the first, and add its time to all rows."""
    products_rows = [row for row in rows if row.family == PRODUCTS_FAMILY]
    other_rows = [row for row in rows if row.family != PRODUCTS_FAMILY]
    if not products_rows:
        return other_rows

    times = [row.ms for row in products_rows if row.ms is not None]
    graph_times = [row.graph_ms for row in products_rows if row.graph_ms is not None]
    merged_row = replace(
        products_rows[0],
        ms=median(times) if times else None,
        graph_ms=median(graph_times) if graph_times else None,
        repeats=sum(row.repeats for row in products_rows),
    )
    return [replace(row, products_ms=merged_row.ms) for row in (merged_row, *other_rows)]


def _can_be_captured(row: Row) -> bool:
    """Return whether a competitor can be captured as a CUDA graph.

    A competitor that makes the CPU wait for the GPU cannot be captured. The failed attempt would leave the random
    generator of the GPU unusable for the next competitors.
    """
    if row.family == "reefknot":
        return True
    return row.competitor.startswith("eager") and row.end != "adaptive"


def _check_step(row: Row, step: Step, device: str, exact_gradients: dict[str, Tensor]) -> Row:
    """Return the row with all measurements except time.

    Memory is measured after the first run, which compiles and tunes kernels. The matrix products have only a time.
    """
    step.run()
    if row.family == PRODUCTS_FAMILY:
        return row
    row = check_gradients(row, step, exact_gradients)
    deterministic = is_deterministic(step)
    return replace(row, deterministic=deterministic, over_mib=measure_working_memory(step, device) / MIB)


def describe_machine(bench: Bench, rate: float) -> dict[str, Any]:
    """Return the versions, the data type and the matrix rate that the measurements depend on."""
    return {
        **describe_versions(PACKAGES),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "matrix_tflops": rate / 1e12,
    }
