"""`reefknot bench heads`: measure our output ends next to other implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import Graph, RecordFile, Seconds, check_gpu_options, check_names, open_record
from reefknot.lab.cli.options import Device

if TYPE_CHECKING:
    from reefknot.lab.bench.heads import Row

EXAMPLES = """\b
Examples:
  reefknot bench heads
  reefknot bench heads --end plain --shape 2048,256,50000 --competitor reefknot --competitor eager
  reefknot bench heads --end plain --shape 8192,1024,267735 --memory 128 --memory 1024
  reefknot bench heads --vocabulary --json sweep.json     # from 10 K to 1 M words
"""


def heads(
    end: Annotated[
        list[str] | None,
        typer.Option(
            help="Output end to measure: plain, adaptive, augmented, augmented-detached, mixture or drill. Can be "
            "repeated. [default: all]"
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape to measure: N,D,V for rows, dimension and classes. Can be repeated. [default: several per end]"
        ),
    ] = None,
    competitor: Annotated[
        list[str] | None,
        typer.Option(
            help="Implementation to measure: reefknot, eager, compile, torch, liger or cce. Can be repeated. "
            "[default: all]"
        ),
    ] = None,
    vocabulary: Annotated[
        bool, typer.Option("--vocabulary", help="Measure a range of vocabulary sizes instead of shapes.")
    ] = False,
    weights: Annotated[str | None, typer.Option(help="Type of the weights: float32 or bfloat16.")] = None,
    memory: Annotated[
        list[float] | None,
        typer.Option(help="Working memory of reefknot in MiB. Can be repeated. [default: 256 on a GPU, 32 on a CPU]"),
    ] = None,
    seconds: Seconds = 2.0,
    graph: Graph = False,
    json: RecordFile = None,
    device: Device = "auto",
) -> None:
    """Measure the output ends: time, memory, gradient error, and whether results repeat bit for bit."""
    from reefknot.errors import SettingsError
    from reefknot.lab.bench.heads import FAMILIES, LEAN, SWEPT, Bench, cases, facts, measure_all
    from reefknot.lab.bench.measure import SUSTAINED
    from reefknot.lab.bench.problems import ENDS, Shape
    from reefknot.lab.training.throughput import measure_matrix_rate

    check_names("--end", end or [], ENDS)
    check_names("--competitor", competitor or [], FAMILIES)
    check_names("--weights", [weights] if weights else [], ("float32", "bfloat16"))
    for budget in memory or []:
        if not budget > 0:
            raise SettingsError(f"--memory {budget:g}: must be a number of MiB above 0")
    if memory and competitor and "reefknot" not in competitor:
        raise SettingsError(
            "--memory has no effect without --competitor reefknot; add this competitor or leave --memory out"
        )
    if vocabulary and shape:
        raise SettingsError("--shape has no effect with --vocabulary, which chooses the shapes; leave --shape out")
    if vocabulary:
        check_names("--vocabulary --end", end or [], SWEPT)
    record = open_record("heads", device, json)
    check_gpu_options(record, weights, graph)
    lean = (LEAN[record.device],)
    setup = Bench(record.device, competitor or FAMILIES, weights, memory or lean, seconds, graph)
    chosen = cases(record.device, end or [], [Shape.read(text) for text in shape or []], vocabulary)
    rate = measure_matrix_rate(record.device, setup.dtype, 2 * SUSTAINED)
    machine = facts(setup, rate)
    notes = [machine["dtype"], f"{machine['matrix_tflops']:,.3g} TFLOP/s in large products"]
    record.begin(machine, notes, vocabulary=vocabulary)
    for rows in measure_all(setup, rate, chosen, record.progress):
        record.print(f"\n{rows[0].end}, {rows[0].shape}: floor {printing.number(rows[0].floor_ms)} ms")
        titles = ["competitor", "ms", "x floor", "over MiB", "worst error", "same bits"]
        titles += ["graph ms"] if graph else []
        lines = [_line(row, graph) for row in rows if row.ms is not None]
        printing.print_numbers(titles, lines, [(row.competitor, row.note) for row in rows])
        record.add(row.record() for row in rows)


def _line(row: Row, graph: bool) -> list[str]:
    return [
        row.competitor,
        printing.number(row.ms),
        printing.number(row.over_floor),
        printing.number(row.over_mib),
        printing.error(row.worst_error),
        printing.yes_or_no(row.deterministic),
        *([printing.number(row.graph_ms)] if graph else []),
    ]
