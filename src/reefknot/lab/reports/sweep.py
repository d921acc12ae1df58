"""A sweep: one row of a recipe with several settings, judged on the validation text alone.

Whoever chooses settings by test figures has no test left. So a sweep's rows carry none, whatever is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from reefknot.lab.reports.results import Result, Spread, load
from reefknot.lab.reports.rows import TableRow, comparable, judged_by
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.result import Frequency, Neighbors, RunResult, Translations
from reefknot.lab.runs.scores import BLEU, PERPLEXITY


@dataclass(frozen=True)
class Trial:
    """One combination of settings and the folders of its runs, one per seed."""

    name: str
    settings: Mapping[str, Any]
    """By dotted key: those that the sweep varies."""
    runs: tuple[Path, ...]

    def row(self) -> TableRow:
        """The trial with those of its runs that have begun, test figures included."""
        begun = tuple(load(run) for run in self.runs if (run / "config.json").is_file())
        return TableRow(self.name, results=begun)


def rank(trials: Sequence[Trial]) -> list[tuple[Trial, TableRow]]:
    """The trials that have begun, lowest validation perplexity first (of translators, the highest BLEU), then those
    without one; test figures withheld.

    One that cannot be compared with the others, for its vocabulary say, comes after those that can.
    """
    rows = [(trial, row) for trial in trials if (row := trial.row()).results]
    common = _shared([record for _, row in rows for record in row.records])
    told = [
        (trial, replace(row, results=tuple(_withhold(result, common) for result in row.results))) for trial, row in rows
    ]
    metric = judged_by([row for _, row in told])
    fair = comparable([row for _, row in told])

    def order(pair: tuple[Trial, TableRow]) -> tuple[bool, bool, float]:
        figure = pair[1].figure(metric, "valid")
        return (
            figure is None,
            metric == PERPLEXITY and pair[1] not in fair,
            metric.sign * figure.mean if figure else 0.0,
        )

    return sorted(told, key=order)


def summary(ranked: Sequence[tuple[Trial, TableRow]], root: Path) -> list[dict[str, Any]]:
    """What sweep.json says of each trial, in the same order."""
    return [
        {
            "settings": dict(trial.settings),
            "runs": [run.relative_to(root).as_posix() for run in trial.runs],
            "valid": figures(row.figure(PERPLEXITY, "valid")),
            **({"bleu_valid": figures(bleu)} if (bleu := row.figure(BLEU, "valid")) else {}),
            "epochs": row.epochs,
            "seconds": figures(Spread.of(record.training.seconds for record in row.records)),
            "seconds_per_epoch": figures(Spread.of(result.seconds_per_epoch for result in row.results)),
        }
        for trial, row in ranked
    ]


def figures(value: Spread | None) -> dict[str, Any] | None:
    """A mean over seeds as sweep.json has it."""
    return asdict(value) if value else None


def _shared(records: Sequence[RunResult]) -> tuple[Change, ...]:
    """Changes of the recipe that every trial has: those it is not named for."""
    first = records[0].changed if records else ()
    return tuple(change for change in first if all(change in record.changed for record in records))


def _withhold(result: Result, changed: tuple[Change, ...]) -> Result:
    """The run without its test figures, and without what is looked at in a model that was chosen already."""
    result = replace(result, evaluations={})
    if result.record is None:
        return result
    protocol, told = result.record.protocol, result.record.translation
    kept: dict[str, Any] = {
        "test": None,
        "protocol": protocol.replace(test=None) if protocol else None,
        "paper": {},
        "changed": changed,
        "frequency": Frequency(),
        "neighbors": Neighbors(),
        "samples": (),
        "translation": told and Translations(valid=told.valid),
    }
    return replace(result, record=result.record.replace(**kept))
