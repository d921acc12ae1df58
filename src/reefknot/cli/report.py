"""`reefknot report`: one HTML page about some runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reefknot.cli.options import AsJson, emit

EXAMPLES = """\b
Examples:
  reefknot report runs/demo -o demo.html
  reefknot report runs/demo/tied/seed0 runs/demo/untied/seed0
"""


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold runs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Reefknot report",
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page: table, curves, loss by frequency, neighbours, samples, settings."""
    from reefknot.reports.page import write_report
    from reefknot.reports.results import collect

    results = collect(runs)
    page = write_report(results, output, title=title).resolve()
    emit({"report": str(page), "runs": len(results)}, f"report: {page}", as_json)
