"""Learning-rate schedules. A schedule returns a factor, by which the initial learning rate is multiplied.

The factor depends on the epoch and the number of updates only. Schedules have no state to save or resume.

The papers on recurrent models change the rate once per epoch. Baevski & Auli (2019) change it in every update: after a
linear warm-up, the rate follows cosine cycles (Loshchilov & Hutter 2017). Each cycle is longer and lower than the last.
The inverse square root is the schedule of Vaswani et al. (2017).
"""

from __future__ import annotations

import math
from typing import Annotated

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Count, Ge, Gt, Le, Positive, Share

Epochs = Annotated[int, Ge(0), Le(10**6)]
Updates = Annotated[int, Ge(0), Le(10**9)]
Growth = Annotated[float, Ge(1.0), Le(1e9)]
PositiveShare = Annotated[float, Gt(0.0), Le(1.0)]


class Constant:
    """A constant learning rate."""

    def factor(self, epoch: int, step: int) -> float:
        """Return the factor for this epoch, counted from 1, after `step` updates."""
        return 1.0


class Decay:
    """A rate that is constant for some epochs, and is then multiplied by a factor before every epoch.

    Args:
        hold: Number of epochs at the initial rate.
        factor: Factor per epoch after that. With 0.5, the rate is halved before each later epoch.
    """

    def __init__(self, hold: Epochs, factor: Positive) -> None:
        self.hold = hold
        self.decay = factor

    def factor(self, epoch: int, step: int) -> float:
        """Return the factor for this epoch, counted from 1, after `step` updates."""
        return float(self.decay ** max(epoch - self.hold, 0))


class Cosine:
    """A linear warm-up, then cycles in which the rate decreases like a cosine from its peak to its minimum.

    Cycles repeat until training ends. The last rate is the minimum only if training ends together with a cycle.

    Args:
        period: Number of updates of the first cycle, after the warm-up.
        warmup: Number of updates until the full rate is reached.
        warmup_from: Rate at the first update of the warm-up, as a share of the full rate.
        growth: Length of a cycle relative to the previous cycle. With 2, every cycle is twice as long as the last.
        shrink: Peak and minimum of a cycle relative to the previous cycle.
        least: Minimum of the first cycle, as a share of the full rate.
    """

    def __init__(
        self,
        period: Count,
        warmup: Updates = 0,
        warmup_from: Share = 0.0,
        growth: Growth = 1.0,
        shrink: PositiveShare = 1.0,
        least: Share = 0.0,
    ) -> None:
        _check("period", period, "must be at least 1", period < 1)
        _check("warmup", warmup, "must be at least 0", warmup < 0)
        _check("warmup_from", warmup_from, "must lie between 0 and 1", not 0.0 <= warmup_from <= 1.0)
        _check("growth", growth, "must be at least 1", not 1.0 <= growth < math.inf)
        _check("shrink", shrink, "must be above 0 and at most 1", not 0.0 < shrink <= 1.0)
        _check("least", least, "must lie between 0 and 1", not 0.0 <= least <= 1.0)
        self.period, self.growth, self.shrink, self.least = period, growth, shrink, least
        self.warmup, self.warmup_from = warmup, warmup_from

    def factor(self, epoch: int, step: int) -> float:
        """Return the factor for this epoch, counted from 1, after `step` updates."""
        if step < self.warmup:
            return self.warmup_from + (1.0 - self.warmup_from) * step / self.warmup
        cycle, share = self._position(step - self.warmup)
        height = (1.0 + math.cos(math.pi * share)) / 2
        return float(self.shrink**cycle * (self.least + (1.0 - self.least) * height))

    def _position(self, step: int) -> tuple[int, float]:
        """Return the index of the cycle of a step after the warm-up, and the fraction of the cycle that has passed."""
        if self.growth == 1.0:
            return step // self.period, step % self.period / self.period
        # A loop, because a logarithm may round the first update of a cycle into the previous cycle.
        cycle, offset, length = 0, step, self.period
        while offset >= length:
            cycle, offset = cycle + 1, offset - length
            length = round(self.period * self.growth**cycle)
        return cycle, offset / length


class InverseSqrt:
    """A linear warm-up from 0, then a rate that decreases with the inverse square root of the number of updates.

    Args:
        warmup: Number of updates until the full rate is reached.
    """

    def __init__(self, warmup: Count) -> None:
        _check("warmup", warmup, "must be at least 1", warmup < 1)
        self.warmup = warmup

    def factor(self, epoch: int, step: int) -> float:
        """Return the factor for this epoch, counted from 1, after `step` updates."""
        return step / self.warmup if step < self.warmup else math.sqrt(self.warmup / step)


def _check(name: str, value: float, constraint: str, violated: bool) -> None:
    """Raise an error if `violated`. Values in recipes have been checked already."""
    if violated:
        raise SettingsError(f"schedule: {name} = {value}: {constraint}")
