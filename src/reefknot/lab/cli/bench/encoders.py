"""`reefknot bench encoders`: measure our masked recurrences next to nn.LSTM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import Graph, RecordFile, Seconds, check_gpu_options, check_names, open_record
from reefknot.lab.cli.options import Device

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
            help="Shape to measure: B,T,D-H-H for streams, steps, and the dimensions of the input and of every "
            "layer. Can be repeated. [default: several]"
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Type of the matrix products: float32, bfloat16 or tf32. [default: all]")
    ] = None,
    seconds: Seconds = 2.0,
    graph: Graph = False,
    json: RecordFile = None,
    device: Device = "auto",
) -> None:
    """Measure the recurrent encoders: time, gradient error, and whether results repeat bit for bit."""
    from reefknot.lab.bench.encoders import DTYPES, SHAPES, Bench, Shape, facts, measure_all

    check_names("--weights", [weights] if weights else [], ("float32", "bfloat16", "tf32"))
    record = open_record("encoders", device, json)
    check_gpu_options(record, weights, graph)
    setup = Bench(record.device, (weights,) if weights else DTYPES[record.device], seconds, graph)
    shapes = [Shape.read(text) for text in shape or []] or SHAPES[record.device]
    # If the benchmark is stopped, its record says which cases were not reached.
    unmeasured = {f"{shape}, {dtype}": "not reached" for shape in shapes for dtype in setup.dtypes}
    record.begin(facts(), not_measured=unmeasured)
    for rows in measure_all(setup, shapes, record.progress):
        case = f"{rows[0].shape}, {rows[0].dtype}"
        del unmeasured[case]
        record.print(f"\n{case}")
        titles = ["competitor", "ms", *(["graph ms"] if graph else []), "x nn.LSTM", "worst error", "same bits"]
        lines = [_line(row, graph) for row in rows if row.ms is not None]
        printing.print_numbers(titles, lines, [(row.competitor, row.note) for row in rows])
        record.add(row.record() for row in rows)


def _line(row: Row, graph: bool) -> list[str]:
    return [
        row.competitor,
        printing.number(row.ms),
        *([printing.number(row.graph_ms)] if graph else []),
        printing.number(row.over_lstm),
        printing.error(row.worst_error),
        printing.yes_or_no(row.deterministic),
    ]
