"""Learning-rate schedules: constant, decay per epoch, cosine cycles and inverse square root.

`Schedule` defines their only method, `learning_rate_factor`:

    rate = initial_rate * Decay(hold=2, factor=0.5).learning_rate_factor(epoch=3, step=4000)    # 0.5 * initial_rate

The arguments of a constructor are the settings of `training.schedule` in a recipe. Attributes have the same names. An
update is a step of the optimiser.

The papers on recurrent models change the rate once per epoch (`Decay`). Baevski & Auli (2019) change it in every
update: after a linear warm-up, the rate follows cosine cycles (Loshchilov & Hutter 2017), each of which is longer and
lower than the last (`Cosine`). Vaswani et al. (2017) use the inverse square root (`InverseSqrt`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Count, Ge, Gt, Le, Positive, Share

Epochs = Annotated[int, Ge(0), Le(10**6)]
Updates = Annotated[int, Ge(0), Le(10**9)]
Growth = Annotated[float, Ge(1.0), Le(1e9)]
PositiveShare = Annotated[float, Gt(0.0), Le(1.0)]


class Schedule(ABC):
    """The learning rate over the course of training. A schedule has no state to save or resume."""

    @abstractmethod
    def learning_rate_factor(self, epoch: int, step: int) -> float:
        """Return the number by which the initial learning rate is multiplied for the next update.

        Args:
            epoch: The current epoch, counted from 1.
            step: Number of updates so far, over all epochs.
        """


class Constant(Schedule):
    """A constant learning rate."""

    def learning_rate_factor(self, epoch: int, step: int) -> float:
        return 1.0


class Decay(Schedule):
    """A rate that is constant for some epochs, and is then multiplied by a factor before every epoch.

    With `hold = 2` and `factor = 0.5`, the factors of the first four epochs are 1, 1, 0.5 and 0.25.

    Args:
        hold: Number of epochs at the initial rate.
        factor: Factor per epoch after that. With 0.5, the rate is halved before each later epoch.
    """

    def __init__(self, hold: Epochs, factor: Positive) -> None:
        _check_argument("hold", hold, hold >= 0, "must be at least 0")
        _check_argument("factor", factor, 0.0 < factor < math.inf, "must be above 0")
        self.hold = hold
        self.factor = factor

    def learning_rate_factor(self, epoch: int, step: int) -> float:
        num_decays = max(epoch - self.hold, 0)
        return float(self.factor**num_decays)


class Cosine(Schedule):
    """A linear warm-up, then cycles in which the rate decreases like a cosine from its peak to its minimum.

    Cycles repeat until training ends. The last rate is the minimum only if training ends together with a cycle. With
    `warmup = 100`, `period = 1000`, `growth = 2` and `shrink = 0.5`:

        updates      0 to  100    the factor rises from 0 to 1
        updates    100 to 1100    it falls from 1 to 0
        updates   1100 to 3100    it falls from 0.5 to 0
        updates   3100 to 7100    it falls from 0.25 to 0

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
        self.warmup = warmup
        self.warmup_from = warmup_from
        self.period = period
        self.growth = growth
        self.shrink = shrink
        self.least = least

    def learning_rate_factor(self, epoch: int, step: int) -> float:
        if step < self.warmup:
            return self.warmup_from + (1.0 - self.warmup_from) * step / self.warmup
        cycle, fraction_of_cycle = self._cycle_position(num_updates=step - self.warmup)
        cosine = (1.0 + math.cos(math.pi * fraction_of_cycle)) / 2  # from 1 at the start of a cycle to 0 at its end
        scale = self.shrink**cycle
        return float(scale * (self.least + (1.0 - self.least) * cosine))

    def _cycle_position(self, num_updates: int) -> tuple[int, float]:
        """Return the index of the current cycle, and the fraction of this cycle that has passed.

        Args:
            num_updates: Number of updates since the end of the warm-up.
        """
        if self.growth == 1.0:
            cycle, updates_into_cycle = divmod(num_updates, self.period)
            return cycle, updates_into_cycle / self.period
        # A loop, because a logarithm may round the first update of a cycle into the previous cycle.
        cycle = 0
        updates_into_cycle = num_updates
        cycle_length = self.period
        while updates_into_cycle >= cycle_length:
            cycle += 1
            updates_into_cycle -= cycle_length
            cycle_length = round(self.period * self.growth**cycle)
        return cycle, updates_into_cycle / cycle_length


class InverseSqrt(Schedule):
    """A linear warm-up from 0, then a rate that decreases with the inverse square root of the number of updates.

    Args:
        warmup: Number of updates until the full rate is reached.
    """

    def __init__(self, warmup: Count) -> None:
        _check_argument("warmup", warmup, warmup >= 1, "must be at least 1")
        self.warmup = warmup

    def learning_rate_factor(self, epoch: int, step: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        return math.sqrt(self.warmup / step)


def _check_argument(name: str, value: float, is_valid: bool, constraint: str) -> None:
    """Raise an error if an argument is not valid. Values in recipes have been checked already."""
    if not is_valid:
        raise SettingsError(f"schedule: {name} = {value}: {constraint}")
