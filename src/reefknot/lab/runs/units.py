"""A mean loss in the unit that papers print; how it and bands of words are printed. Without torch: reports use it."""

from __future__ import annotations

import math

_MOST = 700.0
"""exp of a little more is no number any more."""


def perplexity(nll: float) -> float:
    """exp of a mean loss, kept finite: a model this bad is bad enough."""
    return math.exp(min(nll, _MOST))


def shown(perplexity: float) -> str:
    """As a person reads it: with its order of magnitude alone where a model has lost its way."""
    if perplexity >= math.exp(_MOST):
        return ">1e304"
    return f"{perplexity:,.2f}" if perplexity < 1e7 else f"{perplexity:.1e}"


def seen(low: int, high: int | None) -> str:
    """How often the words of a band were seen, as tables and pictures have it."""
    return f"{low:,}" if low == high else f"{low:,}+" if high is None else f"{low:,}-{high:,}"
