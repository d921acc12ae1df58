"""The losses of a linear classifier as autograd functions.

`SummedLossFunction` computes the gradients in the forward pass, `RowLossesFunction` in the backward pass.

Shapes: N rows (tokens), D dimensions, V classes, K experts of a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.passes import LossInputs, gradients, losses, losses_with_gradients
from reefknot.kernels.scores import IGNORE, RowTerms, Scores, accumulation_dtype


class RowLossesFunction(torch.autograd.Function):
    """One loss per row. The weights of the rows are known in the backward pass, which computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        w: Tensor,
        b: Tensor | None,
        y: Tensor,
        tau: float | None,
        dtype: torch.dtype,
        scores: Scores,
        budget: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.autocast(h.device.type, enabled=False):
            nll, lse, lse_tau = losses(LossInputs(h, w, b, y, dtype, scores, budget), tau)
        ctx.save_for_backward(h, w, b, y, lse, lse_tau)
        ctx.tau = tau
        ctx.options = dtype, scores, budget
        ctx.set_materialize_grads(False)
        return nll, lse, lse_tau

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Any, ...]:
        reject_second_derivatives()
        h, w, b, y, lse, lse_tau = ctx.saved_tensors
        inputs = LossInputs(h, w, b, y, *ctx.options)
        input_grads = row_gradients(inputs, lse, lse_tau, ctx.tau, output_grads, ctx.needs_input_grad[:3])
        return (*input_grads, None, None, None, None, None)


def row_gradients(
    inputs: LossInputs,
    lse: Tensor,
    lse_tau: Tensor | None,
    tau: float | None,
    output_grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of h, w and b; None for a gradient that is not needed.

    Args:
        inputs: The inputs of the forward pass.
        lse: The log-sum-exps that the forward pass returned, (N,).
        lse_tau: The log-sum-exps at temperature `tau`, (N,), or None.
        tau: The temperature, or None.
        output_grads: The gradients of the losses, of `lse` and of `lse_tau`. None stands for zero.
        needs: Whether the gradients of h, w and b are needed.
    """
    g_nll, g_lse, g_tau = output_grads
    target = torch.zeros_like(lse) if g_nll is None else g_nll.where(inputs.scored(slice(None)), 0.0)
    plain = target if g_lse is None else target + g_lse
    terms = RowTerms(lse, plain, target)
    if g_tau is not None and tau is not None:
        terms = RowTerms(lse, plain, target, lse_tau, g_tau / tau, tau, 1 / inputs.w.shape[0])
    with torch.autocast(lse.device.type, enabled=False):
        return gradients(inputs, terms, (needs[0], needs[1], needs[2]), tau).finished()


class SummedLossFunction(torch.autograd.Function):
    """The sum of the losses. The pass over the scores that computes it also computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        w: Tensor,
        b: Tensor | None,
        y: Tensor,
        log_prior: Tensor | None,
        training: bool,
        dtype: torch.dtype,
        scores: Scores,
        budget: int,
    ) -> Tensor:
        ctx.options = dtype, scores, budget
        if not (training and any(ctx.needs_input_grad)):
            return Sum(h, w, b, y, log_prior, *ctx.options).value()
        ctx.save_for_backward(h, w, b, y, log_prior)
        total, ctx.gradients = Sum(h, w, b, y, log_prior, *ctx.options).value_with_gradients(ctx.needs_input_grad)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        reject_second_derivatives()
        # The gradients are scaled in place, so they cannot be reused. A second backward pass computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = Sum(*ctx.saved_tensors, *ctx.options).value_with_gradients(ctx.needs_input_grad)
        scores: Scores = ctx.options[1]
        for gradient in gradients:
            if gradient is not None:
                scores.scale(gradient, g)
        return (*gradients, None, None, None, None)


class Sum:
    """Computes the sum of the losses of the rows, or of a mixture, and its gradients."""

    def __init__(
        self,
        h: Tensor,
        w: Tensor,
        b: Tensor | None,
        y: Tensor,
        log_prior: Tensor | None,
        dtype: torch.dtype,
        scores: Scores,
        budget: int,
    ) -> None:
        self.y, self.log_prior = y, log_prior
        self.experts = 1 if log_prior is None else log_prior.shape[1]
        self.posterior = None if log_prior is None else torch.empty_like(log_prior)
        self.sums: list[Tensor] = []
        y_rows = y if log_prior is None else y[:, None].expand(-1, self.experts).flatten()
        self.inputs = LossInputs(h, w, b, y_rows, dtype, scores, budget)

    def value(self) -> Tensor:
        """Return the sum."""
        with torch.autocast(self.y.device.type, enabled=False):
            self._weigh(slice(0, self.inputs.h.shape[0]), losses(self.inputs)[0])
        return self._total()

    def value_with_gradients(self, needs: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the sum, and the gradients of h, w, b, y (always None) and the log-prior."""
        with torch.autocast(self.y.device.type, enabled=False):
            sums = losses_with_gradients(self.inputs, self._weigh, (needs[0], needs[1], needs[2]), self.experts)
        log_prior = None if self.posterior is None else self.posterior.neg_()
        return self._total(), [*sums.finished(), None, log_prior]

    def _weigh(self, rows: slice, nll: Tensor) -> Tensor | None:
        """Add the losses of some rows to the sum, and return the weights of the rows."""
        if self.log_prior is None or self.posterior is None:
            self.sums.append(nll.sum())
            return None
        targets = slice(rows.start // self.experts, rows.stop // self.experts)
        log_prior_NK, y_N, nll_NK = self.log_prior[targets], self.y[targets], nll.view(-1, self.experts)
        self.sums.append(mixed(log_prior_NK, nll_NK, y_N).sum())
        posterior_NK = torch.softmax(log_prior_NK - nll_NK, dim=-1).where((y_N != IGNORE)[:, None], 0.0)
        self.posterior[targets] = posterior_NK
        return posterior_NK.flatten()

    def _total(self) -> Tensor:
        if not self.sums:
            return self.inputs.h.new_zeros((), dtype=accumulation_dtype(self.inputs.dtype))
        return self.sums[0] if len(self.sums) == 1 else torch.stack(self.sums).sum()


def reject_second_derivatives() -> None:
    """Raise an error in a backward pass with `create_graph`: autograd would treat the gradients as constants."""
    if torch.is_grad_enabled():
        raise ArgumentError(
            "losses computed in blocks have no second derivatives, which create_graph = True asks for; "
            "use impl = 'reference'"
        )


def mixed(log_prior_NK: Tensor, nll_NK: Tensor, y_N: Tensor) -> Tensor:
    """Return the losses of a mixture, (N,), from the losses of its experts."""
    nll_N = -torch.logsumexp(log_prior_NK - nll_NK, dim=-1)
    # For an ignored target nll_NK is 0, but the result is not exactly 0, because the prior does not sum to exactly 1.
    return nll_N.where(y_N != IGNORE, 0.0)
