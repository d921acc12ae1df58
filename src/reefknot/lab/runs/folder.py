"""A run folder: the layout of its files, the lock that protects it, and the settings it was trained with.

A run is one training of a row (one experiment of a recipe).

    with RunFolder.open_for_training(path, config) as run:    # starts or resumes a run, and holds its lock
        run.write_result(result)
    RunFolder.open(path).result                               # reads a run

The folder contains these files:

    RUN/config.json          the complete settings; a run can be resumed only with the same settings
        environment.json     the machine, the versions and the code revision
        vocabulary.json      the vocabulary
        tokenizer.json       the sub-word tokenizer, if the run uses one
        metrics.jsonl        one line per report of the training loop
        result.json          the scores of the finished run
        scores.safetensors   negative log-likelihood of every token, per split
        evaluations/         dynamic.json, cache.json, mc.json: scores from other evaluation modes
        texts/               scores of other texts, from `evaluate --text --save`
        earlier/             results of the run before it was trained longer, see earlier.py
        translations/        valid.txt, test.txt: a translator's output for the held-out sources
        log.txt              the messages of the run, with timestamps
        MANIFEST.json        size and SHA-256 of the files above, except logs (`storage/manifest.py`). metrics.jsonl is
                             listed when the run is finished
        checkpoints/, best   see checkpoints.py
        .lock                held while a process trains the run; the kernel releases it if the process dies
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.upgrade import detect_task, upgrade_settings
from reefknot.lab.runs.changes import Change, canonical_json, find_changes
from reefknot.lab.runs.checkpoints import RESTORE_ADVICE, Checkpoint, Checkpoints
from reefknot.lab.runs.earlier import earlier_folders, is_longer, move_result
from reefknot.lab.runs.result import SCORES_FILE, RunResult, SavedEvaluation, read_evaluation, read_result
from reefknot.storage import files, manifest
from reefknot.storage.lines import decode_lines

if TYPE_CHECKING:
    from torch import Tensor

_MAX_LISTED_CHANGES = 8  # a message lists at most this many changes, and counts the others
_MAX_LISTED_RUNS = 3  # the same for runs
_SUBFOLDERS = ("checkpoints", "earlier", "evaluations", "source", "texts", "translations")
"""The folders in a run folder, in which a killed process may leave temporary files."""
_CHANGEABLE_SETTING = "settings.training.accumulate"
"""A setting that may change until a run is finished, because the memory of the GPUs decides how large it must be."""


class RunFolder:
    """The folder of one run. `open_for_training` holds its lock until `close`; `open` only reads.

    No method deletes a run.
    """

    def __init__(self, path: Path, lock_descriptor: int | None = None) -> None:
        """Wrap a folder without checking it. Use `open` or `open_for_training` instead, which check it."""
        self.path = path
        self.metrics = Metrics(path / "metrics.jsonl")
        self._lock_descriptor = lock_descriptor

    # -- open and close ------------------------------------------------------------------------------------------

    @classmethod
    def open_for_training(cls, path: Path, config: dict[str, Any], *, longer: bool = False) -> RunFolder:
        """Start a run at `path`, or resume the existing run if it has the same settings.

        Args:
            path: The run folder.
            config: The settings.
            longer: Accept settings with a longer training. The result of the existing run moves to `RUN/earlier`.
        """
        path = Path(path)
        _reject_foreign_folder(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock_descriptor = _take_lock(path)
        except OSError as error:
            raise SettingsError(f"cannot train in {path}: {error.strerror}; use another --out") from error

        run = cls(path, lock_descriptor)
        try:
            for folder in (path, *(path / name for name in _SUBFOLDERS)):
                files.remove_leftovers(folder)
            if longer:
                _make_longer(run, config)
            is_finished = (path / "result.json").exists()
            if not manifest.exists(path) and not is_finished:
                manifest.create(path, _listed_files(path))
            if (path / "config.json").exists():
                _reject_other_settings(path, run.config, config, is_finished=is_finished)
            else:
                manifest.write_json(path / "config.json", config)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open a run for reading, finished or not."""
        path = Path(path)
        if not path.is_dir():
            reason = "it is a file" if path.exists() else "there is no such folder"
            raise DataError(f"{path} is not a run folder: {reason}")
        if not (path / "config.json").is_file():
            run_inside = find_run_inside(path)
            advice = f"; it contains runs such as {run_inside}: use one of them" if run_inside else ""
            raise DataError(f"{path} is not a run folder: it has no config.json{advice}")
        note_if_unverified(path)
        return cls(path)

    def close(self) -> None:
        """Release the lock, so that another process can train the run."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- settings ------------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json, with the current names of settings and the name of the task."""
        config = manifest.read_object(self.path / "config.json")
        settings = config.get("settings")
        if not isinstance(settings, dict):
            return config
        task = config.get("task", detect_task(settings))
        return config | {"task": task, "settings": upgrade_settings(settings)}

    @property
    def task(self) -> str:
        """The task, which is the kind of experiment, such as `language_model` (`lab/tasks`)."""
        task = self.config.get("task")
        if not isinstance(task, str):
            raise DataError(f"{self.path / 'config.json'} has no settings: it is damaged; {RESTORE_ADVICE}")
        return task

    @property
    def config_hash(self) -> str:
        """The hash of config.json as it was written, before any setting is renamed."""
        return config_hash(manifest.read_object(self.path / "config.json"))

    @property
    def checkpoint_hashes(self) -> set[str]:
        """The hashes of the settings that checkpoints may have: those of the run, now and before it was longer."""
        folders = [self.path, *earlier_folders(self.path)]
        return {config_hash(manifest.read_object(folder / "config.json")) for folder in folders}

    @property
    def imported(self) -> bool:
        """Whether the model was trained by another program, which also chose the ids of its words."""
        return "imported" in self.config

    # -- weights and vocabularies --------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run. Saving with this object keeps two steps, whatever the recipe says."""
        return Checkpoints(self.path)

    def best_checkpoint(self) -> Path:
        """Return the folder of the checkpoint with the best validation score."""
        if self.result is not None and not (self.path / "best").exists():
            if not self.vocabulary_path.exists():
                raise DataError(
                    f"{self.path} is the record of a run, without weights; use the folder it was trained in"
                )
            raise DataError(
                f"{self.path} is finished, but its weights are gone: `best` points to a missing checkpoint; restore "
                "best and checkpoints, or train it again with another --out"
            )
        best = self.checkpoints.best_path()
        if best is None and "model_type" in self.config:
            raise DataError(f"{self.path} is an exported model and not a run; use the run that it was exported from")
        if best is None:
            raise DataError(f"{self.path} has no trained weights yet: finish its training first (reefknot train)")
        return best

    def best_weights(self) -> dict[str, Tensor]:
        """Load the weights with the best validation score."""
        checkpoint = self.checkpoints.load(self.best_checkpoint())
        if checkpoint.fingerprint not in self.checkpoint_hashes:
            raise DataError(
                f"{self.path / 'config.json'} has changed since {checkpoint.path} was saved; {RESTORE_ADVICE}"
            )
        return checkpoint.weights

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raise an error if a checkpoint from which training resumes belongs to a run with other settings."""
        if checkpoint.fingerprint not in self.checkpoint_hashes:
            raise DataError(
                f"{checkpoint.path} is a checkpoint of a run whose settings differ from those of {self.path}; "
                "use another --out"
            )

    @property
    def vocabulary_path(self) -> Path:
        return self.path / "vocabulary.json"

    @property
    def source_vocabulary_path(self) -> Path:
        """The source vocabulary of a translator that does not share one vocabulary between both languages."""
        return self.path / "source" / "vocabulary.json"

    # -- results and other files ---------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, Any] | None:
        path = self.path / "environment.json"
        return manifest.read_object(path) if path.exists() else None

    def write_environment(self, environment: dict[str, Any]) -> None:
        manifest.write_json(self.path / "environment.json", environment)

    @property
    def result(self) -> RunResult | None:
        """The result of the run; None until it is finished."""
        path = self.path / "result.json"
        return read_result(path) if path.exists() else None

    def write_result(self, result: RunResult) -> None:
        manifest.add(self.metrics.path)
        manifest.write_json(self.path / "result.json", result.record())

    def evaluation(self, kind: str) -> SavedEvaluation | None:
        """Return the saved evaluation in a mode, such as `dynamic`, or None if there is no such evaluation.

        Args:
            kind: The name of the file in `evaluations/`, without its extension.
        """
        path = self._evaluation_path(kind)
        return read_evaluation(path, self.result) if path.exists() else None

    def write_evaluation(self, evaluation: SavedEvaluation) -> Path:
        """Write an evaluation and return its path: in `evaluations`, or in `texts` if it has the score of another text.

        The name of a file in `texts` has the name of the text, the first digits of its hash, and the mode.
        """
        path = self._evaluation_path(evaluation.kind)
        if evaluation.other is not None:
            text = evaluation.other.text
            assert text is not None
            name = f"{folder_name(text.split)}-{(text.sha256 or 'shortened')[:12]}-{evaluation.kind}"
            path = self.path / "texts" / f"{name}.json"
        with files.writing(path):
            path.parent.mkdir(exist_ok=True)
        files.remove_leftovers(path.parent)
        manifest.write_json(path, evaluation.record())
        return path

    def _evaluation_path(self, kind: str) -> Path:
        return self.path / "evaluations" / f"{kind}.json"

    def read_scores(self) -> dict[str, Tensor]:
        """Return the negative log-likelihood of every token, by split."""
        path = self.path / SCORES_FILE
        if not path.exists():
            raise DataError(
                f"{path} is missing: run folders contain the loss of every token, records do not; {RESTORE_ADVICE}"
            )
        return files.decode_tensors(manifest.read_bytes(path), path)

    def write_scores(self, scores: Mapping[str, Tensor]) -> None:
        """Write the negative log-likelihood of every token, by split."""
        manifest.write_bytes(self.path / SCORES_FILE, files.encode_tensors(scores))

    def read_translations(self, split: str) -> list[str]:
        """Read the translations that `write_translations` wrote."""
        path = self._translations_path(split)
        return list(decode_lines(manifest.read_bytes(path), path))

    def write_translations(self, split: str, translations: Sequence[str]) -> None:
        """Write the translations of a split's sources, one per line."""
        path = self._translations_path(split)
        path.parent.mkdir(exist_ok=True)
        content = "".join(f"{translation}\n" for translation in translations)
        manifest.write_bytes(path, content.encode())

    def _translations_path(self, split: str) -> Path:
        return self.path / "translations" / f"{split}.txt"

    def log(self, text: str) -> None:
        """Append `text` to log.txt, with the UTC time before each line."""
        timestamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        lines = text.splitlines() or [""]
        stamped_text = "".join(f"{timestamp} {line}\n" for line in lines)
        _append(self.path / "log.txt", stamped_text)


