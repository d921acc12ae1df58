"""The losses as custom operators of torch, so that `torch.compile` keeps a loss in one graph.

`summed_loss`, `row_losses` and `soft_targets` are the functions to start from. Inside a compiled graph,
`linear_cross_entropy` and `soft_target` call them. They give the same results as the eager functions. A compiler cannot
trace a loop over blocks of scores. It does not need to, because each operator declares the shapes of its outputs
(`register_fake`) and its gradient (`register_autograd`).

An operator may return neither None nor one of its inputs, so an empty tensor stands for a result that is not needed.
The schemas are written out because versions of torch differ in what they can infer from annotations.

`weight` holds one vector per class. `nll` stands for negative log-likelihoods (the losses), `lse` for log-sum-exps of
the scores, and `lse_tau` for log-sum-exps at temperature tau. The gradient of `x` is `grad_x`.
Shapes: N rows (tokens), D dimensions, V classes, K experts of a mixture; U queries, C dimensions of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from reefknot.kernels.autograd import SummedLoss, compute_row_gradients
from reefknot.kernels.choice import Choice, Impl, resolve_impl
from reefknot.kernels.divergence import DivergenceInputs
from reefknot.kernels.linear_cross_entropy import RowLosses
from reefknot.kernels.passes import LossInputs, compute_losses
from reefknot.kernels.scores import TorchBackend, accumulation_dtype, at_least_float32, get_backend
from reefknot.kernels.soft_target import Attention, SoftTargets

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias"
_OPTIONS = "ScalarType dtype, str impl, float? memory"
"""Arguments of every operator: the type of the matrix products, and a `Choice`. They are read outside the operator,
where autocast and `using` are visible, and resolved inside."""


# -- the sum of the losses -----------------------------------------------------------------------------------------


def summed_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    log_prior_NK: Tensor | None,
    dtype: torch.dtype,
    choice: Choice,
) -> Tensor:
    """Compute `linear_cross_entropy.summed_loss` in a compiled graph."""
    inputs = (hidden_ND, weight_VD, bias_V, log_prior_NK)
    needs_grad = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in inputs]
    total: Tensor = _summed_loss(*inputs, targets_N, dtype, choice.impl, choice.memory, needs_grad)[0]
    return total


@custom_op(
    "reefknot::summed_loss",
    mutates_args=(),
    schema=f"({_HEAD}, Tensor? log_prior, Tensor targets, {_OPTIONS}, bool[] needs_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _summed_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_prior: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    impl: Impl,
    memory: float | None,
    needs_grad: list[bool],
) -> tuple[Tensor, ...]:
    """Return the sum, and its gradients with respect to hidden, weight, bias and the log-prior."""
    loss = SummedLoss(
        hidden, weight, bias, targets, log_prior, dtype, *_choose_backend(dtype, impl, memory, hidden.device)
    )
    if not any(needs_grad):
        return loss.compute(), *_fill_unneeded(needs_grad, [None] * len(needs_grad), hidden)
    total, (grad_hidden, grad_weight, grad_bias, _, grad_log_prior) = loss.compute_with_gradients(needs_grad)
    return total, *_fill_unneeded(needs_grad, (grad_hidden, grad_weight, grad_bias, grad_log_prior), hidden)


@_summed_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_prior: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    *options: Any,
) -> tuple[Tensor, ...]:
    total_dtype = accumulation_dtype(dtype)
    if log_prior is not None:
        total_dtype = torch.promote_types(total_dtype, log_prior.dtype)
    return hidden.new_empty((), dtype=total_dtype), *_allocate(options[-1], (hidden, weight, bias, log_prior), hidden)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    # A factor rounded to half precision would change all gradients in the same direction.
    scaled = [(at_least_float32(gradient) * grad_total).to(gradient.dtype) for gradient in ctx.saved_tensors]
    num_others = len(ctx.needs_input_grad) - len(scaled)
    return _drop_unneeded(ctx.needs_input_grad[: len(scaled)], scaled, num_others=num_others)


_summed_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)


# -- losses of rows ------------------------------------------------------------------------------------------------


def row_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    tau: float | None,
    dtype: torch.dtype,
    choice: Choice,
) -> RowLosses:
    """Compute `linear_cross_entropy.row_losses` in a compiled graph."""
    nll_N, lse_N, lse_tau_N = _row_losses(
        hidden_ND, weight_VD, bias_V, targets_N, tau, dtype, choice.impl, choice.memory
    )
    return RowLosses(nll_N, lse_N, None if tau is None else lse_tau_N)


@custom_op(
    "reefknot::row_losses",
    mutates_args=(),
    schema=f"({_HEAD}, Tensor targets, float? tau, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _row_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tau: float | None,
    dtype: torch.dtype,
    impl: Impl,
    memory: float | None,
) -> tuple[Tensor, ...]:
    with torch.autocast(hidden.device.type, enabled=False):
        results = compute_losses(
            LossInputs(hidden, weight, bias, targets, dtype, *_choose_backend(dtype, impl, memory, hidden.device)), tau
        )
    return _fill_unneeded((True, True, tau is not None), results, results[1])


@_row_losses.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tau: float | None,
    dtype: torch.dtype,
    *options: Any,
) -> tuple[Tensor, ...]:
    lse = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(dtype))
    return _allocate((True, True, tau is not None), (lse, lse, lse), lse)


def _save_normalisers(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, *ctx.options = inputs
    ctx.save_for_backward(hidden, weight, bias, targets, *output[1:])
    ctx.set_materialize_grads(False)


def _row_losses_backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_grad = list(ctx.needs_input_grad[:3])
    gradients = _row_gradients(*ctx.saved_tensors, *output_grads, *ctx.options, needs_grad)
    return _drop_unneeded(needs_grad, gradients, num_others=5)


_row_losses.register_autograd(_row_losses_backward, setup_context=_save_normalisers)


@custom_op(
    "reefknot::row_gradients",
    mutates_args=(),
    schema=f"({_HEAD}, Tensor targets, Tensor lse, Tensor lse_tau, Tensor? grad_nll, Tensor? grad_lse,"
    f" Tensor? grad_lse_tau, float? tau, {_OPTIONS}, bool[] needs_grad) -> (Tensor, Tensor, Tensor)",
)
def _row_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    lse_tau: Tensor,
    grad_nll: Tensor | None,
    grad_lse: Tensor | None,
    grad_lse_tau: Tensor | None,
    tau: float | None,
    dtype: torch.dtype,
    impl: Impl,
    memory: float | None,
    needs_grad: list[bool],
) -> tuple[Tensor, ...]:
    inputs = LossInputs(hidden, weight, bias, targets, dtype, *_choose_backend(dtype, impl, memory, hidden.device))
    return _fill_unneeded(
        needs_grad,
        compute_row_gradients(inputs, lse, lse_tau, tau, (grad_nll, grad_lse, grad_lse_tau), needs_grad),
        hidden,
    )


@_row_gradients.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    return _allocate(options[-1], (hidden, weight, bias), hidden)


# -- soft targets --------------------------------------------------------------------------------------------------


def soft_targets(
    queries_UD: Tensor, keys_VD: Tensor, values_VC: Tensor | None, tau: float, dtype: torch.dtype, choice: Choice
) -> SoftTargets:
    """Compute `soft_target.soft_targets` in a compiled graph. `values_VC` is None if the keys are also the values."""
    mean_UC, negentropy_U, _ = _soft_targets(queries_UD, keys_VD, values_VC, tau, dtype, choice.impl, choice.memory)
    return SoftTargets(mean_UC, negentropy_U)


@custom_op(
    "reefknot::soft_targets",
    mutates_args=(),
    schema=f"(Tensor queries, Tensor keys, Tensor? values, float tau, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _soft_targets(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    tau: float,
    dtype: torch.dtype,
    impl: Impl,
    memory: float | None,
) -> tuple[Tensor, ...]:
    """Return means, negative entropies, and the normalisers that the backward pass needs."""
    with torch.autocast(queries.device.type, enabled=False):
        backend_and_budget = _choose_backend(dtype, impl, memory, queries.device)
        return Attention(queries, keys, values, tau, dtype, *backend_and_budget).forward()


@_soft_targets.register_fake
def _(
    queries: Tensor, keys: Tensor, values: Tensor | None, tau: float, dtype: torch.dtype, *options: Any
) -> tuple[Tensor, ...]:
    num_queries, dim = queries.shape[0], (keys if values is None else values).shape[1]
    mean = queries.new_empty((num_queries, dim), dtype=accumulation_dtype(dtype))
    negentropy, lse = (mean.new_empty(num_queries) for _ in range(2))
    return mean, negentropy, lse


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    queries, keys, values, *ctx.options = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(queries, keys, values, *output)


def _soft_targets_backward(ctx: Any, grad_mean: Tensor, grad_negentropy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    needs_grad = list(ctx.needs_input_grad[:3])
    gradients = _soft_target_gradients(*ctx.saved_tensors, grad_mean, grad_negentropy, *ctx.options, needs_grad)
    return _drop_unneeded(needs_grad, gradients, num_others=4)


_soft_targets.register_autograd(_soft_targets_backward, setup_context=_save_attention)


@custom_op(
    "reefknot::soft_gradients",
    mutates_args=(),
    schema="(Tensor queries, Tensor keys, Tensor? values, Tensor mean, Tensor negentropy, Tensor lse, Tensor grad_mean,"
    f" Tensor grad_negentropy, float tau, {_OPTIONS}, bool[] needs_grad) -> (Tensor, Tensor, Tensor)",
)
def _soft_target_gradients(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    mean: Tensor,
    negentropy: Tensor,
    lse: Tensor,
    grad_mean: Tensor,
    grad_negentropy: Tensor,
    tau: float,
    dtype: torch.dtype,
    impl: Impl,
    memory: float | None,
    needs_grad: list[bool],
) -> tuple[Tensor, ...]:
    with torch.autocast(queries.device.type, enabled=False):
        backend_and_budget = _choose_backend(dtype, impl, memory, queries.device)
        attention = Attention(queries, keys, values, tau, dtype, *backend_and_budget)
        gradients = attention.backward((mean, negentropy, lse), (grad_mean, grad_negentropy), needs_grad)
    return _fill_unneeded(needs_grad, gradients, queries)


@_soft_target_gradients.register_fake
def _(queries: Tensor, keys: Tensor, values: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    return _allocate(options[-1], (queries, keys, values), queries)


# -- divergences ---------------------------------------------------------------------------------------------------

_SIDES = "Tensor hs, Tensor ws, Tensor? bs, Tensor ht, Tensor wt, Tensor? bt"
"""Hidden states, class vectors and biases: of the student, then of the teacher."""
_DIVERGENCE_OPTIONS = (
    "str kind, float beta, float temperature, ScalarType student_dtype, ScalarType teacher_dtype, int budget"
)


def summed_divergence(inputs: DivergenceInputs, weight_N: Tensor) -> Tensor:
    """Compute the weighted sum of the divergences in a compiled graph."""
    tensors = (*inputs.student, *inputs.teacher)
    needs_grad = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    total: Tensor = _summed_divergence(*tensors, weight_N, *inputs.flat_options(), needs_grad)[0]
    return total


def row_divergences(inputs: DivergenceInputs) -> Tensor:
    """Compute the divergence of each row in a compiled graph."""
    losses: Tensor = _row_divergences(*inputs.student, *inputs.teacher, *inputs.flat_options())
    return losses


@custom_op(
    "reefknot::summed_divergence",
    mutates_args=(),
    schema=f"({_SIDES}, Tensor weight, {_DIVERGENCE_OPTIONS}, bool[] needs_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _summed_divergence(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the weighted sum, and its gradients with respect to the six tensors."""
    tensors, weight, options, needs_grad = arguments[:6], arguments[6], arguments[7:13], arguments[13]
    inputs = DivergenceInputs.from_flat(tensors, *options)
    with torch.autocast(weight.device.type, enabled=False):
        losses, gradients = inputs.compute(weight if any(needs_grad) else None, needs_grad)
    return (losses * weight).sum(), *_fill_unneeded(needs_grad, gradients, weight)


