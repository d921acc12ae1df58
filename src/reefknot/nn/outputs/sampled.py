"""Sampled softmax (Jean et al. 2015): trained on a random sample of the classes, for large vocabularies.

Start reading at `SampledSoftmax`. In training, `prepare` draws one sample of the classes per batch. `loss` then scores
a row against its target and the sampled classes only, so only these class vectors are computed. Evaluation is exact.

The sample is drawn with replacement, and duplicates are removed. With S draws, a class v of probability p_v is in the
sample with probability Q_v. The score of the class is corrected by log Q_v:

    Q_v = 1 - (1 - p_v)^S
    corrected score_v = score_v - log Q_v

Shapes: N rows (one row per token), S draws, R distinct classes that are sampled or targets, M rows whose target is not
sampled, D dimensions, V classes.
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
from reefknot.nn.outputs.contract import LossPart, Plan, RowLoss
from reefknot.nn.outputs.rows import rows_only
from reefknot.nn.outputs.softmax import Softmax

Distribution = Literal["log_uniform", "uniform"]


@dataclass(frozen=True)
class Candidates(Plan):
    """The plan of a training batch: the classes that the rows are scored against.

    For the targets 5, 9, 5 and the sample 2, 5:

        ids                  2, 5, 9          the sampled classes, then the target 9, which is not sampled
        num_sampled          2
        sampled_targets      1, IGNORE, 1     rows 0 and 2 have the target 5, at position 1 of `ids`
        unsampled_rows       1                row 1 has the target 9
        unsampled_targets    2                at position 2 of `ids`
    """

    num_sampled: int
    """The number of distinct sampled classes. They come first in `ids`."""
    ids: Tensor
    """The ids of the R classes: first the sampled classes, then the targets that are not sampled. A target that is not
    sampled is scored only in its own rows."""
    log_q: Tensor
    """For each of the R classes, the logarithm of the probability that the class is in the sample."""
    sampled_targets: Tensor
    """For each of the N rows, the position of its target among the sampled classes, or `IGNORE`."""
    unsampled_rows: Tensor
    """The M rows whose target is not sampled."""
    unsampled_targets: Tensor
    """For each of the M rows, the position of its target in `ids`."""


class SampledSoftmax(Softmax):
    """A softmax that is trained on a sample of the classes and exact in evaluation.

    In training mode, the part `nll` of the loss is computed over the sample and is usually below the true negative
    log-likelihood. In evaluation mode it is exact. The mode at the time of `prepare` decides. Pappas & Henderson (2019,
    section 3.4) suggest this output end for DRILL, whose class vectors are expensive.

    log Q_v is subtracted from the score of class v (see the top of the file), because a rare class in the sample also
    stands for rare classes that are not in the sample. With this correction the true model is a stationary point of the
    loss. If every Q is 1, the loss is exact.

    Args:
        classifier: The classifier whose scores are normalised, such as `Plain(table)`.
        samples: Number of draws per batch, with replacement.
        distribution: The distribution to draw from: `uniform`, or `log_uniform`, which approximates word frequencies
            if ids are sorted by decreasing frequency.
    """

    divides_classes = False

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
        """Draw a sample of the classes from torch's CPU generator. In evaluation mode, only count the targets.

        Args:
            targets: Target classes on the host, with any shape. Targets of -100 are ignored.
        """
        plan = super().prepare(targets)
        if not self.training:
            return plan
        targets_N = targets.reshape(-1).cpu()

        # Find each target in the sample, which `unique` sorts.
        sampled_ids = torch.unique(self._sample_classes())
        num_sampled = len(sampled_ids)
        positions_N = torch.searchsorted(sampled_ids, targets_N).clamp(max=num_sampled - 1)
        is_sampled_N = sampled_ids[positions_N] == targets_N

        # The other targets follow the sample.
        is_unsampled_N = ~is_sampled_N & (targets_N != IGNORE)
        unsampled_rows_M = is_unsampled_N.nonzero().squeeze(-1)
        unsampled_ids, unsampled_positions_M = torch.unique(targets_N[unsampled_rows_M], return_inverse=True)
        ids_R = torch.cat([sampled_ids, unsampled_ids])

        return Candidates(
            count=plan.count,
            num_sampled=num_sampled,
            ids=ids_R,
            log_q=self._log_sample_probabilities(ids_R),
            sampled_targets=positions_N.where(is_sampled_N, IGNORE),
            unsampled_rows=unsampled_rows_M,
            unsampled_targets=num_sampled + unsampled_positions_M,
        )

    @rows_only
    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Return the loss of the targets as the part `nll`: over the sample in training, exact in evaluation.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        if not isinstance(plan, Candidates):
            return super().loss(hidden_ND, targets_N, plan)
        sampled_nll_N, unsampled_nll_M = self._compute_nll(hidden_ND, plan.to(hidden_ND.device))
        return {"nll": LossPart(sampled_nll_N.sum() + unsampled_nll_M.sum(), plan.count)}

    def loss_per_row(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, RowLoss]:
        if not isinstance(plan, Candidates):
            return super().loss_per_row(hidden_ND, targets_N, plan)
        plan = plan.to(hidden_ND.device)
        sampled_nll_N, unsampled_nll_M = self._compute_nll(hidden_ND, plan)
        return {"nll": RowLoss(sampled_nll_N.index_add(0, plan.unsampled_rows, unsampled_nll_M))}

    def _compute_nll(self, hidden_ND: Tensor, plan: Candidates) -> tuple[Tensor, Tensor]:
        """Return the losses over the sample: of the N rows, zero where the target is not sampled, and of the M others.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            plan: The plan of the batch, on the device of `hidden_ND`.
        """
        classifier = self.classifier
        context_ND = classifier.context(hidden_ND)
        weight_RD = classifier.weight(plan.ids)

        # The correction of the scores is added to the biases.
        bias_R = -plan.log_q.to(torch.promote_types(weight_RD.dtype, torch.float32))
        if classifier.bias is not None:
            bias_R = bias_R + classifier.bias[plan.ids]

        # Rows with a sampled target have a softmax over the sampled classes.
        sampled_weight = weight_RD[: plan.num_sampled]
        sampled_bias = bias_R[: plan.num_sampled]
        losses = row_losses(context_ND, sampled_weight, sampled_bias, plan.sampled_targets)

        # In the other rows, the target is one more class. With its score t, the loss is
        # -log(e^t / (e^lse + e^t)) = softplus(lse - t).
        # Rows may share a target. `F.embedding` sums its gradient in a fixed order, but indexing does not.
        target_weight_MD = F.embedding(plan.unsampled_targets, weight_RD)
        target_bias_M = F.embedding(plan.unsampled_targets, bias_R[:, None])[:, 0]
        context_MD = context_ND.index_select(0, plan.unsampled_rows)
        target_scores_M = (context_MD * target_weight_MD).sum(-1, dtype=bias_R.dtype) + target_bias_M
        lse_M = losses.lse.index_select(0, plan.unsampled_rows)
        return losses.nll, F.softplus(lse_M - target_scores_M)

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
        # Invert the distribution function of the rank k, counted from 1: log(k + 1) / log(V + 1).
        uniform_S = torch.rand(self.samples, dtype=torch.float64)
        ranks_S = torch.exp(uniform_S * math.log(self.vocab_size + 1)).long()
        return (ranks_S - 1).clamp(max=self.vocab_size - 1)

    def _log_sample_probabilities(self, ids_R: Tensor) -> Tensor:
        """Return log Q, the logarithm of the probability that each of these classes is in the sample."""
        draw_probabilities_R = self._draw_probabilities(ids_R)
        # log(1 - (1 - p)^S), computed so that it stays exact for small p.
        return torch.log(-torch.expm1(self.samples * torch.log1p(-draw_probabilities_R)))

    def _draw_probabilities(self, ids_R: Tensor) -> Tensor:
        """Return the probability of each of these classes in one draw."""
        if self.distribution == "uniform":
            return torch.full(ids_R.shape, 1 / self.vocab_size, dtype=torch.float64)
        return torch.log1p(1 / (ids_R.double() + 1)) / math.log(self.vocab_size + 1)
