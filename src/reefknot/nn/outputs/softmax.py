"""Softmax over the whole vocabulary, with optional label smoothing (Szegedy et al. 2016) and capped scores.

    output = Softmax(Plain(WordTable(10_000, 200)))
    log_probs_NV = output.log_probs(hidden_ND)

This is the simplest output end (the last stage of a language model: a classifier and its loss). `Softmax.loss` calls
kernels that compute the loss block by block, so the N x V scores are never stored.

Shapes: N rows (one row per token), D dimensions, V classes, R rows of scores (several per token in a mixture).
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.errors import SettingsError, describe_type
from reefknot.kernels.losses import row_losses, smoothed_losses, smoothing_losses, summed_loss
from reefknot.kernels.reference import linear_scores, transform_scores
from reefknot.kernels.scores import IDENTITY, ScoreTransform
from reefknot.kernels.topk import linear_topk
from reefknot.nn.bounds import Positive, Probability, check_positive, check_rates
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan, RowLoss
from reefknot.nn.outputs.rows import any_leading_shape, any_leading_shape_with_targets, rows_only
from reefknot.nn.tables import WordTable, hint_for_torch_layer


class Softmax(OutputEnd):
    """A softmax over the scores of a classifier.

    Label smoothing spreads a share s of every target over all classes. With the scores z, the loss of a target y is

        (1 - s) nll + s mean_v(-log p_v)  =  nll + s (z_y - mean_v z_v)

    The second term is a separate part of the loss, so log-probabilities and perplexity do not include the smoothing.

    With a cap c, as in Gemma 2, every score s becomes c tanh(s / c), which is between -c and c.

    Args:
        classifier: The classifier whose scores are normalised, such as `Plain(table)`.
        smoothing: Label smoothing: the share of every target that is spread over all classes in training.
        softcap: If given, the largest absolute score: scores become softcap * tanh(score / softcap).
    """

    divides_classes = True

    def __init__(self, classifier: Classifier, smoothing: Probability = 0.0, softcap: Positive | None = None) -> None:
        super().__init__()
        if not isinstance(classifier, Classifier):
            raise SettingsError(
                f"softmax: needs a classifier, such as Plain(table); {describe_type(classifier)} is not one"
                f"{hint_for_torch_layer(classifier, 'Plain')}"
            )
        check_rates("softmax", smoothing=smoothing)
        check_positive("softmax", softcap=softcap)
        self.classifier = classifier
        self.smoothing = smoothing
        self.softcap = softcap
        self.vocab_size = classifier.vocab_size
        self.context_dim = classifier.context_dim

    @rows_only
    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Return the loss of the targets as the part `nll` and, with label smoothing, the part `smoothing`.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        inputs, transform, shard = self._loss_inputs(hidden_ND, targets_N), self.transform, self.classifier.shard
        if self.smoothing and (self.softcap is not None or shard is not None):
            nll_N, smoothing_N = smoothed_losses(*inputs, transform, shard)
            nll_sum, smoothing_sum = nll_N.sum(), smoothing_N.sum()
        else:
            nll_sum = summed_loss(*inputs, transform=transform, shard=shard, has_checked_targets=True)
            if self.smoothing:
                smoothing_sum = smoothing_losses(*inputs).sum()
        loss_parts = {"nll": LossPart(nll_sum, plan.count)}
        if self.smoothing:
            loss_parts["smoothing"] = LossPart(smoothing_sum, plan.count, self.smoothing)
        return loss_parts

    def loss_per_row(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, RowLoss]:
        inputs = self._loss_inputs(hidden_ND, targets_N)
        if self.smoothing and self.softcap is not None:
            nll_N, smoothing_N = smoothed_losses(*inputs, self.transform)
        else:
            nll_N = row_losses(*inputs, transform=self.transform).nll
            if self.smoothing:
                smoothing_N = smoothing_losses(*inputs)
        losses = {"nll": RowLoss(nll_N)}
        if self.smoothing:
            losses["smoothing"] = RowLoss(smoothing_N, self.smoothing)
        return losses

    def _loss_inputs(self, hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return the first four arguments of the losses: hidden states, class vectors, biases and targets."""
        classifier = self.classifier
        return classifier.context(hidden_ND), classifier.weight(), classifier.bias, targets_N

    @property
    def transform(self) -> ScoreTransform:
        """What is applied to the scores: the cap, if there is one."""
        return IDENTITY if self.softcap is None else ScoreTransform(softcap=float(self.softcap))

    def penalties(self) -> dict[str, Tensor]:
        """Return the penalties of the classifier. They are added once per optimiser step to the loss sums."""
        return self.classifier.penalties()

    @any_leading_shape
    def log_probs(self, hidden_ND: Tensor) -> Tensor:
        return self._normalised_scores(hidden_ND)

    @any_leading_shape_with_targets
    def target_log_probs(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        return -self._target_nll(hidden_ND, targets_N)

    @any_leading_shape
    def topk(self, hidden_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.check_topk_size(k)
        context_ND = self.classifier.context(hidden_ND)
        classifier = self.classifier
        return linear_topk(context_ND, classifier.weight(), k, linear_bias=classifier.bias, softcap=self.softcap)

    def _normalised_scores(self, hidden_RD: Tensor) -> Tensor:
        """Return the logarithms of the softmax of the classifier's scores, with shape (R, V)."""
        context_RD = self.classifier.context(hidden_RD)
        scores_RV = linear_scores(context_RD, self.classifier.weight(), self.classifier.bias)
        if self.softcap is not None:
            scores_RV = transform_scores(scores_RV, self.transform)
        return torch.log_softmax(scores_RV, dim=-1)

    def _target_nll(self, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
        """Return the negative log-likelihood of each target under the softmax of the classifier's scores, (R,)."""
        return row_losses(*self._loss_inputs(hidden_RD, targets_R), transform=self.transform).nll

    def vectors(self) -> Tensor:
        """Return the class vectors of the classifier, one row per class, for example to find nearest neighbours."""
        return self.classifier.weight()

    def tables(self) -> list[WordTable]:
        """Return the table of the classifier. An input end that uses the same table is tied to this output end."""
        return [self.classifier.table]

    def flops(self, targets_N: Tensor) -> int:
        return self.classifier.flops(len(targets_N))

    def extra_repr(self) -> str:
        """Return the settings that `print(model)` shows, if they are not the defaults."""
        settings = {"smoothing": self.smoothing or None, "softcap": self.softcap}
        return ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None)
