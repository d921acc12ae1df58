"""docs/results.md documents exactly the fields that `--json` prints, and the fields of the files of a run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.lab.cli.main import iter_verbs
from reefknot.lab.papers.fields import format_fields
from reefknot.lab.runs.scores import TextScore

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]
PAGE = (Path(__file__).parents[3] / "docs" / "results.md").read_text(encoding="utf-8")


def documented_fields(verb: str) -> set[str]:
    """Return the names in the first column of the tables in the section of a verb."""
    section = PAGE.split(f"\n### {verb}\n")[1].split("\n### ")[0].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall("`([^`]+)`", row)}


def test_every_verb_is_documented() -> None:
    for words, _ in iter_verbs():
        if words[0] not in ("bench", "figure"):
            assert f"\n### {' '.join(words)}\n" in PAGE


@pytest.fixture(scope="module")
def printed(cli: Cli, runs: Runs, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return what the verbs print with --json, by verb."""
    folder = tmp_path_factory.mktemp("printed")
    shutil.copytree(runs.root, folder / "table", symlinks=True)  # `table` then trains nothing
    short = ("training.epochs=1", "--device", "cpu")
    commands: list[tuple[object, ...]] = [
        ("train", recipe, *short, "--row", "tied", "--out", folder / "run"),
        ("table", recipe, "--out", folder / "table"),
        ("evaluate", runs.tied),
        ("evaluate", runs.tied, "--protocol", "awd"),
        ("compare", runs.untied, runs.tied, "--bands"),
        ("report", runs.root, "-o", folder / "report.html"),
        ("generate", runs.tied, "--prompt", "green"),
        ("score", runs.tied, "green river"),
        ("predict", runs.tied, "green river"),
        ("predict", runs.tied, "--split", "test"),
        ("rank", runs.tied),
        ("validate", recipe),
        ("vectors export", runs.tied, "--format", "word2vec", "-o", folder / "vectors.vec"),
    ]
    outputs: dict[str, list[Any]] = {}
    for verb, *words in commands:
        outputs.setdefault(str(verb), []).append(cli(*str(verb).split(), *words, "--json").json())
    return outputs


@pytest.mark.parametrize(
    "verb",
    ["train", "table", "report", "generate", "score", "predict", "rank", "validate", "vectors export"],
)
def test_printed_fields_are_documented(printed: dict[str, list[Any]], verb: str) -> None:
    names = set()
    for output in printed[verb]:
        for record in output if isinstance(output, list) else [output]:
            names |= set(record)
    assert names == documented_fields(verb)


def test_fields_of_comparisons_are_documented(printed: dict[str, list[Any]]) -> None:
    """The section also documents the fields of translators."""
    [[comparison]] = printed["compare"]
    assert set(comparison) <= documented_fields("compare")


def test_fields_of_evaluations_are_those_of_scores_and_of_the_section(printed: dict[str, list[Any]]) -> None:
    scores = {*TextScore.model_fields, *TextScore.model_computed_fields}
    names = {name for output in printed["evaluate"] for name in output}
    assert names - scores == documented_fields("evaluate")


def test_training_prints_the_results_of_its_runs(printed: dict[str, list[Any]]) -> None:
    for verb in ("train", "table"):
        for run in printed[verb][0]["runs"]:
            assert run["result"] == json.loads((Path(run["run"]) / "result.json").read_text("utf-8"))
            assert run["result"]["test"]["perplexity"] > 1
    assert len(printed["table"][0]["runs"]) == 2


def test_withheld_test_scores_are_not_printed(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    outcome = cli("train", recipe, "training.epochs=1", "--row", "tied", "--out", out, "--withhold-test", "--json")
    [run] = outcome.json()["runs"]
    assert "valid" in run["result"]
    assert not {"test", "frequency", "protocol"} & set(run["result"])
    assert "valid perplexity" in outcome.err


def test_fields_of_files_are_documented() -> None:
    assert format_fields() in PAGE
    assert "|  |" not in format_fields()  # every field has a meaning
