"""One softmax over the whole vocabulary, whose targets may be smoothed (Szegedy et al. 2016).

A target of 1 - s, with a share s of it spread over all classes, costs (1 - s) nll + s mean_v(-log p_v). That is
nll + s (z_y - mean_v z_v), the score of the target less the mean of all: no log-probability beside the target's.

Shapes: N rows (tokens), D width, V classes.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.linear_cross_entropy import row_losses, smoothing_losses, summed_loss
from reefknot.kernels.reference import linear_scores
from reefknot.kernels.topk import linear_topk
from reefknot.lab.config.settings import Probability, check_rates
from reefknot.nn.classifiers.contract import Classifier, NestedClassifier
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan
from reefknot.nn.tables import WordTable


class Softmax(OutputEnd):
    """A softmax over the scores of any classifier.

    Smoothing has a part and a weight of its own: log-probabilities and perplexity are those of the targets as they are.
    """

    def __init__(
        self,
        classifier: NestedClassifier,
        smoothing: Annotated[
            Probability, Field(description="share of every target that is spread over all classes, in training")
        ] = 0.0,
    ) -> None:
        super().__init__()
        if not isinstance(classifier, Classifier):
            raise SettingsError(
                f"softmax: needs a classifier, such as Plain(table); a {type(classifier).__name__} is none"
            )
        check_rates("softmax", smoothing=smoothing)
        self.classifier = classifier
        self.smoothing = smoothing
        self.vocab_size = classifier.vocab_size
        self.context_dim = classifier.context_dim

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        classifier = self.classifier
        c_ND, w_VD = classifier.context(h_ND), classifier.weight()
        parts = {"nll": LossPart(summed_loss(c_ND, w_VD, classifier.bias, y_N), plan.count)}
        if self.smoothing:
            above_mean = smoothing_losses(c_ND, w_VD, classifier.bias, y_N).sum()
            parts["smoothing"] = LossPart(above_mean, plan.count, self.smoothing)
        return parts

    def penalties(self) -> dict[str, Tensor]:
        return self.classifier.penalties()

    def log_probs(self, h_ND: Tensor) -> Tensor:
        classifier = self.classifier
        return torch.log_softmax(linear_scores(classifier.context(h_ND), classifier.weight(), classifier.bias), dim=-1)

    def target_log_probs(self, h_ND: Tensor, y_N: Tensor) -> Tensor:
        classifier = self.classifier
        return -row_losses(classifier.context(h_ND), classifier.weight(), classifier.bias, y_N).nll

    def topk(self, h_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.check_k(k)
        classifier = self.classifier
        return linear_topk(classifier.context(h_ND), classifier.weight(), classifier.bias, k)

    def vectors(self) -> Tensor:
        return self.classifier.weight()

    def tables(self) -> list[WordTable]:
        return [self.classifier.table]
