"""Mixture of softmaxes (Yang et al. 2018): a weighted average of the distributions of several softmaxes.

    latent_k(h) = tanh(W_k h + b_k)
    p(y | h) = sum_k prior_k(h) softmax_y(scores of latent_k(h))

Start reading at `MixtureOfSoftmaxes.loss`. The K softmaxes are called experts. They share one classifier, so a token
has K rows of scores, one row per expert. With the negative log-likelihood nll_k of expert k, the loss of a token is

    nll = -logsumexp_k(log prior_k - nll_k)

Shapes: N tokens, D dimensions of the hidden state, K experts, L dimensions of a latent vector, E = K x L, R = N x K
rows, C dimensions of a class vector, V classes, B streams, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from reefknot.nn.encoders.masks import locked_dropout
from reefknot.nn.outputs.contract import LossPart, Plan, RowLoss
from reefknot.nn.outputs.rows import any_leading_shape, any_leading_shape_with_targets, rows_only
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.part import FLOPS_PER_WEIGHT, count_matrix_weights


@dataclass(frozen=True)
class WindowPlan(Plan):
    """The plan of a mixture: the number of targets, and how many rows in sequence share one dropout mask."""

    steps: int = 1
    """Number of steps of the window. The rows are B streams of so many steps, one stream after the other."""


class MixtureOfSoftmaxes(Softmax):
    """A weighted mixture of several softmaxes over one classifier (Yang et al. 2018).

    Each softmax, called an expert, has its own map of the hidden state to a latent vector. A learned prior gives the
    weights of the experts. The gradient of a token's loss is the gradient of its rows, weighted by the posterior of the
    experts. The loss stores neither the scores nor the mixed distribution over V classes.

    By default, a dropout mask of the latent vectors is drawn for every token. With `locked`, as in the authors' code,
    there is one mask for each stream of a window. The streams follow from the shape of the targets that `prepare`
    reads, (B, T). Rows without such a shape have one mask together: targets of shape (N,), a window with padding, and
    methods that do not read a plan. Pappas & Henderson (2019, section 4) compare DRILL with this mixture.

    Args:
        classifier: The classifier that all experts share. It reads a latent vector instead of the hidden state.
        context_dim: Dimension of the hidden state, D.
        experts: Number of softmaxes in the mixture, K.
        latent_dim: Dimension of the latent vectors, L. The default is the dimension that the classifier reads.
        dropout: Dropout rate of the latent vectors.
        locked: Draw one dropout mask per stream and window, as in the authors' code, instead of one per token.
    """

    divides_classes = False

    def __init__(
        self,
        classifier: Classifier,
        context_dim: int,
        experts: Layers = 15,
        latent_dim: Dim | None = None,
        dropout: Probability = 0.0,
        locked: bool = False,
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
        self.experts = experts
        self.rows_per_token = experts
        self.dropout = dropout
        self.locked = locked
        self.latent = nn.Linear(context_dim, experts * classifier.context_dim)
        self.prior = nn.Linear(context_dim, experts, bias=False)

    def prepare(self, targets: Tensor) -> WindowPlan:
        count = super().prepare(targets).count
        return WindowPlan(count, steps=targets.shape[-1] if targets.dim() else 1)

    @rows_only
    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Return the negative log-likelihood of the targets under the mixture, as the part `nll`.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        latents_NKL = self._compute_latents(hidden_ND, plan)
        context_RC = self.classifier.context(latents_NKL.flatten(0, 1))
        log_prior_NK = self._compute_log_prior(hidden_ND)
        classifier = self.classifier
        nll_sum = summed_loss(
            context_RC, classifier.weight(), classifier.bias, targets_N, log_prior_NK, has_checked_targets=True
        )
        return {"nll": LossPart(nll_sum, plan.count)}

    def loss_per_row(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, RowLoss]:
        return {"nll": RowLoss(self._compute_row_nll(hidden_ND, targets_N, plan))}

    @any_leading_shape
    def log_probs(self, hidden_ND: Tensor) -> Tensor:
        latents_NKL = self._compute_latents(hidden_ND)
        log_probs_RV = self._normalised_scores(latents_NKL.flatten(0, 1))
        log_probs_NKV = log_probs_RV.view(-1, self.experts, self.vocab_size)
        log_prior_NK = self._compute_log_prior(hidden_ND)
        return torch.logsumexp(log_prior_NK[..., None] + log_probs_NKV, dim=1)

    @any_leading_shape_with_targets
    def target_log_probs(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        return -self._compute_row_nll(hidden_ND, targets_N)

    @any_leading_shape
    def topk(self, hidden_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.check_topk_size(k)
        latents_NKL = self._compute_latents(hidden_ND)
        context_RC = self.classifier.context(latents_NKL.flatten(0, 1))
        log_prior_NK = self._compute_log_prior(hidden_ND)
        classifier = self.classifier
        return linear_topk(context_RC, classifier.weight(), k, linear_bias=classifier.bias, log_prior=log_prior_NK)

    @any_leading_shape
    def sample(self, hidden_ND: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one class per hidden state: an expert from the prior, then a class from its softmax.

        The result has shape (...). This needs N x V numbers instead of N x K x V.

        Args:
            hidden_ND: Hidden states, with shape (..., D).
            generator: Random number generator on the device of `hidden_ND`. The default is torch's own.
        """
        prior_NK = self._compute_log_prior(hidden_ND).exp()
        experts_N = torch.multinomial(prior_NK, 1, generator=generator).squeeze(-1)

        latents_NKL = self._compute_latents(hidden_ND)
        token_indices_N = torch.arange(len(hidden_ND), device=hidden_ND.device)
        drawn_latents_NL = latents_NKL[token_indices_N, experts_N]

        probabilities_NV = self._normalised_scores(drawn_latents_NL).exp()
        return torch.multinomial(probabilities_NV, 1, generator=generator).squeeze(-1)

    def maps_hidden(self) -> bool:
        return True

    def flops(self, targets_N: Tensor) -> int:
        # Every expert scores all classes.
        num_tokens = len(targets_N)
        weights_per_token = count_matrix_weights(self.latent) + count_matrix_weights(self.prior)
        latent_and_prior_flops = FLOPS_PER_WEIGHT * num_tokens * weights_per_token
        return latent_and_prior_flops + self.classifier.flops(self.experts * num_tokens)

    def _compute_row_nll(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan | None = None) -> Tensor:
        """Return the negative log-likelihood of each target, (N,)."""
        # Every expert predicts the same target.
        targets_NK = targets_N[:, None].expand(-1, self.experts)
        latents_NKL = self._compute_latents(hidden_ND, plan)
        nll_R = self._target_nll(latents_NKL.flatten(0, 1), targets_NK.flatten())
        nll_NK = nll_R.view(targets_NK.shape)
        return mixture_losses(self._compute_log_prior(hidden_ND), nll_NK, targets_N)

    def _compute_latents(self, hidden_ND: Tensor, plan: Plan | None = None) -> Tensor:
        """Return one latent vector per token and expert, (N, K, L), with dropout in training mode.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            plan: The plan, which tells the streams of the rows. Without it, all rows are one stream.
        """
        latents_NE = torch.tanh(self.latent(hidden_ND))
        if self.locked:
            steps = plan.steps if isinstance(plan, WindowPlan) else len(hidden_ND)
            latents_BTE = latents_NE.view(-1, max(steps, 1), latents_NE.shape[-1])
            latents_NE = locked_dropout(latents_BTE, self.dropout, self.training).flatten(0, 1)
        else:
            latents_NE = F.dropout(latents_NE, self.dropout, self.training)
        return latents_NE.view(-1, self.experts, self.classifier.context_dim)

    def _compute_log_prior(self, hidden_ND: Tensor) -> Tensor:
        """Return the logarithms of the weights of the experts, (N, K)."""
        scores_NK = at_least_float32(self.prior(hidden_ND))
        return torch.log_softmax(scores_NK, dim=-1)
