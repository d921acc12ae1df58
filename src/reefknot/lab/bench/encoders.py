"""Measure recurrent encoders in one run: `reefknot bench encoders`.

A step is one forward and backward pass of the encoder alone, with all gradients, including the gradients of its inputs.
The yardstick is torch's `nn.LSTM` without any mask, which is cuDNN on a GPU. The time of our encoders includes drawing
their masks. The plain loop is our variational LSTM as a loop over the steps in Python.

All competitors (implementations that are compared) multiply matrices in the same type: in float32, in float32 rounded
to TF32 (the default of cuDNN, and of training with `determinism = "fast"`), or in bfloat16.

Gradients are compared with the gradients of a float64 loop that has the same masks. Equal seeds are not enough for
equal masks, because a generator draws different numbers for different types. So `RecordDraws` keeps all random numbers
of a run, and `ReplayDraws` copies them into a later run.

Shapes: B streams (rows of a batch), T steps, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from reefknot.errors import SettingsError
from reefknot.kernels.choice import using
from reefknot.lab.bench.measure import (
    Competitor,
    Measured,
    Step,
    equal_twice,
    measure_group,
    ratio,
    relative_errors,
    version,
)
from reefknot.nn.encoders.awd_lstm import AWDLSTM
from reefknot.nn.encoders.bayesian_lstm import BayesianLSTM
from reefknot.nn.encoders.contract import Encoder
from reefknot.nn.encoders.variational_lstm import VariationalLSTM

RATE, SEED = 0.25, 11
"""The rate of every dropout, and the seed of weights and masks."""


class Shape(NamedTuple):
    """The numbers of streams and steps, and the dimensions of the input and of each layer."""

    batch: int
    steps: int
    dims: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Shape:
        """Parse "B,T,D-H-H"."""
        try:
            batch, steps, dims = text.split(",")
            shape = cls(int(batch), int(steps), tuple(int(dim) for dim in dims.split("-")))
        except ValueError:
            raise SettingsError(
                f"--shape {text}: must be streams,steps,dimensions of the input and of each layer, such as "
                "20,35,200-200-200"
            ) from None
        if min(shape.batch, shape.steps, *shape.dims) < 1 or len(shape.dims) < 2:
            raise SettingsError(f"--shape {text}: needs at least 1 stream, 1 step and 1 layer: B,T,D-H")
        return shape

    @property
    def layers(self) -> int:
        return len(self.dims) - 1

    def __str__(self) -> str:
        return f"B = {self.batch:,}, T = {self.steps:,}, {'-'.join(map(str, self.dims))}"


_AWD = (400, 1150, 1150, 400)
SHAPES = {
    "cuda": (*(Shape(20, 35, (dim,) * 3) for dim in (200, 650, 1500)), Shape(20, 70, _AWD), Shape(80, 70, _AWD)),
    "cpu": (Shape(20, 35, (200,) * 3), Shape(20, 35, (100, 280, 280, 100))),
}
"""The default shapes. On a GPU they are the shapes of the papers' encoders."""
KINDS = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
"""The types of the tensors. TF32 is not a type of tensors, only of matrix products."""
DTYPES = {"cuda": tuple(KINDS), "cpu": ("float32",)}


