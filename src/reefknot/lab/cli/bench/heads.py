"""`reefknot bench heads`: measure the output layers of language models, in reefknot and in other packages.

An output end is a classifier with its loss. This subcommand parses the options and prints the results;
`lab/bench/heads.py` does the measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import (
    GraphOption,
    RecordFileOption,
    SecondsOption,
    check_gpu_options,
    check_memory,
    check_names,
    open_record,
)
from reefknot.lab.cli.options import DeviceOption

if TYPE_CHECKING:
    from reefknot.lab.bench.heads import Row

EXAMPLES = """\b
Examples:
  reefknot bench heads
  reefknot bench heads --end plain --shape 2048,256,50000 --competitor reefknot --competitor eager
  reefknot bench heads --end plain --shape 8192,1024,267735 --memory 128 --memory 1024
  reefknot bench heads --end softcap --end log_probs --end distil --shape 512,128,20000
  reefknot bench heads --vocabulary --json sweep.json     # from 10 K to 1 M words
"""


def heads(
    end: Annotated[
        list[str] | None,
        typer.Option(
            help="Output end (classifier and loss) to measure: plain, adaptive, augmented, augmented-detached, "
            "mixture, drill, softcap (capped scores), log_probs (log-probabilities and entropies) or distil "
            "(divergence from a teacher). Can be repeated. [default: all]"
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape to measure: N,D,V for the numbers of hidden states, dimensions and classes. Can be repeated. "
            "[default: several shapes per end]"
        ),
    ] = None,
    competitor: Annotated[
        list[str] | None,
        typer.Option(
            help="Implementation to measure: reefknot, eager, compile, torch, trl, liger, quack or cce. Can be "
            "repeated. [default: all]"
        ),
    ] = None,
    vocabulary: Annotated[
        bool, typer.Option("--vocabulary", help="Measure vocabularies of 10 K to 1 M words instead of shapes.")
    ] = False,
    weights: Annotated[str | None, typer.Option(help="Data type of the weights: float32 or bfloat16.")] = None,
    memory: Annotated[
        list[float] | None,
        typer.Option(
            help="Also measure reefknot with this working memory, in MiB. Can be repeated. "
            "[default: 256 on a GPU, 32 on a CPU]"
        ),
    ] = None,
    seconds: SecondsOption = 2.0,
    graph: GraphOption = False,
    json: RecordFileOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure the output ends: time, memory, gradient error, and whether results are reproducible bit for bit."""
    from reefknot.lab.bench.competitors import FAMILIES
    from reefknot.lab.bench.heads import LOW_MEMORY_MIB, Bench, choose_cases, describe_machine, measure_all
    from reefknot.lab.bench.measure import SUSTAINED_SECONDS
    from reefknot.lab.bench.problems import ENDS, Shape
    from reefknot.lab.training.throughput import measure_matrix_rate

    # Check the options.
    check_names("--end", end or [], ENDS)
    check_names("--competitor", competitor or [], FAMILIES)
    check_names("--weights", [weights] if weights else [], ("float32", "bfloat16"))
    check_memory(memory or [], competitor or FAMILIES)
    _check_vocabulary(vocabulary, end or [], shape or [])
    record = open_record("heads", device, json)
    check_gpu_options(record, weights, graph)
    memory_budgets = memory or (LOW_MEMORY_MIB[record.device],)
    settings = Bench(record.device, competitor or FAMILIES, weights, memory_budgets, seconds, graph)
    shapes = [Shape.parse(shape_option) for shape_option in shape or []]
    ends_and_shapes = choose_cases(record.device, end or [], shapes, vocabulary)

    # Measure how fast the device multiplies large matrices, and print the header.
    rate = measure_matrix_rate(record.device, settings.dtype, 2 * SUSTAINED_SECONDS)
    machine = describe_machine(settings, rate)
    notes = [machine["dtype"], f"{machine['matrix_tflops']:,.3g} TFLOP/s in large products"]
    record.print_header(machine, notes, vocabulary=vocabulary)

    # Measure and print one table per end and shape.
    for rows in measure_all(settings, rate, ends_and_shapes, record.print_progress):
        first_row = rows[0]
        heading = f"{first_row.end}, {first_row.shape}: floor {printing.format_number(first_row.floor_ms)} ms"
        # Only some ends are compared with the time of the matrix products alone.
        record.add_table(heading, rows, partial(_format_cells, graph=graph), hide_empty=True)


def _check_vocabulary(vocabulary: bool, ends: Sequence[str], shapes: Sequence[str]) -> None:
    """Raise an error if --vocabulary contradicts the ends or shapes."""
    from reefknot.errors import SettingsError
    from reefknot.lab.bench.heads import SWEEP_ENDS

    if not vocabulary:
        return
    if shapes:
        raise SettingsError("--shape has no effect with --vocabulary, which chooses the shapes; leave --shape out")
    check_names("--vocabulary --end", ends, SWEEP_ENDS)


def _format_cells(row: Row, graph: bool) -> dict[str, str]:
    """Return the cells by column title. `graph` adds a column with the time of a captured CUDA graph."""
    graph_cell = {"graph ms": printing.format_number(row.graph_ms)} if graph else {}
    return {
        "competitor": row.competitor,
        "ms": printing.format_number(row.ms),
        "x floor": printing.format_number(row.over_floor),
        "x products": printing.format_number(row.over_products),
        "over MiB": printing.format_number(row.over_mib),
        "worst error": printing.format_error(row.worst_error),
        "same bits": printing.format_bool(row.deterministic),
        **graph_cell,
    }
