"""A sweep: one row of a recipe, trained with several settings and ranked by validation scores alone.

If settings were chosen by test scores, the test score of the best would be biased. So the rows of a sweep have no test
scores.
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
    """Values of the settings that the sweep varies, by dotted key."""
    runs: tuple[Path, ...]

    def row(self) -> TableRow:
        """Return the trial as a row of a table, with the runs that have begun and their test scores."""
        existing_run = tuple(load(run) for run in self.runs if (run / "config.json").is_file())
        return TableRow(self.name, results=existing_run)


def rank(trials: Sequence[Trial]) -> list[tuple[Trial, TableRow]]:
    """Return the trials that have begun, without test scores, best first.

    The best trial has the lowest validation perplexity, or the highest BLEU for translators. Trials that cannot be
    compared with the others, for example because of their vocabulary, come after them. Trials without a score come
    last.
    """
    rows = [(trial, row) for trial in trials if (row := trial.row()).results]
    common = _shared([record for _, row in rows for record in row.records])
    withheld = [
        (trial, replace(row, results=tuple(_withhold(result, common) for result in row.results))) for trial, row in rows
    ]
    metric = judged_by([row for _, row in withheld])
    fair = comparable([row for _, row in withheld])

    def order(pair: tuple[Trial, TableRow]) -> tuple[bool, bool, float]:
        score = pair[1].mean_score(metric, "valid")
        return (
            score is None,
            metric == PERPLEXITY and pair[1] not in fair,
            metric.sign * score.mean if score else 0.0,
        )

    return sorted(withheld, key=order)


def summary(ranked: Sequence[tuple[Trial, TableRow]], root: Path) -> list[dict[str, Any]]:
    """Return the entries of sweep.json, one for each trial, in the same order."""
    return [
        {
            "settings": dict(trial.settings),
            "runs": [run.relative_to(root).as_posix() for run in trial.runs],
            "valid": spread_record(row.mean_score(PERPLEXITY, "valid")),
            **({"bleu_valid": spread_record(bleu)} if (bleu := row.mean_score(BLEU, "valid")) else {}),
            "epochs": row.epochs,
            "seconds": spread_record(Spread.of(record.training.seconds for record in row.records)),
            "seconds_per_epoch": spread_record(Spread.of(result.seconds_per_epoch for result in row.results)),
        }
        for trial, row in ranked
    ]


def spread_record(value: Spread | None) -> dict[str, Any] | None:
    """Return a mean over seeds in the format of sweep.json."""
    return asdict(value) if value else None


def _shared(records: Sequence[RunResult]) -> tuple[Change, ...]:
    """Return the changes of the recipe that all trials share. The names of the trials do not show them."""
    first = records[0].changed if records else ()
    return tuple(change for change in first if all(change in record.changed for record in records))


def _withhold(result: Result, changed: tuple[Change, ...]) -> Result:
    """Return the run without test scores and without samples, neighbours and other parts that describe its model."""
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
