"""The losses of a linear classifier as autograd functions, for `linear_cross_entropy` and `linear_log_probs`.

`RowLossesFunction` returns one loss per row, and summaries of each row's scores. It computes the gradients in the
backward pass. `SummedLossFunction` returns the sum of the losses, or of a mixture's losses, and computes the gradients
in the forward pass. Both call the passes over blocks of scores in `passes`. `ops` wraps the same computations for
`torch.compile`. Both work with `torch.func.grad` and `torch.vmap`; a second derivative raises an error.

`weight` holds one vector per class. `nll` stands for negative log-likelihoods (the losses), `lse` for log-sum-exps of
the scores, and `lse_tau` for log-sum-exps at temperature tau. The gradient of `x` is `grad_x`.
If the class vectors are several matrices side by side (`columns`), the first is `weight` and the others follow last.
Shapes: N rows (tokens), D dimensions, V classes, K experts of a mixture.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.columns import ClassVectors, JoinedColumns, join_columns
from reefknot.kernels.passes import LossInputs, compute_gradients, compute_losses, compute_losses_with_gradients
from reefknot.kernels.scores import (
    IDENTITY,
    IGNORE,
    GradientTerms,
    ScoreTransform,
    SummaryRequest,
    TorchBackend,
    accumulation_dtype,
    at_least_float32,
)


@dataclass(frozen=True)
class LossOptions:
    """How a loss is computed: everything but the tensors."""

    dtype: torch.dtype
    """The type of the matrix products."""
    backend: TorchBackend
    budget: int
    """Working memory in bytes."""
    transform: ScoreTransform = IDENTITY
    needs_grad: tuple[bool, ...] = ()
    """Whether the gradients of hidden, weight, bias and log-prior are needed. Only `SummedLossFunction` reads it."""
    needs_columns: tuple[bool, ...] = ()
    """Whether each matrix of `JoinedColumns` needs a gradient. Only `SummedLossFunction` reads it."""

    def join_columns(self, weight: Tensor, more_columns: Sequence[Tensor]) -> ClassVectors:
        """Return the class vectors that several matrices hold."""
        return join_columns((weight, *more_columns), self.needs_columns)

    def loss_inputs(
        self,
        hidden: Tensor,
        weight: ClassVectors,
        bias: Tensor | None,
        targets: Tensor,
        class_weight: Tensor | None = None,
    ) -> LossInputs:
        """Return the inputs of a pass over the scores."""
        return LossInputs(
            hidden,
            weight,
            bias,
            targets,
            self.dtype,
            self.backend,
            self.budget,
            transform=self.transform,
            class_weight=class_weight,
        )


def without_defaults(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare that all arguments of a forward pass are given by position. Torch then binds them 0.02 ms faster."""
    arguments = inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)
    function.__signature__ = inspect.Signature([arguments])  # type: ignore[attr-defined]
    return function


# -- losses of rows ------------------------------------------------------------------------------------------------


class RowResults(NamedTuple):
    """Losses and summaries of the scores, one per row, (N,), at least in float32. None if not requested."""

    nll: Tensor
    """The negative log-likelihood of the target. It is zero if the target is `IGNORE`."""
    lse: Tensor
    """The log-sum-exp of the scores."""
    lse_tau: Tensor | None = None
    """The log-sum-exp of (s - mean(s)) / tau over the classes, where s are the scores without bias. The mean is
    subtracted because a divergence between two tempered softmaxes does not depend on it."""
    entropy: Tensor | None = None
    total: Tensor | None = None
    """The sum of the scores over the classes, weighted by the classes' weights."""
    best_class: Tensor | None = None
    """The class with the largest score. It has no gradient."""


def compute_row_results(inputs: LossInputs, request: SummaryRequest) -> RowResults:
    """Return losses and summaries of all rows."""
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        nll, summary = compute_losses(inputs, request)
    assert summary.lse is not None
    entropy = None if summary.expected is None else summary.lse - summary.expected
    return RowResults(nll, summary.lse, summary.lse_tau, entropy, summary.total, summary.best_class)


