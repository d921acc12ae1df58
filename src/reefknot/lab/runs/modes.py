"""Names of evaluation modes and of window layouts, as saved evaluations and recipes use them.

A mode is a way to evaluate a model. A window is a part of the text that is scored on its own, without the hidden state
of the text before it. These names exist:

    dynamic                 the model is trained while it reads
    cache                   the model has a cache of the words that it has read
    mc                      the model has dropout, and its probabilities are averaged over several passes
    context-C-stride-S      each window scores S tokens after up to C tokens of context
    complete-L              blocks of whole lines, of at most L tokens
    context-C-complete-L    each window scores such a block after up to C tokens of context
    lines                   single lines

    parse_window_sizes("context-480-stride-32")    # WindowSizes(context=480, stride=32, length=0)
    describe_mode("context-480-stride-32")         # "windows of 480 + 32 tokens"

This module does not import torch, so recipes and reports can use it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MODES = {"dynamic": "dynamic evaluation", "cache": "continuous cache", "mc": "Monte-Carlo dropout"}
"""Modes in which, while it reads, a model is trained (dynamic), has a cache (cache), or has dropout (mc)."""

MAX_TOKENS = 10**9
"""Largest context, stride or block, in tokens. `training.steps` has the same limit."""

WINDOW_NAMES = "context-C-stride-S, complete-L, context-C-complete-L or lines"
"""The names of windows, for error messages."""

_NUMBER = "[1-9][0-9]{0,8}|10{9}"  # a number of tokens from 1 to MAX_TOKENS
_SLIDING_NAME = f"context-(0|{_NUMBER})-stride-({_NUMBER})"
_COMPLETE_NAME = f"(?:context-({_NUMBER})-)?complete-({_NUMBER})"
_WINDOWS_NAME = re.compile(f"{_SLIDING_NAME}|{_COMPLETE_NAME}|lines")


class WindowSizes(NamedTuple):
    """The numbers in a window name such as `context-480-stride-32`. A number is 0 if the name does not have it.

    Windows with neither a stride nor a length are single lines.
    """

    context: int
    """Maximum number of tokens before the scored tokens of a window."""
    stride: int
    """Number of tokens that each window scores."""
    length: int
    """Maximum number of tokens in a block of whole lines."""


def parse_window_sizes(name: str) -> WindowSizes | None:
    """Return the numbers in a window name, or None if `name` is not a window name."""
    match = _WINDOWS_NAME.fullmatch(name)
    if match is None:
        return None
    sliding_context, stride, block_context, length = (int(number) for number in match.groups(default="0"))
    return WindowSizes(sliding_context or block_context, stride, length)


def check_mode(name: str) -> str:
    """Return the name of a mode, or a window name, unchanged.

    Raises:
        ValueError: `reefknot evaluate` does not save evaluations of this name.
    """
    if name not in MODES and parse_window_sizes(name) is None:
        raise ValueError(f"must be {', '.join(MODES)}, {WINDOW_NAMES}")
    return name


def describe_mode(name: str) -> str:
    """Describe a mode or windows in a few words, for the name of a row. An unknown name is returned unchanged."""
    sizes = parse_window_sizes(name)
    if sizes is None:
        return MODES.get(name, name)
    if sizes.stride and sizes.context:
        return f"windows of {sizes.context:,} + {sizes.stride:,} tokens"
    return _describe_blocks(sizes)


def describe_windows(name: str) -> str:
    """Describe which tokens a window has and which tokens it scores. An unknown name is returned unchanged."""
    sizes = parse_window_sizes(name)
    if sizes is None:
        return name
    if sizes.stride and sizes.context:
        return f"windows of {sizes.context + sizes.stride:,} tokens, of which the last {sizes.stride:,} are scored"
    return _describe_blocks(sizes)


def describe_windows_in_full(name: str) -> str:
    """Describe windows in full: their tokens, that they are computed independently, and exceptions."""
    sizes = parse_window_sizes(name)
    exceptions = ""
    if sizes and sizes.context:
        exceptions += "; the first windows have less context"
    if sizes and sizes.length:
        exceptions += "; a longer line is split into blocks of its own"
    return f"{describe_windows(name)}, each computed independently{exceptions}"


def _describe_blocks(sizes: WindowSizes) -> str:
    """Describe windows that score blocks or lines."""
    if sizes.stride:
        return f"blocks of {sizes.stride:,} tokens"
    if sizes.length:
        blocks = f"blocks of whole lines of at most {sizes.length:,} tokens"
        return f"{blocks} after {sizes.context:,} tokens of context" if sizes.context else blocks
    return "single lines"