@_summed_divergence.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, weight, options, needs_grad = arguments[:6], arguments[6], arguments[7:13], arguments[13]
    dtype = DivergenceInputs.from_flat(tensors, *options).loss_dtype
    return weight.new_empty((), dtype=dtype), *_allocate(needs_grad, tensors, weight)


_summed_divergence.register_autograd(_scale_gradients, setup_context=_save_gradients)


@custom_op("reefknot::row_divergences", mutates_args=(), schema=f"({_SIDES}, {_DIVERGENCE_OPTIONS}) -> Tensor")
def _row_divergences(*arguments: Any) -> Tensor:
    inputs = DivergenceInputs.from_flat(arguments[:6], *arguments[6:])
    with torch.autocast(arguments[0].device.type, enabled=False):
        losses, _ = inputs.compute(None, [False] * 6)
    return losses


@_row_divergences.register_fake
def _(*arguments: Any) -> Tensor:
    hidden: Tensor = arguments[0]
    return hidden.new_empty(hidden.shape[0], dtype=DivergenceInputs.from_flat(arguments[:6], *arguments[6:]).loss_dtype)


def _save_sides(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _row_divergences_backward(ctx: Any, g_losses: Tensor) -> tuple[Tensor | None, ...]:
    needs_grad = list(ctx.needs_input_grad[:6])
    gradients = _divergence_gradients(*ctx.saved_tensors, g_losses, *ctx.options, needs_grad)
    return _drop_unneeded(needs_grad, gradients, num_others=6)


_row_divergences.register_autograd(_row_divergences_backward, setup_context=_save_sides)


@custom_op(
    "reefknot::divergence_gradients",
    mutates_args=(),
    schema=f"({_SIDES}, Tensor g_losses, {_DIVERGENCE_OPTIONS}, bool[] needs_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _divergence_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, g_losses, options, needs_grad = arguments[:6], arguments[6], arguments[7:13], arguments[13]
    with torch.autocast(g_losses.device.type, enabled=False):
        _, gradients = DivergenceInputs.from_flat(tensors, *options).compute(g_losses, needs_grad)
    return _fill_unneeded(needs_grad, gradients, g_losses)


@_divergence_gradients.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _allocate(arguments[13], arguments[:6], arguments[6])


# -- helpers -------------------------------------------------------------------------------------------------------


def _choose_backend(
    dtype: torch.dtype, impl: Impl, memory: float | None, device: torch.device
) -> tuple[TorchBackend, int]:
    """Return the object that computes the blocks, and its budget in bytes."""
    choice = Choice(impl, memory)
    return get_backend(resolve_impl(choice, device, dtype)), choice.budget(device)


def _fill_unneeded(needs_grad: Sequence[bool], results: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Return the results that are needed, and empty tensors in place of the others."""
    return tuple(
        result.contiguous() if need and result is not None else like.new_empty(0)
        for need, result in zip(needs_grad, results, strict=True)
    )


def _allocate(needs_grad: Sequence[bool], inputs: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Return uninitialised tensors with the shapes that `_fill_unneeded` returns for the gradients of these inputs."""
    gradients = [None if tensor is None else tensor.new_empty(tensor.shape) for tensor in inputs]
    return _fill_unneeded(needs_grad, gradients, like)


def _drop_unneeded(
    needs_grad: Sequence[bool], gradients: Sequence[Tensor], num_others: int
) -> tuple[Tensor | None, ...]:
    """Return the gradients that autograd needs, and None for the `num_others` arguments after them."""
    needed = (gradient if need else None for need, gradient in zip(needs_grad, gradients, strict=True))
    return *needed, *[None] * num_others
