"""Recipes, schedules, windows and quoted code in docs/attention.md are correct."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from pages import Page, experiments
from reefknot.lab.config.parts import SCHEDULES
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.tasks import build_model
from reefknot.lab.tasks.language_model import LanguageModelExperiment

PAGE = Page("docs/attention.md")
(FRAME,) = PAGE.snippets("How to read this page")
(FIRST,) = PAGE.snippets("A first model")
(MODEL,) = PAGE.snippets("`transformer`: causal self-attention in pre-norm blocks")
(TRAINING,) = PAGE.snippets("Training")
(ADAMW,) = PAGE.snippets("AdamW")
(SCORING,) = PAGE.snippets("Context")
TEXT = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1, 1, 0])
"""Ten tokens in lines of 4, 3 and 3 tokens. <eos> is 0."""
EXAMPLES = re.findall(
    r"^\| `(\{.+\})` \| (.+) \|$", PAGE.sections["Windows: what a token is predicted from"], re.MULTILINE
)


def paper(folder: Path, training: str = TRAINING) -> LanguageModelExperiment:
    """Return the experiment of the paper, joined from the snippets of the page."""
    (experiment,) = experiments(folder, FRAME, MODEL, training, SCORING).values()
    return experiment


def test_first_model_is_built_with_tied_ends(tmp_path: Path) -> None:
    (experiment,) = experiments(tmp_path, FIRST).values()
    assert experiment.input.model_dump()["scale"] == pytest.approx(128**0.5, rel=1e-2)
    with torch.device("meta"):
        assert build_model(experiment, 5_000).tied


@pytest.mark.parametrize("training", [TRAINING, ADAMW])
def test_recipe_of_the_paper_has_its_batches_and_windows(tmp_path: Path, training: str) -> None:
    experiment = paper(tmp_path, training)
    assert experiment.training.batch * experiment.training.steps == 65_536
    assert experiment.training.batch // (experiment.training.accumulate or 1) * experiment.training.steps == 16_384
    assert experiment.windows is not None
    assert experiment.windows.name == "complete-512"


def test_training_snippet_equals_the_shipped_recipe(tmp_path: Path) -> None:
    published = load_recipe("baevski2019/table3", row="ADP-T").experiments["ADP-T"]
    assert paper(tmp_path).model_dump() == published.model_dump()


def test_training_ends_with_the_last_cycle(tmp_path: Path) -> None:
    settings = paper(tmp_path).training
    schedule = SCHEDULES.build(settings.schedule, {})
    cycles = [18_000, 36_000, 72_000, 144_000]
    assert 16_000 + sum(cycles) == settings.updates
    last, following = (schedule.learning_rate_factor(1, settings.updates + shift) for shift in (-1, 0))
    assert last < 1e-4 < 0.3 < following == pytest.approx(0.75**4)


def test_formula_of_the_learning_rate_equals_the_code(tmp_path: Path) -> None:
    schedule = SCHEDULES.build(paper(tmp_path).training.schedule, {})
    for step, i, s in ((16_000, 0, 0.0), (25_000, 0, 0.5), (34_000, 1, 0.0), (43_000, 1, 0.25), (88_000, 2, 0.25)):
        expected = 0.75**i * (1e-5 + (1 - 1e-5) * (1 + math.cos(math.pi * s)) / 2)
        assert schedule.learning_rate_factor(1, step) == pytest.approx(expected)


@pytest.mark.parametrize(("settings", "expected"), EXAMPLES)
def test_window_examples_equal_the_code(tmp_path: Path, settings: str, expected: str) -> None:
    (experiment,) = experiments(tmp_path, FIRST, f"[base.evaluation]\nwindows = {settings}").values()
    assert experiment.windows is not None
    spans = experiment.windows.spans(TEXT, 0)
    windows = [
        f"{start + 1}-{stop} ({scored + 1}-{stop})" for start, scored, stop in zip(*map(list, spans), strict=True)
    ]
    assert expected == ", ".join(windows)


def test_default_windows_have_no_context(tmp_path: Path) -> None:
    (experiment,) = experiments(tmp_path, FIRST).values()
    assert experiment.windows is not None
    assert experiment.windows.name == "context-0-stride-64"


def test_example_override_removes_a_setting(tmp_path: Path) -> None:
    (changes,) = re.findall(r"`(training\.updates=\S+ training\.epochs=\S+)`", PAGE.text)
    training = load_recipe("baevski2019/table2", changes.split()).experiments["Adaptive inputs"].training
    assert (training.updates, training.epochs) == (None, 3)
