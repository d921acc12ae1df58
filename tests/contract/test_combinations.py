"""The list of combinations: complete, counted, buildable, and honest about what is left out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import CLASSIFIERS, ENCODERS, INPUTS, OUTPUTS, WITHOUT_MEANING
from reefknot.nn.classifiers.plain import Plain

from .combinations import (
    ALONE,
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


def test_every_registered_part_is_walked() -> None:
    every, kept = all_cases(), meaningful_cases()
    print(summary(kept))
    assert len(every) == len(set(every)) == len(INPUTS) * len(ALONE) * len(OUTPUTS) * len(CLASSIFIERS) * 2
    for family, field in ((INPUTS, "input"), (ALONE, "encoder"), (OUTPUTS, "output"), (CLASSIFIERS, "classifier")):
        assert set(family) <= {getattr(case, field) for case in every}
    assert {case.tied for case in kept} == {True, False}


def test_listed_combinations_raise_their_sentence() -> None:
    for pattern, sentence in WITHOUT_MEANING:
        matching = [case for case in all_cases() if case.matches(pattern)]
        assert matching, f"{pattern} names nothing that is registered"
        for case in matching:
            build = case.tie_by_force if not case.build_input().tables() else case.build
            with pytest.raises(SettingsError, match=re.escape(sentence)):
                build()


def test_the_covering_joins_every_two_parts_that_can_meet() -> None:
    chosen, kept = covering_cases(), meaningful_cases()
    assert set(chosen) < set(kept)
    fields = ("input", "encoder", "output", "classifier", "tied")
    for one, other in itertools.combinations(fields, 2):
        met = {(getattr(case, one), getattr(case, other)) for case in chosen}
        assert met == {(getattr(case, one), getattr(case, other)) for case in kept}


def test_tied_means_one_table(case: Case) -> None:
    model = case.build()
    assert model.tied == case.tied
    assert sum(model.parameter_counts().values()) == sum(p.numel() for p in set(model.parameters()))


def test_a_new_part_needs_its_line_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLASSIFIERS._parts, "newcomer", f"{Plain.__module__}:{Plain.__name__}")
    assert "newcomer" in {case.classifier for case in meaningful_cases()}


def test_a_missing_test_value_says_where_to_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SETTINGS, "encoders.lstm")
    with pytest.raises(pytest.fail.Exception, match=r"encoders.lstm needs hidden_dim: add .* to SETTINGS"):
        part_settings(ENCODERS, "lstm", {})


def test_state_dict_keys_are_frozen(frozen: Frozen) -> None:
    """Checkpoints stay readable. New parts join the list by `pytest tests/contract --freeze`.

    Every combination of ends with one encoder and every encoder with one combination of ends: neither changes what the
    other stores.
    """
    cases = meaningful_cases()
    chosen = [
        case for case in cases if case in (replace(cases[0], encoder=case.encoder), replace(case, encoder="lstm"))
    ]
    translating: dict[str, Case] = {}
    for case in translating_cases():
        translating.setdefault(case.encoder, case)  # the first, so that a new end changes no entry
    now = {case.name: list(case.build().state_dict()) for case in (*chosen, *translating.values())}
    stored = frozen(Path(__file__).with_name("keys.json"), now)
    assert stored.keys() == now.keys()
    assert stored == now
