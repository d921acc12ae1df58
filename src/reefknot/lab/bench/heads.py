"""Output ends measured side by side in one run: `reefknot bench heads`.

For every end and shape: time over the floor of its matrix products at the rate this machine reaches, memory over what
must exist, the worst gradient error against float64 on the same inputs, and whether two runs are equal to the bit.
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
from reefknot.lab.bench import ours
from reefknot.lab.bench.floors import floor
from reefknot.lab.bench.measure import (
    MIB,
    OUT_OF_MEMORY,
    Competitor,
    Measured,
    Step,
    equal_twice,
    measure_group,
    memory_over,
    reason,
    relative_errors,
    version,
)
from reefknot.lab.bench.naive import reference
from reefknot.lab.bench.peers import PACKAGES, peers
from reefknot.lab.bench.problems import Problem, Shape, make_problem

FAMILIES = ("reefknot", "eager", "compile", "torch", *PACKAGES)
LEAN = {"cuda": 256.0, "cpu": 32.0}
"""MiB of working memory of our lean row, where no budgets are named."""
VOCABULARIES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
SWEPT = ("plain", "adaptive", "drill")
"""Ends that are measured against the size of the vocabulary."""
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
    """A competitor at one end and shape."""

    end: str
    shape: Shape
    family: str
    weights: str
    floor_ms: float
    over_mib: float | None = None

    @property
    def over_floor(self) -> float | None:
        return None if self.ms is None else self.ms / self.floor_ms

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {
            "shape": list(self.shape),
            "over_floor": self.over_floor,
            "worst_error": self.worst_error,
        }


@dataclass(frozen=True)
class Bench:
    """What to measure, and how."""

    device: str
    families: Sequence[str] = FAMILIES
    weights: str | None = None
    """The type of all weights; on a GPU, where nothing is said, bfloat16 and one row of ours with float32."""
    memory: Sequence[float] = ()
    """MiB of working memory: one row of ours for each."""
    seconds: float = 2.0
    """Of timing per competitor."""
    graph: bool = False
    """Whether to time a captured CUDA graph as well."""

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in, and what hidden states are."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.dtype if self.weights is None else getattr(torch, self.weights)


def cases(device: str, ends: Sequence[str], shapes: Sequence[Shape], vocabulary: bool) -> list[tuple[str, Shape]]:
    """Which ends to measure at which shapes, where the user leaves some of it open."""
    if vocabulary:
        rows, width = (4096, 512) if device == "cuda" else (256, 64)
        shapes = [Shape(rows, width, words) for words in VOCABULARIES]
        ends = [end for end in SWEPT if not ends or end in ends]
    usual = _ON_GPU if device == "cuda" else dict.fromkeys(_ON_GPU, (Shape(700, 200, 10_000),))
    return [(end, shape) for end in ends or usual for shape in shapes or usual[end]]


def measure_all(
    bench: Bench, rate: float, chosen: Sequence[tuple[str, Shape]], say: Callable[[str], None]
) -> Iterator[list[Row]]:
    """The rows of every case, as soon as it is measured. A GPU has competitors one after the other, a CPU in turns."""
    for end, shape in chosen:
        say(f"{end}, {shape}")
        if not {"reefknot", *(peer.family for peer in peers(end))} & set(bench.families):
            say("  none of the competitors asked for has this end")
            continue
        try:
            problem = make_problem(end, shape, bench.device, bench.dtype)
            exact = reference(problem)
        except (MemoryError, RuntimeError) as error:
            if reason(error) != OUT_OF_MEMORY:
                raise
            raise ResourceError(
                f"{end}, {shape}: the reference does not fit this machine; name another --shape"
            ) from error
        field = competitors(bench, problem, 1e3 * floor(problem) / rate)
        groups = [[each] for each in field] if bench.device == "cuda" else [field]
        examine = partial(_examine, device=bench.device, exact=exact)
        yield [row for group in groups for row in measure_group(group, examine, bench.device, bench.seconds, say)]


def competitors(bench: Bench, problem: Problem, floor_ms: float) -> list[Competitor[Row]]:
    """Ours first, then everyone else's of the families asked for."""
    weights = str(bench.weight_dtype).removeprefix("torch.")
    blank = Row(problem.end, problem.shape, "reefknot", weights, floor_ms, competitor="reefknot")
    found: list[tuple[Row, Callable[[], Step]]] = []
    if "reefknot" in bench.families:
        make = partial(ours.make_step, problem, bench.weight_dtype)
        found.append((blank, make))
        for memory in bench.memory:
            found.append((replace(blank, competitor=f"reefknot, {memory:g} MiB"), partial(make, memory=memory)))
        found.append((replace(blank, competitor="reefknot, chunked"), partial(make, impl="chunked")))
        if bench.device == "cuda" and bench.weights is None:
            wide = replace(blank, competitor="reefknot, fp32 weights", weights="float32")
            found.append((wide, partial(ours.make_step, problem, torch.float32)))
    for peer in peers(problem.end):
        if peer.family in bench.families:
            row = replace(blank, competitor=peer.label, family=peer.family)
            found.append((row, partial(peer.make_step, problem, bench.weight_dtype)))
    return [Competitor(row, make, bench.graph and _can_be_captured(row)) for row, make in found]


def _can_be_captured(row: Row) -> bool:
    """A competitor that makes the host wait cannot be, and the attempt would leave the device's generator unusable for
    whoever comes after it."""
    return row.family == "reefknot" or (row.competitor.startswith("eager") and row.end != "adaptive")


def _examine(row: Row, step: Step, device: str, exact: dict[str, Tensor]) -> Row:
    """All but the time. The first run compiles and tunes; memory is measured after it."""
    step.run()
    errors = relative_errors(step.gradients(), exact)
    finite = all(map(math.isfinite, errors.values()))
    same = equal_twice(step)
    over = memory_over(step, device) / MIB
    note = "" if finite else "gradients are not finite"
    return replace(row, errors=errors if finite else None, deterministic=same, over_mib=over, note=note)


def facts(bench: Bench, rate: float) -> dict[str, Any]:
    """What figures depend on beside the machine."""
    return {
        "torch": str(torch.__version__),
        "triton": version("triton"),
        "liger_kernel": version("liger-kernel"),
        "cut_cross_entropy": version("cut-cross-entropy"),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "matrix_tflops": rate / 1e12,
    }
