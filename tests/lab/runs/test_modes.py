"""Names of evaluation modes: what recipes may contain, and how reports describe it."""

from __future__ import annotations

import pytest

from reefknot.lab.evaluation.windows import Complete, Lines, Sliding
from reefknot.lab.runs.modes import MAX_TOKENS, check_mode, describe_mode


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("dynamic", "dynamic evaluation"),
        ("cache", "continuous cache"),
        ("mc", "Monte-Carlo dropout"),
        (Sliding(2560, 512).name, "windows of 2,560 + 512 tokens"),
        (Sliding(0, 3072).name, "blocks of 3,072 tokens"),
        (Complete(512).name, "blocks of whole lines of at most 512 tokens"),
        (Complete(32, 480).name, "blocks of whole lines of at most 32 tokens after 480 tokens of context"),
        (Lines().name, "single lines"),
    ],
)
def test_every_mode_has_a_name_and_a_description(name: str, description: str) -> None:
    assert check_mode(name) == name
    assert describe_mode(name) == description


@pytest.mark.parametrize(
    "name",
    [
        *("", "plain", "context-1", "context-01-stride-2", "context-3-stride-0", "complete-", "lines\n", "context--1"),
        *(f"complete-{MAX_TOKENS + 1}", f"context-0-stride-{10 * MAX_TOKENS}", "complete-1\N{ARABIC-INDIC DIGIT TWO}"),
    ],
)
def test_unknown_mode_name_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="must be dynamic, cache, mc, context-C-stride-S, complete-L, context-C-comp"):
        check_mode(name)


def test_mode_name_of_a_newer_version_is_shown_as_it_is() -> None:
    assert describe_mode("reversed") == "reversed"
