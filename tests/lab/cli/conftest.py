"""Run the command line in this process, and train two tiny runs with it."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from reefknot.lab.cli.main import main
from tiny import MODEL, UNTIED

TRAINING = """
[base.training]
epochs = 2
batch = 4
steps = 10
optimiser = { kind = "sgd", learning_rate = 2.0 }
schedule = { kind = "constant" }

[[rows]]
name = "quoted"
quoted = true
paper = { test = 12.5 }

[[rows]]
name = "tied"
paper = { test = 14.5 }
"""

WORDS = ["green", "river", "house", "bird", "tree", "mountain", "stone", "cloud", "winter", "<b>bold</b>"]


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


def run_command(*words: object) -> Outcome:
    """Run `reefknot WORDS` in this process. An exception other than an exit fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["reefknot", *map(str, words)])
        with pytest.raises(SystemExit) as exit_info:
            main()
    code = exit_info.value.code
    return Outcome(code if isinstance(code, int) else int(code is not None), out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def cli() -> Callable[..., Outcome]:
    torch.set_num_threads(1)
    return run_command


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write random lines of six words. An empty line after every second line separates documents."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for name, lines in (("train", 150), ("valid", 20), ("test", 60)):
        text = [" ".join(rng.choice(WORDS) for _ in range(6)) + "\n" * (1 + line % 2) for line in range(lines)]
        (folder / f"{name}.txt").write_text("".join(text), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    model = MODEL.format(corpus=repr(str(corpus)), layers=1, dropout=0.2, classifier="plain")
    path.write_text(f'title = "Tiny: two rows"\n{model}{TRAINING}{UNTIED}', encoding="utf-8")
    return path


@dataclass(frozen=True)
class Runs:
    """Two finished runs, where `reefknot table --out root` looks for them."""

    root: Path
    printed: str

    @property
    def tied(self) -> Path:
        return self.root / "tied" / "seed0"

    @property
    def untied(self) -> Path:
        return self.root / "untied" / "seed0"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, recipe: Path, cli: Callable[..., Outcome]) -> Runs:
    """Train both runs once. Tests must not change them."""
    root = tmp_path_factory.mktemp("runs")
    printed = ""
    for row in ("tied", "untied"):
        outcome = cli("train", recipe, "--row", row, "--out", root / row / "seed0", "--device", "cpu")
        assert outcome.code == 0, outcome.err
        printed += outcome.out
    return Runs(root, printed)
