"""Measure reefknot's LSTM encoders against torch's `nn.LSTM`: `reefknot bench encoders`.

`measure_all` yields one table for every shape and data type, with one row per competitor (implementation) of
`LAYER_BUILDERS`. A step is one forward and backward pass of the encoder alone, with all gradients, including the
gradients of its inputs. The time includes drawing dropout masks.

All competitors multiply matrices in the same data type: float32, float32 rounded to TF32 (the default of cuDNN, and of
training with `determinism = "fast"`), or bfloat16. Their gradients are compared with the gradients of a float64 loop
over the steps that has the same dropout masks.

Shapes: B streams (sequences that are read in parallel), T steps, D dimensions.
"""

from __future__ import annotations

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
    Entry,
    Measurement,
    Step,
    check_gradients,
    describe_versions,
    divide,
    is_deterministic,
    measure_entries,
)
from reefknot.nn.encoders.awd_lstm import AWDLSTM
from reefknot.nn.encoders.bayesian_lstm import BayesianLSTM
from reefknot.nn.encoders.contract import Encoder
from reefknot.nn.encoders.variational_lstm import VariationalLSTM

DROPOUT = 0.25
"""The rate of every dropout."""
SEED = 11
"""The seed of weights and masks."""


class Shape(NamedTuple):
    """The numbers of streams and steps, and the dimensions of the input and of each layer."""

    batch: int
    steps: int
    dims: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse "B,T,D-H-H", such as "20,35,200-200-200" for two layers."""
        try:
            batch, steps, joined_dims = text.split(",")
            dims = tuple(int(dim) for dim in joined_dims.split("-"))
            shape = cls(int(batch), int(steps), dims)
        except ValueError:
            raise SettingsError(
                f"--shape {text}: must be streams,steps,dimensions of the input and of each layer, such as "
                "20,35,200-200-200"
            ) from None
        if min(shape.batch, shape.steps, *shape.dims) < 1 or len(shape.dims) < 2:
            raise SettingsError(f"--shape {text}: needs at least 1 stream, 1 step and 1 layer: B,T,D-H")
        return shape

    @property
    def num_layers(self) -> int:
        return len(self.dims) - 1

    def __str__(self) -> str:
        return f"B = {self.batch:,}, T = {self.steps:,}, {'-'.join(map(str, self.dims))}"


SHAPES = {
    "cuda": (
        Shape(20, 35, (200, 200, 200)),
        Shape(20, 35, (650, 650, 650)),
        Shape(20, 35, (1500, 1500, 1500)),
        Shape(20, 70, (400, 1150, 1150, 400)),
        Shape(80, 70, (400, 1150, 1150, 400)),
    ),
    "cpu": (Shape(20, 35, (200, 200, 200)), Shape(20, 35, (100, 280, 280, 100))),
}
"""The default shapes. On a GPU they are the shapes of the papers' encoders."""
TENSOR_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
"""The data types of the tensors. TF32 is not a data type of tensors, only of matrix products."""
DTYPES = {"cuda": tuple(TENSOR_DTYPES), "cpu": ("float32",)}
"""The data types that are measured."""


@dataclass(frozen=True)
class Row(Measurement):
    """The measurements of a competitor at one shape and in one data type."""

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


def measure_all(bench: Bench, shapes: Sequence[Shape], notify: Callable[[str], None]) -> Iterator[list[Row]]:
    """Yield the rows of every shape and data type.

    Competitors run one after the other on a GPU, and take turns on a CPU.
    """
    for shape in shapes:
        for dtype in bench.dtypes:
            notify(f"{shape}, {dtype}")
            with _set_matmul_precision(tf32=dtype == "tf32"):
                rows = _measure_shape(bench, shape, dtype, notify)
            yield _add_ratios(rows)


def _measure_shape(bench: Bench, shape: Shape, dtype: str, notify: Callable[[str], None]) -> list[Row]:
    """Return one row per competitor, at one shape and in one data type."""
    entries = []
    for competitor in list_competitors(shape):
        build = partial(build_step, competitor, shape, TENSOR_DTYPES[dtype], bench.device)
        row = Row(shape, dtype, competitor=competitor)
        entries.append(Entry(row, build, time_graph=bench.graph))
    check_step = partial(_check_step, device=bench.device)
    return measure_entries(entries, check_step, bench.device, bench.seconds, notify)


