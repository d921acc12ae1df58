"""`reefknot bench translation`: measure training and decoding of translators.

A translator is a row (one experiment) of a recipe. This subcommand parses the options and prints the results;
`lab/bench/translation.py` does the measuring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import RecordFile, RowPatterns, Seconds, load_rows, open_record
from reefknot.lab.cli.options import RECIPE_HELP, Data, Device, Overrides

if TYPE_CHECKING:
    from reefknot.lab.bench.translation import Row

EXAMPLES = """\b
Examples:
  reefknot bench translation --data DIR
  reefknot bench translation pappas2019/multi30k --row TWWT training.batch=32 --json translation.json
"""


def translation(
    recipe: Annotated[
        str | None,
        typer.Argument(help=f"{RECIPE_HELP} [default: pappas2019/multi30k, row TWWT]"),
    ] = None,
    overrides: Overrides = None,
    row: RowPatterns = None,
    seconds: Seconds = 2.0,
    json: RecordFile = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Measure training against nn.Transformer, and beam search against a search without a KV cache.

    If a corpus is not on this machine, the benchmark uses random sentence pairs where that is possible.
    """
    from reefknot.lab.bench.encoders import describe_machine
    from reefknot.lab.bench.translation import DEFAULT_RECIPE, DEFAULT_ROW, build_job, measure_all

    record = open_record("translation", device, json)
    patterns = row
    if not recipe and not row:
        patterns = [DEFAULT_ROW]
    loaded, rows = load_rows(recipe or DEFAULT_RECIPE, overrides, patterns, data)
    jobs = [build_job(loaded, row, data) for row in rows]
    record.print_header(describe_machine(), recipe=loaded.name, overrides=list(overrides or []))
    for description in dict.fromkeys(job.description for job in jobs):
        record.print(description)
    for modes in measure_all(jobs, record.device, seconds, record.print_progress):
        record.add_table(f"{modes[0].row}, {modes[0].what}", modes, _format_cells, hide_empty=True)


def _format_cells(row: Row) -> dict[str, str]:
    """Return the cells by column title. A cell is empty if its value was not measured."""
    return {
        "mode": row.mode,
        "ms": printing.format_number(row.ms),
        "tokens/s": printing.format_integer(row.tokens_per_second),
        "GiB": printing.format_gib(row.memory_bytes),
        "x baseline": printing.format_number(row.over_baseline),
        "same": printing.format_percent(row.same),
    }
