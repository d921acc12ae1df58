"""Recurrent encoders measured side by side in one run: `reefknot bench encoders`.

One forward and backward pass of the encoder alone, with all gradients, those of its inputs too. The yardstick is
torch's `nn.LSTM` without any mask, which is cuDNN on a GPU; ours draw their masks inside what is timed. The plain loop
is our variational LSTM as everyone writes it, a step of Python at a time.

Products are made in the type that the row names, for everybody: float32 as such, or rounded to TF32 as cuDNN does by
default and training does with `determinism = "fast"`.

Shapes: B streams, T steps, D width.
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

from reefknot.errors import SettingsError
from reefknot.kernels.choice import using
from reefknot.lab.bench.draws import Again, Kept
from reefknot.lab.bench.measure import (
    Competitor,
    Measured,
    Step,
    equal_twice,
    measure_group,
    relative_errors,
    version,
)
from reefknot.nn.encoders.awd_lstm import AWDLSTM
from reefknot.nn.encoders.bayesian_lstm import BayesianLSTM
from reefknot.nn.encoders.contract import Encoder
from reefknot.nn.encoders.variational_lstm import VariationalLSTM

RATE, SEED = 0.25, 11
"""Every drop rate, and the seed of weights and masks."""


class Shape(NamedTuple):
    """Streams, steps, and the widths from the input to the last layer."""

    batch: int
    steps: int
    widths: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Shape:
        """From "B,T,D-H-H"."""
        try:
            batch, steps, widths = text.split(",")
            shape = cls(int(batch), int(steps), tuple(int(width) for width in widths.split("-")))
        except ValueError:
            raise SettingsError(
                f"--shape {text}: must be streams,steps,widths, the input's and each layer's, such as 20,35,200-200-200"
            ) from None
        if min(shape.batch, shape.steps, *shape.widths) < 1 or len(shape.widths) < 2:
            raise SettingsError(f"--shape {text}: needs at least 1 stream, 1 step and 1 layer: B,T,D-H")
        return shape

    @property
    def layers(self) -> int:
        return len(self.widths) - 1

    def __str__(self) -> str:
        return f"B = {self.batch:,}, T = {self.steps:,}, {'-'.join(map(str, self.widths))}"


_AWD = (400, 1150, 1150, 400)
SHAPES = {
    "cuda": (*(Shape(20, 35, (width,) * 3) for width in (200, 650, 1500)), Shape(20, 70, _AWD), Shape(80, 70, _AWD)),
    "cpu": (Shape(20, 35, (200,) * 3), Shape(20, 35, (100, 280, 280, 100))),
}
"""What is measured where nothing is said: on a GPU the papers' encoders."""
KINDS = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
"""Types of the numbers; TF32 is one of products alone."""
DTYPES = {"cuda": tuple(KINDS), "cpu": ("float32",)}


@dataclass(frozen=True)
class Row(Measured):
    """A competitor at one shape, all of it in one type."""

    shape: Shape
    dtype: str
    over_lstm: float | None = None
    """Time over that of `nn.LSTM`: captured over captured, where graphs are timed."""

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        shape = {"shape": [self.shape.batch, self.shape.steps, list(self.shape.widths)]}
        return asdict(self) | shape | {"worst_error": self.worst_error}


@dataclass(frozen=True)
class Bench:
    """How to measure."""

    device: str
    dtypes: Sequence[str]
    seconds: float = 2.0
    """Of timing per competitor."""
    graph: bool = False
    """Whether to time a captured CUDA graph as well."""


class Tower(nn.Module):
    """Layers one above the other, each from an empty state, so that competitors of any widths can be built."""

    def __init__(self, parts: Sequence[Encoder | nn.LSTM]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x_BTD: Tensor) -> Tensor:
        for part in self.parts:
            start = (part.initial_state(len(x_BTD), x_BTD.device),) if isinstance(part, Encoder) else ()
            x_BTD = part(x_BTD, *start)[0]
        return x_BTD


def _plain(below: int, width: int, layers: int) -> nn.LSTM:
    return nn.LSTM(below, width, layers, batch_first=True)


def _variational(below: int, width: int, layers: int) -> Encoder:
    return VariationalLSTM(below, width, layers, dropout=RATE)


