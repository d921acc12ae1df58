"""Learning-rate schedules: constant, decay per epoch, cosine cycles and inverse square root.

The method `factor` of a schedule returns the number by which the initial learning rate is multiplied. It depends on the
epoch and the number of updates only, so schedules have no state to save or resume. The arguments of a constructor are
the settings of `training.schedule` in a recipe.

The papers on recurrent models change the rate once per epoch (`Decay`). Baevski & Auli (2019) change it in every
update: after a linear warm-up, the rate follows cosine cycles (Loshchilov & Hutter 2017), each of which is longer and
lower than the last (`Cosine`). Vaswani et al. (2017) use the inverse square root (`InverseSqrt`).
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

    With `hold = 2` and `factor = 0.5`, the factors of the first four epochs are 1, 1, 0.5 and 0.25.

    Args:
        hold: Number of epochs at the initial rate.
        factor: Factor per epoch after that. With 0.5, the rate is halved before each later epoch.
    """

    def __init__(self, hold: Epochs, factor: Positive) -> None:
        self.hold = hold
        self.factor_per_epoch = factor

    def factor(self, epoch: int, step: int) -> float:
        """Return the factor for this epoch, counted from 1, after `step` updates."""
        return float(self.factor_per_epoch ** max(epoch - self.hold, 0))


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
        _check_argument("period", period, period >= 1, "must be at least 1")
        _check_argument("warmup", warmup, warmup >= 0, "must be at least 0")
        _check_argument("warmup_from", warmup_from, 0.0 <= warmup_from <= 1.0, "must lie between 0 and 1")
        _check_argument("growth", growth, 1.0 <= growth < math.inf, "must be at least 1")
        _check_argument("shrink", shrink, 0.0 < shrink <= 1.0, "must be above 0 and at most 1")
        _check_argument("least", least, 0.0 <= least <= 1.0, "must lie between 0 and 1")
        self.period, self.growth, self.shrink, self.least = period, growth, shrink, least
        self.warmup, self.warmup_from = warmup, warmup_from

    def factor(self, epoch: int, step: int) -> float:
        """Return the factor for this epoch, counted from 1, after `step` updates."""
        if step < self.warmup:
            return self.warmup_from + (1.0 - self.warmup_from) * step / self.warmup
        cycle, fraction = self._cycle_position(step - self.warmup)
        height = (1.0 + math.cos(math.pi * fraction)) / 2
        return float(self.shrink**cycle * (self.least + (1.0 - self.least) * height))

    def _cycle_position(self, step: int) -> tuple[int, float]:
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
        _check_argument("warmup", warmup, warmup >= 1, "must be at least 1")
        self.warmup = warmup

    def factor(self, epoch: int, step: int) -> float:
        """Return the factor for this epoch, counted from 1, after `step` updates."""
        if step < self.warmup:
            return step / self.warmup
        return math.sqrt(self.warmup / step)


def _check_argument(name: str, value: float, is_valid: bool, constraint: str) -> None:
    """Raise an error if an argument is not valid. Values in recipes have been checked already."""
    if not is_valid:
        raise SettingsError(f"schedule: {name} = {value}: {constraint}")
