"""What docs/recurrent.md says is true: recipes that go together, choices of settings, figures of the code."""

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


def test_encoders_and_trainings_go_together(tmp_path: Path) -> None:
    assert len(TRAININGS) == 2
    for heading, training in product(ENCODER_HEADINGS, TRAININGS):
        assert experiments(tmp_path, FRAME, *PAGE.snippets(heading), training, SCORING).keys() == {"mine"}


def test_finetuning_begins_with_the_first_row(tmp_path: Path) -> None:
    awd = next(heading for heading in ENCODER_HEADINGS if "awd" in heading)
    found = experiments(tmp_path, FRAME, *PAGE.snippets(awd), TRAININGS[1], FINETUNING)["finetuned"].training
    assert found.start is not None
    assert found.averaging is not None
    assert found.random_steps is not None
    assert (found.start.row, found.averaging.start, found.random_steps.most) == ("mine", "at_once", 80)
