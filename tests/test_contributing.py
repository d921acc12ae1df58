"""The examples in CONTRIBUTING.md work: a classifier, which passes the contract tests, and a verb."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import reefknot.lab.cli
import reefknot.nn.classifiers
from pages import ROOT, code
from reefknot.lab.cli.main import load_verb
from reefknot.lab.config.parts import CLASSIFIERS
from reefknot.nn.tables import WordTable

FILE, LINE, VERB = code((ROOT / "CONTRIBUTING.md").read_text("utf-8"), "python")
KIND, HOME = re.fullmatch(r' *"(\w+)": "([\w.:]+)",\n', LINE).groups()  # type: ignore[union-attr]

REGISTER_EXAMPLE = f"""
import reefknot.nn.classifiers
from reefknot.lab.config.parts import CLASSIFIERS

reefknot.nn.classifiers.__path__.append({{folder!r}})
CLASSIFIERS._parts[{KIND!r}] = {HOME!r}
"""


def test_example_classifier_scales_its_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unit.py").write_text(FILE, encoding="utf-8")
    monkeypatch.setattr(reefknot.nn.classifiers, "__path__", [*reefknot.nn.classifiers.__path__, str(tmp_path)])
    monkeypatch.setitem(CLASSIFIERS._parts, KIND, HOME)
    classifier = CLASSIFIERS.load(KIND)(WordTable(11, 4), length=2.0)
    assert torch.allclose(classifier.weight().norm(dim=-1), torch.full((11,), 2.0))


@pytest.mark.slow
def test_example_classifier_passes_the_contract_tests(tmp_path: Path) -> None:
    """Run in another process, because the settings of recipes are derived at the first import."""
    (tmp_path / "unit.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "register_example.py").write_text(REGISTER_EXAMPLE.format(folder=str(tmp_path)), encoding="utf-8")
    options = ["-p", "register_example", "-p", "no:cacheprovider", "-k", f"{KIND} and tied"]
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/contract", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    passed = re.search(r"(\d+) passed", completed.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40, completed.stdout


def test_example_verb_prints_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.py").write_text(VERB, encoding="utf-8")
    monkeypatch.setattr(reefknot.lab.cli, "__path__", [*reefknot.lab.cli.__path__, str(tmp_path)])
    outcome = CliRunner().invoke(load_verb("rows"), ["press2017/table6"])
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.splitlines() == ["Small model", "Small + WT", "Small + PR", "Small + WT + PR"]
