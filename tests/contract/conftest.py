"""Choose the combinations to test: a pairwise covering, or all with `--combinations all`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from pydantic import TypeAdapter

from reefknot.lab.config.parts import ENCODERS
from reefknot.nn.encoders.contract import Encoder

from .combinations import (
    DIM,
    LANGUAGE_MODEL_ENCODERS,
    Case,
    add_variants,
    covering_cases,
    meaningful_cases,
    part_settings,
    translating_cases,
)


@cache
def chosen_cases(config: pytest.Config) -> list[Case]:
    cases = meaningful_cases() if config.getoption("--combinations") == "all" else covering_cases()
    return add_variants(cases)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise `case` by models, and `end_case` by models with one encoder, for tests of the output end only."""
    cases = chosen_cases(metafunc.config)
    first = LANGUAGE_MODEL_ENCODERS[0]
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])
    if "end_case" in metafunc.fixturenames:
        ends = list(dict.fromkeys(replace(case, encoder=first) for case in cases))
        metafunc.parametrize("end_case", ends, ids=[case.name for case in ends])
    if "encoder_kind" in metafunc.fixturenames:
        metafunc.parametrize("encoder_kind", LANGUAGE_MODEL_ENCODERS)
    if "translating_case" in metafunc.fixturenames:
        all_translators = translating_cases()
        chosen = (
            all_translators if metafunc.config.getoption("--combinations") == "all" else covering_cases(all_translators)
        )
        metafunc.parametrize("translating_case", chosen, ids=[case.name for case in chosen])


@pytest.fixture
def encoder(encoder_kind: str) -> Encoder:
    """Return an encoder of vectors with `DIM` dimensions, in float64 and without dropout."""
    settings = TypeAdapter(ENCODERS.entry_type()).validate_python(part_settings(ENCODERS, encoder_kind, {}))
    torch.manual_seed(0)
    built: Encoder = ENCODERS.build(settings, {"input_dim": DIM})
    return built.double().eval()
