"""Every combination of registered parts, built from settings as in a recipe.

A new part is covered as soon as its line is in `lab/config/parts.py`. An argument without a default also needs a small
value in `SETTINGS`; the test fails with this advice if it is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations
from typing import Any

import pytest
import torch

from reefknot.lab.config.parts import (
    CLASSIFIERS,
    ENCODERS,
    INPUTS,
    OUTPUTS,
    PROJECTIONS,
    TABLES,
    UNSUPPORTED_COMBINATIONS,
)
from reefknot.lab.config.registry import Registry
from reefknot.lab.tasks import build_model, check_experiment
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.tables import BandedTable

LANGUAGE_MODEL_ENCODERS, TRANSLATOR_ENCODERS = (
    [kind for kind in ENCODERS if ENCODERS.load(kind).reads_source is reads] for reads in (False, True)
)
"""Kinds of encoders of language models and of translators."""
WORDS = Vocabulary(
    ("the", "<eos>", "of", "<unk>", "file", "a", "naïve", "in", "x", "string", "is"), tuple(range(11, 0, -1))
)
VOCABULARY = len(WORDS)
DIM = 8
"""All dimensions, so that all parts fit together. Bands have 8, 4 and 2 dimensions.

A band of one dimension would not do: a classifier that scales its vectors has no gradient there.
"""

SETTINGS: dict[str, dict[str, Any]] = {
    "tables.word": {"dim": DIM},
    "tables.banded": {"dim": DIM, "sizes": [4, 4], "factor": 2},
    "projections.bands": {"dim": DIM},
    "inputs.char_cnn": {"dim": DIM, "filters": [[1, 5], [2, 6]], "byte_dim": 4},
    **{f"encoders.{kind}": {"hidden_dim": DIM} for kind in LANGUAGE_MODEL_ENCODERS},
    "encoders.highway": {"hidden_dim": DIM, "depth": 2},
    "encoders.transformer": {"layers": 2, "heads": 2, "ffn_dim": 12},
    "encoders.attention_gru": {"units": DIM},
    "encoders.encoder_decoder": {"layers": 2, "heads": 2, "ffn_dim": 12},
    "outputs.augmented": {"tau": 2.0, "gamma": 0.5},
    "outputs.mixture": {"experts": 3},
    "outputs.sampled": {"samples": 5},
}
"""Test values, by `family.kind`, of arguments whose default is missing or too large for a test."""

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
"""Settings of an experiment other than its model."""
PAIRS: dict[str, Any] = {
    "corpus": {"name": "multi30k", "pairs": {"source": "en", "target": "de"}},
    "training": EXPERIMENT["training"] | {"batching": "pairs"},
}
"""Settings of an experiment with a translator, other than its model."""


@dataclass(frozen=True)
class Case:
    """One combination of parts. `classifier` is None for an output end without classifier."""

    input: str
    encoder: str
    output: str
    classifier: str | None
    tied: bool

    @property
    def name(self) -> str:
        ends = [self.input, self.encoder, self.output, self.classifier, "tied" if self.tied else "untied"]
        return "-".join(end for end in ends if end)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the model, with one table for both ends if they are tied."""
        classes = "words" if self.tied else "classes"
        reads_bands, writes_bands = _banded(INPUTS, self.input), _banded(OUTPUTS, self.output)
        tables: dict[str, Any] = {}
        if _takes_table(INPUTS, self.input):
            tables["words"] = table_settings(reads_bands or (self.tied and writes_bands))
            if self.input == "lookup" and self.tied and writes_bands:
                tables["words"]["factor"] = 1  # a plain lookup needs bands of equal dimension
        tables.setdefault(classes, table_settings(writes_bands))
        projections: dict[str, Any] = {}
        if reads_bands:
            projections["words"] = part_settings(PROJECTIONS, "bands", {"table": "words"})
        if writes_bands and not (reads_bands and self.tied):
            projections[classes] = part_settings(PROJECTIONS, "bands", {"table": classes}) | {"head": False}
        # An augmented loss uses the input vectors for its soft targets if they have one dimension.
        targets = "words" if tables.get("words", {}).get("kind") == "word" else classes
        source = part_settings(INPUTS, self.input, {"table": "words", "projections": "words"})
        translates = self.encoder in TRANSLATOR_ENCODERS
        return (PAIRS | {"source": source} if translates else EXPERIMENT) | {
            "tables": tables,
            "projections": projections,
            "input": source,
            "encoder": part_settings(ENCODERS, self.encoder, {}),
            "output": part_settings(
                OUTPUTS, self.output, {"table": targets, "projections": classes}, self.classifier, {"table": classes}
            ),
        }

    def build(self, seed: int = 0) -> LanguageModel:
        experiment = check_experiment(self.settings(), self.name)
        torch.manual_seed(seed)
        return build_model(experiment, WORDS)

    def tie_by_force(self) -> OutputEnd:
        """Return the output end tied to an input end that has no table."""
        experiment = check_experiment(self.settings(), self.name)
        source = self.build_input()
        arguments = {"tables": {"words": source}, "projections": {"words": None}, "context_dim": DIM}
        built: OutputEnd = OUTPUTS.build(experiment.output, arguments)
        return built

    def build_input(self) -> Any:
        return Case(self.input, self.encoder, next(iter(OUTPUTS)), next(iter(CLASSIFIERS)), False).build().input

    def matches(self, pattern: Mapping[str, Any]) -> bool:
        return all(getattr(self, field) == value for field, value in pattern.items())


