"""Requests: which options were given, which have no effect on a run, and old names of options."""

from __future__ import annotations

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.config.upgrade import upgrade_command
from reefknot.lab.tasks.requests import EvaluationRequest


def test_an_option_is_given_if_it_differs_from_its_default() -> None:
    request = EvaluationRequest(context=0, dynamic=True, dynamic_decay=0.0, cache=False)
    assert request.given_options() == ["context", "dynamic", "dynamic_decay"]
    assert request.given_values("dynamic_") == {"decay": 0.0}


def test_an_option_that_the_task_does_not_use_is_rejected() -> None:
    request = EvaluationRequest(split="valid", limit=3, length_penalty=0.0)
    request.reject_unused({"length_penalty"}, "RUN")
    with pytest.raises(SettingsError, match="--length-penalty has no effect on RUN"):
        request.reject_unused({"beam"}, "RUN")


@pytest.mark.parametrize(
    ("request_", "splits"),
    [
        (EvaluationRequest(), ["test"]),
        (EvaluationRequest(save=True), ["valid", "test"]),
        (EvaluationRequest(split="valid", save=True), ["valid"]),
    ],
)
def test_both_held_out_texts_are_scored_only_to_save_them(request_: EvaluationRequest, splits: list[str]) -> None:
    assert request_.splits == splits


def test_recorded_commands_are_shown_with_the_new_names_of_options() -> None:
    old_command = "reefknot evaluate RUN --cache --fill full --window 9 --data DIR"
    new_command = "reefknot evaluate RUN --cache --cache-fill full --cache-window 9 --data DIR"
    assert upgrade_command(old_command) == new_command
    assert upgrade_command("reefknot generate RUN --seed 1") == "reefknot generate RUN --seed 1"
