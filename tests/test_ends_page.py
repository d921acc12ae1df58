"""Recipes and sizes in docs/ends.md are correct, and its pictures are reproducible."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from pages import ROOT, Page, code, experiments
from reefknot.lab.tasks import build_model
from reefknot.nn.models.language_model import LanguageModel

PAGE = Page("docs/ends.md")
WORDS = 10_000  # vocabulary of the Penn Treebank, the corpus of the recipes on the page
FRAME, CHANGE = PAGE.snippets("How to read this page")
PARTS = re.findall(r"^### (.+)$", PAGE.text, re.MULTILINE)
"""Headings of the sections about parts."""


def _recipe(section: str) -> str:
    (snippet,) = code(section, "toml")
    return snippet


def _build(snippet: str, folder: Path) -> LanguageModel:
    """Build the model of a recipe that consists of the frame and a snippet."""
    (experiment,) = experiments(folder, FRAME, snippet).values()
    with torch.device("meta"):
        return build_model(experiment, WORDS)


@pytest.mark.parametrize("heading", PARTS)
def test_recipe_of_a_part_builds_with_the_stated_size(heading: str, tmp_path: Path) -> None:
    snippet = _recipe(PAGE.sections[heading])
    counts = _build(snippet, tmp_path).parameter_counts()
    claimed = re.findall(r"^# ends: ([\d,]+) parameters", snippet, re.MULTILINE)
    if "[base.vocabulary" in snippet:
        assert not claimed, "the size would depend on the vocabulary"
    else:
        assert claimed == [f"{counts['input'] + counts['output']:,}"]


def test_row_changes_the_base(tmp_path: Path) -> None:
    base = _recipe(PAGE.sections["Tying: ends that hold one table"]).replace("dim = 400", "dim = 400\nunit_norm = true")
    changed = FRAME.replace('name = "mine"\n', f'name = "mine"\n{CHANGE}')
    vocabulary = "[base.vocabulary]\nmin_count = 2\nmax_size = 5_000\n"
    (experiment,) = experiments(tmp_path, changed, base, vocabulary).values()
    assert experiment.tables["words"].model_dump(exclude_defaults=True) == {"kind": "word", "dim": 256}
    assert not experiment.tables["words"].unit_norm
    assert (experiment.vocabulary.min_count, experiment.vocabulary.max_size) == (2, None)


def test_picture_is_drawn_with_the_same_bytes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`script/pictures --check` compares bytes."""
    monkeypatch.syspath_prepend(str(ROOT / "script"))
    pictures = importlib.import_module("drawing.shapes").PICTURES
    importlib.import_module("drawing.ends")
    assert pictures["adaptive_output"].svg_file == pictures["adaptive_output"].svg_file
