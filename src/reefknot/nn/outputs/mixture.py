"""Mixture of softmaxes (Yang et al. 2018; the rival of DRILL in Pappas & Henderson 2019, section 4).

    p(y | h) = sum_k prior_k(h) softmax_y(scores of latent_k(h)),   latent_k = tanh(W_k h + b_k)

All experts share one classifier. The loss is -logsumexp_k(log prior_k - nll_k) over K rows per token, and its
gradient that of the rows weighed by the experts' posterior: neither the scores nor the mixture of V-wide distributions
are ever stored.

Shapes: N rows (tokens), D width of the hidden state, K experts, L width of a latent, V classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.kernels.autograd import mixed
from reefknot.kernels.linear_cross_entropy import summed_loss
from reefknot.kernels.scores import at_least_float32
from reefknot.kernels.topk import linear_topk
from reefknot.lab.config.settings import Dim, Layers, Probability, check_rates
from reefknot.nn.classifiers.contract import NestedClassifier
from reefknot.nn.outputs.contract import LossPart, Plan
from reefknot.nn.outputs.softmax import Softmax


class MixtureOfSoftmaxes(Softmax):
    """Several softmaxes over the same classifier, each reading the hidden state its own way, mixed by a learned prior.

    Dropout on the latents is drawn anew for every token; the authors' code holds one mask for a whole window.
    """

    def __init__(
        self,
        classifier: NestedClassifier,
        context_dim: int,
        experts: Annotated[Layers, Field(description="softmaxes in the mixture")] = 15,
        latent_dim: Annotated[
            Dim | None, Field(description="width of what an expert reads; left out, that which the classifier reads")
        ] = None,
        dropout: Annotated[Probability, Field(description="dropout on the latents")] = 0.0,
    ) -> None:
        super().__init__(classifier)
        if experts < 1:
            raise SettingsError(f"mixture: experts = {experts}: a mixture needs at least one")
        check_rates("mixture", dropout=dropout)
        if latent_dim is not None and latent_dim != classifier.context_dim:
            raise SettingsError(
                f"mixture: latent_dim = {latent_dim} but the classifier reads {classifier.context_dim} numbers; "
                "leave it out, or use a classifier that projects (kind = 'projected')"
            )
        self.context_dim = context_dim
        self.experts = self.rows_per_token = experts
        self.dropout = dropout
        self.latent = nn.Linear(context_dim, experts * classifier.context_dim)
        self.prior = nn.Linear(context_dim, experts, bias=False)

    @staticmethod
    def scope(settings: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The nested classifier reads a latent, not the hidden state."""
        return given if settings.latent_dim is None else {**given, "context_dim": settings.latent_dim}

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        classifier = self.classifier
        context_RD = classifier.context(self._latents(h_ND).flatten(0, 1))
        nll = summed_loss(context_RD, classifier.weight(), classifier.bias, y_N, self._log_prior(h_ND))
        return {"nll": LossPart(nll, plan.count)}

    def log_probs(self, h_ND: Tensor) -> Tensor:
        logp_NKV = super().log_probs(self._latents(h_ND).flatten(0, 1)).view(-1, self.experts, self.vocab_size)
        return torch.logsumexp(self._log_prior(h_ND)[..., None] + logp_NKV, dim=1)

    def target_log_probs(self, h_ND: Tensor, y_N: Tensor) -> Tensor:
        y_NK = y_N[:, None].expand(-1, self.experts)
        logp_R = super().target_log_probs(self._latents(h_ND).flatten(0, 1), y_NK.flatten())
        return -mixed(self._log_prior(h_ND), -logp_R.view(y_NK.shape), y_N)

    def topk(self, h_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.check_k(k)
        classifier = self.classifier
        context_RD = classifier.context(self._latents(h_ND).flatten(0, 1))
        return linear_topk(context_RD, classifier.weight(), classifier.bias, k, self._log_prior(h_ND))

    def sample(self, h_ND: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """An expert from the prior, then a class from its softmax: N x V numbers, not N x K x V."""
        k_N = torch.multinomial(self._log_prior(h_ND).exp(), 1, generator=generator).squeeze(-1)
        chosen_NL = self._latents(h_ND)[torch.arange(len(h_ND), device=h_ND.device), k_N]
        logp_NV = super().log_probs(chosen_NL)
        return torch.multinomial(logp_NV.exp(), 1, generator=generator).squeeze(-1)

    def _latents(self, h_ND: Tensor) -> Tensor:
        latent_NKL = torch.tanh(self.latent(h_ND)).view(-1, self.experts, self.classifier.context_dim)
        return F.dropout(latent_NKL, self.dropout, self.training)

    def _log_prior(self, h_ND: Tensor) -> Tensor:
        return torch.log_softmax(at_least_float32(self.prior(h_ND)), dim=-1)
