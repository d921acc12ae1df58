"""Fixtures for classifiers: tables with fixed values, losses with gradients, and a deterministic dropout.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

TARGETS = torch.tensor([3, 0, IGNORE, 10, 3, 7])


@pytest.fixture
def make_table() -> Callable[[int], WordTable]:
    """Return a function that makes a float64 table of 11 words; equal dimensions give equal vectors."""

    def make(dim: int) -> WordTable:
        torch.manual_seed(3)
        return WordTable(11, dim).double()

    return make


@pytest.fixture
def loss_and_gradients() -> Callable[[Classifier], dict[str, Tensor]]:
    """Return a function that computes a classifier's loss, log-probabilities and gradients for fixed contexts."""

    def compute(classifier: Classifier) -> dict[str, Tensor]:
        torch.manual_seed(4)
        hidden_ND = torch.randn(len(TARGETS), classifier.context_dim, dtype=torch.float64, requires_grad=True)
        bias_V = torch.randn(classifier.vocab_size, dtype=torch.float64)
        output = Softmax(classifier.double())
        assert classifier.bias is not None
        with torch.no_grad():
            classifier.bias.copy_(bias_V)
        loss = output.loss(hidden_ND, TARGETS, output.prepare(TARGETS))["nll"].sum
        loss.backward()
        assert hidden_ND.grad is not None
        assert classifier.table.weight.grad is not None
        assert classifier.bias.grad is not None
        return {
            "loss": loss.detach(),
            "log_probs": output.log_probs(hidden_ND).detach(),
            "by h": hidden_ND.grad,
            "by table": classifier.table.weight.grad,
            "by bias": classifier.bias.grad,
        }

    return compute


@pytest.fixture
def halved_mask_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Replace dropout by multiplication with 1/2, and return the list that records the shape of each mask."""
    shapes: list[tuple[int, ...]] = []

    def halve(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        shapes.append(tuple(x.shape))
        return 0.5 * x

    monkeypatch.setattr(F, "dropout", halve)
    return shapes