class Metrics:
    """The file metrics.jsonl, with one JSON object per line.

    Clock times are stored under "wall", so that everything else is bit-identical in two equal runs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: dict[str, Any]) -> None:
        """Append a JSON object as one line."""
        encoded_line = json.dumps(line, allow_nan=False, ensure_ascii=False)
        _append(self.path, encoded_line + "\n")

    @property
    def lines(self) -> int:
        """The number of complete lines; a line that was cut off by a kill does not count."""
        return len(self._complete_lines())

    def read(self) -> list[dict[str, Any]]:
        """Return the content of all complete lines."""
        objects = []
        for line_number, line in enumerate(self._complete_lines(), start=1):
            objects.append(files.decode_object(line, f"{self.path}, line {line_number},"))
        return objects

    def truncate(self, max_lines: int) -> None:
        """Keep only the first `max_lines` lines, written before the checkpoint that training resumes from."""
        manifest.forget(self.path)  # a session that trains appends lines
        lines = self._complete_lines()
        if len(lines) < max_lines:
            raise DataError(f"{self.path} has {len(lines)} lines, but the checkpoint was saved after {max_lines}")
        content = b"".join(line + b"\n" for line in lines[:max_lines])
        if self.path.exists() and self.path.stat().st_size != len(content):
            files.write_bytes(self.path, content)

    def sync(self) -> None:
        """Flush every line to disk, before a checkpoint with the number of lines is committed."""
        if self.path.exists():
            with files.writing(self.path):
                files.sync(self.path)
                files.sync(self.path.parent)

    def _complete_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        *complete_lines, _ = files.read_bytes(self.path).split(b"\n")
        return complete_lines


_unverified_runs: dict[Path, None] = {}  # the runs without a manifest that this process has opened, in their order


def find_run_inside(folder: Path) -> Path | None:
    """Return the first run folder inside a folder, at most three levels down, to suggest it in a message."""
    runs_inside: list[Path] = []
    for pattern in ("*/config.json", "*/*/config.json", "*/*/*/config.json"):
        runs_inside += [config_path.parent for config_path in folder.glob(pattern)]
    return min(runs_inside, default=None)


def note_if_unverified(path: Path) -> None:
    """Remember a run folder without a manifest, for `describe_unverified`."""
    if not manifest.exists(path):
        _unverified_runs[path] = None


def describe_unverified() -> str | None:
    """Return a message about the opened runs that have no manifest, or None if there are none. It is returned once."""
    paths = [str(path) for path in _unverified_runs]
    _unverified_runs.clear()
    if not paths:
        return None
    names = ", ".join(paths[:_MAX_LISTED_RUNS])
    if len(paths) > _MAX_LISTED_RUNS:
        names += f" and {len(paths) - _MAX_LISTED_RUNS} more"
    return f"{names}: from before runs had a {manifest.MANIFEST_FILE}, so damaged files may go unnoticed"


def _listed_files(path: Path) -> list[Path]:
    """Return the existing files of a run that its manifest lists."""
    patterns = ("*.json", "*.safetensors", "source/*.json", "evaluations/*.json", "texts/*.json", "translations/*.txt")
    names_to_skip = (manifest.MANIFEST_FILE, "nonfinite.json")
    return [file for pattern in patterns for file in path.glob(pattern) if file.name not in names_to_skip]


def folder_name(row: str) -> str:
    """Return the folder name for a row, such as `small-wt-pr` for "Small + WT + PR"."""
    return re.sub(r"[^a-z0-9]+", "-", row.lower()).strip("-") or "row"


def config_hash(config: dict[str, Any]) -> str:
    """Return the SHA-256 of the settings as canonical JSON; the order of keys does not matter.

    The field `task` is left out because it follows from the settings, and older runs do not have it.
    """
    return hashlib.sha256(canonical_json(_without_task(config)).encode()).hexdigest()


def _without_task(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without the field `task`."""
    return {key: value for key, value in config.items() if key != "task"}