def _check_step(row: Row, step: Step, device: str) -> Row:
    """Return the row with gradient errors, against a float64 loop with the same masks, and determinism.

    Equal seeds are not enough for equal masks, because a generator gives different numbers for different data types.
    Therefore all random tensors of the step are recorded and copied into the loop.
    """
    torch.manual_seed(SEED)
    with RecordRandomTensors() as recorder:
        step.run()
    exact_step = build_step(row.competitor, row.shape, TENSOR_DTYPES[row.dtype], device, exact=True)
    with ReplayRandomTensors(recorder.tensors), torch.backends.cudnn.flags(enabled=False):
        exact_step.run()
    exact_gradients = {name: gradient for name, gradient in exact_step.get_gradients().items() if gradient is not None}
    row = check_gradients(row, step, exact_gradients)

    def compute_seeded_loss() -> Tensor:
        torch.manual_seed(SEED)
        return step.compute_loss()

    seeded_step = replace(step, compute_loss=compute_seeded_loss)
    return replace(row, deterministic=is_deterministic(seeded_step))


def _add_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their times divided by the time of the baseline."""
    baseline = next(row for row in rows if row.competitor == BASELINE)
    compared_rows = []
    for row in rows:
        ratio = divide(row.graph_ms, baseline.graph_ms)
        if ratio is None:
            ratio = divide(row.ms, baseline.ms)
        compared_rows.append(replace(row, over_lstm=ratio))
    return compared_rows


@contextmanager
def _set_matmul_precision(tf32: bool) -> Iterator[None]:
    """Multiply float32 matrices in TF32 or in full precision."""
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    previous = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = tf32
    matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = previous


def describe_machine() -> dict[str, Any]:
    """Return the versions that the measurements depend on."""
    cudnn_version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {**describe_versions(), "cudnn": cudnn_version}


# -- competitors -----------------------------------------------------------------------------------------------------


def _build_torch_lstm(input_dim: int, dim: int, num_layers: int) -> nn.LSTM:
    return nn.LSTM(input_dim, dim, num_layers, batch_first=True)


def _build_variational(input_dim: int, dim: int, num_layers: int) -> Encoder:
    return VariationalLSTM(input_dim, dim, num_layers, dropout=DROPOUT)


def _build_bayesian(input_dim: int, dim: int, num_layers: int) -> Encoder:
    return BayesianLSTM(input_dim, dim, num_layers, dropout_input=DROPOUT, dropout_hidden=DROPOUT, gates="separate")


BASELINE = "nn.LSTM, no masks"
"""torch's LSTM without dropout masks. On a GPU it is cuDNN."""
PLAIN_LOOP = "plain loop, variational"
"""Reefknot's variational LSTM as a loop over the steps in Python."""
AWD = "reefknot, AWD"
LAYER_BUILDERS: dict[str, Callable[[int, int, int], Encoder | nn.LSTM]] = {
    BASELINE: _build_torch_lstm,
    "reefknot, variational": _build_variational,
    "reefknot, Bayesian": _build_bayesian,
    PLAIN_LOOP: _build_variational,
}
"""The competitors, with functions that build layers: (input_dim, dim, num_layers) -> layers of one dimension."""


def list_competitors(shape: Shape) -> list[str]:
    """Return the competitors at a shape, the baseline first.

    AWD-LSTM needs three layers, of which the first two have the same dimension. Otherwise it is left out.
    """
    competitors = list(LAYER_BUILDERS)
    if shape.num_layers == 3 and shape.dims[1] == shape.dims[2]:
        competitors.append(AWD)
    return competitors


