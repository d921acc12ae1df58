"""Read the folders of training runs, finished or not, for tables and reports.

`load_run` reads one run folder into a `Result`, and `collect_runs` reads all runs below some folders:

    results = collect_runs(["runs/demo"])
    Spread.from_values(result.record.test.perplexity for result in results)    # the mean over seeds

A run is one training of a row (an experiment of a recipe) with one random seed. The functions after `collect_runs`
compare the settings of runs.

Weights are not needed, and this module does not import torch. These files of a run folder are read:

    config.json            settings
    environment.json       machine, code and command
    metrics.jsonl          losses during training, one JSON object per line
    result.json            scores; it is missing until the run is finished
    evaluations/*.json     scores of `reefknot evaluate --save`
    texts/*.json           scores of `reefknot evaluate --text FILE --save`
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from reefknot.errors import DataError
from reefknot.lab.config.upgrade import detect_task, upgrade_settings
from reefknot.lab.runs.earlier import is_earlier
from reefknot.lab.runs.folder import note_if_unverified
from reefknot.lab.runs.result import (
    MetricsLine,
    RunResult,
    SavedEvaluation,
    read_evaluation,
    read_metrics_line,
    read_result,
)
from reefknot.storage import manifest

OLD_RUN_DEFAULTS: dict[str, Any] = {
    "evaluation.protocol": "definition",
    "input.scale": 1.0,
    "input.word_dropout_by": "type",
    "source.word_dropout_by": "type",
    "target.word_dropout_by": "type",
    "training.batching": "streams",
    "training.capture": True,
    "vocabulary.dictionary": "own",
    "vocabulary.sides": "joint",
    "vocabulary.text": "train",
}
"""Values of settings that older runs do not have. Settings that are off (null, false, zero, empty) are not listed."""


@dataclass(frozen=True)
class Result:
    """A run, read from its folder."""

    folder: Path
    recipe: str
    row: str
    seed: int
    record: RunResult | None
    """The scores, from result.json; None until the run is finished."""
    metrics: tuple[MetricsLine, ...]
    """The losses during training."""
    settings: Mapping[str, Any]
    """The settings of the experiment, nested as in a recipe."""
    environment: Mapping[str, Any]
    """The machine, the code and the command."""
    evaluations: Mapping[str, SavedEvaluation] = field(default_factory=dict)
    """Saved evaluations by mode: dynamic, cache, mc, or the windows of a text."""
    texts: Mapping[str, SavedEvaluation] = field(default_factory=dict)
    """Saved evaluations of other texts, by the name of the file."""

    @property
    def task(self) -> str:
        """The kind of experiment, such as `language_model`; see `lab/tasks`."""
        return self.record.task if self.record else detect_task(self.settings)

    def last_metrics(self, kind: str) -> MetricsLine | None:
        """Return the newest metrics of a kind, such as `train` or `valid`."""
        for line in reversed(self.metrics):
            if line.kind == kind:
                return line
        return None

    @property
    def uses_subwords(self) -> bool:
        """Whether the tokens are sub-words."""
        return flatten(self.settings).get("vocabulary.bpe.merges") is not None

    @property
    def tokens_per_word_in_validation(self) -> float | None:
        """Tokens per word of the validation text; None for sub-words until the run is finished."""
        if self.record and self.record.valid:
            return self.record.valid.tokens_per_word
        return None if self.uses_subwords else 1.0

    @property
    def epochs(self) -> float:
        """The number of epochs that were run. Early stopping makes it smaller than the number in the settings."""
        last_validation = self.last_metrics("valid")
        if last_validation:
            return last_validation.epoch
        if self.record:
            return self.record.training.epochs or 0.0
        return 0.0

    @property
    def is_limited_by_updates(self) -> bool:
        """Whether training was limited by updates, so that the last epoch may be incomplete."""
        return self.record is not None and self.record.training.epochs is None

    @property
    def awaits_averaging(self) -> bool:
        """Whether training ended before averaging began, which waits until the validation loss stops improving."""
        waits_for_plateau = flatten(self.settings).get("training.averaging.start") == "nonmonotone"
        return waits_for_plateau and self.record is not None and self.record.training.averaged_from_epoch is None

    @property
    def best_epoch(self) -> float | None:
        """The epoch of the weights that were scored; 0 for the starting weights, None for averaged checkpoints."""
        if self.record is None or self.record.best is None or self.record.averaged:
            return None
        return self.record.best.epoch

    @property
    def best_precedes_averaging(self) -> bool:
        """Whether averaging began, but the best weights are from an epoch before that."""
        averaged_from_epoch = self.record.training.averaged_from_epoch if self.record else None
        if not self.best_epoch or not averaged_from_epoch:
            return False
        return 0 < self.best_epoch < averaged_from_epoch

    @property
    def running_perplexity(self) -> float | None:
        """The training perplexity of the last epoch, computed while the weights changed and with dropout."""
        lines = [line for line in self.metrics if line.kind == "train" and line.epoch == self.epochs]
        if not lines:
            return None
        mean_nll = statistics.fmean([line.nll for line in lines], [line.tokens for line in lines])
        return math.exp(mean_nll)

    def last_epoch_perplexity(self, split: str) -> float | None:
        """Return the perplexity after the last epoch, or None if the run has no such score.

        The score is computed by the paper's protocol if these weights were scored by it. If the best epoch was an
        earlier one, the validation perplexity comes from the metrics, and there is no test perplexity. For the training
        text, it is the running perplexity.
        """
        if self.record is None:
            return None
        if split == "train":
            return self.running_perplexity
        if len(self.record.averaged) == 1 or self.best_epoch == self.epochs:
            score = getattr(self.record.protocol, split, None) or self.record.score(split)
            return score.perplexity if score else None
        last_validation = self.last_metrics("valid")
        if split == "valid" and last_validation and not self.uses_subwords:
            return last_validation.perplexity
        return None

    @property
    def seconds_per_epoch(self) -> float | None:
        """Seconds of training per epoch, without validation.

        This is the median over epochs, because a pause or a slow start does not change it. If the metrics do not have
        a time for every epoch, it is the mean.
        """
        if not self.record or not self.epochs or self.is_limited_by_updates:
            return None
        # The last line of an epoch has the seconds of training up to its end.
        end_by_epoch = {line.epoch: line.wall.seconds for line in self.metrics if line.kind != "valid"}
        epoch_ends = [seconds for _, seconds in sorted(end_by_epoch.items()) if seconds is not None]
        if len(epoch_ends) != self.epochs:
            return self.record.training.seconds / self.epochs
        return statistics.median(end - start for start, end in pairwise([0.0, *epoch_ends]))


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with the sample standard deviation."""

    mean: float
    sd: float | None
    """The standard deviation; None for a single seed."""
    n: int
    """The number of seeds."""

    @classmethod
    def from_values(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the mean and the standard deviation of the values that are not None, or None without any values."""
        known_values = [value for value in values if value is not None]
        if not known_values:
            return None
        sd = statistics.stdev(known_values) if len(known_values) > 1 else None
        return cls(statistics.fmean(known_values), sd, len(known_values))


def load_run(folder: Path | str) -> Result:
    """Read a run folder, finished or not."""
    folder = Path(folder)
    if not _is_run(folder):
        raise DataError(f"{folder} is not a run folder: it has neither config.json nor result.json")
    note_if_unverified(folder)
    result_file = folder / "result.json"
    record = read_result(result_file) if result_file.is_file() else None
    config = _read_object(folder / "config.json")
    settings = config.get("settings", {})
    if not isinstance(settings, dict):
        raise DataError(f"{folder / 'config.json'}: 'settings' is not a JSON object; is this a run of Reefknot?")

    evaluation_files = sorted(folder.glob("evaluations/*.json"))
    return Result(
        folder=folder,
        recipe=record.recipe if record else str(config.get("recipe") or ""),
        row=record.row if record else str(config.get("row") or folder.name),
        seed=record.seed if record else _find_seed(settings, folder),
        record=record,
        metrics=_read_metrics(folder / "metrics.jsonl"),
        settings=upgrade_settings(settings),
        environment=_read_object(folder / "environment.json"),
        evaluations={path.stem: read_evaluation(path, record) for path in evaluation_files},
        texts={path.stem: read_evaluation(path, record) for path in sorted(folder.glob("texts/*.json"))},
    )


def collect_runs(paths: Iterable[Path | str]) -> list[Result]:
    """Return the runs at some paths. A path is a run folder, or a folder that contains run folders at any depth."""
    runs: dict[Path, Result] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            problem = "this is a file" if path.exists() else "there is no such folder"
            raise DataError(f"{path}: {problem}; pass a run folder, or a folder that contains runs")

        if _is_run(path):
            run_folders = {path}
        else:
            json_folders = {file.parent for file in path.rglob("*.json")}
            # Records of earlier lengths are runs only if their own folder, RUN/earlier, is named.
            run_folders = {
                folder
                for folder in json_folders
                if _is_run(folder) and (folder.parent == path or not is_earlier(folder))
            }
        if not run_folders:
            raise DataError(f"{path}: no runs in this folder (no config.json or result.json at any depth)")

        results = [load_run(folder) for folder in run_folders]
        results.sort(key=lambda result: (result.folder.parent, result.seed))
        for result in results:
            runs.setdefault(result.folder.resolve(), result)
    if not runs:
        raise DataError("no folders were given; pass a run folder, or a folder that contains runs")
    return list(runs.values())


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key, in their order: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted keys whose values are not all equal, in the order in which they first appear."""
    flattened = [flatten(nested) for nested in settings]
    keys = dict.fromkeys(key for flat in flattened for key in flat)

    def differs(key: str) -> bool:
        return any(key not in flat or flat[key] != flattened[0].get(key) for flat in flattened)

    return [key for key in keys if differs(key)]


def distinguishing_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that distinguish a run from others, by dotted key.

    Runs for which these settings are equal are repetitions of each other. The seed is left out. Settings that are off
    (null, false, zero, empty) are left out too, because a run that is older than a setting does not have it, and nearly
    all new settings are off by default. The exceptions are in `OLD_RUN_DEFAULTS`.
    """
    flat_settings = OLD_RUN_DEFAULTS | flatten(settings)
    return {key: value for key, value in flat_settings.items() if value and not _is_seed(key)}


def _is_seed(key: str) -> bool:
    """Return whether a dotted key, such as `training.seed`, is the seed."""
    _, _, name = key.rpartition(".")
    return name == "seed"


def _find_seed(settings: Mapping[str, Any], folder: Path) -> int:
    """Return the seed in the settings, or the seed in the name of the folder, such as `seed1`, or 0."""
    for key, value in flatten(settings).items():
        if _is_seed(key) and isinstance(value, int):
            return value
    suffix = folder.name.removeprefix("seed")
    return int(suffix) if suffix.isdecimal() else 0


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "result.json").is_file()


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty dict if there is no such file."""
    if not path.is_file():
        return {}
    return manifest.read_object(path)


def _read_metrics(path: Path) -> tuple[MetricsLine, ...]:
    """Return all complete lines. The last line is incomplete if the run is still writing it or was killed."""
    if not path.is_file():
        return ()
    complete_lines = manifest.read_bytes(path).split(b"\n")[:-1]
    metrics = []
    for line_number, line in enumerate(complete_lines, 1):
        if line.strip():
            metrics.append(read_metrics_line(line, f"{path}, line {line_number}"))
    return tuple(metrics)
