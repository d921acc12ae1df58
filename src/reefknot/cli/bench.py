"""`reefknot bench`: our ends beside everyone else's, measured here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.cli.options import Device

if TYPE_CHECKING:
    from reefknot.benchmarks.heads import Row

EXAMPLES = """\b
Examples:
  reefknot bench heads                                    every end, at the sizes of this machine
  reefknot bench heads --end plain --shape 2048,256,50000 --competitor reefknot --competitor eager
  reefknot bench heads --vocabulary --json sweep.json     cost against the vocabulary, 10 K to 1 M words
"""


def bench(
    what: Annotated[str, typer.Argument(help="What to measure: heads.")],
    end: Annotated[
        list[str] | None, typer.Option(help="plain, adaptive, augmented, augmented-detached, mixture or drill.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="N,D,V: rows, width, classes.")] = None,
    competitor: Annotated[list[str] | None, typer.Option(help="reefknot, eager, compile, torch, liger or cce.")] = None,
    vocabulary: Annotated[bool, typer.Option("--vocabulary", help="Sweep the vocabulary instead.")] = False,
    weights: Annotated[str | None, typer.Option(help="float32 or bfloat16; float32 on a GPU: autocast.")] = None,
    memory: Annotated[list[float] | None, typer.Option(help="MiB of working memory for a row of ours.")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Timing per competitor.")] = 2.0,
    graph: Annotated[bool, typer.Option("--graph", help="Also time a captured CUDA graph.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.", show_default=False)] = None,
    device: Device = "auto",
) -> None:
    """Measure output ends against other implementations: time, memory, gradient error. Options can be repeated."""
    from rich.console import Console

    from reefknot.benchmarks.heads import FAMILIES, LEAN, SWEPT, Bench, cases, facts, measure_all
    from reefknot.benchmarks.measure import matrix_rate
    from reefknot.benchmarks.problems import ENDS, Shape
    from reefknot.durable import write_json
    from reefknot.errors import SettingsError
    from reefknot.experiments import choose_device
    from reefknot.runs.environment import capture

    _check_names("bench", [what], ["heads"])
    _check_names("--end", end or [], ENDS)
    _check_names("--competitor", competitor or [], FAMILIES)
    _check_names("--weights", [weights] if weights else [], ("float32", "bfloat16"))
    for budget in memory or ():
        if not budget > 0:
            raise SettingsError(f"--memory {budget:g}: must be a number of MiB above 0")
    if vocabulary and shape:
        raise SettingsError("--vocabulary chooses its own shapes; leave out --shape")
    if vocabulary:
        _check_names("--vocabulary --end", end or [], SWEPT)
    if json is not None and (json.is_dir() or not json.resolve().parent.is_dir()):
        fault = "is a folder; name a file" if json.is_dir() else f"there is no folder {json.resolve().parent}"
        raise SettingsError(f"--json {json}: {fault}")
    place = choose_device(device)
    if place == "cpu" and (weights == "bfloat16" or graph):
        raise SettingsError(f"--{'graph' if graph else 'weights bfloat16'} needs a GPU; torch sees none here")
    setup = Bench(place, competitor or FAMILIES, weights, memory or (LEAN[place],), seconds, graph)
    chosen = cases(place, end or (), [Shape.read(text) for text in shape or ()], vocabulary)
    environment = capture()
    rate = matrix_rate(place, setup.dtype)
    machine = {"device": environment["cpu"] if place == "cpu" else environment["gpus"][0], **facts(setup, rate)}
    console = Console()
    console.print(_headline(machine), highlight=False, soft_wrap=True)
    rows = []
    for found in measure_all(setup, rate, chosen, lambda line: typer.echo(line, err=True)):
        _print_case(found, console, graph)
        rows += [row.record() for row in found]
        if json is not None:
            # After every case, so that a run which is stopped leaves what it measured.
            write_json(json, {"machine": machine, "environment": environment, "vocabulary": vocabulary, "rows": rows})


def _check_names(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    from reefknot.errors import SettingsError

    for name in given:
        if name not in known:
            raise SettingsError(f"{option} {name}: must be {' or '.join(known)}")


def _headline(machine: dict[str, Any]) -> str:
    triton = f"triton {machine['triton']}" if machine["triton"] else "no triton"
    rate = f"{machine['matrix_tflops']:,.3g} TFLOP/s in large products"
    return ", ".join([machine["device"], f"torch {machine['torch']}", triton, machine["dtype"], rate])


def _print_case(rows: Sequence[Row], console: Any, graph: bool) -> None:
    """One table for an end and a shape; below it, who did not take part and why."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    first = rows[0]
    console.print(f"\n{first.end}, {first.shape}: floor {_figure(first.floor_ms)} ms", highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("competitor", no_wrap=True)
    titles = ["ms", "x floor", "over MiB", "worst error", "same bits", *(["graph ms"] if graph else [])]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        if row.ms is not None:
            same = {True: "yes", False: "no", None: ""}[row.deterministic]
            cells = [_figure(row.ms), _figure(row.over_floor), _figure(row.over_mib), _error(row.worst_error), same]
            table.add_row(row.competitor, *cells, *([_figure(row.graph_ms)] if graph else []))
    if table.row_count:
        console.print(table)
    for note in dict.fromkeys(row.note for row in rows if row.note):
        names = ", ".join(row.competitor for row in rows if row.note == note)
        console.print(f"{names}: {note}", highlight=False, markup=False)


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
