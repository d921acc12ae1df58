"""A softmax with the augmented loss (Inan et al. 2017, section 3), which also rewards words similar to the target.

Start reading at `Augmented.loss`. It adds a second term, J_aug, to the negative log-likelihood J. Both distributions in
J_aug are at the temperature tau:

    soft target      q = softmax(L l_y / tau)      L has all input vectors, l_y is the input vector of the target y
    soft prediction  p = softmax(W c / tau)        W has the class vectors, c is the context; no bias, as in the paper
    J_aug = KL(q || p)

The soft target depends only on the target word, so it is computed once per distinct target of a batch. The docstring of
`Augmented.loss` gives the formula that this uses.

Shapes: N rows (one row per token), M rows with a target that is not ignored, U distinct targets, D dimensions of the
class vectors, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError, describe_type
from reefknot.kernels.losses import row_losses
from reefknot.kernels.scores import IGNORE
from reefknot.kernels.small import stored_augmented_losses, stores_scores
from reefknot.kernels.soft_target import SoftTargets, soft_targets
from reefknot.nn.bounds import NonNegative, Positive, Share
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.outputs.contract import LossPart, Plan, RowLoss
from reefknot.nn.outputs.rows import rows_only
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable, hint_for_torch_layer

PAD_MULTIPLE = 32
"""The number of distinct targets is padded to a multiple of this number. A training step is captured in a CUDA graph
once for each shape, so there should be few shapes."""


@dataclass(frozen=True)
class DistinctTargets(Plan):
    """The plan of a batch: its scored rows and its distinct targets.

    The targets 7, 3, IGNORE, 7 give, before padding:

        rows         0, 1, 3
        targets      3, 7
        positions    1, 0, 1
    """

    rows: Tensor
    """The M rows whose target is not ignored."""
    targets: Tensor
    """The U distinct targets, padded with copies of the first target to a multiple of `PAD_MULTIPLE`. All micro-batches
    of a step have the same number of targets."""
    positions: Tensor
    """For each of the M rows, the position of its target among the U distinct targets."""

    def pad(self, length: int) -> DistinctTargets:
        """Return the plan with the targets padded to this length. A plan without targets stays empty."""
        padding = self.targets[:1].repeat(length - len(self.targets))
        return replace(self, targets=torch.cat([self.targets, padding]))


class Augmented(Softmax):
    """A softmax with the augmented loss, which also predicts the target's neighbours in a table (Inan et al. 2017).

    The augmented loss is a separate part of the loss, so log-probabilities and perplexity are those of the plain
    softmax. Give its weight in one of three ways:

        alpha    J + alpha J_aug
        gamma    alpha = gamma tau (the paper's experiments)
        beta     (1 - beta) J + beta tau^2 V J_aug (the paper's validation experiment)

    Args:
        classifier: The classifier whose scores are normalised, such as `Plain(table)`.
        table: The word table whose vectors define the soft targets, usually that of the input end.
        tau: Temperature of the soft target and the soft prediction.
        alpha: Weight of the augmented loss.
        gamma: Instead of `alpha`: alpha = gamma tau. The paper uses 0.5 to 1.5.
        beta: Instead of `alpha`: the weight beta tau^2 V for the augmented loss, and 1 - beta for the nll.
        detach_target: Stop the gradient through the soft target. Tied models then train far worse.
    """

    def __init__(
        self,
        classifier: Classifier,
        table: WordTable,
        tau: Positive = 20.0,
        alpha: NonNegative | None = None,
        gamma: NonNegative | None = None,
        beta: Share | None = None,
        detach_target: bool = False,
    ) -> None:
        super().__init__(classifier)
        if not isinstance(table, WordTable):
            raise SettingsError(
                f"augmented: needs a word table to compare words with; {describe_type(table)} is not one"
                f"{hint_for_torch_layer(table) or '. Use the word table of the input'}"
            )
        if table.vocab_size != classifier.vocab_size:
            raise SettingsError(
                f"augmented: the table has {table.vocab_size} words but the classifier has "
                f"{classifier.vocab_size} classes; give both the same vocabulary"
            )
        if not tau > 0:
            raise SettingsError(f"augmented: tau = {tau}: must be greater than 0; the paper uses 20")
        self.table = table
        self.tau = tau
        self.detach_target = detach_target
        self.nll_weight, self.augmented_weight = _compute_weights(alpha, gamma, beta, tau, classifier.vocab_size)

    def prepare(self, targets: Tensor) -> DistinctTargets:
        """Find the distinct targets of a batch. An unknown class raises an `ArgumentError`.

        Args:
            targets: Target classes on the host, with any shape. Targets of -100 are ignored.
        """
        return self.prepare_micro_batches([targets])[0]

    def prepare_micro_batches(self, micro_batches: Sequence[Tensor]) -> list[DistinctTargets]:
        """Return one plan for each micro-batch of an optimiser step, all with the same number of distinct targets.

        Args:
            micro_batches: The target classes of each micro-batch, on the host.
        """
        plans = [self._plan_without_padding(targets.reshape(-1)) for targets in micro_batches]
        max_targets = max(len(plan.targets) for plan in plans)
        length = math.ceil(max_targets / PAD_MULTIPLE) * PAD_MULTIPLE
        return [plan.pad(length) for plan in plans]

    @rows_only
    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Return the loss as two parts: `nll`, and `augmented`, which is the KL divergence from the soft targets.

        Row n has the target u. With m_u = sum_v (q_uv - 1 / V) w_v, where w_v is the vector of class v, its divergence
        is

            KL_n = -H(q_u) - c_n . m_u / tau + logsumexp((W c_n - mean) / tau)

        H is the entropy, and `mean` is the mean of the scores W c_n. At a high temperature p and q are both close to
        1 / V, and the gradient is their difference. Terms that are the same for all classes (the mean of the class
        vectors, the mean of the scores, and 1 / V) would cancel in this difference. They are left out from the start,
        which keeps the difference precise.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        if not isinstance(plan, DistinctTargets):
            plan = self.prepare(targets_N)
        nll_sum, divergence_sum = self._compute_sums(hidden_ND, targets_N, plan.to(hidden_ND.device))
        return {
            "nll": LossPart(nll_sum, plan.count, self.nll_weight),
            "augmented": LossPart(divergence_sum, plan.count, self.augmented_weight),
        }

    def loss_per_row(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, RowLoss]:
        if not isinstance(plan, DistinctTargets):
            plan = self.prepare(targets_N)
        plan = plan.to(hidden_ND.device)
        nll_N, kl_M = self._compute_nll_and_divergence(hidden_ND, targets_N, plan)
        kl_N = torch.zeros_like(nll_N).index_copy(0, plan.rows, kl_M.to(nll_N.dtype))
        return {"nll": RowLoss(nll_N, self.nll_weight), "augmented": RowLoss(kl_N, self.augmented_weight)}

    def _compute_sums(self, hidden_ND: Tensor, targets_N: Tensor, plan: DistinctTargets) -> tuple[Tensor, Tensor]:
        """Return the sums of the nll and of KL(q || p). Small problems on a GPU store the scores."""
        is_divided = self.classifier.shard is not None or self.table.shard is not None
        if is_divided or not stores_scores(hidden_ND, self.vocab_size):
            nll_N, kl_M = self._compute_nll_and_divergence(hidden_ND, targets_N, plan)
            return nll_N.sum(), kl_M.sum()
        if len(plan.rows) < len(hidden_ND):
            hidden_ND, targets_N = hidden_ND.index_select(0, plan.rows), targets_N.index_select(0, plan.rows)
        context_ND = self.classifier.context(hidden_ND)
        queries_ND, keys_VD = self._queries_and_keys(targets_N)
        classifier = self.classifier
        return stored_augmented_losses(
            context_ND, classifier.weight(), classifier.bias, targets_N, queries_ND, keys_VD, self.tau
        )

    def _queries_and_keys(self, targets_U: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors of some targets and of all words, from which the soft targets are computed."""
        queries_UD, keys_VD = self.table.vectors(targets_U), self.table.vectors()
        return (queries_UD.detach(), keys_VD.detach()) if self.detach_target else (queries_UD, keys_VD)

    def _compute_nll_and_divergence(
        self, hidden_ND: Tensor, targets_N: Tensor, plan: DistinctTargets
    ) -> tuple[Tensor, Tensor]:
        """Return the negative log-likelihood of each of the N rows, and KL(q || p) of each of the M scored rows."""
        context_ND = self.classifier.context(hidden_ND)
        weight_VD = self.classifier.weight()
        shard = self.classifier.shard
        losses = row_losses(context_ND, weight_VD, self.classifier.bias, targets_N, tau=self.tau, shard=shard)
        assert losses.lse_tau is not None

        soft = self._soft_targets(plan, weight_VD)
        context_MD = context_ND.index_select(0, plan.rows)
        lse_M = losses.lse_tau.index_select(0, plan.rows)
        kl_M = soft.negentropy - (context_MD * soft.mean).sum(-1) / self.tau + lse_M
        return losses.nll, kl_M

    def _soft_targets(self, plan: DistinctTargets, weight_VD: Tensor) -> SoftTargets:
        """Return m and -H(q) (see `loss`) for each of the M scored rows, computed once per distinct target."""
        queries_UD, keys_VD = self._queries_and_keys(plan.targets)
        if self.table.shard is None:
            mean_UD, negentropy_U = soft_targets(queries_UD, keys_VD, weight_VD, self.tau)
        else:
            from reefknot.kernels.parallel_rows import parallel_soft_targets  # few models divide their vocabulary

            mean_UD, negentropy_U = parallel_soft_targets(queries_UD, keys_VD, weight_VD, self.tau, self.table.shard)
        # Rows share targets. `F.embedding` sums its gradient in a fixed order, but indexing does not.
        mean_MD = F.embedding(plan.positions, mean_UD)
        negentropy_M = F.embedding(plan.positions, negentropy_U[:, None])[:, 0]
        return SoftTargets(mean_MD, negentropy_M)

    def untrained_parameters(self) -> list[tuple[nn.Parameter, str]]:
        """Return the weight of the table if only the detached soft targets use it."""
        if not self.detach_target or self.table is self.classifier.table:
            return []
        message = (
            "augmented: with detach_target = true, this end does not train the table of the soft targets; "
            "use the table of the input end for it"
        )
        return [(self.table.weight, message)]

    def flops(self, targets_N: Tensor) -> int:
        # Soft targets are computed once per distinct target: scores, means of vectors and, unless detached, the
        # gradients of both.
        num_distinct = len(torch.unique(targets_N))
        flops_per_weight = 6 if self.detach_target else 10
        soft_target_flops = flops_per_weight * num_distinct * self.classifier.dim * self.vocab_size
        return self.classifier.flops(len(targets_N)) + soft_target_flops

    def _plan_without_padding(self, targets_N: Tensor) -> DistinctTargets:
        count = super().prepare(targets_N).count
        rows_M = (targets_N != IGNORE).nonzero().squeeze(-1)
        targets_U, positions_M = torch.unique(targets_N[rows_M], return_inverse=True)
        return DistinctTargets(count, rows_M, targets_U, positions_M)

    def extra_repr(self) -> str:
        """Return the temperature and the weights that `print(model)` shows."""
        return f"tau={self.tau}, weights={self.nll_weight} nll + {self.augmented_weight} augmented"


def _compute_weights(
    alpha: float | None, gamma: float | None, beta: float | None, tau: float, vocab_size: int
) -> tuple[float, float]:
    """Return two weights: that of the nll and that of the augmented loss."""
    settings = {"alpha": alpha, "gamma": gamma, "beta": beta}
    given_settings = {name: value for name, value in settings.items() if value is not None}
    if len(given_settings) != 1:
        problem = f"{' and '.join(given_settings)} are given" if given_settings else "none is given"
        raise SettingsError(f"augmented: give one of alpha, gamma (alpha = gamma tau) and beta; {problem}")

    if beta is not None:
        if not 0 <= beta <= 1:
            raise SettingsError(f"augmented: beta = {beta}: must be from 0 to 1")
        return 1.0 - beta, beta * tau**2 * vocab_size

    for name, value in given_settings.items():
        if not value >= 0:
            raise SettingsError(f"augmented: {name} = {value}: must be 0 or greater")
    if gamma is not None:
        return 1.0, gamma * tau
    assert alpha is not None
    return 1.0, alpha
