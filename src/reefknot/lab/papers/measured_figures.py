"""Read the recorded figures of the papers, and write their sections in PAPERS.md.

A record is a JSON file with the measurements of one figure and their origin (commit, command, machine):

    reefknot figure NAME RUN ... --json FILE    writes a record
    script/papers --record FILE                 checks it and copies it to results/figures/ (`add_record`)
    script/papers                               reads all records (`read_figures`) and writes their sections in
                                                PAPERS.md (`to_markdown`)
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reefknot.errors import DataError
from reefknot.storage.files import read_json, write_text

RECORD_FOLDER = Path("results/figures")
PICTURE_FOLDER = Path("docs/figures")


@dataclass(frozen=True)
class RecordedFigure:
    """A record of a figure, with the title, the table and the picture that the figure makes from it."""

    title: str
    description: str
    lines: Sequence[str]
    """The lines of the table."""
    svg: str
    """The picture, as the content of an SVG file."""
    record: Mapping[str, Any]

    @property
    def picture_path(self) -> Path:
        """The path of the picture, relative to the root of the project."""
        return PICTURE_FOLDER / f"{slug(self.record)}.svg"

    @property
    def anchor(self) -> str:
        """The link to the section of the figure in PAPERS.md."""
        return "#" + re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")


def slug(record: Mapping[str, Any]) -> str:
    """Return the file name of a record's figure, without its suffix: `inan2017-2`."""
    return str(record["figure"]).replace("/", "-")


def add_record(root: Path, path: Path) -> Path:
    """Copy a record into the project and return its new path."""
    record = _read_traceable(path)
    environment = record["environment"]
    check_code(root, path, environment["commit"], environment.get("source_sha256"))

    copy_path = root / RECORD_FOLDER / f"{slug(record)}.json"
    copy_path.parent.mkdir(parents=True, exist_ok=True)
    json_text = json.dumps(record, indent=2, ensure_ascii=False)
    write_text(copy_path, remove_local_paths(json_text) + "\n")
    return copy_path


def read_figures(root: Path) -> list[dict[str, Any]]:
    """Return the records of the project; raise a DataError if one cannot be traced to its code."""
    record_paths = sorted((root / RECORD_FOLDER).glob("*.json"))
    return [_read_traceable(path) for path in record_paths]


def _read_traceable(path: Path) -> dict[str, Any]:
    """Read a record and check that it names the commit and the command of the measurement and of each run."""
    record = read_json(path)
    if not isinstance(record, dict) or not {"figure", "measured", "environment", "runs"} <= record.keys():
        raise DataError(f"{path}: not a record of a figure; `reefknot figure NAME --json {path}` writes one")
    check_origin(path, record["environment"])
    for run in record["runs"]:
        check_origin(path, run, f"its run {run.get('row')}")
    return record


def check_origin(path: Path, origin: Mapping[str, Any], subject: str = "it") -> None:
    """Raise a DataError if a record does not name the commit and the command that made it.

    Args:
        path: The file of the record, for the message.
        origin: The commit, the command and whether there were uncommitted changes, as stored in the record.
        subject: Whose origin it is, for the message.
    """
    missing_keys = [key for key in ("commit", "command") if not origin.get(key)]
    if missing_keys:
        raise DataError(f"{path}: no {' and no '.join(missing_keys)} recorded for {subject}; measure it again")
    if origin.get("dirty"):
        raise DataError(f"{path}: {subject} was made with uncommitted changes; commit and run it again")


def check_code(root: Path, record_path: Path, commit: str | None, source_hash: str | None) -> None:
    """Raise a DataError if the code that ran is not the code of the commit.

    A machine without the git history cannot check this, so it is checked when a record is added.

    Args:
        root: The root of the project.
        record_path: The record, for the message.
        commit: The commit that the record names.
        source_hash: Hash of the code that ran (`source_sha256`).
    """
    from reefknot.lab.runs.environment import source_sha256  # imports torch, which reports do not need

    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "commit.tar"
        command = ["git", "-C", str(root), "archive", "-o", str(archive), str(commit), "src/reefknot"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise DataError(f"{record_path}: commit {commit} is not in this repository")
        shutil.unpack_archive(archive, folder, filter="data")
        commit_hash = source_sha256(Path(folder) / "src" / "reefknot")
        if commit_hash != source_hash:
            raise DataError(f"{record_path}: the code that ran differs from commit {commit}; run it again")


def remove_local_paths(json_text: str) -> str:
    """Remove paths of the local machine from the commands in a JSON text.

    RUN and DIR replace folders, and output files are reduced to their names.
    """

    def replace_paths(match: re.Match[str]) -> str:
        key, command = match.groups()
        command = re.sub(r"--data[ =]\S+", "--data DIR", command)
        command = re.sub(r"(?<= )(--json|--output|-o)([ =])/(?:\S*/)?", r"\1\2", command)
        command = re.sub(r"(?<=[ =])/\S+|(?<=^reefknot evaluate )[^-\s]\S*", "RUN", command)
        return key + command

    return re.sub(r'("command": ")((?:[^"\\]|\\.)*)', replace_paths, json_text)


def to_markdown(figure: RecordedFigure) -> str:
    """Return the section of a figure in PAPERS.md."""
    notes = "".join(f"{note[0].upper()}{note[1:]}.\n\n" for note in figure.record.get("notes", ()))
    table = "\n".join(figure.lines)
    return (
        f"## {figure.title}\n\n{figure.description}\n\n![{figure.title}]({figure.picture_path.as_posix()})\n\n"
        f"```text\n{table}\n```\n\n{notes}{_describe_origin(figure.record)}\n"
    )


def _describe_origin(record: Mapping[str, Any]) -> str:
    """Describe the runs, the machines and the code that produced a figure."""
    runs = record["runs"]
    environment = record["environment"]
    values_by_name = {
        "Runs of": [f"`{run['recipe']}`" for run in runs],
        "corpus": [run.get("corpus") for run in runs],
        "seeds": [str(seed) for seed in sorted({run["seed"] for run in runs})],
        "device": [run.get("device") for run in runs],
        "torch": [run.get("torch") for run in runs],
        "commit": [f"`{run['commit'][:12]}`" for run in runs],
    }
    details = []
    for name, values in values_by_name.items():
        distinct_values = dict.fromkeys(value for value in values if value)
        if distinct_values:
            details.append(f"{name} {', '.join(distinct_values)}")

    machine = ", ".join(environment.get("gpus") or [environment.get("cpu") or "a CPU"])
    return (
        f"{'; '.join(details)}. Measured by `{environment['command']}` on {machine}, "
        f"commit `{environment['commit'][:12]}`."
    )
