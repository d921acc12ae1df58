"""`reefknot bench translation`: measure training and decoding of a recipe's translators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import RecordFile, Seconds, open_record
from reefknot.lab.cli.options import Data, Device, Overrides

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
        typer.Argument(
            help="A shipped recipe (see `reefknot ls`) or the path of a TOML file. "
            "[default: pappas2019/multi30k, row TWWT]"
        ),
    ] = None,
    overrides: Overrides = None,
    row: Annotated[
        list[str] | None,
        typer.Option(help="Row to measure, or a pattern with * for several rows. Can be repeated."),
    ] = None,
    seconds: Seconds = 2.0,
    json: RecordFile = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Measure translators: training next to nn.Transformer, and beam search next to a search without a KV cache.

    If a corpus is not on this machine, random pairs replace its text where that is possible.
    """
    from reefknot.lab.bench.encoders import facts
    from reefknot.lab.bench.translation import RECIPE, ROW, job_of, measure_all
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.recipes.recipe import load_recipe

    record = open_record("translation", device, json)
    name = recipe or RECIPE
    rows = row or ([] if recipe else [ROW])
    loaded = load_recipe(name, overrides or [], rows or None, alone=True)
    chosen = [row for row in loaded.rows if row.trained]
    check_data(data, [loaded.experiments[row.name].corpus.name for row in chosen], name)
    jobs = [job_of(loaded, row, data) for row in chosen]
    record.begin(facts(), recipe=loaded.name, overrides=list(overrides or []))
    for description in dict.fromkeys(job.description for job in jobs):
        record.print(description)
    for measured in measure_all(jobs, record.device, seconds, record.progress):
        record.print(f"\n{measured[0].row}, {measured[0].what}")
        cells = [_cells(row) for row in measured if row.ms is not None]
        printing.print_cells(cells, [(row.mode, row.note) for row in measured])
        record.add(row.record() for row in measured)


def _cells(row: Row) -> dict[str, str]:
    """Return the row by column title; a cell is empty if its value was not measured."""
    return {
        "mode": row.mode,
        "ms": printing.number(row.ms),
        "tokens/s": printing.whole(row.tokens_per_second),
        "GiB": printing.gib(row.memory_bytes),
        "x baseline": printing.number(row.over_baseline),
        "same": printing.percent(row.same),
    }
