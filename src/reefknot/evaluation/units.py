"""A mean loss in the unit that papers print, and how it is printed. Without torch, so that reports can use it."""

from __future__ import annotations

import math


def perplexity(nll: float) -> float:
    """exp of a mean loss, kept finite: a model this bad is bad enough."""
    return math.exp(min(nll, 700.0))


def shown(perplexity: float) -> str:
    """As a person reads it: with its order of magnitude alone where a model has lost its way."""
    return f"{perplexity:,.2f}" if perplexity < 1e7 else f"{perplexity:.1e}"
