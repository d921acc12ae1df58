"""The results and metrics of runs as flat tables, for CSV files and pandas.

Each table is a list of rows, and a row is a dictionary from column names to numbers, strings and truth values:

    results      one row per run, and one per saved evaluation of it
    metrics      one row per line of metrics.jsonl
    frequency    one row per frequency band of the test text

    rows = result_rows(load_run("runs/demo/tied/seed0"))
    to_csv(rows)

A column of results or metrics is named after the field of `result.json` or `metrics.jsonl` that it shows, with dots for
nested fields, such as `test.perplexity`. Columns that start with `settings.` are the settings of the run. Lists and
long descriptions are left out. docs/results.md documents the fields.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reefknot.errors import SettingsError
from reefknot.extras import import_extra
from reefknot.lab.runs.loading import Result, flatten, load_run
from reefknot.lab.runs.result import RunResult

if TYPE_CHECKING:
    import pandas as pd

    from reefknot.lab.runs.folder import RunFolder

Row = dict[str, Any]

_LONG_FIELDS = {"describe", "definition", "bleu_signature", "chrf_signature"}
"""Fields that are left out of tables, because they are descriptions for people."""
_SETTINGS = "settings."
"""Prefix of the columns that show the settings of a run."""


def to_pandas(run: RunFolder, table: str) -> pd.DataFrame:
    """Return a table of a finished run as a pandas DataFrame.

    Args:
        run: The run folder, or the folder of its record.
        table: One of `TABLES`.
    """
    if table not in TABLES:
        raise SettingsError(f"there is no table '{table}'; the tables of a run are {', '.join(TABLES)}")
    pandas = import_extra("pandas", "to_pandas")
    result = load_run(run.path)
    if result.record is None:
        raise SettingsError(f"{run.path} is not finished, so it has no results yet; finish its training first")
    rows = TABLES[table](result)
    frame: pd.DataFrame = pandas.DataFrame(rows, columns=list_columns(rows))
    return frame


def result_rows(run: Result) -> list[Row]:
    """Return the row of a run, and a row for each of its saved evaluations.

    The column `mode` is `plain` for the scores of training, and otherwise the name of the evaluation. A row of an
    evaluation has the scores of the evaluation and everything else of its run. The scores of another text are in
    columns that start with `other.`, and `other.text.split` is the name of the text.
    """
    settings = {f"{_SETTINGS}{key}": value for key, value in _flatten(run.settings).items()}
    origin: Row = {"run": str(run.folder), "recipe": run.recipe, "row": run.row, "seed": run.seed}
    if run.record is None:
        return [{**origin, "mode": "plain", "finished": False, **settings}]

    fields = _flatten_result(run.record)
    rows = [{**origin, "mode": "plain", "finished": True, **fields, **settings}]
    without_scores = {name: value for name, value in fields.items() if not _is_score(name)}
    for kind, evaluation in {**run.evaluations, **run.texts}.items():
        scores = {name: value for name, value in _flatten(evaluation.record()).items() if _is_score(name)}
        rows.append({**origin, "mode": kind, "finished": True, **without_scores, **scores, **settings})
    return rows


def metrics_rows(run: Result) -> list[Row]:
    """Return one row per line of metrics."""
    origin: Row = {"run": str(run.folder), "recipe": run.recipe, "row": run.row, "seed": run.seed}
    return [origin | _flatten(line.record()) for line in run.metrics]


def frequency_rows(run: Result) -> list[Row]:
    """Return one row per frequency band. `position` says whose training count selects the band."""
    if run.record is None:
        return []
    origin: Row = {"run": str(run.folder), "recipe": run.recipe, "row": run.row, "seed": run.seed}
    rows = []
    for position in ("target", "previous"):
        for band in getattr(run.record.frequency, position):
            rows.append({**origin, "position": position, **band.record()})
    return rows


TABLES = {"results": result_rows, "metrics": metrics_rows, "frequency": frequency_rows}
"""The function that makes the rows of each table."""


def list_columns(rows: Iterable[Row]) -> list[str]:
    """Return the columns of all rows in the order in which they first appear. Settings come last."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return sorted(names, key=lambda name: name.startswith(_SETTINGS))


def to_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV with a header. A row that does not have a column has an empty cell."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list_columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _flatten_result(record: RunResult) -> Row:
    """Return the fields of a result that are single values, and the changed settings and correlations as text."""
    content = record.record()
    for name in ("format", "recipe", "row", "seed"):
        content.pop(name)
    fields = _flatten(content)
    if record.changed:
        fields["changed"] = "; ".join(map(str, record.changed))
    for end in record.similarity:
        for benchmark, score in record.similarity_scores(end).items():
            fields[f"similarity.{end}.{benchmark}"] = score.value
    return fields


def _is_score(name: str) -> bool:
    """Return whether a column has a score of a text, which differs between evaluations."""
    return name.split(".")[0] in ("valid", "test", "other", "translation", "protocol")


def _flatten(content: Mapping[str, Any]) -> Row:
    """Return the single values of nested dictionaries by dotted name. Lists and long descriptions are left out."""
    row: Row = {}
    for name, value in flatten(content).items():
        _, _, field = name.rpartition(".")
        if not isinstance(value, list | tuple | Mapping) and field not in _LONG_FIELDS:
            row[name] = value
    return row
