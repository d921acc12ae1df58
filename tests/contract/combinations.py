"""Every combination of registered parts, built from settings as a recipe would build it.

A new part is covered as soon as its line stands in `lab/config/parts.py`. Only an argument without a default needs a
small value in `SETTINGS`, and its absence says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations
from typing import Any

import pytest
import torch

from reefknot.lab.config.parts import CLASSIFIERS, ENCODERS, INPUTS, OUTPUTS, PROJECTIONS, TABLES, WITHOUT_MEANING
from reefknot.lab.config.registry import Registry
from reefknot.lab.tasks import build_model, check_experiment
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.tables import BandedTable

ALONE, TRANSLATING = (
    [kind for kind in ENCODERS if ENCODERS.load(kind).reads_source is reads] for reads in (False, True)
)
"""Encoders of language models, and those of translators."""
WORDS = Vocabulary(
    ("the", "<eos>", "of", "<unk>", "file", "a", "naïve", "in", "x", "string", "is"), tuple(range(11, 0, -1))
)
VOCABULARY = len(WORDS)

SETTINGS: dict[str, dict[str, Any]] = {
    "tables.word": {"dim": 6},
    "tables.banded": {"dim": 6, "sizes": [4, 4], "factor": 2},
    "projections.bands": {"dim": 6},
    "inputs.char_cnn": {"dim": 6, "filters": [[1, 3], [2, 4]], "byte_dim": 4},
    **{f"encoders.{kind}": {"hidden_dim": 6} for kind in ALONE},
    "encoders.highway": {"hidden_dim": 6, "depth": 2},
    "encoders.transformer": {"layers": 2, "heads": 2, "ffn_dim": 12},
    "encoders.attention_gru": {"units": 6},
    "encoders.encoder_decoder": {"layers": 2, "heads": 2, "ffn_dim": 12},
    "outputs.augmented": {"tau": 2.0, "gamma": 0.5},
    "outputs.mixture": {"experts": 3},
    "outputs.sampled": {"samples": 5},
}
"""Test values of the arguments that have no default, or one too large for a test, as `family.kind`. All widths are 6,
so that everything joins."""

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
PAIRS: dict[str, Any] = {
    "corpus": {"name": "multi30k", "pairs": {"source": "en", "target": "de"}},
    "training": EXPERIMENT["training"] | {"batching": "pairs"},
}
"""The same for a translator."""


@dataclass(frozen=True)
class Case:
    """One combination. `classifier` is None for an output end that takes none."""

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
        """The model's part of a recipe: one table for both ends where they are tied, else one each."""
        classes = "words" if self.tied else "classes"
        reads_bands, writes_bands = _banded(INPUTS, self.input), _banded(OUTPUTS, self.output)
        tables: dict[str, Any] = {}
        if _takes_table(INPUTS, self.input):
            tables["words"] = table_settings(reads_bands or (self.tied and writes_bands))
            if self.input == "lookup" and self.tied and writes_bands:
                tables["words"]["factor"] = 1  # a plain lookup needs one width
        tables.setdefault(classes, table_settings(writes_bands))
        projections: dict[str, Any] = {}
        if reads_bands:
            projections["words"] = part_settings(PROJECTIONS, "bands", {"table": "words"})
        if writes_bands and not (reads_bands and self.tied):
            projections[classes] = part_settings(PROJECTIONS, "bands", {"table": classes}) | {"head": False}
        # The soft targets of an augmented loss are made of the input's vectors where these have one width.
        targets = "words" if tables.get("words", {}).get("kind") == "word" else classes
        source = part_settings(INPUTS, self.input, {"table": "words", "projections": "words"})
        translates = self.encoder in TRANSLATING
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
        """The output end over whatever the input end is, for an input end without a table."""
        experiment = check_experiment(self.settings(), self.name)
        source = self.build_input()
        given = {"tables": {"words": source}, "projections": {"words": None}, "context_dim": 6}
        built: OutputEnd = OUTPUTS.build(experiment.output, given)
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
    """Settings of a part from its signature: shared objects and nested part by role, the rest by default or
    `SETTINGS`."""
    entry = f"{registry.family}.{kind}"
    values = SETTINGS.get(entry, {})
    found: dict[str, Any] = {"kind": kind, **values}
    for argument in registry.arguments(kind):
        if argument.role == "shared":
            found[argument.name] = shared[argument.name]
        elif argument.family is not None:
            inner = nested if argument.family is CLASSIFIERS and nested else next(iter(argument.family))
            found[argument.name] = part_settings(argument.family, inner, shared_inside or shared)
        elif argument.role == "setting" and argument.default is ... and argument.name not in values:
            pytest.fail(f'{entry} needs {argument.name}: add "{entry}": {{"{argument.name}": ...}} to SETTINGS')
    return found


def _takes_table(registry: Registry, kind: str) -> bool:
    return any(argument.role == "shared" for argument in registry.arguments(kind))


def _banded(registry: Registry, kind: str) -> bool:
    """Whether an end reads bands: its table must have them, or it holds projections of them."""
    return any(
        argument.annotation is BandedTable or argument.group == "projections" for argument in registry.arguments(kind)
    )


def all_cases() -> list[Case]:
    """The whole product of language models, with and without a meaning."""
    return list(_product(ALONE))


def _product(encoders: Sequence[str]) -> Iterator[Case]:
    for source in INPUTS:
        for encoder in encoders:
            for output in OUTPUTS:
                takes_labels = any(argument.family is CLASSIFIERS for argument in OUTPUTS.arguments(output))
                for classifier in CLASSIFIERS if takes_labels else (None,):
                    for tied in (True, False):
                        yield Case(source, encoder, output, classifier, tied)


def meaningful_cases() -> list[Case]:
    return [case for case in all_cases() if _has_meaning(case)]


def translating_cases() -> list[Case]:
    """Those of translators, whose source goes in as their target does, by the same table if there is one."""
    return [case for case in _product(TRANSLATING) if _has_meaning(case)]


def _has_meaning(case: Case) -> bool:
    return not any(case.matches(pattern) for pattern, _ in WITHOUT_MEANING)


def covering_cases(cases: Sequence[Case] | None = None) -> list[Case]:
    """A few combinations in which every two parts that can meet do meet."""
    pairs = {case: _pairs(case) for case in (meaningful_cases() if cases is None else cases)}
    left = set().union(*pairs.values())
    chosen: list[Case] = []
    while left:
        best = max(pairs, key=lambda case: len(left & pairs[case]))
        chosen.append(best)
        left -= pairs[best]
    return chosen


def _pairs(case: Case) -> set[tuple[Any, Any]]:
    return set(combinations(enumerate(astuple(case)), 2))


def summary(tested: list[Case]) -> str:
    every, kept = len(all_cases()), len(meaningful_cases())
    return f"contract: {kept} combinations with a meaning, {every - kept} without; {len(tested)} tested"