def build_encoder(competitor: str, shape: Shape) -> LayerStack:
    """Build the encoder of a competitor. Equal calls give equal weights."""
    torch.manual_seed(SEED)
    input_dim, *layer_dims = shape.dims
    if competitor == AWD:
        dropouts = {
            "dropout_input": DROPOUT,
            "dropout_hidden": DROPOUT,
            "dropout_output": DROPOUT,
            "weight_drop": DROPOUT,
        }
        encoder = AWDLSTM(input_dim, layer_dims[0], shape.num_layers, layer_dims[-1], **dropouts)  # type: ignore[arg-type]
        return LayerStack([encoder])

    # One module has all layers if they have the same dimension. Otherwise there is one module per layer.
    build_layers = LAYER_BUILDERS[competitor]
    if len(set(layer_dims)) == 1:
        return LayerStack([build_layers(input_dim, layer_dims[0], shape.num_layers)])
    return LayerStack([build_layers(dim_in, dim_out, 1) for dim_in, dim_out in pairwise(shape.dims)])


def build_step(competitor: str, shape: Shape, dtype: torch.dtype, device: str, *, exact: bool = False) -> Step:
    """Return a forward and backward pass of a competitor.

    Inputs and output gradients are random. They are the same for all competitors.

    Args:
        competitor: Name of the competitor.
        shape: Streams, steps and dimensions.
        dtype: The data type of the tensors.
        device: `cuda` or `cpu`.
        exact: Return the reference instead: a float64 loop over the same numbers.
    """
    encoder = build_encoder(competitor, shape).to(device, dtype)
    generator = torch.Generator().manual_seed(SEED)
    inputs_BTD = torch.randn(shape.batch, shape.steps, shape.dims[0], generator=generator).to(device, dtype)
    gradient_BTD = torch.randn(shape.batch, shape.steps, shape.dims[-1], generator=generator).to(device, dtype)
    if exact:
        encoder = encoder.double()
        inputs_BTD = inputs_BTD.double()
        gradient_BTD = gradient_BTD.double()
    leaves = {"input": inputs_BTD.requires_grad_(), **dict(encoder.named_parameters())}

    def compute_loss() -> Tensor:
        return torch.sum(encoder(inputs_BTD) * gradient_BTD)

    def get_gradients() -> dict[str, Tensor | None]:
        return {name: leaf.grad for name, leaf in leaves.items()}

    use_loop = exact or competitor == PLAIN_LOOP
    context = partial(using, "reference" if use_loop else "auto")
    return Step(compute_loss, list(leaves.values()), get_gradients, context)


class LayerStack(nn.Module):
    """A stack of layers of any dimensions. Every layer starts from an empty state."""

    def __init__(self, layers: Sequence[Encoder | nn.LSTM]) -> None:
        super().__init__()
        # Records contain the names of the parameters, such as "parts.0.weight_hh_l0".
        self.parts = nn.ModuleList(layers)

    def forward(self, inputs_BTD: Tensor) -> Tensor:
        """Return the outputs of the last layer."""
        hidden_BTD = inputs_BTD
        for layer in self.parts:
            if isinstance(layer, Encoder):
                state = layer.initial_state(len(hidden_BTD), hidden_BTD.device)
                hidden_BTD = layer(hidden_BTD, state)[0]
            else:
                hidden_BTD = layer(hidden_BTD)[0]
        return hidden_BTD


# -- random tensors --------------------------------------------------------------------------------------------------

_DROPOUT = torch.ops.aten.native_dropout.default
"""torch's dropout, which returns its output and the mask."""


class RecordRandomTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records all random tensors in `tensors`, whichever function of torch samples them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_random(func):
            random_tensor = result[1] if func is _DROPOUT else result
            self.tensors.append(random_tensor.clone())
        return result


class ReplayRandomTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which random tensors get recorded values, in the order in which they were recorded."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: Iterator[Tensor] = iter(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_random(func):
            return result
        recorded = next(self._tensors, None)
        if recorded is None:
            raise RuntimeError("more random tensors are drawn than were recorded")
        if func is _DROPOUT:
            dropout_input, rate = args[:2]
            return dropout_input * recorded / (1.0 - rate), recorded
        return result.copy_(recorded)


def _is_random(func: Any) -> bool:
    """Return whether an operator of torch returns random numbers.

    Recurrent layers are tagged as random too, because they can have dropout. Dropout inside layers is not used here, so
    they are excluded.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return func is _DROPOUT or len(func._schema.returns) == 1
