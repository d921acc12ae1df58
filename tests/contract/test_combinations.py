"""The list of combinations is complete, and combinations that cannot work raise their listed error."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import CLASSIFIERS, ENCODERS, INPUTS, OUTPUTS, UNSUPPORTED_COMBINATIONS
from reefknot.nn.classifiers.plain import Plain

from .combinations import (
    LANGUAGE_MODEL_ENCODERS,
    SETTINGS,
    Case,
    all_cases,
    covering_cases,
    meaningful_cases,
    part_settings,
    summary,
    translating_cases,
)

Frozen = Callable[[Path, dict[str, Any]], dict[str, Any]]


def test_every_registered_part_is_in_a_combination() -> None:
    all_combinations, working = all_cases(), meaningful_cases()
    print(summary(working))
    assert (
        len(all_combinations)
        == len(set(all_combinations))
        == len(INPUTS) * len(LANGUAGE_MODEL_ENCODERS) * len(OUTPUTS) * len(CLASSIFIERS) * 2
    )
    for family, field in (
        (INPUTS, "input"),
        (LANGUAGE_MODEL_ENCODERS, "encoder"),
        (OUTPUTS, "output"),
        (CLASSIFIERS, "classifier"),
    ):
        assert set(family) <= {getattr(case, field) for case in all_combinations}
    assert {case.tied for case in working} == {True, False}


def test_listed_combinations_raise_their_error() -> None:
    for pattern, message in UNSUPPORTED_COMBINATIONS:
        matching = [case for case in all_cases() if case.matches(pattern)]
        assert matching, f"{pattern} matches no registered parts"
        for case in matching:
            build = case.tie_by_force if not case.build_input().tables() else case.build
            with pytest.raises(SettingsError, match=re.escape(message)):
                build()


def test_covering_contains_every_working_pair_of_parts() -> None:
    chosen, working = covering_cases(), meaningful_cases()
    assert set(chosen) < set(working)
    fields = ("input", "encoder", "output", "classifier", "tied")
    for first_field, second_field in itertools.combinations(fields, 2):
        covered = {(getattr(case, first_field), getattr(case, second_field)) for case in chosen}
        assert covered == {(getattr(case, first_field), getattr(case, second_field)) for case in working}


def test_tied_ends_share_one_table(case: Case) -> None:
    model = case.build()
    assert model.tied == case.tied
    assert sum(model.parameter_counts().values()) == sum(parameter.numel() for parameter in set(model.parameters()))


def test_new_part_is_covered_by_its_registry_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLASSIFIERS._parts, "new_part", f"{Plain.__module__}:{Plain.__name__}")
    assert "new_part" in {case.classifier for case in meaningful_cases()}


def test_missing_test_value_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SETTINGS, "encoders.lstm")
    with pytest.raises(pytest.fail.Exception, match=r"encoders.lstm needs hidden_dim: add .* to SETTINGS"):
        part_settings(ENCODERS, "lstm", {})


def test_state_dict_keys_are_frozen(frozen: Frozen) -> None:
    """Otherwise old checkpoints could not be read. `pytest tests/contract --freeze` adds new parts to the list.

    The list has every combination of ends with one encoder, and every encoder with one combination of ends, because
    the keys of ends and encoders do not depend on each other.
    """
    cases = meaningful_cases()
    chosen = [
        case for case in cases if case in (replace(cases[0], encoder=case.encoder), replace(case, encoder="lstm"))
    ]
    translators: dict[str, Case] = {}
    for case in translating_cases():
        translators.setdefault(case.encoder, case)  # the first case, so that a new end does not change this entry
    keys = {case.name: list(case.build().state_dict()) for case in (*chosen, *translators.values())}
    stored = frozen(Path(__file__).with_name("keys.json"), keys)
    assert stored.keys() == keys.keys()
    assert stored == keys
