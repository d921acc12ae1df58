"""Copy finished training runs into results/, so that PAPERS.md can be generated from them on any machine.

`record_runs`, called by `script/papers --record RUN ...`, checks that a run can be traced to its code, and copies its
files without weights and without paths of the local machine. A run is stored by recipe, row (one experiment of the
recipe) and random seed:

    results/<recipe>/<row>/seed<k>/config.json, environment.json, metrics.jsonl, result.json
    results/<recipe>/<row>/seed<k>/evaluations/<mode>.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reefknot.errors import DataError
from reefknot.lab.papers.measured_figures import add_record, check_code, remove_local_paths
from reefknot.lab.runs.folder import folder_name
from reefknot.lab.runs.loading import Result, collect_runs
from reefknot.lab.runs.result import RunResult, SavedEvaluation
from reefknot.storage import manifest
from reefknot.storage.files import write_text

RECORDED_FILES = ("config.json", "environment.json", "metrics.jsonl", "result.json")
"""The files of a run that a record contains: no weights and no text of a corpus."""
EVALUATIONS_FOLDER = "evaluations"
"""The folder with the results of `reefknot evaluate --save`, which is also part of a record."""


def record_runs(root: Path, paths: Sequence[Path]) -> list[Path]:
    """Copy finished runs, and records of figures, into results/, and return the new paths.

    A run is rejected if the code that ran is not the code of its commit.

    Args:
        root: The root of the project.
        paths: Folders of runs, and JSON files of figures.
    """
    run_folders = [path for path in paths if not path.is_file()]
    figure_files = [path for path in paths if path.is_file()]
    results = collect_runs(run_folders) if run_folders else []

    # Check all runs before the first one is copied.
    target_folders: list[Path] = []
    for result in results:
        check_run_origin(result)
        _check_code(root, result)
        target_folder = root / "results" / result.recipe / folder_name(result.row) / f"seed{result.seed}"
        if target_folder in target_folders:
            raise DataError(f"{result.folder}: another given run has the same row and seed; pass only one of them")
        target_folders.append(target_folder)

    for result, target_folder in zip(results, target_folders, strict=True):
        _copy_run(result, target_folder)
    figure_records = [add_record(root, path) for path in figure_files]
    return target_folders + figure_records


def check_run_origin(result: Result) -> None:
    """Raise a DataError if a run is not finished, or if it or one of its evaluations cannot be traced to its code."""
    if result.record is None:
        raise DataError(f"{result.folder} has no result.json; only finished runs can be recorded")
    _check_fields(result.record, result.folder / "result.json", ("commit", "command", "config_hash"))
    for mode, evaluation in result.evaluations.items():
        _check_fields(evaluation, result.folder / EVALUATIONS_FOLDER / f"{mode}.json", ("commit", "command"))


def _check_fields(record: RunResult | SavedEvaluation, path: Path, required: Sequence[str]) -> None:
    """Raise a DataError if a record does not name the code and the command that made it."""
    missing_fields = [name for name in required if not getattr(record, name)]
    if missing_fields:
        raise DataError(f"{path}: has no {', '.join(missing_fields)}; record a run that has them")
    if record.dirty:
        raise DataError(f"{path}: was made with uncommitted changes; commit and run it again")


def _check_code(root: Path, result: Result) -> None:
    """Raise a DataError unless all sessions of a run used the code of its commit."""
    source_hash = result.environment.get("source_sha256")
    if any(environment.get("source_sha256") != source_hash for environment in earlier_environments(result)):
        raise DataError(f"{result.folder}: its sessions used different code; train it again")

    records = [record for record in (result.record, *result.evaluations.values()) if record]
    code_versions = dict.fromkeys((record.commit, record.source_sha256) for record in records)
    for commit, record_hash in code_versions:
        check_code(root, result.folder, commit, record_hash)


def earlier_environments(result: Result) -> list[dict[str, object]]:
    """Return the environments of a run's earlier sessions that differ from the environment of the last session.

    A session is one process that trains the run; a resumed run has several.
    """
    return list(result.environment.get("earlier", []))


def _copy_run(result: Result, target_folder: Path) -> None:
    """Copy the recorded files of a run into a folder, without local paths and with fewer metrics."""
    if result.record and not result.record.embedding.words and (result.folder / "best").exists():
        from reefknot.lab.tasks.word_vectors import store_embedding  # imports torch, which nothing else here needs

        store_embedding(result.folder)

    target_folder.mkdir(parents=True, exist_ok=True)
    if result.evaluations:
        (target_folder / EVALUATIONS_FOLDER).mkdir(exist_ok=True)
    evaluation_files = [f"{EVALUATIONS_FOLDER}/{mode}.json" for mode in result.evaluations]
    for name in (*RECORDED_FILES, *evaluation_files):
        content = (result.folder / name).read_text(encoding="utf-8")
        write_text(target_folder / name, remove_local_paths(content))
    write_text(target_folder / "metrics.jsonl", _reduce_metrics(result.folder / "metrics.jsonl"))
    manifest.create(target_folder, [target_folder / name for name in (*RECORDED_FILES, *evaluation_files)])


def _reduce_metrics(path: Path) -> str:
    """Reduce metrics to the points of curves: every validation, and the mean training loss of each epoch."""
    metrics_by_epoch: dict[int, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        metrics_by_epoch.setdefault(metrics["epoch"], []).append(metrics)

    reduced: list[dict[str, Any]] = []
    for epoch_metrics in metrics_by_epoch.values():
        training = [metrics for metrics in epoch_metrics if metrics["kind"] == "train"]
        if training and "nll" in training[-1]:
            tokens = [metrics.get("tokens", 1) for metrics in training]
            mean_nll = fmean((metrics["nll"] for metrics in training), weights=tokens)
            reduced.append(training[-1] | {"nll": mean_nll, "tokens": sum(tokens)})
        else:
            reduced += training[-1:]  # skip-gram logs the loss of the same pairs every time
        reduced += [metrics for metrics in epoch_metrics if metrics["kind"] != "train"]
    return "".join(json.dumps(metrics, ensure_ascii=False) + "\n" for metrics in reduced)
