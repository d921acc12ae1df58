"""Every combination of registered parts (inputs, encoders, outputs, classifiers), built from settings as in a recipe.

A `Case` is one combination, and `Case.build` returns its model. `meaningful_cases` returns the combinations that can
work, and `covering_cases` a few of them that contain every pair of parts.

A new part is covered as soon as its line is in `lab/config/parts.py`. An argument without a default also needs a small
value in `SETTINGS`; the test fails with this advice if it is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
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

LANGUAGE_MODEL_ENCODERS = [kind for kind in ENCODERS if not ENCODERS.load(kind).reads_source]
"""Kinds of encoders of language models."""
TRANSLATOR_ENCODERS = [kind for kind in ENCODERS if ENCODERS.load(kind).reads_source]
"""Kinds of encoders of translators."""
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

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {"outputs.softmax": {"capped": {"softcap": 1.5}}}
"""More settings of output ends, by `family.kind` and name. They are tested in addition to the defaults."""

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
    """One combination of parts. `classifier` is None for an output end without classifier.

    `variant` names other settings of the output end, from `VARIANTS`.
    """

    input: str
    encoder: str
    output: str
    classifier: str | None
    tied: bool
    variant: str = ""

    @property
    def name(self) -> str:
        tied = "tied" if self.tied else "untied"
        kinds = [self.input, self.encoder, self.output, self.classifier, tied, self.variant]
        return "-".join(kind for kind in kinds if kind)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the experiment, with one table for both ends if they are tied."""
        # The name of the table of the output end. The table of the input end is always called "words".
        class_table = "words" if self.tied else "classes"
        input_has_bands = _needs_bands(INPUTS, self.input)
        output_has_bands = _needs_bands(OUTPUTS, self.output)

        tables: dict[str, Any] = {}
        if _takes_table(INPUTS, self.input):
            tables["words"] = table_settings(input_has_bands or (self.tied and output_has_bands))
            if self.input == "lookup" and self.tied and output_has_bands:
                tables["words"]["factor"] = 1  # a plain lookup needs bands of equal dimension
        tables.setdefault(class_table, table_settings(output_has_bands))

        projections: dict[str, Any] = {}
        if input_has_bands:
            projections["words"] = part_settings(PROJECTIONS, "bands", {"table": "words"})
        if output_has_bands and not (input_has_bands and self.tied):
            projections[class_table] = part_settings(PROJECTIONS, "bands", {"table": class_table}) | {"head": False}

        # An augmented loss uses the input vectors for its soft targets if they have one dimension.
        words_have_one_dimension = tables.get("words", {}).get("kind") == "word"
        soft_target_table = "words" if words_have_one_dimension else class_table
        input_settings = part_settings(INPUTS, self.input, {"table": "words", "projections": "words"})
        output_settings = part_settings(
            OUTPUTS,
            self.output,
            {"table": soft_target_table, "projections": class_table},
            self.classifier,
            {"table": class_table},
        )
        if self.variant:
            output_settings |= VARIANTS[f"outputs.{self.output}"][self.variant]

        experiment = EXPERIMENT
        if self.encoder in TRANSLATOR_ENCODERS:
            experiment = PAIRS | {"source": input_settings}
        return experiment | {
            "tables": tables,
            "projections": projections,
            "input": input_settings,
            "encoder": part_settings(ENCODERS, self.encoder, {}),
            "output": output_settings,
        }

    def build(self, seed: int = 0) -> LanguageModel:
        """Return the model of this combination."""
        experiment = check_experiment(self.settings(), self.name)
        torch.manual_seed(seed)
        return build_model(experiment, WORDS)

    def tie_by_force(self) -> OutputEnd:
        """Return the output end tied to an input end that has no table."""
        experiment = check_experiment(self.settings(), self.name)
        input_end = self.build_input()
        arguments = {"tables": {"words": input_end}, "projections": {"words": None}, "context_dim": DIM}
        output_end: OutputEnd = OUTPUTS.build(experiment.output, arguments)
        return output_end

    def build_input(self) -> Any:
        """Return the input end of this combination, built with an output end that always works."""
        first_output = next(iter(OUTPUTS))
        first_classifier = next(iter(CLASSIFIERS))
        return Case(self.input, self.encoder, first_output, first_classifier, tied=False).build().input

    def matches(self, pattern: Mapping[str, Any]) -> bool:
        """Return whether the fields of this combination have the values of a pattern of `UNSUPPORTED_COMBINATIONS`."""
        return all(getattr(self, field) == value for field, value in pattern.items())


