"""Softmax over the whole vocabulary, with optional label smoothing (Szegedy et al. 2016).

This is the simplest output end (classifier and loss of a language model). `Softmax` calls kernels that compute the loss
in blocks, so the N x V scores are never stored.

Label smoothing spreads a share s of every target over all classes, so the loss of a target is (1 - s) nll + s
mean_v(-log p_v). This equals nll + s (z_y - mean_v z_v), where z are the scores, so only the log-probability of the
target is needed.

Shapes: N rows (tokens), D dimensions, V classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.losses import row_losses, smoothing_losses, summed_loss
from reefknot.kernels.reference import linear_scores
from reefknot.kernels.topk import linear_topk
from reefknot.nn.bounds import Probability, check_rates
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan
from reefknot.nn.tables import WordTable


class Softmax(OutputEnd):
    """A softmax over the scores of a classifier.

    Label smoothing is a separate part of the loss, so log-probabilities and perplexity are those of the targets without
    smoothing.

    Args:
        classifier: The classifier whose scores are normalised, such as `Plain(table)`.
        smoothing: Label smoothing: the share of every target that is spread over all classes in training.
    """

    def __init__(self, classifier: Classifier, smoothing: Probability = 0.0) -> None:
        super().__init__()
        if not isinstance(classifier, Classifier):
            raise SettingsError(
                f"softmax: needs a classifier, such as Plain(table); a {type(classifier).__name__} is not one"
            )
        check_rates("softmax", smoothing=smoothing)
        self.classifier = classifier
        self.smoothing = smoothing
        self.vocab_size = classifier.vocab_size
        self.context_dim = classifier.context_dim

    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Return the loss of the targets as the part `nll` and, with label smoothing, the part `smoothing`.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        classifier = self.classifier
        context_ND, weight_VD = classifier.context(hidden_ND), classifier.weight()
        parts = {"nll": LossPart(summed_loss(context_ND, weight_VD, classifier.bias, targets_N), plan.count)}
        if self.smoothing:
            smoothing_loss = smoothing_losses(context_ND, weight_VD, classifier.bias, targets_N).sum()
            parts["smoothing"] = LossPart(smoothing_loss, plan.count, self.smoothing)
        return parts

    def penalties(self) -> dict[str, Tensor]:
        """Return the penalties of the classifier. They are added once per optimiser step to the loss sums."""
        return self.classifier.penalties()

    def log_probs(self, hidden_ND: Tensor) -> Tensor:
        classifier = self.classifier
        scores_NV = linear_scores(classifier.context(hidden_ND), classifier.weight(), classifier.bias)
        return torch.log_softmax(scores_NV, dim=-1)

    def target_log_probs(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        classifier = self.classifier
        return -row_losses(classifier.context(hidden_ND), classifier.weight(), classifier.bias, targets_N).nll

    def topk(self, hidden_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.check_topk_size(k)
        classifier = self.classifier
        return linear_topk(classifier.context(hidden_ND), classifier.weight(), k, linear_bias=classifier.bias)

    def vectors(self) -> Tensor:
        """Return the class vectors of the classifier, one row per class, for example to find neighbours."""
        return self.classifier.weight()

    def tables(self) -> list[WordTable]:
        """Return the table of the classifier. An input end that uses the same table is tied to this output end."""
        return [self.classifier.table]

    def flops(self, targets_N: Tensor) -> int:
        return self.classifier.flops(len(targets_N))