class RowLossesFunction(torch.autograd.Function):
    """One loss per row. The weights of the rows are known in the backward pass, which computes the scores again."""

    @staticmethod
    @without_defaults
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        class_weight: Tensor | None,
        request: SummaryRequest,
        options: LossOptions,
        *more_columns: Tensor,
    ) -> tuple[Tensor | None, ...]:
        class_vectors = join_columns((weight, *more_columns))
        inputs = options.loss_inputs(hidden, class_vectors, bias, targets, class_weight)
        return tuple(compute_row_results(inputs, request))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        *tensors, ctx.request, ctx.options = inputs[:7]
        results = RowResults(*output)  # type: ignore[arg-type]
        if results.best_class is not None:
            ctx.mark_non_differentiable(results.best_class)
        ctx.save_for_backward(*tensors, results.lse, results.lse_tau, results.entropy, *inputs[7:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Any, ...]:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_columns, request, options = ctx.needs_input_grad[7:], ctx.request, ctx.options
        num_grads = len(output_grads) - 1  # the last output is a class, which has no gradient
        needs_grad = (needs_hidden, needs_weight or any(needs_columns), needs_bias)

        def compute(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
            grads = RowGrads(*tensors[:num_grads])
            hidden, weight, bias, targets, class_weight, lse, lse_tau, entropy, *more_columns = tensors[num_grads:]
            class_vectors = join_columns(cast(list[Tensor], [weight, *more_columns]), (needs_weight, *needs_columns))
            loss_inputs = options.loss_inputs(hidden, class_vectors, bias, targets, class_weight)
            gradients = compute_row_gradients(
                loss_inputs, request, cast(Tensor, lse), lse_tau, entropy, grads, needs_grad
            )
            return split_weight_gradient(class_vectors, gradients)

        gradients = compute_once_differentiable(compute, *output_grads[:-1], *ctx.saved_tensors)
        return (*gradients[:3], None, None, None, None, *gradients[3:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return apply_in_loop(RowLossesFunction, info.batch_size, in_dims, arguments)


def split_weight_gradient(class_vectors: ClassVectors, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients of an autograd function whose second input and last inputs hold the class vectors."""
    if not isinstance(class_vectors, JoinedColumns):
        return tuple(gradients)
    grad_hidden, grad_columns, *others = gradients
    grad_weight, *grad_more_columns = class_vectors.split_gradient(grad_columns)
    return grad_hidden, grad_weight, *others, *grad_more_columns


class RowGrads(NamedTuple):
    """The gradients that arrive for `RowResults`. None stands for zero."""

    nll: Tensor | None = None
    lse: Tensor | None = None
    lse_tau: Tensor | None = None
    entropy: Tensor | None = None
    total: Tensor | None = None


def compute_row_gradients(
    inputs: LossInputs,
    request: SummaryRequest,
    lse: Tensor,
    lse_tau: Tensor | None,
    entropy: Tensor | None,
    output_grads: RowGrads,
    needs_grad: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, weight and bias; None for a gradient that is not needed.

    Args:
        inputs: The inputs of the forward pass.
        request: The request of the forward pass.
        lse: The log-sum-exps that the forward pass returned, (N,).
        lse_tau: The log-sum-exps at temperature tau, (N,), or None.
        entropy: The entropies, (N,), or None.
        output_grads: The gradients of the results.
        needs_grad: Whether the gradients of hidden, weight and bias are needed.
    """
    terms = build_gradient_terms(inputs.has_target(slice(None)), lse, entropy, output_grads, inputs.transform)
    tau = request.tau
    if output_grads.lse_tau is not None and tau is not None:
        tempered_weight = output_grads.lse_tau / tau
        terms = replace(
            terms, lse_tau=lse_tau, tempered_weight=tempered_weight, tau=tau, uniform=1 / inputs.num_classes
        )
    needs_hidden, needs_weight, needs_bias = needs_grad
    with torch.autocast(lse.device.type, enabled=False):
        return compute_gradients(inputs, terms, (needs_hidden, needs_weight, needs_bias), tau).in_input_dtypes()


def build_gradient_terms(
    has_target_N: Tensor, lse_N: Tensor, entropy_N: Tensor | None, output_grads: RowGrads, transform: ScoreTransform
) -> GradientTerms:
    """Return the terms of the gradient of the scores, without the tempered one.

    Args:
        has_target_N: A mask of the rows whose target is a class.
        lse_N: The log-sum-exps over all classes.
        entropy_N: The entropies, or None.
        output_grads: The gradients of the results.
        transform: The transform of the scores.
    """
    # nll = lse - z_y, so the gradient of nll counts at the target, and those of nll and lse in the softmax.
    if output_grads.nll is None:
        target_weight_N = torch.zeros_like(lse_N)
    else:
        target_weight_N = output_grads.nll.where(has_target_N, 0.0)
    plain_weight_N = target_weight_N if output_grads.lse is None else target_weight_N + output_grads.lse
    terms = GradientTerms(lse_N, plain_weight_N, target_weight_N, transform=transform)
    if output_grads.entropy is not None and entropy_N is not None:
        terms = replace(terms, entropy_weight=output_grads.entropy, expected=lse_N - entropy_N)
    if output_grads.total is not None:
        terms = replace(terms, total_weight=output_grads.total)
    return terms


# -- the sum of the losses -----------------------------------------------------------------------------------------


class SummedLossFunction(torch.autograd.Function):
    """The sum of the losses, and its gradients, which the same pass over the scores computes."""

    @staticmethod
    @without_defaults
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        log_prior: Tensor | None,
        row_weight: Tensor | None,
        options: LossOptions,
        *more_columns: Tensor,
    ) -> tuple[Tensor | None, ...]:
        class_vectors = options.join_columns(weight, more_columns)
        loss = SummedLoss(hidden, class_vectors, bias, targets, log_prior, row_weight, options)
        if not any(options.needs_grad):
            return loss.compute(), None, None, None, None, *(None for _ in more_columns)
        total, gradients = loss.compute_with_gradients(options.needs_grad)
        return total, *split_weight_gradient(class_vectors, gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        *tensors, ctx.options = inputs[:7]
        # The gradients are attributes, not saved tensors, because the backward pass scales them in place.
        ctx.gradients = output[1:]
        ctx.mark_non_differentiable(*(gradient for gradient in ctx.gradients if gradient is not None))
        ctx.save_for_backward(*tensors, *inputs[7:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_total is None:
            return (None,) * len(ctx.needs_input_grad)
        # The gradients are scaled in place, so they are used once. A second backward pass computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            hidden, weight, bias, targets, log_prior, row_weight, *more_columns = ctx.saved_tensors
            class_vectors = ctx.options.join_columns(weight, more_columns)
            loss = SummedLoss(hidden, class_vectors, bias, targets, log_prior, row_weight, ctx.options)
            gradients = split_weight_gradient(class_vectors, loss.compute_with_gradients(ctx.options.needs_grad)[1])
        gradients = scale_gradients(gradients, grad_total, ctx.saved_tensors, ctx.options.backend)
        grad_hidden, grad_weight, grad_bias, grad_log_prior, *grad_columns = gradients
        return (grad_hidden, grad_weight, grad_bias, None, grad_log_prior, None, None, *grad_columns)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return apply_in_loop(SummedLossFunction, info.batch_size, in_dims, arguments)


class SummedLoss:
    """Computes the sum of the losses of the rows, or of a mixture, and its gradients.

    Args:
        hidden: Hidden states, (N, D). For a mixture (N * K, D), with K consecutive rows per target.
        weight: Class vectors, (V, D).
        bias: Biases, (V,), or None.
        targets: Targets, (N,).
        log_prior: The logarithms of a mixture's weights, (N, K), or None.
        row_weight: The weight of each target's loss in the sum, (N,), zero for ignored targets; None for weights of 1.
            A mixture has none.
        options: How the loss is computed.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: ClassVectors,
        bias: Tensor | None,
        targets: Tensor,
        log_prior: Tensor | None,
        row_weight: Tensor | None,
        options: LossOptions,
    ) -> None:
        self.targets = targets
        self.log_prior = log_prior
        self.row_weight = row_weight
        self.num_experts = 1 if log_prior is None else log_prior.shape[1]
        self.posterior = None if log_prior is None else torch.empty_like(log_prior)
        self.block_sums: list[Tensor] = []
        row_targets = targets if log_prior is None else targets[:, None].expand(-1, self.num_experts).flatten()
        self.inputs = options.loss_inputs(hidden, weight, bias, row_targets)

    def compute(self) -> Tensor:
        """Return the sum."""
        with torch.autocast(self.targets.device.type, enabled=False):
            nll, _ = compute_losses(self.inputs, SummaryRequest())
            self._add_losses(slice(0, self.inputs.num_rows), nll)
        return self._total()

    def compute_with_gradients(self, needs_grad: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the sum, and the gradients of hidden, weight, bias and log-prior."""
        needs_hidden, needs_weight, needs_bias = needs_grad[:3]
        with torch.autocast(self.targets.device.type, enabled=False):
            gradients = compute_losses_with_gradients(
                self.inputs, self._add_losses, (needs_hidden, needs_weight, needs_bias), group=self.num_experts
            )
        grad_log_prior = None if self.posterior is None else self.posterior.neg_()
        return self._total(), [*gradients.in_input_dtypes(), grad_log_prior]

    def _add_losses(self, rows: slice, nll: Tensor) -> Tensor | None:
        """Add the losses of some rows to the sum, and return the weights of the rows, or None if they are 1.

        The weight of an expert's row is its posterior: its share in the probability of the target.
        """
        if self.row_weight is not None:
            row_weights = self.row_weight[rows].to(nll.dtype)
            self.block_sums.append((nll * row_weights).sum())
            return row_weights
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


# -- gradients that the forward pass computed ----------------------------------------------------------------------


def scale_gradients(
    gradients: Sequence[Tensor | None], factor: Tensor, inputs: Sequence[Tensor | None], backend: TorchBackend
) -> tuple[Tensor | None, ...]:
    """Multiply the gradients of a loss by the gradient that arrives for the loss.

    Args:
        gradients: The gradients. They are overwritten, unless autograd records the backward pass.
        factor: The gradient of the loss, ().
        inputs: The tensors that the gradients depend on.
        backend: Scales gradients in place.
    """
    if torch.is_grad_enabled():  # with create_graph and in torch.func

        def scale(factor: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
            gradients = tensors[len(inputs) :]
            return tuple(None if gradient is None else scale_gradient(gradient, factor) for gradient in gradients)

        return compute_once_differentiable(scale, factor, *inputs, *gradients)
    for gradient in gradients:
        if gradient is not None:
            backend.scale_in_place(gradient, factor)
    return tuple(gradients)


def scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    """Return the gradient times a factor, in the type of the gradient."""
    # A factor that is rounded to half precision would change all gradients in the same direction.
    return (at_least_float32(gradient) * factor).to(gradient.dtype)


# -- second derivatives and torch.func -----------------------------------------------------------------------------


def compute_once_differentiable(
    compute: Callable[..., tuple[Tensor | None, ...]], *tensors: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return compute(*tensors), the gradients of a loss. Taking their derivative raises an error.

    Without this, autograd would treat the gradients as constants.
    """
    gradients: tuple[Tensor | None, ...] = _OnceDifferentiable.apply(compute, *tensors)  # type: ignore[no-untyped-call]
    return gradients


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients that have no derivative."""

    @staticmethod
    def forward(
        compute: Callable[..., tuple[Tensor | None, ...]], *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        raise ArgumentError(
            "losses computed in blocks have no second derivatives, which this backward pass asks for; "
            "use impl = 'reference'"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return apply_in_loop(_OnceDifferentiable, info.batch_size, in_dims, arguments)


def apply_in_loop(
    function: type[torch.autograd.Function], batch_size: int, in_dims: Sequence[int | None], arguments: Sequence[Any]
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """Apply a function to each entry of a batch, for `torch.vmap`. Return the stacked results and their batch dims."""
    results = []
    for index in range(batch_size):
        selected = (
            argument.select(dim, index) if isinstance(dim, int) else argument
            for dim, argument in zip(in_dims, arguments, strict=True)
        )
        results.append(function.apply(*selected))  # type: ignore[no-untyped-call]
    stacked = tuple(None if column[0] is None else torch.stack(column) for column in zip(*results, strict=True))
    return stacked, tuple(None if column is None else 0 for column in stacked)
