"""`reefknot bench encoders`: measure the recurrent encoders, with nn.LSTM as the baseline.

This subcommand parses the options and prints the results; `lab/bench/encoders.py` does the measuring.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import (
    GraphOption,
    RecordFileOption,
    SecondsOption,
    check_gpu_options,
    check_names,
    open_record,
)
from reefknot.lab.cli.options import DeviceOption

if TYPE_CHECKING:
    from reefknot.lab.bench.encoders import Row

EXAMPLES = """\b
Examples:
  reefknot bench encoders
  reefknot bench encoders --shape 20,35,200-200-200
  reefknot bench encoders --weights tf32 --graph --json encoders.json
"""


def encoders(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape to measure: B,T,D-H-H for the batch size, the number of time steps, and the dimensions of the "
            "input and of every layer. Can be repeated. [default: several shapes]"
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Data type of the matrix products: float32, bfloat16 or tf32. [default: all]")
    ] = None,
    seconds: SecondsOption = 2.0,
    graph: GraphOption = False,
    json: RecordFileOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure the recurrent encoders: time, gradient error, and whether results are reproducible bit for bit."""
    from reefknot.lab.bench.encoders import DTYPES, SHAPES, Bench, Shape, describe_machine, measure_all

    check_names("--weights", [weights] if weights else [], ("float32", "bfloat16", "tf32"))
    record = open_record("encoders", device, json)
    check_gpu_options(record, weights, graph)
    dtypes = (weights,) if weights else DTYPES[record.device]
    shapes = SHAPES[record.device]
    if shape:
        shapes = tuple(Shape.parse(shape_option) for shape_option in shape)

    # If the benchmark is stopped, its record says which cases (a shape and a data type) were not reached.
    unmeasured = {}
    for measured_shape in shapes:
        for dtype in dtypes:
            unmeasured[f"{measured_shape}, {dtype}"] = "not reached"
    record.print_header(describe_machine(), not_measured=unmeasured)

    settings = Bench(record.device, dtypes, seconds, graph)
    for rows in measure_all(settings, shapes, record.print_progress):
        case = f"{rows[0].shape}, {rows[0].dtype}"
        del unmeasured[case]
        record.add_table(case, rows, partial(_format_cells, graph=graph))


def _format_cells(row: Row, graph: bool) -> dict[str, str]:
    """Return the cells by column title. `graph` adds a column with the time of a captured CUDA graph."""
    graph_cell = {"graph ms": printing.format_number(row.graph_ms)} if graph else {}
    return {
        "competitor": row.competitor,
        "ms": printing.format_number(row.ms),
        **graph_cell,
        "x nn.LSTM": printing.format_number(row.over_lstm),
        "worst error": printing.format_error(row.worst_error),
        "same bits": printing.format_bool(row.deterministic),
    }
