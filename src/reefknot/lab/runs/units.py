"""Perplexities and frequency bands as papers print them. Reports use this module, so it does not import torch."""

from __future__ import annotations

import math

_MAX_LOSS = 700.0
"""exp() overflows a little above this."""


def perplexity(nll: float) -> float:
    """Return exp of a mean loss, clamped so that it is finite."""
    return math.exp(min(nll, _MAX_LOSS))


def shown(perplexity: float) -> str:
    """Format a perplexity for people; a very large one only by its order of magnitude."""
    if perplexity >= math.exp(_MAX_LOSS):
        return ">1e304"
    return f"{perplexity:,.2f}" if perplexity < 1e7 else f"{perplexity:.1e}"


def seen(low: int, high: int | None) -> str:
    """Format a band of training counts for tables and plots."""
    return f"{low:,}" if low == high else f"{low:,}+" if high is None else f"{low:,}-{high:,}"
