"""Rank the trials of a hyperparameter sweep by their validation scores.

A sweep trains one row (one experiment of a recipe) with several combinations of settings. `rank_trials` sorts the
combinations, best first, and `summarise_trials` writes them to sweep.json. Test scores are removed from the ranked
rows: if settings were chosen by test scores, the test score of the best would be biased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from reefknot.lab.reports.rows import TableRow, largest_comparable_group, ranking_metric
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.loading import Result, Spread, load_run
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
        results = tuple(load_run(folder) for folder in self.runs if (folder / "config.json").is_file())
        return TableRow(self.name, results=results)


def rank_trials(trials: Sequence[Trial]) -> list[tuple[Trial, TableRow]]:
    """Return the trials that have begun, without test scores, best first.

    The best trial has the lowest validation perplexity, or the highest BLEU for translators. Trials that cannot be
    compared with the others, for example because of their vocabulary, come after them. Trials without a score come
    last.
    """
    trial_rows = [(trial, trial.row()) for trial in trials]
    started = [(trial, row) for trial, row in trial_rows if row.results]

    # Remove the test scores.
    shared_changes = _find_shared_changes([record for _, row in started for record in row.records])
    pairs = []
    for trial, row in started:
        results = tuple(_remove_test_scores(result, shared_changes) for result in row.results)
        pairs.append((trial, replace(row, results=results)))

    # Sort by the validation score.
    rows = [row for _, row in pairs]
    metric = ranking_metric(rows)
    comparable_rows = largest_comparable_group(rows)

    def sort_key(pair: tuple[Trial, TableRow]) -> tuple[bool, bool, float]:
        _, row = pair
        score = row.mean_score(metric, "valid")
        is_incomparable = metric == PERPLEXITY and row not in comparable_rows
        sort_value = metric.sign * score.mean if score else 0.0
        return score is None, is_incomparable, sort_value

    return sorted(pairs, key=sort_key)


def summarise_trials(ranked: Sequence[tuple[Trial, TableRow]], root: Path) -> list[dict[str, Any]]:
    """Return the entries of sweep.json, one for each trial, in the same order.

    Args:
        ranked: The trials with their rows, from `rank_trials`.
        root: The folder of the sweep. The paths of runs are relative to it.
    """
    entries = []
    for trial, row in ranked:
        entry: dict[str, Any] = {
            "settings": dict(trial.settings),
            "runs": [run.relative_to(root).as_posix() for run in trial.runs],
            "valid": spread_to_dict(row.mean_score(PERPLEXITY, "valid")),
        }
        bleu = row.mean_score(BLEU, "valid")
        if bleu:
            entry["bleu_valid"] = spread_to_dict(bleu)
        seconds = Spread.from_values(record.training.seconds for record in row.records)
        seconds_per_epoch = Spread.from_values(result.seconds_per_epoch for result in row.results)
        entry |= {
            "epochs": row.epochs,
            "seconds": spread_to_dict(seconds),
            "seconds_per_epoch": spread_to_dict(seconds_per_epoch),
        }
        entries.append(entry)
    return entries


def spread_to_dict(spread: Spread | None) -> dict[str, Any] | None:
    """Return a mean over seeds in the format of sweep.json."""
    return asdict(spread) if spread else None


def _find_shared_changes(records: Sequence[RunResult]) -> tuple[Change, ...]:
    """Return the changes to the recipe that all trials share. The names of the trials do not show them."""
    if not records:
        return ()
    first_changes = records[0].changed
    return tuple(change for change in first_changes if all(change in record.changed for record in records))


def _remove_test_scores(result: Result, changes: tuple[Change, ...]) -> Result:
    """Return the run without test scores and without samples, neighbours and other parts that describe its model.

    Args:
        result: The run.
        changes: The changes to the recipe that replace the run's own changes.
    """
    result = replace(result, evaluations={})
    if result.record is None:
        return result

    protocol = result.record.protocol
    translation = result.record.translation
    replacements: dict[str, Any] = {
        "test": None,
        "protocol": protocol.replace(test=None) if protocol else None,
        "paper": {},
        "changed": changes,
        "frequency": Frequency(),
        "neighbors": Neighbors(),
        "samples": (),
        "translation": Translations(valid=translation.valid) if translation else None,
    }
    return replace(result, record=result.record.replace(**replacements))
