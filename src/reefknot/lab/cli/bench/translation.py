"""`reefknot bench translation`: measure training and decoding of translators.

A translator is a row (one experiment) of a recipe. This subcommand parses the options and prints the results;
`lab/bench/translation.py` does the measuring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import RecordFileOption, RowPatternsOption, SecondsOption, load_rows, open_record
from reefknot.lab.cli.options import RECIPE_HELP, DataOption, DeviceOption, OverridesArgument

if TYPE_CHECKING:
    from reefknot.lab.bench.translation import ModeMeasurement

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
    overrides: OverridesArgument = None,
    row: RowPatternsOption = None,
    seconds: SecondsOption = 2.0,
    json: RecordFileOption = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
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
    loaded_recipe, recipe_rows = load_rows(recipe or DEFAULT_RECIPE, overrides, patterns, data)
    jobs = [build_job(loaded_recipe, recipe_row, data) for recipe_row in recipe_rows]
    record.print_header(describe_machine(), recipe=loaded_recipe.name, overrides=list(overrides or []))
    for description in dict.fromkeys(job.description for job in jobs):
        record.print(description)

    # Print two tables per row, training and decoding, with one line per mode.
    for measurements in measure_all(jobs, record.device, seconds, record.print_progress):
        heading = f"{measurements[0].row}, {measurements[0].what}"
        record.add_table(heading, measurements, _format_cells, hide_empty=True)


def _format_cells(row: ModeMeasurement) -> dict[str, str]:
    """Return the cells by column title. A cell is empty if its value was not measured."""
    return {
        "mode": row.mode,
        "ms": printing.format_number(row.ms),
        "tokens/s": printing.format_integer(row.tokens_per_second),
        "GiB": printing.format_gib(row.memory_bytes),
        "x baseline": printing.format_number(row.over_baseline),
        "same": printing.format_percent(row.same),
    }