def table_settings(banded: bool) -> dict[str, Any]:
    return part_settings(TABLES, "banded" if banded else "word", {})


def part_settings(
    registry: Registry,
    kind: str,
    shared: Mapping[str, str],
    nested: str | None = None,
    shared_inside: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the settings of a part: names of shared objects, nested parts, and values of `SETTINGS`."""
    entry = f"{registry.family}.{kind}"
    values = SETTINGS.get(entry, {})
    settings: dict[str, Any] = {"kind": kind, **values}
    for argument in registry.arguments(kind):
        if argument.role == "shared":
            settings[argument.name] = shared[argument.name]
        elif argument.family is not None:
            inner = nested if argument.family is CLASSIFIERS and nested else next(iter(argument.family))
            settings[argument.name] = part_settings(argument.family, inner, shared_inside or shared)
        elif argument.role == "setting" and argument.default is ... and argument.name not in values:
            pytest.fail(f'{entry} needs {argument.name}: add "{entry}": {{"{argument.name}": ...}} to SETTINGS')
    return settings


def _takes_table(registry: Registry, kind: str) -> bool:
    return any(argument.role == "shared" for argument in registry.arguments(kind))


def _banded(registry: Registry, kind: str) -> bool:
    """Return whether an end needs a banded table or projections of bands."""
    return any(
        argument.annotation is BandedTable or argument.section == "projections" for argument in registry.arguments(kind)
    )


def all_cases() -> list[Case]:
    """Return all combinations for language models, including those that cannot work."""
    return list(_product(LANGUAGE_MODEL_ENCODERS))


def _product(encoders: Sequence[str]) -> Iterator[Case]:
    for source in INPUTS:
        for encoder in encoders:
            for output in OUTPUTS:
                takes_classifier = any(argument.family is CLASSIFIERS for argument in OUTPUTS.arguments(output))
                for classifier in CLASSIFIERS if takes_classifier else (None,):
                    for tied in (True, False):
                        yield Case(source, encoder, output, classifier, tied)


def meaningful_cases() -> list[Case]:
    """Return the combinations for language models that can work."""
    return [case for case in all_cases() if _has_meaning(case)]


def translating_cases() -> list[Case]:
    """Return the combinations for translators, whose source input end is like the target input end."""
    return [case for case in _product(TRANSLATOR_ENCODERS) if _has_meaning(case)]


def _has_meaning(case: Case) -> bool:
    return not any(case.matches(pattern) for pattern, _ in UNSUPPORTED_COMBINATIONS)


def covering_cases(cases: Sequence[Case] | None = None) -> list[Case]:
    """Return a few combinations that contain every pair of parts that can work together."""
    pairs = {case: _pairs(case) for case in (meaningful_cases() if cases is None else cases)}
    uncovered = set().union(*pairs.values())
    chosen: list[Case] = []
    while uncovered:
        best = max(pairs, key=lambda case: len(uncovered & pairs[case]))
        chosen.append(best)
        uncovered -= pairs[best]
    return chosen


def _pairs(case: Case) -> set[tuple[Any, Any]]:
    return set(combinations(enumerate(astuple(case)), 2))


def summary(tested: list[Case]) -> str:
    """Return a line with the number of combinations that work and that are tested."""
    total, working = len(all_cases()), len(meaningful_cases())
    return f"contract: {working} combinations work, {total - working} do not; {len(tested)} tested"
