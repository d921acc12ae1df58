"""`reefknot figure`: measure a figure of a paper on the user's runs, and draw it.

`lab/papers/figures/` has one module per figure. This subcommand chooses the runs, asks the figure to measure them, and
writes the table, the picture and the record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.bench.record import check_output_file
from reefknot.lab.cli.options import DataOption, DeviceOption, reject_options, user_options

if TYPE_CHECKING:
    from reefknot.lab.papers.figures.contract import Figure, Measurements

EXAMPLES = """\b
Examples:
  reefknot figure                                            # list all figures
  reefknot figure inan2017/2 -o figure2.svg                  # from runs/inan2017/table1
  reefknot figure baevski2019/2 results/baevski2019/enwiki   # from other runs, or from records of runs
  reefknot figure press2017/table3 RUN RUN -o table3.png --json table3.json
"""

SUFFIXES = (".svg", ".png", ".html")


def figure(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Name of a figure, such as inan2017/1. [default: list all figures]")
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders that hold runs. [default: the runs of the figure's recipe]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Draw the figure in this .svg, .png or .html file.", show_default=False),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the measurements to this JSON file.", show_default=False)
    ] = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Reproduce a figure of a paper with your runs.

    The measurements are printed as a table, next to the paper's numbers. Use -o to draw the figure.
    """
    from reefknot.errors import SettingsError
    from reefknot.storage.files import write_json

    if name is None:
        options = user_options(ctx)
        if options:
            raise SettingsError(
                f"{', '.join(options.values())}: no figure is given; pass its name (`reefknot figure` lists them)"
            )
        _list_figures()
        return
    _check_output_files(output, json)

    from reefknot.lab.papers.figures import open_figure
    from reefknot.lab.papers.figures.record import build_record
    from reefknot.lab.papers.figures.runs import select_runs
    from reefknot.lab.training.distributed import choose_device

    # Open the figure and choose the runs.
    paper_figure = open_figure(name)
    unused_options = {"data", "device"} - set(paper_figure.options)
    inputs = paper_figure.needs or "results and metrics only"
    reject_options(ctx, unused_options, f"on {name}, which reads {inputs}; leave {{option}} out")
    selection = select_runs(paper_figure, runs or [])
    for note in selection.notes:
        typer.echo(f"{name}: {note}", err=True)

    # Measure and print.
    measurements = paper_figure.measure(selection.runs, data=data, device=choose_device(device))
    typer.echo(f"{paper_figure.title}\n{paper_figure.description}\n")
    typer.echo("\n".join(paper_figure.format_lines(measurements)))
    if json is not None:
        write_json(json, build_record(paper_figure, measurements, selection.runs, selection.notes))
        typer.echo(f"record: {json.resolve()}")
    if output is not None:
        _write_figure(output, paper_figure, measurements, selection.notes)
        typer.echo(f"figure: {output.resolve()}")


def _list_figures() -> None:
    """Print the name and the title of every figure, and what it reads besides results."""
    from reefknot.lab.papers.figures import FIGURES, open_figure

    for name in FIGURES:
        figure = open_figure(name)
        inputs = f" (reads {figure.needs})" if figure.needs else ""
        typer.echo(f"{name:<20} {figure.title}{inputs}")


def _check_output_files(output: Path | None, json: Path | None) -> None:
    """Raise an error if an output file cannot be written. Called before anything is measured."""
    from reefknot.errors import SettingsError

    if output is not None and output.suffix not in SUFFIXES:
        raise SettingsError(f"-o {output}: must end with {', '.join(SUFFIXES)}")
    check_output_file("-o", output)
    check_output_file("--json", json)


def _write_figure(path: Path, figure: Figure, measurements: Measurements, notes: list[str]) -> None:
    """Draw a figure in a file. The suffix of the file decides the format."""
    from reefknot.lab.papers.figures.section import render_page
    from reefknot.storage.files import write_bytes, write_text

    if path.suffix == ".png":
        write_bytes(path, figure.draw(measurements).png)
    elif path.suffix == ".svg":
        write_text(path, figure.draw(measurements).svg_file)
    else:
        write_text(path, render_page(figure, measurements, notes))
