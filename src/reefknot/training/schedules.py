"""Learning-rate schedules: a factor per epoch, a function of the epoch alone, so that there is nothing to resume."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from reefknot.settings import Positive


class Constant:
    """The same rate throughout."""

    def factor(self, epoch: int) -> float:
        """What the first rate is multiplied with in this epoch; epochs count from 1."""
        return 1.0


class Decay:
    """The first rate for some epochs, then multiplied once before every epoch."""

    def __init__(
        self,
        hold: Annotated[int, Field(ge=0, le=10**6, description="epochs at the first rate")],
        factor: Annotated[Positive, Field(description="0.5 halves the rate before each later epoch")],
    ) -> None:
        self.hold = hold
        self.rate = factor

    def factor(self, epoch: int) -> float:
        return float(self.rate ** max(epoch - self.hold, 0))
