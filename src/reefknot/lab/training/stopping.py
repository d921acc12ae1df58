"""Early stopping: rules that look at the validation losses so far and say that it is enough.

The non-monotone rule is the one that begins averaging in AWD-LSTM (Merity et al. 2018) and ends its finetuning. It is
the rule of the authors' code; the condition that the paper prints is a slip, as they have said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from reefknot.lab.config.parts import describe_values
from reefknot.lab.config.settings import Count, Settings


def nonmonotone(earlier: Sequence[float], current: float, interval: int) -> bool:
    """Whether the current loss is worse than the best of more than `interval` validations ago."""
    return len(earlier) > interval and current > min(earlier[:-interval])


def impatient(earlier: Sequence[float], current: float, interval: int) -> bool:
    """Whether the last `interval` validations have brought no new best."""
    losses = [*earlier, current]
    return len(losses) - 1 - losses.index(min(losses)) >= interval


class StoppingSettings(Settings):
    """End training before its time. Where averages are to be kept, their validation losses alone count."""

    rule: Annotated[Literal["nonmonotone", "patience"], Field(description=describe_values("training.stop.rule"))]
    interval: Annotated[Count, Field(description="validations that the rule waits")] = 5

    def verdict(self, earlier: Sequence[float], current: float) -> str | None:
        """Why training is to stop at this validation loss; None: it goes on."""
        if self.rule == "nonmonotone" and nonmonotone(earlier, current, self.interval):
            return f"the non-monotone rule: the best of more than {self.interval} validations ago was better"
        if self.rule == "patience" and impatient(earlier, current, self.interval):
            return f"patience: no new best in {self.interval} validations"
        return None
