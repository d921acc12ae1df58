"""The augmented loss (Inan et al. 2017, section 3): predict the target's neighbours too, not the target alone.

Beside the negative log-likelihood J stands J_aug = KL(soft target || soft prediction), both at temperature tau:

    soft target      q = softmax(L l_y / tau)      l_y is the input vector of the target, L all input vectors
    soft prediction  p = softmax(W c / tau)        W the class vectors, c the context; the bias is left out, as written

The soft target depends on the target's type alone, so its V-wide work is done once per distinct target u of a batch:
with m_u = sum_v (q_uv - 1 / V) w_v,

    KL_n = -H(q_u) - c_n . m_u / tau + logsumexp((W c_n - mean) / tau).

At a high temperature p and q are both near 1 / V, and their difference is the gradient. What is the same for all
classes cancels in it, so it is never added: the mean of the class vectors, the mean of the scores, and 1 / V.

Shapes: N rows (tokens), M of them scored, U distinct targets, D width of the class vectors, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.kernels.linear_cross_entropy import row_losses
from reefknot.kernels.scores import IGNORE
from reefknot.kernels.soft_target import soft_targets
from reefknot.lab.config.settings import NonNegative, Positive
from reefknot.nn.classifiers.contract import NestedClassifier
from reefknot.nn.outputs.contract import LossPart, Plan
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import NamedTable, WordTable

FILL = 32
"""Few numbers of distinct targets instead of many: a training step is captured once for each of its shapes."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class DistinctTargets(Plan):
    """Which rows are scored, and which of the distinct targets each of them has."""

    rows: Tensor
    """The M scored rows."""
    targets: Tensor
    """The U distinct targets, filled up with more of the first to a multiple of `FILL`, the same in all pieces of an
    update."""
    places: Tensor
    """For each of the M rows, where its target stands among the U."""

    def filled(self, length: int) -> DistinctTargets:
        """The same with so many targets, or still with none."""
        filling = self.targets[:1].repeat(length - len(self.targets))
        return replace(self, targets=torch.cat([self.targets, filling]))


class Augmented(Softmax):
    """A softmax with Inan's second loss: the targets' neighbours in the input table, at a temperature.

    The second loss has a part and a weight of its own: log-probabilities and perplexity are those of the plain softmax.
    Its weight is said in one of three ways: alpha; gamma, alpha = gamma tau (the paper's experiments); or beta, for
    beta tau^2 V J_aug + (1 - beta) J (its validation experiment).
    """

    def __init__(
        self,
        classifier: NestedClassifier,
        table: NamedTable,
        tau: Annotated[Positive, Field(description="temperature of the soft target and the soft prediction")] = 20.0,
        alpha: Annotated[NonNegative | None, Field(description="weight of the augmented loss")] = None,
        gamma: Annotated[
            NonNegative | None, Field(description="instead of alpha: alpha = gamma tau; the paper has 0.5 to 1.5")
        ] = None,
        beta: Annotated[
            Share | None,
            Field(description="instead of alpha: beta tau^2 V for the augmented loss, 1 - beta for the nll"),
        ] = None,
        detach_target: Annotated[
            bool, Field(description="cut the gradient through the soft target; tied models then train far worse")
        ] = False,
    ) -> None:
        super().__init__(classifier)
        if not isinstance(table, WordTable):
            raise SettingsError(
                f"augmented: a {type(table).__name__} is no word table to compare words by; "
                "give it the word table of the input"
            )
        if table.vocab_size != classifier.vocab_size:
            raise SettingsError(
                f"augmented: the table has {table.vocab_size} words but the classifier has "
                f"{classifier.vocab_size} classes; "
                "give both the same vocabulary"
            )
        if not tau > 0:
            raise SettingsError(f"augmented: tau = {tau} must be above 0; the paper has 20")
        self.table = table
        self.tau = tau
        self.detach_target = detach_target
        self.nll_weight, self.augmented_weight = _weights(alpha, gamma, beta, tau, classifier.vocab_size)

    def prepare(self, y_cpu: Tensor) -> DistinctTargets:
        return self.prepare_pieces([y_cpu])[0]

    def prepare_pieces(self, pieces: Sequence[Tensor]) -> list[DistinctTargets]:
        plans = [self._distinct(y_cpu.reshape(-1)) for y_cpu in pieces]
        length = -(-max(len(plan.targets) for plan in plans) // FILL) * FILL
        return [plan.filled(length) for plan in plans]

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        plan = plan if isinstance(plan, DistinctTargets) else self.prepare(y_N)
        plan = plan.to(h_ND.device)
        c_ND, w_VD = self.classifier.context(h_ND), self.classifier.weight()
        found = row_losses(c_ND, w_VD, self.classifier.bias, y_N, tau=self.tau)
        assert found.lse_tau is not None
        queries_UD, keys_VD = self.table.vectors(plan.targets), self.table.vectors()
        if self.detach_target:
            queries_UD, keys_VD = queries_UD.detach(), keys_VD.detach()
        m_UD, negentropy_U = soft_targets(queries_UD, keys_VD, w_VD, self.tau)
        # Rows share targets. The gradient of an embedding adds them up in one order, that of indexing in any.
        m_MD, negentropy_M1 = (F.embedding(plan.places, each) for each in (m_UD, negentropy_U[:, None]))
        c_MD, lse_M = (each.index_select(0, plan.rows) for each in (c_ND, found.lse_tau))
        kl_M = negentropy_M1[:, 0] - (c_MD * m_MD).sum(-1) / self.tau + lse_M
        return {
            "nll": LossPart(found.nll.sum(), plan.count, self.nll_weight),
            "augmented": LossPart(kl_M.sum(), plan.count, self.augmented_weight),
        }

    def left_to_others(self) -> list[tuple[nn.Parameter, str]]:
        if not self.detach_target or self.table is self.classifier.table:
            return []
        sentence = "augmented: with detach_target its table learns nothing here; give it the table of the input end"
        return [(self.table.weight, sentence)]

    def _distinct(self, y_N: Tensor) -> DistinctTargets:
        """The plan before its targets are filled up."""
        rows_M = (y_N != IGNORE).nonzero().squeeze(-1)
        targets_U, places_M = torch.unique(y_N[rows_M], return_inverse=True)
        return DistinctTargets(super().prepare(y_N).count, rows_M, targets_U, places_M)

    def extra_repr(self) -> str:
        return f"tau={self.tau}, weights={self.nll_weight} nll + {self.augmented_weight} augmented"


def _weights(
    alpha: float | None, gamma: float | None, beta: float | None, tau: float, vocab_size: int
) -> tuple[float, float]:
    """What the nll and the augmented loss weigh."""
    given = {name: value for name, value in (("alpha", alpha), ("gamma", gamma), ("beta", beta)) if value is not None}
    if len(given) != 1:
        fault = f"{' and '.join(given)} are given" if given else "none is given"
        raise SettingsError(f"augmented: give one of alpha, gamma (alpha = gamma tau) and beta; {fault}")
    ((name, value),) = given.items()
    if not value >= 0 or (name == "beta" and value > 1):
        bounds = "from 0 to 1" if name == "beta" else "0 or more"
        raise SettingsError(f"augmented: {name} = {value} must be {bounds}")
    if name == "beta":
        return 1.0 - value, value * tau**2 * vocab_size
    return 1.0, value * tau if name == "gamma" else value
