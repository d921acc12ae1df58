"""A mean loss in the unit that papers print. Without torch, so that reports can use it."""

from __future__ import annotations

import math


def perplexity(nll: float) -> float:
    """exp of a mean loss, kept finite: a model this bad is bad enough."""
    return math.exp(min(nll, 700.0))
