"""Sampled softmax (Jean et al. 2015), which Pappas & Henderson (2019, section 3.4) suggest for large vocabularies.

In training each batch is scored against its targets and a sample of the classes, so only their class vectors are
computed. Evaluation is exact. The whole batch uses one sample. It is drawn with replacement, and duplicates are
removed: with S draws, a class v of probability p_v is in the sample with probability Q_v = 1 - (1 - p_v)^S. The
softmax of a row is over its target and the sampled classes. log Q_v is subtracted from the score of class v, because a
rare class in the sample also stands for rare classes that are not in the sample. With this correction the true model
is a stationary point of the loss, and if every Q is 1 the loss is exact.

Shapes: N rows (tokens), S draws, R distinct classes that are drawn or targeted, D dimensions, V classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.linear_cross_entropy import row_losses
from reefknot.kernels.scores import IGNORE
from reefknot.nn.bounds import Count
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.outputs.contract import LossPart, Plan
from reefknot.nn.outputs.softmax import Softmax

Distribution = Literal["log_uniform", "uniform"]


@dataclass(frozen=True)
class Candidates(Plan):
    """The classes that a batch is scored against."""

    drawn_count: int
    """The number of distinct classes that were drawn. They are the first of `ids`."""
    ids: Tensor
    """The R classes: first the classes that were drawn, then the targets that were not drawn. A target that was not
    drawn is scored only in its own rows."""
    log_q: Tensor
    """For each of the R classes, the logarithm of the probability that it is in the sample."""
    drawn_targets: Tensor
    """For each of the N rows, the position of its target among the drawn classes, or `IGNORE`."""
    other_rows: Tensor
    """The rows whose target was not drawn."""
    other_targets: Tensor
    """For each of `other_rows`, the position of its target among the R classes."""


class SampledSoftmax(Softmax):
    """A softmax that is trained on a sample of the classes and exact in evaluation.

    In training mode, the part `nll` of the loss is computed over the sample and is usually below the true negative
    log-likelihood. In evaluation mode it is exact. The mode at the time of `prepare` decides.

    Args:
        classifier: The classifier whose scores are normalised, such as `Plain(table)`.
        samples: Number of draws per batch, with replacement.
        distribution: The distribution to draw from: `uniform`, or `log_uniform`, which approximates word frequencies
            if ids are sorted by decreasing frequency.
    """

    def __init__(
        self, classifier: Classifier, samples: Count = 8192, distribution: Distribution = "log_uniform"
    ) -> None:
        super().__init__(classifier)
        if samples < 1:
            raise SettingsError(f"sampled: samples = {samples}: at least one class must be drawn")
        if distribution not in get_args(Distribution):
            raise SettingsError(
                f"sampled: distribution = {distribution!r}; there are: {', '.join(get_args(Distribution))}"
            )
        self.samples = samples
        self.distribution = distribution

    def prepare(self, y_cpu: Tensor) -> Plan:
        """Draw a sample for these targets, from torch's CPU generator. In evaluation mode, only count the targets.

        Args:
            y_cpu: Target classes on the host, with any shape. Targets of -100 are ignored.
        """
        plan = super().prepare(y_cpu)
        if not self.training:
            return plan
        y_N = y_cpu.reshape(-1).cpu()
        drawn = torch.unique(self._draw())  # sorted
        positions_N = torch.searchsorted(drawn, y_N).clamp(max=len(drawn) - 1)
        is_drawn_N = drawn[positions_N] == y_N
        other_rows = (~is_drawn_N & (y_N != IGNORE)).nonzero().squeeze(-1)
        others, other_targets = torch.unique(y_N[other_rows], return_inverse=True)
        ids_R = torch.cat([drawn, others])
        log_q_R = torch.log(-torch.expm1(self.samples * torch.log1p(-self._probabilities(ids_R))))
        drawn_targets = positions_N.where(is_drawn_N, IGNORE)
        return Candidates(plan.count, len(drawn), ids_R, log_q_R, drawn_targets, other_rows, other_targets + len(drawn))

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Return the loss of the targets as the part `nll`: over the sample in training, exact in evaluation.

        Args:
            h_ND: Hidden states, with shape (N, D).
            y_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        if not isinstance(plan, Candidates):
            return super().loss(h_ND, y_N, plan)
        plan = plan.to(h_ND.device)
        classifier = self.classifier
        c_ND, w_RD = classifier.context(h_ND), classifier.weight(plan.ids)
        bias_R = -plan.log_q.to(torch.promote_types(w_RD.dtype, torch.float32))
        if classifier.bias is not None:
            bias_R = bias_R + classifier.bias[plan.ids]
        sampled = row_losses(c_ND, w_RD[: plan.drawn_count], bias_R[: plan.drawn_count], plan.drawn_targets)
        # Rows may share a target. The gradient of an embedding is summed in a fixed order, unlike that of indexing.
        target_w, target_bias = (F.embedding(plan.other_targets, values) for values in (w_RD, bias_R[:, None]))
        context = c_ND.index_select(0, plan.other_rows)
        target_scores = (context * target_w).sum(-1, dtype=bias_R.dtype) + target_bias[:, 0]
        other_nll = F.softplus(sampled.lse.index_select(0, plan.other_rows) - target_scores)
        return {"nll": LossPart(sampled.nll.sum() + other_nll.sum(), plan.count)}

    def flops(self, y_N: Tensor) -> int:
        # Targets are scored against a sample of the classes.
        return self.classifier.flops(len(y_N), min(self.samples, self.vocab_size))

    def extra_repr(self) -> str:
        """Return the arguments that `print(model)` shows."""
        return f"samples={self.samples}, distribution={self.distribution}"

    def _draw(self) -> Tensor:
        if self.distribution == "uniform":
            return torch.randint(self.vocab_size, (self.samples,))
        # The inverse of the distribution function log(k + 1) / log(V + 1).
        ranks_S = torch.exp(torch.rand(self.samples, dtype=torch.float64) * math.log(self.vocab_size + 1)).long()
        return (ranks_S - 1).clamp(max=self.vocab_size - 1)

    def _probabilities(self, ids: Tensor) -> Tensor:
        """Return the probability of each of these classes in one draw."""
        if self.distribution == "uniform":
            return torch.full(ids.shape, 1 / self.vocab_size, dtype=torch.float64)
        return torch.log1p(1 / (ids.double() + 1)) / math.log(self.vocab_size + 1)
