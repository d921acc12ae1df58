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
from reefknot.kernels.linear_cross_entropy import IGNORE, linear_scores
from reefknot.outputs.contract import LossPart, Plan
from reefknot.outputs.labels.contract import NestedLabels
from reefknot.outputs.softmax import Softmax
from reefknot.settings import Count

Distribution = Literal["log_uniform", "uniform"]


@dataclass(frozen=True)
class Candidates(Plan):
    """The classes a batch is scored against."""

    ids: Tensor
    """The R classes, drawn or targeted."""
    drawn: Tensor
    """Which of them were drawn. A target that was not competes in its own rows only."""
    log_q: Tensor
    """Log-probability of each to be drawn."""
    places: Tensor
    """Where the target of each of the N rows stands among the R, or `IGNORE`."""


class SampledSoftmax(Softmax):
    """A softmax trained against a sample of the classes; exact in evaluation.

    In training the part `nll` is the loss of the sampled problem, as a rule below the negative log-likelihood, which
    only evaluation gives. Which of the two is computed follows from the plan, so from the mode at `prepare`.
    """

    def __init__(
        self,
        labels: NestedLabels,
        samples: Annotated[Count, Field(description="draws per batch, with replacement")] = 8192,
        distribution: Annotated[
            Distribution,
            Field(description="what classes are drawn from; log_uniform expects ids that fall in frequency"),
        ] = "log_uniform",
    ) -> None:
        super().__init__(labels)
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
        scored_N = y_N != IGNORE
        drawn_S = self._draw()
        # Targets come first, so the first places are theirs.
        ids_R, places = torch.unique(torch.cat([y_N[scored_N], drawn_S]), return_inverse=True)
        log_q_R = torch.log(-torch.expm1(self.samples * torch.log1p(-self._probabilities(ids_R))))
        places_N = torch.full_like(y_N, IGNORE).masked_scatter(scored_N, places)
        return Candidates(plan.count, ids_R, torch.isin(ids_R, drawn_S), log_q_R, places_N)

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        if not isinstance(plan, Candidates):
            return super().loss(h_ND, y_N, plan)
        ids_R, drawn_R, log_q_R, places_N = (
            part.to(h_ND.device, non_blocking=True) for part in (plan.ids, plan.drawn, plan.log_q, plan.places)
        )
        labels = self.labels
        bias_R = None if labels.bias is None else labels.bias[ids_R]
        scores_NR = linear_scores(labels.context(h_ND), labels.weight(ids_R), bias_R)
        own_NR = places_N[:, None] == torch.arange(len(ids_R), device=h_ND.device)
        scores_NR = (scores_NR - log_q_R.to(scores_NR.dtype)).where(drawn_R | own_NR, -torch.inf)
        nll = F.cross_entropy(scores_NR, places_N, reduction="sum", ignore_index=IGNORE)
        return {"nll": LossPart(nll, plan.count)}

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
