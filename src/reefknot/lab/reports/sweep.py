"""A sweep: one row of a recipe with several settings, judged on the validation text alone.

Settings that are chosen by test scores leave no unbiased test. So the rows of a sweep have no test scores.
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
    """The settings that the sweep varies, by dotted key."""
    runs: tuple[Path, ...]

    def row(self) -> TableRow:
        """Return the trial as a row with the runs that have begun, including test scores."""
        existing_run = tuple(load(run) for run in self.runs if (run / "config.json").is_file())
        return TableRow(self.name, results=existing_run)


def rank(trials: Sequence[Trial]) -> list[tuple[Trial, TableRow]]:
    """Return the trials that have begun, without test scores, best first.

    Trials are ranked by the lowest validation perplexity, or the highest BLEU for translators. Trials that cannot be
    compared with the others, for example because of their vocabulary, follow; trials without a score come last.
    """
    rows = [(trial, row) for trial in trials if (row := trial.row()).results]
    common = _shared([record for _, row in rows for record in row.records])
    withheld = [
        (trial, replace(row, results=tuple(_withhold(result, common) for result in row.results))) for trial, row in rows
    ]
    metric = judged_by([row for _, row in withheld])
    fair = comparable([row for _, row in withheld])

    def order(pair: tuple[Trial, TableRow]) -> tuple[bool, bool, float]:
        figure = pair[1].figure(metric, "valid")
        return (
            figure is None,
            metric == PERPLEXITY and pair[1] not in fair,
            metric.sign * figure.mean if figure else 0.0,
        )

    return sorted(withheld, key=order)


def summary(ranked: Sequence[tuple[Trial, TableRow]], root: Path) -> list[dict[str, Any]]:
    """Return the entries of sweep.json, one for each trial, in the same order."""
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
    """Return a mean over seeds in the format of sweep.json."""
    return asdict(value) if value else None


def _shared(records: Sequence[RunResult]) -> tuple[Change, ...]:
    """Return the changes of the recipe that all trials share, which are not part of their names."""
    first = records[0].changed if records else ()
    return tuple(change for change in first if all(change in record.changed for record in records))


def _withhold(result: Result, changed: tuple[Change, ...]) -> Result:
    """Return the run without test scores, and without the parts that describe a final model."""
    result = replace(result, evaluations={})
    if result.record is None:
        return result
    protocol, translation = result.record.protocol, result.record.translation
    withheld: dict[str, Any] = {
        "test": None,
        "protocol": protocol.replace(test=None) if protocol else None,
        "paper": {},
        "changed": changed,
        "frequency": Frequency(),
        "neighbors": Neighbors(),
        "samples": (),
        "translation": translation and Translations(valid=translation.valid),
    }
    return replace(result, record=result.record.replace(**withheld))
