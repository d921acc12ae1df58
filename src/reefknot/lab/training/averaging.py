"""Weight averaging and early stopping.

`WeightAverages` keeps the running mean of the weights during training:

    averages = WeightAverages(dict(model.named_parameters()))
    averages.update(num_applied=torch.ones(()))    # after every optimiser step
    with averages.swap_in():                       # the model has the mean weights inside this block
        validate(model)

`AveragingSettings` and `StoppingSettings` are the sections `[training.averaging]` and `[training.stop]` of a recipe.
They decide from the validation losses when averaging starts and when training stops.

Averaged stochastic gradient descent (ASGD, Polyak and Juditsky 1992) returns the mean of all iterates (the weights
after each optimiser step) instead of the last iterate. AWD-LSTM (Merity et al. 2018) starts to average when plain SGD
no longer improves the validation loss (NT-ASGD), and ends its finetuning by the same non-monotone rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from reefknot.lab.config.parts import describe_choices
from reefknot.lab.config.settings import Count, Settings

# -- weight averaging --------------------------------------------------------------------------------------------------


class AveragingSettings(Settings):
    """Settings of weight averaging. The mean of the iterates is validated and saved; training continues without it."""

    # Averaging starts at the first step (at_once), or when the validation loss no longer improves (nonmonotone).
    start: Annotated[Literal["nonmonotone", "at_once"], Field(description=describe_choices("training.averaging.start"))]
    interval: Annotated[Count, Field(description="Number of recent validations that the nonmonotone rule ignores.")] = 5

    def should_start(self, earlier_losses: Sequence[float], loss: float) -> bool:
        """Return whether averaging starts after this validation loss."""
        return is_nonmonotone(earlier_losses, loss, num_ignored=self.interval)


class WeightAverages:
    """The running mean of named parameters, updated once per optimiser step.

    Before the first update, the means are the initial values of the parameters. The mean covers every iterate since
    averaging started. `torch.optim.ASGD` with `t0 = 0` leaves out the first iterate, because it computes the weight of
    a step in the step before.

    `update` never waits for the device and can be captured in a CUDA graph. It uses torch's `_foreach` functions, like
    torch's own optimisers: each changes all parameters in one kernel launch instead of one launch per parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.means = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        device = next(iter(self.means.values())).device
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        """Number of iterates in the means."""

    @classmethod
    def create_at_start(
        cls, parameters: Mapping[str, nn.Parameter], settings: AveragingSettings | None
    ) -> WeightAverages | None:
        """Return the averages at the first step, or None if averaging does not start at once."""
        if settings is None or settings.start != "at_once":
            return None
        return cls(parameters)

    @torch.no_grad()
    def update(self, num_applied: Tensor) -> None:
        """Add the current parameters to the means: mean += (parameter - mean) / count.

        Args:
            num_applied: Number of steps that the optimiser has just made: a scalar tensor that is 1, or 0 if the
                optimiser skipped its step. With 0, nothing changes.
        """
        parameters: list[Tensor] = list(self._parameters.values())
        means = list(self.means.values())
        self.count += num_applied
        new_share = num_applied / self.count.clamp(min=1.0)
        mean_changes = torch._foreach_sub(parameters, means)
        torch._foreach_mul_(mean_changes, new_share.to(means[0].dtype))
        torch._foreach_add_(means, mean_changes)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Copy the means into the parameters, and restore the parameters on exit. The tensors stay the same objects."""
        original_values = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._copy_to_parameters(self.means)
        try:
            yield
        finally:
            self._copy_to_parameters(original_values)

    @torch.no_grad()
    def _copy_to_parameters(self, values: dict[str, Tensor]) -> None:
        """Overwrite the parameters with values of the same names, which are in the same order."""
        torch._foreach_copy_(list(self._parameters.values()), list(values.values()))


# -- early stopping ----------------------------------------------------------------------------------------------------


class StoppingSettings(Settings):
    """Settings of early stopping. With averaging, only the validation losses of the averaged weights count."""

    rule: Annotated[Literal["nonmonotone", "patience"], Field(description=describe_choices("training.stop.rule"))]
    interval: Annotated[Count, Field(description="Number of validations that the rule waits for an improvement.")] = 5

    def reason_to_stop(self, earlier_losses: Sequence[float], loss: float) -> str | None:
        """Return why training stops after this validation loss, or None if it continues."""
        if self.rule == "nonmonotone" and is_nonmonotone(earlier_losses, loss, num_ignored=self.interval):
            return f"the non-monotone rule: a loss of more than {self.interval} validations ago was better"
        if self.rule == "patience" and is_out_of_patience(earlier_losses, loss, patience=self.interval):
            return f"patience: no new best loss in {self.interval} validations"
        return None


# -- rules for both: functions of the validation losses ----------------------------------------------------------------


def is_nonmonotone(earlier_losses: Sequence[float], loss: float, num_ignored: int) -> bool:
    """Return whether an old loss, from before the last `num_ignored` earlier losses, is better than the current loss.

    This is the rule of the authors' code. The condition that the AWD-LSTM paper prints is a mistake, as the authors
    have confirmed.

    With `num_ignored = 2`, the earlier losses 5.0, 4.0, 4.5, 4.4 and the loss 4.2, the answer is yes: the old losses
    are 5.0 and 4.0, and 4.0 is better than 4.2.
    """
    old_losses = earlier_losses[:-num_ignored]
    return bool(old_losses) and loss > min(old_losses)


def is_out_of_patience(earlier_losses: Sequence[float], loss: float, patience: int) -> bool:
    """Return whether none of the last `patience` validations, including this one, reached a new best loss."""
    losses = [*earlier_losses, loss]
    best_index = losses.index(min(losses))
    validations_since_best = len(losses) - 1 - best_index
    return validations_since_best >= patience