def _bayesian(below: int, width: int, layers: int) -> Encoder:
    return BayesianLSTM(below, width, layers, dropout_input=RATE, dropout_hidden=RATE, gates="separate")


YARDSTICK, LOOP, AWD = "nn.LSTM, no masks", "plain loop, variational", "reefknot, AWD"
LAYERS: dict[str, Callable[[int, int, int], Encoder | nn.LSTM]] = {
    YARDSTICK: _plain,
    "reefknot, variational": _variational,
    "reefknot, Bayesian": _bayesian,
    LOOP: _variational,
}
"""Competitors by the layers of one width that they are built of."""


def competitors(shape: Shape) -> list[str]:
    """Who takes part at a shape, the yardstick first. An AWD-LSTM has three layers, the inner ones of one width."""
    fits = shape.layers == 3 and shape.widths[1] == shape.widths[2]
    return [*LAYERS, *([AWD] if fits else [])]


def build(name: str, shape: Shape) -> Tower:
    """A competitor, with the same weights whenever it is called."""
    torch.manual_seed(SEED)
    first, *widths = shape.widths
    if name == AWD:
        drops = {"dropout_input": RATE, "dropout_hidden": RATE, "dropout_output": RATE, "weight_drop": RATE}
        return Tower([AWDLSTM(first, widths[0], shape.layers, widths[-1], **drops)])  # type: ignore[arg-type]
    make = LAYERS[name]
    if len(set(widths)) == 1:
        return Tower([make(first, widths[0], shape.layers)])
    return Tower([make(below, width, 1) for below, width in pairwise(shape.widths)])


def make_step(name: str, shape: Shape, dtype: torch.dtype, device: str, *, exact: bool = False) -> Step:
    """A competitor's pass over inputs and gradients that are the same for all. `exact`: its reference, a float64 loop
    over the same numbers."""
    encoder = build(name, shape).to(device, dtype)
    draw = torch.Generator().manual_seed(SEED)
    x_BTD, grad_BTD = (
        torch.randn(shape.batch, shape.steps, width, generator=draw).to(device, dtype)
        for width in (shape.widths[0], shape.widths[-1])
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


def measure_all(bench: Bench, shapes: Sequence[Shape], say: Callable[[str], None]) -> Iterator[list[Row]]:
    """The rows of every shape and type, as soon as they are measured. A GPU has competitors one after the other, a CPU
    in turns."""
    for shape in shapes:
        for dtype in bench.dtypes:
            say(f"{shape}, {dtype}")
            with _products(tf32=dtype == "tf32"):
                rows = _over_yardstick(_measure(bench, shape, dtype, say))
            yield rows


def _measure(bench: Bench, shape: Shape, dtype: str, say: Callable[[str], None]) -> list[Row]:
    steps = {name: partial(make_step, name, shape, KINDS[dtype], bench.device) for name in competitors(shape)}
    field = [Competitor(Row(shape, dtype, competitor=name), step, bench.graph) for name, step in steps.items()]
    groups = [[each] for each in field] if bench.device == "cuda" else [field]
    examine = partial(_examine, device=bench.device)
    return [row for group in groups for row in measure_group(group, examine, bench.device, bench.seconds, say)]


def _examine(row: Row, step: Step, device: str) -> Row:
    """All but the time: gradients against a float64 loop with the same masks, and two runs from one seed."""
    torch.manual_seed(SEED)
    with Kept() as masks:
        step.run()
    exact = make_step(row.competitor, row.shape, KINDS[row.dtype], device, exact=True)
    with Again(masks.drawn), torch.backends.cudnn.flags(enabled=False):
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

    def ratio(row: Row) -> float | None:
        for mine, other in ((row.graph_ms, yardstick.graph_ms), (row.ms, yardstick.ms)):
            if mine is not None and other is not None:
                return mine / other
        return None

    return [replace(row, over_lstm=ratio(row)) for row in rows]


@contextmanager
def _products(tf32: bool) -> Iterator[None]:
    """Products of float32 numbers as such, or in TF32."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, products.allow_tf32
    cudnn.allow_tf32 = products.allow_tf32 = tf32
    try:
        yield
    finally:
        cudnn.allow_tf32, products.allow_tf32 = before


def facts() -> dict[str, Any]:
    """What figures depend on beside the machine."""
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {"torch": str(torch.__version__), "triton": version("triton"), "cudnn": cudnn}
