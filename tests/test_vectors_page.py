"""Recipes and Python code in docs/vectors.md work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli.conftest import run_command

from pages import Page, code, experiments
from reefknot.lab.tasks import build_model
from reefknot.lab.tasks.initialisation import list_table_files
from reefknot.lab.tasks.skip_gram import SkipGramExperiment
from skip_gram_recipe import write_judgements, write_recipe

PAGE = Page("docs/vectors.md")
(FIRST,) = PAGE.snippets("First word vectors")
(START,) = PAGE.snippets("A table that starts from a file")
PYTHON = code(PAGE.text, "python")


def test_first_recipe_trains_skip_gram_untied_and_tied(tmp_path: Path) -> None:
    untied, tied = experiments(tmp_path, FIRST).values()
    assert isinstance(untied, SkipGramExperiment)
    assert isinstance(tied, SkipGramExperiment)
    assert untied.corpus.name == "python-docs"
    assert (untied.skip_gram.tied, tied.skip_gram.tied) == (False, True)
    assert tied.skip_gram.model_copy(update={"tied": False}) == untied.skip_gram


def test_report_shows_benchmarks_only_of_judged_runs(tmp_path: Path, made_text: Callable[[int], Path]) -> None:
    recipe, data = write_recipe(tmp_path, made_text(600)), write_judgements(tmp_path)
    shown = []
    for similarity, options in (("true", ("--data", data)), ("false", ())):
        run, page = tmp_path / similarity, tmp_path / f"{similarity}.html"
        settings = ("training.epochs=1", f"evaluation.similarity={similarity}")
        train = ("train", recipe, "--row", "tied", "--out", run, "--device", "cpu", *options, *settings)
        for command in (train, ("report", run, "-o", page)):
            outcome = run_command(*command)
            assert outcome.code == 0, outcome.err
        html = page.read_text(encoding="utf-8")
        assert "<h2>Results</h2>" in html
        shown.append(("<h3>Word similarity</h3>" in html, "60 of 999" in html))
    assert shown == [(True, True), (False, False)]


def test_table_starts_from_the_file_and_may_be_frozen(tmp_path: Path) -> None:
    drawn, started, frozen = experiments(tmp_path, START).values()
    with torch.device("meta"):
        tables = [build_model(experiment, 100).input.tables()[0] for experiment in (drawn, started, frozen)]
    files = [list(list_table_files(experiment.tables).values()) for experiment in (drawn, started, frozen)]
    assert files == [[], [Path("words.vec")], [Path("words.vec")]]
    assert [table.frozen for table in tables] == [False, False, True]


@pytest.mark.parametrize("gensim", [False, True])
def test_python_examples_run(gensim: bool, tmp_path: Path) -> None:
    program, with_gensim = PYTHON
    if gensim:
        pytest.importorskip("gensim")
        program += with_gensim
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