def _reject_foreign_folder(path: Path) -> None:
    """Raise an error if `path` is a file, or a folder with files that do not belong to a run."""
    if path.exists() and not path.is_dir():
        raise SettingsError(f"{path} is a file, not a folder; use another --out")
    if not path.is_dir() or (path / "config.json").exists():
        return
    # A process killed while starting a run leaves a lock, a manifest or temporary files. Such a folder is still usable.
    start_files = re.compile(r"\.lock|MANIFEST\.json(\.tmp-\d+)?|config\.json\.tmp-\d+")
    foreign_names = [entry.name for entry in path.iterdir() if not start_files.fullmatch(entry.name)]
    if foreign_names:
        raise SettingsError(
            f"{path} is not a run folder (it contains {min(foreign_names)} but no config.json); use another --out"
        )


def _reject_other_settings(
    path: Path, old_config: dict[str, Any], new_config: dict[str, Any], *, is_finished: bool
) -> None:
    """Raise an error that lists the changes if a run was started with other settings.

    Args:
        path: The run folder.
        old_config: The settings that the run was started with.
        new_config: The settings to resume it with.
        is_finished: Whether the run has a result.
    """
    changes = _find_config_changes(old_config, new_config)
    if not is_finished:
        changes = [change for change in changes if change.key != _CHANGEABLE_SETTING]
    if changes and all(change.key.startswith("start.") for change in changes):
        raise SettingsError(
            f"{path} holds a run that began with other weights; leave out --start to continue it, or use another --out"
        )
    if changes:
        # As they are written in a command: `training.epochs`, not `settings.training.epochs`.
        listed_changes = "; ".join(str(change).removeprefix("settings.") for change in changes[:_MAX_LISTED_CHANGES])
        num_unlisted = len(changes) - _MAX_LISTED_CHANGES
        if num_unlisted > 0:
            listed_changes += f"; and {num_unlisted} more"
        advice = "use another --out"
        if is_longer(old_config, new_config, changes):
            length = changes[0].key.removeprefix("settings.")
            advice += f", or train this run longer with: reefknot train {path} {length}={changes[0].new}"
        raise SettingsError(f"{path} holds a run with other settings ({listed_changes}); {advice}")


def _make_longer(run: RunFolder, config: dict[str, Any]) -> None:
    """Change the length of a run to that of `config`, if this is the only change and it is longer."""
    old_config = run.config
    if is_longer(old_config, config, _find_config_changes(old_config, config)):
        move_result(run.path, old_config["settings"]["training"])
        manifest.write_json(run.path / "config.json", config)


def _find_config_changes(old_config: dict[str, Any], new_config: dict[str, Any]) -> list[Change]:
    return find_changes(_without_task(old_config), _without_task(new_config))


def _take_lock(path: Path) -> int:
    """Lock a run folder, and return the descriptor of the lock file. Closing the descriptor releases the lock."""
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        process_id = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise SettingsError(
            f"process {process_id} is training in {path}; wait for it to end or use another --out"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _append(path: Path, text: str) -> None:
    with files.writing(path), path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)
