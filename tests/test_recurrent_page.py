"""What docs/recurrent.md says is true: recipes that go together, choices of settings, figures of the code."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import get_args

from pages import Page, experiments
from reefknot.evaluation.cache import CacheSettings
from reefknot.evaluation.dynamic import DEFAULTS, ETA_FACTORS, LAMBDA_FACTORS, SEGMENT, DynamicSettings
from reefknot.training.averaging import AveragingSettings
from reefknot.training.stopping import StoppingSettings

PAGE = Page("docs/recurrent.md")
ENCODER_HEADINGS = [heading for heading in PAGE.sections if heading.startswith("`")]
(FRAME,) = PAGE.snippets("How to read this page")
TRAININGS = PAGE.snippets("Training")
(FINETUNING,) = PAGE.snippets("Second sessions")
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


def test_every_choice_of_a_setting_is_named() -> None:
    quoted = [
        *(f'`start = "{each}"`' for each in get_args(AveragingSettings.model_fields["start"].annotation)),
        *(f'`rule = "{each}"`' for each in get_args(StoppingSettings.model_fields["rule"].annotation)),
        *(f"`{each}`" for each in ("weight_decay", "decoupled_decay", "probability", "deviation", "least", "most")),
    ]
    assert [choice for choice in quoted if choice not in PAGE.text] == []


def test_the_numbers_of_the_evaluations_are_those_of_the_code() -> None:
    section = PAGE.sections["Dynamic evaluation"]
    for scale, rates in DEFAULTS.items():
        (row,) = re.findall(rf"^\| `{scale}`.*$", section, re.MULTILINE)
        found = tuple(float(each) for each in re.findall(r"\| ([\d.e-]+) (?=\|)", row))
        assert found == (rates.eta, rates.decay, rates.epsilon)
    assert f"{min(ETA_FACTORS):g} to {max(ETA_FACTORS):g} times" in section
    assert f"{min(LAMBDA_FACTORS):g} to {max(LAMBDA_FACTORS):g} times" in section
    assert f"{SEGMENT} tokens" in section
    assert DynamicSettings().scale == "mean"
    cache = CacheSettings()
    assert (
        f"`--weight` {cache.weight:g}, `--theta` {cache.theta:g}, `--window` {cache.window}" in PAGE.sections["Cache"]
    )
