"""Which combinations are tested: those of a pairwise covering, or with `--combinations all` every one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from pydantic import TypeAdapter

from reefknot.lab.config.parts import ENCODERS
from reefknot.nn.encoders.contract import Encoder

from .combinations import ALONE, Case, covering_cases, meaningful_cases, part_settings, translating_cases


@cache
def chosen_cases(config: pytest.Config) -> list[Case]:
    return meaningful_cases() if config.getoption("--combinations") == "all" else covering_cases()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case`: a model; `end_case`: the same with one encoder, for what the output end alone decides."""
    cases = chosen_cases(metafunc.config)
    first = ALONE[0]
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])
    if "end_case" in metafunc.fixturenames:
        ends = list(dict.fromkeys(replace(case, encoder=first) for case in cases))
        metafunc.parametrize("end_case", ends, ids=[case.name for case in ends])
    if "encoder_kind" in metafunc.fixturenames:
        metafunc.parametrize("encoder_kind", ALONE)
    if "translating_case" in metafunc.fixturenames:
        every = translating_cases()
        some = every if metafunc.config.getoption("--combinations") == "all" else covering_cases(every)
        metafunc.parametrize("translating_case", some, ids=[case.name for case in some])


@pytest.fixture
def encoder(encoder_kind: str) -> Encoder:
    """An encoder over vectors of width 6, in float64 and without dropout, so that equal means equal."""
    settings = TypeAdapter(ENCODERS.settings()).validate_python(part_settings(ENCODERS, encoder_kind, {}))
    torch.manual_seed(0)
    built: Encoder = ENCODERS.build(settings, {"input_dim": 6})
    return built.double().eval()
