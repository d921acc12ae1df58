"""The losses of a linear classifier as autograd functions, for `linear_cross_entropy`.

`RowLossesFunction` returns one loss per row and computes the gradients in the backward pass. `SummedLossFunction`
returns the sum of the losses, or of a mixture's losses, and computes the gradients in the forward pass. Both call the
passes over blocks of scores in `passes`. `ops` wraps the same computations for `torch.compile`.

`weight` holds one vector per class. `nll` stands for negative log-likelihoods (the losses), `lse` for log-sum-exps of
the scores, and `lse_tau` for log-sum-exps at temperature tau. The gradient of `x` is `grad_x`.
Shapes: N rows (tokens), D dimensions, V classes, K experts of a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.passes import LossInputs, compute_gradients, compute_losses, compute_losses_with_gradients
from reefknot.kernels.scores import IGNORE, GradientTerms, TorchBackend, accumulation_dtype


class RowLossesFunction(torch.autograd.Function):
    """One loss per row. The weights of the rows are known in the backward pass, which computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        tau: float | None,
        dtype: torch.dtype,
        backend: TorchBackend,
        budget: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            nll, lse, lse_tau = compute_losses(LossInputs(hidden, weight, bias, targets, dtype, backend, budget), tau)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, lse_tau)
        ctx.tau = tau
        ctx.options = dtype, backend, budget
        ctx.set_materialize_grads(False)
        return nll, lse, lse_tau

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Any, ...]:
        reject_second_derivatives()
        hidden, weight, bias, targets, lse, lse_tau = ctx.saved_tensors
        inputs = LossInputs(hidden, weight, bias, targets, *ctx.options)
        input_grads = compute_row_gradients(inputs, lse, lse_tau, ctx.tau, output_grads, ctx.needs_input_grad[:3])
        return (*input_grads, None, None, None, None, None)


def compute_row_gradients(
    inputs: LossInputs,
    lse: Tensor,
    lse_tau: Tensor | None,
    tau: float | None,
    output_grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, weight and bias; None for a gradient that is not needed.

    Args:
        inputs: The inputs of the forward pass.
        lse: The log-sum-exps that the forward pass returned, (N,).
        lse_tau: The log-sum-exps at temperature `tau`, (N,), or None.
        tau: The temperature, or None.
        output_grads: The gradients of the losses, of `lse` and of `lse_tau`. None stands for zero.
        needs_grad: Whether the gradients of hidden, weight and bias are needed.
    """
    grad_nll, grad_lse, grad_lse_tau = output_grads
    # nll = lse - z_y, so the gradient of nll counts at the target, and those of nll and lse in the softmax.
    if grad_nll is None:
        target_weight = torch.zeros_like(lse)
    else:
        target_weight = grad_nll.where(inputs.has_target(slice(None)), 0.0)
    plain_weight = target_weight if grad_lse is None else target_weight + grad_lse
    if grad_lse_tau is None or tau is None:
        terms = GradientTerms(lse, plain_weight, target_weight)
    else:
        terms = GradientTerms(
            lse=lse,
            plain_weight=plain_weight,
            target_weight=target_weight,
            lse_tau=lse_tau,
            tempered_weight=grad_lse_tau / tau,
            tau=tau,
            uniform=1 / inputs.num_classes,
        )
    needs_hidden, needs_weight, needs_bias = needs_grad
    with torch.autocast(lse.device.type, enabled=False):
        return compute_gradients(inputs, terms, (needs_hidden, needs_weight, needs_bias), tau).in_input_dtypes()


class SummedLossFunction(torch.autograd.Function):
    """The sum of the losses. The pass over the scores that computes it also computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        log_prior: Tensor | None,
        training: bool,
        dtype: torch.dtype,
        backend: TorchBackend,
        budget: int,
    ) -> Tensor:
        ctx.options = dtype, backend, budget
        loss = SummedLoss(hidden, weight, bias, targets, log_prior, *ctx.options)
        if not (training and any(ctx.needs_input_grad)):
            return loss.compute()
        ctx.save_for_backward(hidden, weight, bias, targets, log_prior)
        total, ctx.gradients = loss.compute_with_gradients(ctx.needs_input_grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Any, ...]:
        reject_second_derivatives()
        # The gradients are scaled in place, so they cannot be reused. A second backward pass computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = SummedLoss(*ctx.saved_tensors, *ctx.options).compute_with_gradients(ctx.needs_input_grad)
        _, backend, _ = ctx.options
        for gradient in gradients:
            if gradient is not None:
                backend.scale_in_place(gradient, grad_total)
        return (*gradients, None, None, None, None)