@dataclass(frozen=True)
class Row(Measured):
    """The measurements of a competitor at one shape and in one type."""

    shape: Shape
    dtype: str
    over_lstm: float | None = None
    """Time divided by the time of `nn.LSTM`. If graphs are timed, both times are of captured graphs."""

    def record(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        shape = {"shape": [self.shape.batch, self.shape.steps, list(self.shape.dims)]}
        return asdict(self) | shape | {"worst_error": self.worst_error}


@dataclass(frozen=True)
class Bench:
    """The settings of the benchmark."""

    device: str
    dtypes: Sequence[str]
    seconds: float = 2.0
    """Duration of the timing, per competitor."""
    graph: bool = False
    """Whether to time a captured CUDA graph as well."""


class Tower(nn.Module):
    """A stack of layers of any dimensions. Every layer starts from an empty state."""

    def __init__(self, parts: Sequence[Encoder | nn.LSTM]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x_BTD: Tensor) -> Tensor:
        for part in self.parts:
            start = (part.initial_state(len(x_BTD), x_BTD.device),) if isinstance(part, Encoder) else ()
            x_BTD = part(x_BTD, *start)[0]
        return x_BTD


def _plain(input_dim: int, dim: int, layers: int) -> nn.LSTM:
    return nn.LSTM(input_dim, dim, layers, batch_first=True)


def _variational(input_dim: int, dim: int, layers: int) -> Encoder:
    return VariationalLSTM(input_dim, dim, layers, dropout=RATE)


def _bayesian(input_dim: int, dim: int, layers: int) -> Encoder:
    return BayesianLSTM(input_dim, dim, layers, dropout_input=RATE, dropout_hidden=RATE, gates="separate")


YARDSTICK, LOOP, AWD = "nn.LSTM, no masks", "plain loop, variational", "reefknot, AWD"
LAYERS: dict[str, Callable[[int, int, int], Encoder | nn.LSTM]] = {
    YARDSTICK: _plain,
    "reefknot, variational": _variational,
    "reefknot, Bayesian": _bayesian,
    LOOP: _variational,
}
"""The competitors, with functions that build layers of one dimension."""


def competitors(shape: Shape) -> list[str]:
    """Return the competitors at a shape, the yardstick first.

    AWD-LSTM takes part if the shape fits: three layers, of which the first two have the same dimension.
    """
    fits = shape.layers == 3 and shape.dims[1] == shape.dims[2]
    return [*LAYERS, *([AWD] if fits else [])]


def build(name: str, shape: Shape) -> Tower:
    """Build a competitor. Equal calls give equal weights."""
    torch.manual_seed(SEED)
    first, *dims = shape.dims
    if name == AWD:
        drops = {"dropout_input": RATE, "dropout_hidden": RATE, "dropout_output": RATE, "weight_drop": RATE}
        return Tower([AWDLSTM(first, dims[0], shape.layers, dims[-1], **drops)])  # type: ignore[arg-type]
    make = LAYERS[name]
    if len(set(dims)) == 1:
        return Tower([make(first, dims[0], shape.layers)])
    return Tower([make(input_dim, dim, 1) for input_dim, dim in pairwise(shape.dims)])


def make_step(name: str, shape: Shape, dtype: torch.dtype, device: str, *, exact: bool = False) -> Step:
    """Return a forward and backward pass of a competitor. Inputs and output gradients are the same for all.

    Args:
        name: The competitor.
        shape: Streams, steps and dimensions.
        dtype: The type of the tensors.
        device: `cuda` or `cpu`.
        exact: Return the reference instead: a float64 loop over the same numbers.
    """
    encoder = build(name, shape).to(device, dtype)
    generator = torch.Generator().manual_seed(SEED)
    x_BTD, grad_BTD = (
        torch.randn(shape.batch, shape.steps, dim, generator=generator).to(device, dtype)
        for dim in (shape.dims[0], shape.dims[-1])
    )
    if exact:
        encoder, x_BTD, grad_BTD = encoder.double(), x_BTD.double(), grad_BTD.double()
    leaves = {"input": x_BTD.requires_grad_(), **dict(encoder.named_parameters())}

    def loss() -> Tensor:
        return torch.sum(encoder(x_BTD) * grad_BTD)

    def gradients() -> dict[str, Tensor | None]:
        return {name: leaf.grad for name, leaf in leaves.items()}

    looped = exact or name == LOOP
    return Step(loss, list(leaves.values()), gradients, partial(using, "reference" if looped else "auto"))


def measure_all(bench: Bench, shapes: Sequence[Shape], notify: Callable[[str], None]) -> Iterator[list[Row]]:
    """Yield the rows of every shape and type. Competitors run one after the other on a GPU, and take turns on a CPU."""
    for shape in shapes:
        for dtype in bench.dtypes:
            notify(f"{shape}, {dtype}")
            with _matrix_products(tf32=dtype == "tf32"):
                rows = _over_yardstick(_measure(bench, shape, dtype, notify))
            yield rows


def _measure(bench: Bench, shape: Shape, dtype: str, notify: Callable[[str], None]) -> list[Row]:
    steps = {name: partial(make_step, name, shape, KINDS[dtype], bench.device) for name in competitors(shape)}
    field = [Competitor(Row(shape, dtype, competitor=name), step, bench.graph) for name, step in steps.items()]
    groups = [[competitor] for competitor in field] if bench.device == "cuda" else [field]
    examine = partial(_examine, device=bench.device)
    return [row for group in groups for row in measure_group(group, examine, bench.device, bench.seconds, notify)]


def _examine(row: Row, step: Step, device: str) -> Row:
    """Measure everything except time: gradient errors against a float64 loop with the same masks, and determinism."""
    torch.manual_seed(SEED)
    with RecordDraws() as masks:
        step.run()
    exact = make_step(row.competitor, row.shape, KINDS[row.dtype], device, exact=True)
    with ReplayDraws(masks.tensors), torch.backends.cudnn.flags(enabled=False):
        exact.run()
    expected = {name: gradient for name, gradient in exact.gradients().items() if gradient is not None}
    errors = relative_errors(step.gradients(), expected)
    finite = all(map(math.isfinite, errors.values()))

    def seeded() -> Tensor:
        torch.manual_seed(SEED)
        return step.loss()

    same = equal_twice(replace(step, loss=seeded))
    note = "" if finite else "gradients are not finite"
    return replace(row, errors=errors if finite else None, deterministic=same, note=note)


def _over_yardstick(rows: Sequence[Row]) -> list[Row]:
    yardstick = next(row for row in rows if row.competitor == YARDSTICK)

    def over_lstm(row: Row) -> float | None:
        captured = ratio(row.graph_ms, yardstick.graph_ms)
        return ratio(row.ms, yardstick.ms) if captured is None else captured

    return [replace(row, over_lstm=over_lstm(row)) for row in rows]


@contextmanager
def _matrix_products(tf32: bool) -> Iterator[None]:
    """Multiply float32 matrices in TF32 or in full precision."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def facts() -> dict[str, Any]:
    """Return the versions that the measurements depend on."""
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {"torch": str(torch.__version__), "triton": version("triton"), "cudnn": cudnn}


# -- random draws ----------------------------------------------------------------------------------------------------

_DROPOUT = torch.ops.aten.native_dropout.default


class RecordDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records all random tensors in `tensors`, whichever function of torch draws them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _draws(func):
            self.tensors.append((result[1] if func is _DROPOUT else result).clone())
        return result


class ReplayDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which random tensors get recorded values, in the order in which they were recorded."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: Iterator[Tensor] = iter(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _draws(func):
            return result
        recorded = next(self._tensors, None)
        if recorded is None:
            raise RuntimeError("more random tensors are drawn than were recorded")
        if func is _DROPOUT:
            vectors, rate = args[:2]
            return vectors * recorded / (1.0 - rate), recorded
        return result.copy_(recorded)


def _draws(func: Any) -> bool:
    """Return whether an operator draws random numbers.

    Recurrent layers are tagged as random too, because they can have dropout. Dropout inside layers is not used here, so
    they are excluded.
    """
    random = torch.Tag.nondeterministic_seeded in func.tags
    return random and (func is _DROPOUT or len(func._schema.returns) == 1)
