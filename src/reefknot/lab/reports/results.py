"""Result folders, read back: finished runs, unfinished ones, and several seeds of one row taken together.

Only `config.json`, `environment.json`, `metrics.jsonl`, `result.json` and `evaluations/*.json` are read, so the small
records under `results/`, which have no weights, serve as well as whole runs. Nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from reefknot.errors import DataError
from reefknot.lab.config.upgrade import task_of_settings, upgrade_settings
from reefknot.lab.runs.result import (
    MetricsLine,
    RunResult,
    SavedEvaluation,
    read_evaluation,
    read_metrics_line,
    read_result,
)
from reefknot.storage.files import read_json

ADDED: dict[str, Any] = {
    "evaluation.protocol": "definition",
    "input.scale": 1.0,
    "training.batching": "streams",
    "training.capture": True,
    "vocabulary.dictionary": "own",
    "vocabulary.sides": "joint",
}
"""Settings that came later and are not off by default: what runs from before did."""


@dataclass(frozen=True)
class Result:
    """One run as its folder tells it. `record` is None while the run is not finished."""

    folder: Path
    recipe: str
    row: str
    seed: int
    record: RunResult | None
    metrics: tuple[MetricsLine, ...]
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    evaluations: Mapping[str, SavedEvaluation] = field(default_factory=dict)
    """By kind: dynamic, cache, mc, or the windows of a text."""

    @property
    def task(self) -> str:
        """The kind of experiment, such as `language_model`; see `lab/tasks`."""
        return self.record.task if self.record else task_of_settings(self.settings)

    def last(self, kind: str) -> MetricsLine | None:
        """The newest metrics of a kind: `train` or `valid`."""
        return next((metric for metric in reversed(self.metrics) if metric.kind == kind), None)

    @property
    def cuts_words(self) -> bool:
        """Whether tokens are pieces of words."""
        return flatten(self.settings).get("vocabulary.bpe.merges") is not None

    @property
    def pieces_in_validation(self) -> float | None:
        """Tokens per word of the validation text; None where words are cut and there is no result to say how often."""
        if self.record and self.record.valid:
            return self.record.valid.tokens_per_word
        return None if self.cuts_words else 1.0

    @property
    def epochs(self) -> float:
        """Epochs that were run: fewer than were planned where training has stopped early."""
        last = self.last("valid")
        return last.epoch if last else (self.record and self.record.training.epochs) or 0.0

    @property
    def by_updates(self) -> bool:
        """Whether it was trained for so many updates: its last epoch need not be a whole one."""
        return self.record is not None and self.record.training.epochs is None

    @property
    def awaits_averaging(self) -> bool:
        """Whether it was to average its weights from where its validation loss would tell, and ended before."""
        told = flatten(self.settings).get("training.averaging.start") == "nonmonotone"
        return told and self.record is not None and self.record.training.averaged_from_epoch is None

    @property
    def best_epoch(self) -> float | None:
        """Whose weights its figures are of, 0 being those it began with; None where they are of several."""
        return self.record.best.epoch if self.record and self.record.best and not self.record.averaged else None

    @property
    def best_before_averaging(self) -> bool:
        """Whether its validation loss began averaging, and no average was better than the iterates before."""
        return 0 < (self.best_epoch or 0) < ((self.record and self.record.training.averaged_from_epoch) or 0)

    @property
    def seconds_per_epoch(self) -> float | None:
        """Of training alone, without validation: those of the median epoch, which a pause or a slow start does not
        change; where metrics do not tell, of the mean one."""
        if not self.record or not self.epochs or self.by_updates:
            return None
        until = {metric.epoch: metric.wall.seconds for metric in self.metrics if metric.kind != "valid"}
        clock = [0.0, *(seconds for _, seconds in sorted(until.items()) if seconds is not None)]
        if len(clock) != self.epochs + 1:
            return self.record.training.seconds / self.epochs
        return statistics.median(after - before for before, after in pairwise(clock))


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, with the sample standard deviation when there are several."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        if not known:
            return None
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(statistics.fmean(known), sd, len(known))


def load(folder: Path | str) -> Result:
    """Read one run folder, finished or not."""
    folder = Path(folder)
    if not _is_run(folder):
        raise DataError(f"{folder}: no run here (neither config.json nor result.json)")
    finished = folder / "result.json"
    record = read_result(finished) if finished.is_file() else None
    config = _mapping(folder / "config.json")
    settings = config.get("settings", {})
    if not isinstance(settings, dict):
        raise DataError(f"{folder / 'config.json'}: 'settings' is not a table of settings; is this a run of Reefknot?")
    return Result(
        folder=folder,
        recipe=record.recipe if record else str(config.get("recipe") or ""),
        row=record.row if record else str(config.get("row") or folder.name),
        seed=record.seed if record else _seed(settings, folder),
        record=record,
        metrics=_metrics(folder / "metrics.jsonl"),
        settings=upgrade_settings(settings),
        environment=_mapping(folder / "environment.json"),
        evaluations={path.stem: read_evaluation(path, record) for path in sorted(folder.glob("evaluations/*.json"))},
    )


def collect(paths: Iterable[Path | str]) -> list[Result]:
    """The runs at the paths: each is a run folder, or a folder that holds runs at any depth."""
    found: dict[Path, Result] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise DataError(f"{path}: there is no such folder; name a run, or a folder that holds runs")
        folders = [path] if _is_run(path) else {p.parent for p in path.rglob("*.json") if _is_run(p.parent)}
        if not folders:
            raise DataError(f"{path}: no runs in this folder (no config.json or result.json at any depth)")
        results = sorted(map(load, folders), key=lambda result: (result.folder.parent, result.seed))
        for result in results:
            found.setdefault(result.folder.resolve(), result)
    if not found:
        raise DataError("no result folders were named; name a run, or a folder that holds runs")
    return list(found.values())


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys, in their order."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The dotted keys that do not have one value everywhere, in the order they first appear."""
    flat = [flatten(one) for one in settings]
    keys = dict.fromkeys(key for one in flat for key in one)
    return [key for key in keys if any(key not in one or one[key] != flat[0].get(key) for one in flat)]


def distinguishing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, as far as they tell runs apart: equal ones make runs repetitions of each other.

    The seed does not. Nor does what is off (null, false, zero, empty), since a run that is older than a setting has it
    not, and nearly all that are added begin as off; the others are `ADDED`.
    """
    known = ADDED | flatten(settings)
    return {key: value for key, value in known.items() if value and key.rpartition(".")[2] != "seed"}


def _seed(settings: Mapping[str, Any], folder: Path) -> int:
    named = folder.name.removeprefix("seed")
    seeds = [value for key, value in flatten(settings).items() if key.rpartition(".")[2] == "seed"]
    return next((seed for seed in seeds if isinstance(seed, int)), int(named) if named.isdecimal() else 0)


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "result.json").is_file()


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object; the file is damaged, restore it or run the row again")
    return value


def _metrics(path: Path) -> tuple[MetricsLine, ...]:
    """All whole lines; a run that is writing, or was killed while it wrote, leaves the last one torn."""
    if not path.is_file():
        return ()
    lines = path.read_bytes().split(b"\n")[:-1]
    return tuple(read_metrics_line(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip())
