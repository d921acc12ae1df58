"""What docs/attention.md says is true: recipes, schedules, windows, and what it quotes of the code."""

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
"""Ten tokens in lines of 4, 3 and 3, where <eos> is 0."""
EXAMPLES = re.findall(
    r"^\| `(\{.+\})` \| (.+) \|$", PAGE.sections["Windows: what a token is predicted from"], re.MULTILINE
)


def paper(folder: Path, training: str = TRAINING) -> LanguageModelExperiment:
    (experiment,) = experiments(folder, FRAME, MODEL, training, SCORING).values()
    return experiment


def test_the_first_model_builds(tmp_path: Path) -> None:
    (experiment,) = experiments(tmp_path, FIRST).values()
    assert experiment.input.model_dump()["scale"] == pytest.approx(128**0.5, rel=1e-2)
    with torch.device("meta"):
        assert build_model(experiment, 5_000).tied


@pytest.mark.parametrize("training", [TRAINING, ADAMW])
def test_the_papers_recipe_is_complete(tmp_path: Path, training: str) -> None:
    found = paper(tmp_path, training)
    assert found.training.batch * found.training.steps == 65_536
    assert found.training.batch // (found.training.accumulate or 1) * found.training.steps == 16_384
    assert found.windows is not None
    assert found.windows.name == "complete-512"


def test_training_is_that_of_the_papers_table(tmp_path: Path) -> None:
    theirs = load_recipe("baevski2019/table3", row="ADP-T").experiments["ADP-T"]
    assert paper(tmp_path).model_dump() == theirs.model_dump()


def test_training_ends_in_a_valley(tmp_path: Path) -> None:
    settings = paper(tmp_path).training
    schedule = SCHEDULES.build(settings.schedule, {})
    cycles = [18_000, 36_000, 72_000, 144_000]
    assert 16_000 + sum(cycles) == settings.updates
    assert all(f"{cycle:,}" in PAGE.sections["Warm-up and cycles"] for cycle in cycles)
    last, next_one = (schedule.factor(1, settings.updates + shift) for shift in (-1, 0))
    assert last < 1e-4 < 0.3 < next_one == pytest.approx(0.75**4)


def test_the_formula_of_the_rate_is_the_codes(tmp_path: Path) -> None:
    schedule = SCHEDULES.build(paper(tmp_path).training.schedule, {})
    for step, i, s in ((16_000, 0, 0.0), (25_000, 0, 0.5), (34_000, 1, 0.0), (43_000, 1, 0.25), (88_000, 2, 0.25)):
        expected = 0.75**i * (1e-5 + (1 - 1e-5) * (1 + math.cos(math.pi * s)) / 2)
        assert schedule.factor(1, step) == pytest.approx(expected)


@pytest.mark.parametrize(("settings", "shown"), EXAMPLES)
def test_an_example_of_windows_is_what_is_cut(tmp_path: Path, settings: str, shown: str) -> None:
    (experiment,) = experiments(tmp_path, FIRST, f"[base.evaluation]\nwindows = {settings}").values()
    assert experiment.windows is not None
    spans = experiment.windows.cut(TEXT, 0)
    found = [f"{start + 1}-{stop} ({scored + 1}-{stop})" for start, scored, stop in zip(*map(list, spans), strict=True)]
    assert shown == ", ".join(found)


def test_windows_that_are_left_out(tmp_path: Path) -> None:
    (experiment,) = experiments(tmp_path, FIRST).values()
    assert experiment.windows is not None
    assert experiment.windows.name == "context-0-stride-64"


def test_settings_that_a_command_takes_away(tmp_path: Path) -> None:
    changes = re.findall(r"`(training\.updates=\S+ training\.epochs=\S+)`", PAGE.text)
    assert changes == ["training.updates=default training.epochs=3"]
    found = load_recipe("baevski2019/table2", changes[0].split()).experiments["Adaptive inputs"].training
    assert (found.updates, found.epochs) == (None, 3)
