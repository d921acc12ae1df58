"""`reefknot report`: one HTML page about some runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reefknot.cli.options import AsJson, Data, emit

EXAMPLES = """\b
Examples:
  reefknot report runs/demo -o demo.html
  reefknot report runs/demo/tied/seed0 runs/demo/untied/seed0
  reefknot report runs/press2017 --figures --data DIR
"""


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold runs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Reefknot report",
    figures: Annotated[
        bool, typer.Option("--figures", help="Also the papers' figures that open weights or losses of the runs.")
    ] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page: table, the papers' figures, curves, neighbours, samples, settings."""
    from reefknot.figures.section import sections
    from reefknot.recipe import load_recipe
    from reefknot.recipes import shipped
    from reefknot.reports.page import write_report
    from reefknot.reports.results import collect
    from reefknot.reports.rows import join, name_recipes
    from reefknot.reports.table import from_recipe

    results = collect(runs)
    known = [name for name in shipped() if any(result.recipe == name for result in results)]
    # In the order of their recipe; what it lists beside them is the business of `table`.
    listed = [row for name in known for row in from_recipe(load_recipe(name).rows, name)]
    rows = name_recipes(row for row in join(listed, results) if row.results)
    made, left_out = sections(results, weights=figures, data=data)
    for note in left_out:
        typer.echo(note, err=True)
    page = write_report(results, output, rows=rows, title=title, sections=made).resolve()
    emit({"report": str(page), "runs": len(results)}, f"report: {page}", as_json)
