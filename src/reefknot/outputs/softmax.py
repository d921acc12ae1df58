"""One softmax over the whole vocabulary.

Shapes: N rows (tokens), D width, V classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.linear_cross_entropy import row_losses, summed_loss
from reefknot.kernels.reference import linear_scores
from reefknot.kernels.topk import linear_topk
from reefknot.outputs.contract import LossPart, OutputEnd, Plan
from reefknot.outputs.labels.contract import Labels, NestedLabels
from reefknot.tables import WordTable


class Softmax(OutputEnd):
    """A softmax over the scores of any labels."""

    def __init__(self, labels: NestedLabels) -> None:
        super().__init__()
        if not isinstance(labels, Labels):
            raise SettingsError(f"softmax: needs labels, such as Plain(table); a {type(labels).__name__} is none")
        self.labels = labels
        self.vocab_size = labels.vocab_size
        self.context_dim = labels.context_dim

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        labels = self.labels
        nll = summed_loss(labels.context(h_ND), labels.weight(), labels.bias, y_N)
        return {"nll": LossPart(nll, plan.count)}

    def penalties(self) -> dict[str, Tensor]:
        return self.labels.penalties()

    def log_probs(self, h_ND: Tensor) -> Tensor:
        labels = self.labels
        return torch.log_softmax(linear_scores(labels.context(h_ND), labels.weight(), labels.bias), dim=-1)

    def target_log_probs(self, h_ND: Tensor, y_N: Tensor) -> Tensor:
        labels = self.labels
        return -row_losses(labels.context(h_ND), labels.weight(), labels.bias, y_N).nll

    def topk(self, h_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.check_k(k)
        labels = self.labels
        return linear_topk(labels.context(h_ND), labels.weight(), labels.bias, k)

    def vectors(self) -> Tensor:
        return self.labels.weight()

    def tables(self) -> list[WordTable]:
        return [self.labels.table]
