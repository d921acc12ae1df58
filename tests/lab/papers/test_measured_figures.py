"""Records of figures: only traceable ones are accepted, and shown with picture, table and origin."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import DataError
from reefknot.lab.papers.measured_figures import RecordedFigure, add_record, read_figures, to_markdown
from reefknot.lab.papers.page import update_pages
from reefknot.lab.papers.recorded_runs import record_runs
from reefknot.lab.runs.environment import source_sha256

RECORD: dict[str, Any] = {
    "format": 1,
    "figure": "inan2017/2",
    "measured": {"curves": []},
    "notes": ["runs of demo stand in for them"],
    "environment": {
        "commit": "0123456789abcdef",
        "command": "reefknot figure inan2017/2 /home/me/runs --data /home/me/data --json /tmp/a.json",
        "dirty": False,
        "cpu": "EPYC",
        "gpus": [],
    },
    "runs": [
        {
            "recipe": "inan2017/table1",
            "row": "VD-LSTM large",
            "seed": seed,
            "command": "reefknot train inan2017/table1",
            "commit": "fedcba9876543210",
            "dirty": None,
            "changed": ["training.epochs: 100 -> 3"],
            "corpus": "ptb (334cb66fee55)",
            "device": "NVIDIA H200",
            "torch": "2.13.0",
        }
        for seed in (1, 0)
    ],
}


def write_record(path: Path, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(RECORD | changes))
    return path


def make_shown(**changes: Any) -> RecordedFigure:
    return RecordedFigure("Figure 2", "What it shows.", ["row  lowest", "VD     92.8"], "<svg/>", RECORD | changes)


def test_record_is_shown_in_papers_md_with_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.lab.papers.page.IDEAS", ())
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    old = tmp_path / "docs" / "figures" / "old.svg"
    old.write_text("<svg/>")
    picture = tmp_path / "docs" / "figures" / "inan2017-2.svg"
    assert update_pages(tmp_path, {}, [make_shown()], check=True) == [tmp_path / "PAPERS.md", picture, old]
    assert old.exists()
    update_pages(tmp_path, {}, [make_shown()])
    assert picture.read_text() == "<svg/>"
    assert not old.exists()
    assert "## Figure 2\n\nWhat it shows.\n\n![Figure 2](docs/figures/inan2017-2.svg)" in (
        tmp_path / "PAPERS.md"
    ).read_text(encoding="utf-8")
    assert update_pages(tmp_path, {}, [make_shown()], check=True) == []


def test_section_of_a_record_states_its_origin() -> None:
    text = to_markdown(make_shown())
    assert "```text\nrow  lowest\nVD     92.8\n```\n" in text
    runs, _, measurement = text.rpartition(" Measured by ")
    assert "Runs of demo stand in for them." in runs
    for fact in (
        "`inan2017/table1`",
        "ptb (334cb66fee55)",
        "seeds 0, 1",
        "NVIDIA H200",
        "torch 2.13.0",
        "`fedcba987654`",
    ):
        assert fact in runs
    for fact in ("`reefknot figure", "EPYC", "`0123456789ab`"):
        assert fact in measurement


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": RECORD["environment"] | {"commit": None}}, "no commit recorded for it"),
        ({"environment": RECORD["environment"] | {"dirty": True}}, "it was made with uncommitted changes"),
        ({"runs": [RECORD["runs"][0] | {"command": ""}]}, "no command recorded for its run VD-LSTM large"),
        ({"runs": [RECORD["runs"][0] | {"dirty": True}]}, "its run VD-LSTM large was made with uncommitted changes"),
    ],
)
def test_untraceable_record_is_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_record(tmp_path / "results" / "figures" / "a.json", **changes)
    with pytest.raises(DataError, match=message):
        read_figures(tmp_path)


def test_invalid_record_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "results" / "figures" / "a.json"
    path.parent.mkdir(parents=True)
    for text, message in (("[]", "not a record of a figure"), ("{}", "not a record of a figure"), ("{", "a.json")):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_figures(tmp_path)


def test_record_is_accepted_only_with_the_code_of_its_commit(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    source = tmp_path / "src" / "reefknot"
    source.mkdir(parents=True)
    (source / "a.py").write_text("A = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    environment = RECORD["environment"] | {"commit": git("rev-parse", "HEAD"), "source_sha256": source_sha256(source)}
    path = write_record(tmp_path / "away" / "record.json", environment=environment)
    (recorded,) = record_runs(tmp_path, [path])
    assert recorded == tmp_path / "results" / "figures" / "inan2017-2.json"
    (stored,) = read_figures(tmp_path)
    assert stored["environment"]["command"] == "reefknot figure inan2017/2 RUN --data DIR --json a.json"
    with pytest.raises(DataError, match="the code that ran differs from commit"):
        add_record(tmp_path, write_record(path, environment=environment | {"source_sha256": "ab" * 32}))
    with pytest.raises(DataError, match="is not in this repository"):
        add_record(tmp_path, write_record(path, environment=environment | {"commit": "beef"}))
