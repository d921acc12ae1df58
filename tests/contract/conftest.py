"""Every combination of registered parts, built from settings as a recipe would build it.

A new part is covered as soon as its line stands in `parts.py`. Only an argument without a default needs a small value
in `SETTINGS`, and its absence says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter

from reefknot.encoders.contract import Encoder
from reefknot.models.language_model import LanguageModel
from reefknot.parts import ENCODERS, INPUTS, LABELS, OUTPUTS, TABLES
from reefknot.recipe import build_model, check_experiment
from reefknot.registry import Registry, _arguments

VOCABULARY = 11

SETTINGS: dict[str, dict[str, Any]] = {
    "tables.word": {"dim": 6},
    "encoders.lstm": {"hidden_dim": 6},
}
"""Test values of the arguments that have no default, as `family.kind`. All widths are 6, so that everything joins."""

WITHOUT_MEANING: list[tuple[dict[str, Any], str]] = []
"""Combinations that have no meaning: fields of `Case` that must all match, and words of the sentence that building one
raises. For example ({"output": "augmented", "labels": "char_cnn"}, "has no vectors to compare"). None so far."""

EXPERIMENT: dict[str, Any] = {
    "corpus": {},
    "training": {
        "epochs": 1,
        "batch": 1,
        "steps": 1,
        "optimiser": {"kind": "sgd", "learning_rate": 1.0},
        "schedule": {"kind": "constant"},
    },
}
"""What an experiment has beside its model."""


@dataclass(frozen=True)
class Case:
    """One combination. `labels` is None for an output end that takes none."""

    input: str
    encoder: str
    output: str
    labels: str | None
    tied: bool

    @property
    def name(self) -> str:
        ends = [self.input, self.encoder, self.output, self.labels, "tied" if self.tied else "untied"]
        return "-".join(end for end in ends if end)

    def settings(self) -> dict[str, Any]:
        """The model's part of a recipe."""
        tables: dict[str, Any] = {}
        source = part_settings(INPUTS, self.input, tables, "words")
        output = part_settings(OUTPUTS, self.output, tables, "words" if self.tied else "classes", self.labels)
        encoder = part_settings(ENCODERS, self.encoder, tables, "")
        return {"tables": tables, "input": source, "encoder": encoder, "output": output}

    def build(self, seed: int = 0) -> LanguageModel:
        experiment = check_experiment(EXPERIMENT | self.settings(), self.name)
        torch.manual_seed(seed)
        return build_model(experiment, VOCABULARY)

    def matches(self, pattern: dict[str, Any]) -> bool:
        return all(getattr(self, field) == value for field, value in pattern.items())


def part_settings(
    registry: Registry, kind: str, tables: dict[str, Any], table: str, nested: str | None = None
) -> dict[str, Any]:
    """Settings of a part from its signature: its table and nested part by role, the rest by default or `SETTINGS`."""
    entry = f"{registry.family}.{kind}"
    values = SETTINGS.get(entry, {})
    found: dict[str, Any] = {"kind": kind, **values}
    for argument in _arguments(registry, kind):
        if argument.role == "shared" and argument.marker.group == "tables":
            found[argument.name] = table
            tables[table] = part_settings(TABLES, _table_kind(argument.annotation), tables, "")
        elif argument.role == "part":
            inner = nested if argument.marker is LABELS and nested else next(iter(argument.marker))
            found[argument.name] = part_settings(argument.marker, inner, tables, table)
        elif argument.role == "plain" and argument.default is ... and argument.name not in values:
            pytest.fail(f'{entry} needs {argument.name}: add "{entry}": {{"{argument.name}": ...}} to SETTINGS')
    return found


def _table_kind(annotation: Any) -> str:
    """The kind of table that an end's signature asks for."""
    wanted = get_args(annotation)[0]
    return next(kind for kind in TABLES if issubclass(TABLES.load(kind), wanted))


def all_cases() -> Iterator[Case]:
    """The whole product, with and without a meaning."""
    for source in INPUTS:
        for encoder in ENCODERS:
            for output in OUTPUTS:
                takes_labels = any(argument.marker is LABELS for argument in _arguments(OUTPUTS, output))
                for labels in LABELS if takes_labels else (None,):
                    for tied in (True, False):
                        yield Case(source, encoder, output, labels, tied)


def meaningful_cases() -> list[Case]:
    return [case for case in all_cases() if not any(case.matches(pattern) for pattern, _ in WITHOUT_MEANING)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case`: every combination; `end_case`: one encoder each, for what the output end alone decides."""
    cases = meaningful_cases()
    first = next(iter(ENCODERS))
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])
    if "end_case" in metafunc.fixturenames:
        ends = [case for case in cases if case.encoder == first]
        metafunc.parametrize("end_case", ends, ids=[case.name for case in ends])
    if "encoder_kind" in metafunc.fixturenames:
        metafunc.parametrize("encoder_kind", list(ENCODERS))


@pytest.fixture
def encoder(encoder_kind: str) -> Encoder:
    """An encoder over vectors of width 6, in float64 and without dropout, so that equal means equal."""
    settings = TypeAdapter(ENCODERS.settings()).validate_python(part_settings(ENCODERS, encoder_kind, {}, ""))
    torch.manual_seed(0)
    built: Encoder = ENCODERS.build(settings, {"input_dim": 6})
    return built.double().eval()