def table_settings(banded: bool) -> dict[str, Any]:
    return part_settings(TABLES, "banded" if banded else "word", {})


def part_settings(
    registry: Registry,
    kind: str,
    shared_names: Mapping[str, str],
    classifier: str | None = None,
    classifier_shared_names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the settings of a part, with the test values of `SETTINGS`.

    Args:
        registry: The family of the part.
        kind: The kind of the part.
        shared_names: For arguments such as `table`, the name of the shared object.
        classifier: The kind of the classifier, if the part has one.
        classifier_shared_names: The names of shared objects for the classifier.
    """
    entry = f"{registry.family}.{kind}"
    test_values = SETTINGS.get(entry, {})
    settings: dict[str, Any] = {"kind": kind, **test_values}
    for argument in registry.arguments(kind):
        if argument.role == "shared":
            settings[argument.name] = shared_names[argument.name]
        elif argument.registry is not None:
            nested_kind = next(iter(argument.registry))
            if argument.registry is CLASSIFIERS and classifier:
                nested_kind = classifier
            nested_names = classifier_shared_names or shared_names
            settings[argument.name] = part_settings(argument.registry, nested_kind, nested_names)
        elif argument.role == "setting" and argument.default is ... and argument.name not in test_values:
            pytest.fail(f'{entry} needs {argument.name}: add "{entry}": {{"{argument.name}": ...}} to SETTINGS')
    return settings


def _takes_table(registry: Registry, kind: str) -> bool:
    return any(argument.role == "shared" for argument in registry.arguments(kind))


def _needs_bands(registry: Registry, kind: str) -> bool:
    """Return whether an end needs a banded table or projections of bands."""
    return any(
        argument.annotation is BandedTable or argument.section == "projections" for argument in registry.arguments(kind)
    )


def all_cases() -> list[Case]:
    """Return all combinations for language models, including those that cannot work."""
    return list(_iterate_cases(LANGUAGE_MODEL_ENCODERS))


def _iterate_cases(encoders: Sequence[str]) -> Iterator[Case]:
    """Yield all combinations of inputs, these encoders, outputs and classifiers, tied and untied."""
    for input_kind in INPUTS:
        for encoder in encoders:
            for output in OUTPUTS:
                takes_classifier = any(argument.registry is CLASSIFIERS for argument in OUTPUTS.arguments(output))
                classifiers = list(CLASSIFIERS) if takes_classifier else [None]
                for classifier in classifiers:
                    for tied in (True, False):
                        yield Case(input_kind, encoder, output, classifier, tied)


def meaningful_cases() -> list[Case]:
    """Return the combinations for language models that can work."""
    return [case for case in all_cases() if _can_work(case)]


def add_variants(cases: Sequence[Case]) -> list[Case]:
    """Return the combinations, and each of them with the variants of its output end."""
    variants = [
        replace(case, variant=variant) for case in cases for variant in VARIANTS.get(f"outputs.{case.output}", ())
    ]
    return [*cases, *variants]


def translating_cases() -> list[Case]:
    """Return the combinations for translators, whose source input end is like the target input end."""
    return [case for case in _iterate_cases(TRANSLATOR_ENCODERS) if _can_work(case)]


def _can_work(case: Case) -> bool:
    return not any(case.matches(pattern) for pattern, _ in UNSUPPORTED_COMBINATIONS)


def covering_cases(cases: Sequence[Case] | None = None) -> list[Case]:
    """Return a few combinations that contain every pair of parts that can work together.

    Combinations are chosen one by one: always the combination with the most pairs that no earlier one has.
    """
    if cases is None:
        cases = meaningful_cases()
    pairs_by_case = {case: _list_pairs(case) for case in cases}
    uncovered = set().union(*pairs_by_case.values())
    chosen: list[Case] = []
    while uncovered:
        best = max(pairs_by_case, key=lambda case: len(uncovered & pairs_by_case[case]))
        chosen.append(best)
        uncovered -= pairs_by_case[best]
    return chosen


def _list_pairs(case: Case) -> set[tuple[Any, Any]]:
    """Return all pairs of parts of a combination. A part is a field's position and its value."""
    return set(combinations(enumerate(astuple(case)), 2))


def summary(tested: list[Case]) -> str:
    """Return a line with the number of combinations that work and that are tested."""
    total = len(all_cases())
    working = len(meaningful_cases())
    return f"contract: {working} combinations work, {total - working} do not; {len(tested)} tested"
