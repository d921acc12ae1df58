"""Sampled softmax (Jean et al. 2015): the way out for very large vocabularies that Pappas & Henderson 2019 name (3.4).

In training each batch is scored against its targets and a sample of the classes, so that only their label vectors are
made and moved. Evaluation is exact. One sample serves the whole batch. Drawn with replacement, then made distinct,
it has a class v of probability p_v with probability Q_v = 1 - (1 - p_v)^S. The softmax of a row runs over its target
and the sampled classes, each with score_v - log Q_v: a rare class that was drawn stands for those that were not too.
With this correction a model that is right stays where it is; where every Q is 1 the loss is the exact one.

Shapes: N rows (tokens), S draws, R distinct classes drawn or targeted, V classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.linear_cross_entropy import row_losses
from reefknot.kernels.scores import IGNORE
from reefknot.lab.config.settings import Count
from reefknot.nn.classifiers.contract import NestedClassifier
from reefknot.nn.outputs.contract import LossPart, Plan
from reefknot.nn.outputs.softmax import Softmax

Distribution = Literal["log_uniform", "uniform"]


@dataclass(frozen=True)
class Candidates(Plan):
    """The classes a batch is scored against."""

    drawn: int
    """How many of the classes were drawn: the first ones."""
    ids: Tensor
    """The R classes: those drawn, then the targets that were not. Such a target competes in its own rows only."""
    log_q: Tensor
    """Log-probability of each to be drawn."""
    places: Tensor
    """Where the target of each of the N rows stands among those drawn, or `IGNORE`."""
    rows: Tensor
    """The rows whose target was not drawn."""
    own: Tensor
    """Where the targets of those rows stand among the R."""


class SampledSoftmax(Softmax):
    """A softmax trained against a sample of the classes; exact in evaluation.

    In training the part `nll` is the loss of the sampled problem, as a rule below the negative log-likelihood, which
    only evaluation gives. Which of the two is computed follows from the plan, so from the mode at `prepare`.
    """

    def __init__(
        self,
        classifier: NestedClassifier,
        samples: Annotated[Count, Field(description="draws per batch, with replacement")] = 8192,
        distribution: Annotated[
            Distribution,
            Field(description="what classes are drawn from; log_uniform expects ids that fall in frequency"),
        ] = "log_uniform",
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
        plan = super().prepare(y_cpu)
        if not self.training:
            return plan
        y_N = y_cpu.reshape(-1).cpu()
        drawn = torch.unique(self._draw())
        places_N = torch.searchsorted(drawn, y_N).clamp(max=len(drawn) - 1)
        found_N = drawn[places_N] == y_N
        rows = (~found_N & (y_N != IGNORE)).nonzero().squeeze(-1)
        others, own = torch.unique(y_N[rows], return_inverse=True)
        ids_R = torch.cat([drawn, others])
        log_q_R = torch.log(-torch.expm1(self.samples * torch.log1p(-self._probabilities(ids_R))))
        places_N = places_N.where(found_N, IGNORE)
        return Candidates(plan.count, len(drawn), ids_R, log_q_R, places_N, rows, own + len(drawn))

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        if not isinstance(plan, Candidates):
            return super().loss(h_ND, y_N, plan)
        plan = plan.to(h_ND.device)
        classifier = self.classifier
        c_ND, w_RD = classifier.context(h_ND), classifier.weight(plan.ids)
        bias_R = -plan.log_q.to(torch.promote_types(w_RD.dtype, torch.float32))
        if classifier.bias is not None:
            bias_R = bias_R + classifier.bias[plan.ids]
        found = row_losses(c_ND, w_RD[: plan.drawn], bias_R[: plan.drawn], plan.places)
        # Rows share targets: the gradient of an embedding adds them up in one order.
        own_D, own_bias = F.embedding(plan.own, w_RD), F.embedding(plan.own, bias_R[:, None])[:, 0]
        own = (c_ND.index_select(0, plan.rows) * own_D).sum(-1, dtype=bias_R.dtype) + own_bias
        beside = F.softplus(found.lse.index_select(0, plan.rows) - own)
        return {"nll": LossPart(found.nll.sum() + beside.sum(), plan.count)}

    def extra_repr(self) -> str:
        return f"samples={self.samples}, distribution={self.distribution}"

    def _draw(self) -> Tensor:
        if self.distribution == "uniform":
            return torch.randint(self.vocab_size, (self.samples,))
        # The inverse of the distribution function log(k + 1) / log(V + 1).
        ranks_S = torch.exp(torch.rand(self.samples, dtype=torch.float64) * math.log(self.vocab_size + 1)).long()
        return (ranks_S - 1).clamp(max=self.vocab_size - 1)

    def _probabilities(self, ids: Tensor) -> Tensor:
        """How probable these classes are in one draw."""
        if self.distribution == "uniform":
            return torch.full(ids.shape, 1 / self.vocab_size, dtype=torch.float64)
        return torch.log1p(1 / (ids.double() + 1)) / math.log(self.vocab_size + 1)
