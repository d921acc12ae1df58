"""The ways to score a text beside a run's own, by the names that saved evaluations and rows of recipes give them.

Without torch, so that recipes and reports can use it.
"""

from __future__ import annotations

import re

WAYS = {"dynamic": "dynamic evaluation", "cache": "continuous cache", "mc": "Monte-Carlo dropout"}
"""Ways in which a model learns, remembers or drops as it reads."""

LONGEST = 10**9
"""Most tokens of a context, a stride or a block: as many as `training.steps` may be."""

_LENGTH = "[1-9][0-9]{0,8}|10{9}"  # from 1 to LONGEST
WINDOWS = re.compile(f"context-(0|{_LENGTH})-stride-({_LENGTH})|complete-({_LENGTH})|lines")
"""Windows that a text may be cut into (`windows.py`)."""


def known(way: str) -> str:
    """The name of a way as it is, for a recipe; refuses one that `reefknot evaluate` does not save."""
    if way not in WAYS and not WINDOWS.fullmatch(way):
        raise ValueError(f"must be {', '.join(WAYS)}, context-C-stride-S, complete-L or lines")
    return way


def in_words(way: str) -> str:
    """For a sentence or the name of a row; a name that nobody knows is its own description."""
    if found := WINDOWS.fullmatch(way):
        context, stride, complete = (int(each) if each else 0 for each in found.groups())
        if stride:
            return f"windows of {context:,} + {stride:,} tokens" if context else f"blocks of {stride:,} tokens"
        return f"blocks of whole lines of at most {complete:,} tokens" if complete else "single lines"
    return WAYS.get(way, way)
