"""Processes whose rows have no target: the loss is zero, and every parameter still gets a gradient.

The other processes wait for these gradients.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from contract.combinations import Case, meaningful_cases
from reefknot.kernels.scores import IGNORE
from reefknot.lab.training.update import MicroBatch
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.sampled import SampledSoftmax

CASES = list(dict.fromkeys(replace(case, encoder="transformer", tied=False) for case in meaningful_cases()))


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    case: Case = request.param
    return case.build().double().train()


def summed(model: LanguageModel, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return the loss of a window as an update computes it."""
    (batch,) = MicroBatch.split(inputs_BT, targets_BT, 1, model.output)
    return model.loss(batch.inputs, batch.targets, None, batch.plan, batch.positions).sum()


def gradients(model: LanguageModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    # torch raises an error if a gradient is missing.
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_window_without_targets_has_zero_loss_and_gradients(model: LanguageModel) -> None:
    loss = summed(model, torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), IGNORE))
    assert loss.item() == 0.0
    assert [name for name, gradient in gradients(model, loss).items() if gradient.count_nonzero()] == []


def test_padding_does_not_change_loss_or_gradients(model: LanguageModel) -> None:
    """The targets are words of the first band, so the other bands have none."""
    if isinstance(model.output, SampledSoftmax):
        pytest.skip("draws other candidates for every window")
    targets_BT = torch.tensor([[0, 3, 1], [2, IGNORE, IGNORE]])
    inputs_BT = torch.tensor([[5, 9, 2], [1, 7, 7]])
    padded = summed(model, inputs_BT, targets_BT)
    separate = summed(model, inputs_BT[:1], targets_BT[:1]) + summed(model, inputs_BT[1:, :1], targets_BT[1:, :1])
    torch.testing.assert_close(padded, separate)
    torch.testing.assert_close(gradients(model, padded), gradients(model, separate))
