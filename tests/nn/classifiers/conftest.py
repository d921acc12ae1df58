"""What the tests of labels share: equal tables, what a softmax makes of labels, and a dropout that can be foreseen.

Shapes: N rows, D width, V classes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.kernels.linear_cross_entropy import IGNORE
from reefknot.nn.classifiers.contract import Labels
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

TARGETS = torch.tensor([3, 0, IGNORE, 10, 3, 7])


@pytest.fixture
def words() -> Callable[[int], WordTable]:
    """A table of 11 words in float64; equal widths, equal vectors."""

    def make(dim: int) -> WordTable:
        torch.manual_seed(3)
        return WordTable(11, dim).double()

    return make


@pytest.fixture
def outcome() -> Callable[[Labels], dict[str, Tensor]]:
    """What a softmax over the labels gives for fixed contexts, and the gradients of its loss that all labels have."""

    def find(labels: Labels) -> dict[str, Tensor]:
        torch.manual_seed(4)
        h_ND = torch.randn(len(TARGETS), labels.context_dim, dtype=torch.float64, requires_grad=True)
        bias_V = torch.randn(labels.vocab_size, dtype=torch.float64)
        output = Softmax(labels.double())
        assert labels.bias is not None
        with torch.no_grad():
            labels.bias.copy_(bias_V)
        loss = output.loss(h_ND, TARGETS, output.prepare(TARGETS))["nll"].sum
        loss.backward()
        assert h_ND.grad is not None
        assert labels.table.weight.grad is not None
        assert labels.bias.grad is not None
        return {
            "loss": loss.detach(),
            "log_probs": output.log_probs(h_ND).detach(),
            "by h": h_ND.grad,
            "by table": labels.table.weight.grad,
            "by bias": labels.bias.grad,
        }

    return find


@pytest.fixture
def halving(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Replaces dropout by a factor of 1/2 at the same place; the shapes of the masks that would have been drawn."""
    masks: list[tuple[int, ...]] = []

    def halve(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        masks.append(tuple(x.shape))
        return 0.5 * x

    monkeypatch.setattr(F, "dropout", halve)
    return masks
