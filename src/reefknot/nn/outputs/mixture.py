"""Mixture of softmaxes (Yang et al. 2018): a weighted average of the distributions of several softmaxes.

    p(y | h) = sum_k prior_k(h) softmax_y(scores of latent_k(h)),   latent_k = tanh(W_k h + b_k)

Start reading at `MixtureOfSoftmaxes.loss`. All K softmaxes, the experts, share one classifier, so a token has K rows of
scores. The loss of a token is -logsumexp_k(log prior_k - nll_k) over its K rows. Its gradient is that of the rows,
weighted by the posterior of the experts. Neither the scores nor the mixture of distributions over V classes are stored.
Pappas & Henderson (2019, section 4) compare DRILL with this mixture.

Shapes: N tokens, D dimensions of the hidden state, K experts, L dimensions of a latent, R = N x K rows, V classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.kernels.autograd import mixture_losses
from reefknot.kernels.losses import summed_loss
from reefknot.kernels.scores import at_least_float32
from reefknot.kernels.topk import linear_topk
from reefknot.nn.bounds import Dim, Layers, Probability, check_rates
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.outputs.contract import LossPart, Plan
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.part import FLOPS_PER_WEIGHT, count_matrix_weights


class MixtureOfSoftmaxes(Softmax):
    """A weighted mixture of several softmaxes over one classifier (Yang et al. 2018).

    Each softmax, called an expert, has its own map of the hidden state to a latent vector. A learned prior gives the
    weights. Dropout masks of the latent vectors are drawn for every token; the authors' code uses one mask per window.

    Args:
        classifier: The classifier that all experts share. It reads a latent vector instead of the hidden state.
        context_dim: Dimension of the hidden state, D.
        experts: Number of softmaxes in the mixture, K.
        latent_dim: Dimension of the latent vectors, L. The default is the dimension that the classifier reads.
        dropout: Dropout rate of the latent vectors.
    """

    def __init__(
        self,
        classifier: Classifier,
        context_dim: int,
        experts: Layers = 15,
        latent_dim: Dim | None = None,
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__(classifier)
        if experts < 1:
            raise SettingsError(f"mixture: experts = {experts}: must be at least 1")
        check_rates("mixture", dropout=dropout)
        if latent_dim is not None and latent_dim != classifier.context_dim:
            raise SettingsError(
                f"mixture: latent_dim = {latent_dim} but the classifier reads {classifier.context_dim} numbers; "
                "leave latent_dim out, or use a classifier that projects (kind = 'projected')"
            )
        self.context_dim = context_dim
        self.experts = self.rows_per_token = experts
        self.dropout = dropout
        self.latent = nn.Linear(context_dim, experts * classifier.context_dim)
        self.prior = nn.Linear(context_dim, experts, bias=False)

    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Return the negative log-likelihood of the targets under the mixture, as the part `nll`.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        classifier = self.classifier
        context_RD = classifier.context(self._compute_latents(hidden_ND).flatten(0, 1))
        nll = summed_loss(
            context_RD, classifier.weight(), classifier.bias, targets_N, self._compute_log_prior(hidden_ND)
        )
        return {"nll": LossPart(nll, plan.count)}

    def log_probs(self, hidden_ND: Tensor) -> Tensor:
        log_probs_RV = super().log_probs(self._compute_latents(hidden_ND).flatten(0, 1))
        log_probs_NKV = log_probs_RV.view(-1, self.experts, self.vocab_size)
        return torch.logsumexp(self._compute_log_prior(hidden_ND)[..., None] + log_probs_NKV, dim=1)

    def target_log_probs(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        targets_NK = targets_N[:, None].expand(-1, self.experts)
        log_probs_R = super().target_log_probs(self._compute_latents(hidden_ND).flatten(0, 1), targets_NK.flatten())
        return -mixture_losses(self._compute_log_prior(hidden_ND), -log_probs_R.view(targets_NK.shape), targets_N)

    def topk(self, hidden_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.check_topk_size(k)
        classifier = self.classifier
        context_RD = classifier.context(self._compute_latents(hidden_ND).flatten(0, 1))
        return linear_topk(
            context_RD,
            classifier.weight(),
            k,
            linear_bias=classifier.bias,
            log_prior=self._compute_log_prior(hidden_ND),
        )

    def sample(self, hidden_ND: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one class per row: an expert from the prior, then a class from its softmax. The result has shape (N,).

        This needs N x V numbers instead of N x K x V.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            generator: Random number generator on the device of `hidden_ND`. The default is torch's own.
        """
        expert_N = torch.multinomial(self._compute_log_prior(hidden_ND).exp(), 1, generator=generator).squeeze(-1)
        latent_NL = self._compute_latents(hidden_ND)[torch.arange(len(hidden_ND), device=hidden_ND.device), expert_N]
        log_probs_NV = super().log_probs(latent_NL)
        return torch.multinomial(log_probs_NV.exp(), 1, generator=generator).squeeze(-1)

    def flops(self, targets_N: Tensor) -> int:
        # Every expert scores all classes.
        weights_per_token = count_matrix_weights(self.latent) + count_matrix_weights(self.prior)
        return FLOPS_PER_WEIGHT * len(targets_N) * weights_per_token + self.classifier.flops(
            self.experts * len(targets_N)
        )

    def _compute_latents(self, hidden_ND: Tensor) -> Tensor:
        """Return one latent vector per token and expert, (N, K, L)."""
        latent_NKL = torch.tanh(self.latent(hidden_ND)).view(-1, self.experts, self.classifier.context_dim)
        return F.dropout(latent_NKL, self.dropout, self.training)

    def _compute_log_prior(self, hidden_ND: Tensor) -> Tensor:
        """Return the log of the weights of the experts, (N, K)."""
        return torch.log_softmax(at_least_float32(self.prior(hidden_ND)), dim=-1)
