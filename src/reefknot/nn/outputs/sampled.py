"""Sampled softmax (Jean et al. 2015): trained on a random sample of the classes, for large vocabularies.

Start reading at `SampledSoftmax`. In training, a batch is scored against its targets and one sample of the classes, so
only their class vectors are computed. Evaluation is exact. Pappas & Henderson (2019, section 3.4) suggest it for DRILL,
whose class vectors are expensive.

The sample is drawn with replacement, and duplicates are removed: with S draws, a class v of probability p_v is in the
sample with probability Q_v = 1 - (1 - p_v)^S. The softmax of a row is over its target and the sampled classes. log Q_v
is subtracted from the score of class v, because a rare class in the sample also stands for rare classes that are not in
the sample. With this correction the true model is a stationary point of the loss, and if every Q is 1 the loss is
exact.

Shapes: N rows (tokens), S draws, R distinct classes that are sampled or targets, D dimensions, V classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.losses import row_losses
from reefknot.kernels.scores import IGNORE
from reefknot.nn.bounds import Count
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.outputs.contract import LossPart, Plan
from reefknot.nn.outputs.softmax import Softmax

Distribution = Literal["log_uniform", "uniform"]


@dataclass(frozen=True)
class Candidates(Plan):
    """The classes that a batch is scored against.

    A batch with the targets 5, 9, 5 and the sample 2, 5 has ids 2, 5, 9. Rows 0 and 2 have a sampled target, at
    position 1. Row 1 has a target that was not sampled, at position 2.
    """

    num_sampled: int
    """The number of distinct classes that were sampled. They are the first of `ids`."""
    ids: Tensor
    """The R classes: first the sampled classes, then the targets that were not sampled. A target that was not sampled
    is scored only in its own rows."""
    log_q: Tensor
    """For each of the R classes, the logarithm of the probability that it is in the sample."""
    sampled_targets: Tensor
    """For each of the N rows, the position of its target among the sampled classes, or `IGNORE`."""
    unsampled_rows: Tensor
    """The rows whose target was not sampled."""
    unsampled_targets: Tensor
    """For each of `unsampled_rows`, the position of its target among the R classes."""


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
                f"sampled: distribution = {distribution!r}: must be one of {', '.join(get_args(Distribution))}"
            )
        self.samples = samples
        self.distribution = distribution

    def prepare(self, targets: Tensor) -> Plan:
        """Draw a sample for these targets, from torch's CPU generator. In evaluation mode, only count the targets.

        Args:
            targets: Target classes on the host, with any shape. Targets of -100 are ignored.
        """
        plan = super().prepare(targets)
        if not self.training:
            return plan
        targets_N = targets.reshape(-1).cpu()
        sampled = torch.unique(self._sample_classes())  # sorted
        positions_N = torch.searchsorted(sampled, targets_N).clamp(max=len(sampled) - 1)
        is_sampled_N = sampled[positions_N] == targets_N
        unsampled_rows = (~is_sampled_N & (targets_N != IGNORE)).nonzero().squeeze(-1)
        unsampled, unsampled_targets = torch.unique(targets_N[unsampled_rows], return_inverse=True)
        ids_R = torch.cat([sampled, unsampled])
        log_q_R = torch.log(-torch.expm1(self.samples * torch.log1p(-self._probabilities(ids_R))))
        return Candidates(
            count=plan.count,
            num_sampled=len(sampled),
            ids=ids_R,
            log_q=log_q_R,
            sampled_targets=positions_N.where(is_sampled_N, IGNORE),
            unsampled_rows=unsampled_rows,
            unsampled_targets=unsampled_targets + len(sampled),
        )

    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Return the loss of the targets as the part `nll`: over the sample in training, exact in evaluation.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        if not isinstance(plan, Candidates):
            return super().loss(hidden_ND, targets_N, plan)
        plan = plan.to(hidden_ND.device)
        classifier = self.classifier
        context_ND, weight_RD = classifier.context(hidden_ND), classifier.weight(plan.ids)
        bias_R = -plan.log_q.to(torch.promote_types(weight_RD.dtype, torch.float32))
        if classifier.bias is not None:
            bias_R = bias_R + classifier.bias[plan.ids]
        # Rows with a sampled target have a softmax over the sampled classes.
        losses = row_losses(context_ND, weight_RD[: plan.num_sampled], bias_R[: plan.num_sampled], plan.sampled_targets)
        # In other rows, the target is one more class. With its score t, the loss is
        # -log(e^t / (e^lse + e^t)) = softplus(lse - t).
        # Rows may share a target. The gradient of an embedding is summed in a fixed order, unlike that of indexing.
        target_w = F.embedding(plan.unsampled_targets, weight_RD)
        target_bias = F.embedding(plan.unsampled_targets, bias_R[:, None])[:, 0]
        context = context_ND.index_select(0, plan.unsampled_rows)
        target_scores = (context * target_w).sum(-1, dtype=bias_R.dtype) + target_bias
        unsampled_nll = F.softplus(losses.lse.index_select(0, plan.unsampled_rows) - target_scores)
        return {"nll": LossPart(losses.nll.sum() + unsampled_nll.sum(), plan.count)}

    def flops(self, targets_N: Tensor) -> int:
        # Targets are scored against a sample of the classes.
        return self.classifier.flops(len(targets_N), min(self.samples, self.vocab_size))

    def extra_repr(self) -> str:
        """Return the arguments that `print(model)` shows."""
        return f"samples={self.samples}, distribution={self.distribution}"

    def _sample_classes(self) -> Tensor:
        """Draw S classes with replacement."""
        if self.distribution == "uniform":
            return torch.randint(self.vocab_size, (self.samples,))
        # This inverts the distribution function log(k + 1) / log(V + 1).
        ranks_S = torch.exp(torch.rand(self.samples, dtype=torch.float64) * math.log(self.vocab_size + 1)).long()
        return (ranks_S - 1).clamp(max=self.vocab_size - 1)

    def _probabilities(self, ids: Tensor) -> Tensor:
        """Return the probability of each of these classes in one draw."""
        if self.distribution == "uniform":
            return torch.full(ids.shape, 1 / self.vocab_size, dtype=torch.float64)
        return torch.log1p(1 / (ids.double() + 1)) / math.log(self.vocab_size + 1)
