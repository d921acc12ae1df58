"""Recipes in docs/recurrent.md can be combined and load."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from pages import Page, experiments

PAGE = Page("docs/recurrent.md")
ENCODER_HEADINGS = [heading for heading in PAGE.sections if heading.startswith("`")]
(FRAME,) = PAGE.snippets("How to read this page")
TRAININGS = PAGE.snippets("Training")
(FINETUNING,) = PAGE.snippets("Starting from another row")
(SCORING,) = PAGE.snippets("Perplexity: ours and the papers'")


def test_every_encoder_works_with_every_training(tmp_path: Path) -> None:
    assert len(TRAININGS) == 2
    for heading, training in product(ENCODER_HEADINGS, TRAININGS):
        assert experiments(tmp_path, FRAME, *PAGE.snippets(heading), training, SCORING).keys() == {"mine"}


def test_finetuning_starts_from_the_first_row(tmp_path: Path) -> None:
    awd = next(heading for heading in ENCODER_HEADINGS if "awd" in heading)
    training_settings = experiments(tmp_path, FRAME, *PAGE.snippets(awd), TRAININGS[1], FINETUNING)[
        "finetuned"
    ].training
    assert training_settings.start is not None
    assert training_settings.averaging is not None
    assert training_settings.random_steps is not None
    assert (training_settings.start.row, training_settings.averaging.start, training_settings.random_steps.most) == (
        "mine",
        "at_once",
        80,
    )
