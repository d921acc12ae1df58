"""Modes of evaluation and windows over a text, and their names in saved evaluations and recipes.

    dynamic, cache, mc      the model learns, remembers or drops units while it reads
    context-C-stride-S      each window scores S tokens after up to C tokens of context
    complete-L              blocks of whole lines, of at most L tokens
    lines                   single lines

This module does not import torch, so recipes and reports can use it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MODES = {"dynamic": "dynamic evaluation", "cache": "continuous cache", "mc": "Monte-Carlo dropout"}
"""Modes in which a model learns, remembers or drops units while it reads."""

LONGEST = 10**9
"""Largest context, stride or block in tokens. `training.steps` has the same limit."""

_LENGTH = "[1-9][0-9]{0,8}|10{9}"  # from 1 to LONGEST
_WINDOWS = re.compile(f"context-(0|{_LENGTH})-stride-({_LENGTH})|complete-({_LENGTH})|lines")


class WindowSizes(NamedTuple):
    """The numbers in the name of windows. Windows with neither a stride nor a length are single lines."""

    context: int
    stride: int
    length: int


def window_sizes(name: str) -> WindowSizes | None:
    """Return the numbers in the name of windows, or None if it is not the name of windows."""
    match = _WINDOWS.fullmatch(name)
    return WindowSizes(*(int(group or 0) for group in match.groups())) if match else None


def check_mode(name: str) -> str:
    """Return the name of a mode or of windows unchanged.

    Raises:
        ValueError: `reefknot evaluate` does not save evaluations of this name.
    """
    if name not in MODES and window_sizes(name) is None:
        raise ValueError(f"must be {', '.join(MODES)}, context-C-stride-S, complete-L or lines")
    return name


def in_words(name: str) -> str:
    """Describe a mode or windows in a few words, for the name of a row. An unknown name is returned unchanged."""
    sizes = window_sizes(name)
    if sizes is None:
        return MODES.get(name, name)
    if sizes.stride and sizes.context:
        return f"windows of {sizes.context:,} + {sizes.stride:,} tokens"
    return _blocks(sizes)


def window_description(name: str) -> str:
    """Describe which tokens a window has and which tokens it scores. An unknown name is returned unchanged."""
    sizes = window_sizes(name)
    if sizes is None:
        return name
    if sizes.stride and sizes.context:
        return f"windows of {sizes.context + sizes.stride:,} tokens, of which the last {sizes.stride:,} are scored"
    return _blocks(sizes)


def windows_in_full(name: str) -> str:
    """Describe windows in full: their tokens, that they are computed independently, and exceptions."""
    sizes = window_sizes(name)
    exception = ""
    if sizes and sizes.stride and sizes.context:
        exception = "; the first windows have less context"
    elif sizes and sizes.length:
        exception = "; a longer line is split into blocks of its own"
    return f"{window_description(name)}, each computed independently{exception}"


def _blocks(sizes: WindowSizes) -> str:
    if sizes.stride:
        return f"blocks of {sizes.stride:,} tokens"
    return f"blocks of whole lines of at most {sizes.length:,} tokens" if sizes.length else "single lines"
