"""Recipes in docs/translation.md can be combined and equal the shipped recipes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from pages import Page, experiments
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.tasks import build_model
from reefknot.nn.models.translator import Translator

PAGE = Page("docs/translation.md")
(FRAME,) = PAGE.snippets("How to read this page")
(FIRST,) = PAGE.snippets("A first translator")
(DRILL,) = PAGE.snippets("Both encoders with any end")
TRAININGS = PAGE.snippets("Training")
ENCODER_HEADINGS = [heading for heading in PAGE.sections if heading.startswith("`")]


def test_first_translator_has_one_table(tmp_path: Path) -> None:
    (experiment,) = experiments(tmp_path, FIRST).values()
    with torch.device("meta"):
        model = build_model(experiment, 2_000)
    assert isinstance(model, Translator)
    assert model.three_way
    assert experiment.input.model_dump()["scale"] == pytest.approx(128**0.5, rel=1e-2)


def test_every_encoder_works_with_every_training(tmp_path: Path) -> None:
    assert (len(ENCODER_HEADINGS), len(TRAININGS)) == (2, 2)
    for heading, training in product(ENCODER_HEADINGS, TRAININGS):
        assert experiments(tmp_path, FRAME, *PAGE.snippets(heading), training).keys() == {"mine"}


@pytest.mark.parametrize(
    ("training", "recipe", "row"),
    [(TRAININGS[0], "pappas2019/multi30k", "TWWT"), (TRAININGS[1], "press2017/table8", "EN-FR: TWWT")],
)
def test_training_snippets_equal_the_shipped_recipes(tmp_path: Path, training: str, recipe: str, row: str) -> None:
    (snippet,) = experiments(tmp_path, FRAME, *PAGE.snippets(ENCODER_HEADINGS[0]), training).values()
    published = load_recipe(recipe, row=row).experiments[row]
    assert snippet.training == published.training
    assert "average" not in training or snippet.evaluation == published.evaluation