class SummedLoss:
    """Computes the sum of the losses of the rows, or of a mixture, and its gradients.

    Args:
        hidden: Hidden states, (N, D). For a mixture (N * K, D), with K consecutive rows per target.
        weight: Class vectors, (V, D).
        bias: Biases, (V,), or None.
        targets: Targets, (N,).
        log_prior: The logarithms of a mixture's weights, (N, K), or None.
        dtype: The type of the matrix products.
        backend: Computes the blocks of scores.
        budget: Working memory in bytes.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        log_prior: Tensor | None,
        dtype: torch.dtype,
        backend: TorchBackend,
        budget: int,
    ) -> None:
        self.targets, self.log_prior = targets, log_prior
        self.num_experts = 1 if log_prior is None else log_prior.shape[1]
        self.posterior = None if log_prior is None else torch.empty_like(log_prior)
        self.block_sums: list[Tensor] = []
        row_targets = targets if log_prior is None else targets[:, None].expand(-1, self.num_experts).flatten()
        self.inputs = LossInputs(hidden, weight, bias, row_targets, dtype, backend, budget)

    def compute(self) -> Tensor:
        """Return the sum."""
        with torch.autocast(self.targets.device.type, enabled=False):
            nll, _, _ = compute_losses(self.inputs)
            self._add_losses(slice(0, self.inputs.num_rows), nll)
        return self._total()

    def compute_with_gradients(self, needs_grad: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the sum, and the gradients of hidden, weight, bias, targets (always None) and the log-prior."""
        needs_hidden, needs_weight, needs_bias = needs_grad[:3]
        with torch.autocast(self.targets.device.type, enabled=False):
            gradients = compute_losses_with_gradients(
                self.inputs, self._add_losses, (needs_hidden, needs_weight, needs_bias), group=self.num_experts
            )
        grad_log_prior = None if self.posterior is None else self.posterior.neg_()
        return self._total(), [*gradients.in_input_dtypes(), None, grad_log_prior]

    def _add_losses(self, rows: slice, nll: Tensor) -> Tensor | None:
        """Add the losses of some rows to the sum, and return the weights of the rows, or None if they are 1.

        The weight of an expert's row is its posterior: its share in the probability of the target.
        """
        if self.log_prior is None or self.posterior is None:
            self.block_sums.append(nll.sum())
            return None
        tokens = slice(rows.start // self.num_experts, rows.stop // self.num_experts)
        log_prior_NK, targets_N, nll_NK = self.log_prior[tokens], self.targets[tokens], nll.view(-1, self.num_experts)
        self.block_sums.append(mixture_losses(log_prior_NK, nll_NK, targets_N).sum())
        posterior_NK = torch.softmax(log_prior_NK - nll_NK, dim=-1).where((targets_N != IGNORE)[:, None], 0.0)
        self.posterior[tokens] = posterior_NK
        return posterior_NK.flatten()

    def _total(self) -> Tensor:
        if not self.block_sums:
            return self.inputs.hidden.new_zeros((), dtype=accumulation_dtype(self.inputs.dtype))
        return self.block_sums[0] if len(self.block_sums) == 1 else torch.stack(self.block_sums).sum()


def mixture_losses(log_prior_NK: Tensor, nll_NK: Tensor, targets_N: Tensor) -> Tensor:
    """Return the losses of a mixture, (N,), from the losses of its experts."""
    nll_N = -torch.logsumexp(log_prior_NK - nll_NK, dim=-1)
    # For an ignored target nll_NK is 0, but the result is not exactly 0, because the prior does not sum to exactly 1.
    return nll_N.where(targets_N != IGNORE, 0.0)


def reject_second_derivatives() -> None:
    """Raise an error in a backward pass with `create_graph`: autograd would treat the gradients as constants."""
    if torch.is_grad_enabled():
        raise ArgumentError(
            "losses computed in blocks have no second derivatives, which create_graph = True asks for; "
            "use impl = 'reference'"
        )
