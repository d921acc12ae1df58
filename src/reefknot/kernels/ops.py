"""The losses as custom operators of torch, so that `torch.compile` keeps a loss in one graph.

`summed_loss`, `row_results` and `soft_targets` are the functions to start from. Inside a compiled graph, `losses` and
`soft_target` call them. They give the same results as the eager functions. A compiler cannot
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

from reefknot.kernels.autograd import (
    LossOptions,
    RowGrads,
    RowResults,
    SummedLoss,
    compute_row_gradients,
    compute_row_results,
    scale_gradient,
)
from reefknot.kernels.choice import Choice, Impl, resolve_impl
from reefknot.kernels.divergence_passes import DivergenceInputs, weighted_sum
from reefknot.kernels.scores import (
    ScoreTransform,
    SummaryRequest,
    TorchBackend,
    accumulation_dtype,
    get_backend,
)
from reefknot.kernels.soft_target import Attention, SoftTargets

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias"
_TRANSFORM = "float scale, float? softcap, float temperature"
"""The fields of a `ScoreTransform`."""
_REQUEST = "float? tau, bool expected, bool total, bool best"
"""The fields of a `SummaryRequest`, whose log-sum-exp is always computed."""
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
    row_weight_N: Tensor | None,
    transform: ScoreTransform,
    dtype: torch.dtype,
    choice: Choice,
    needs_grad: Sequence[bool],
) -> Tensor:
    """Compute `losses.summed_loss` in a compiled graph."""
    tensors = (hidden_ND, weight_VD, bias_V, log_prior_NK, targets_N, row_weight_N)
    settings = (*_flatten_transform(transform), dtype, choice.impl, choice.memory)
    total: Tensor = _summed_loss(*tensors, *settings, list(needs_grad))[0]
    return total


@custom_op(
    "reefknot::summed_loss",
    mutates_args=(),
    schema=f"({_HEAD}, Tensor? log_prior, Tensor targets, Tensor? row_weight, {_TRANSFORM}, {_OPTIONS},"
    " bool[] needs_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _summed_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_prior: Tensor | None,
    targets: Tensor,
    row_weight: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: float,
    dtype: torch.dtype,
    impl: Impl,
    memory: float | None,
    needs_grad: list[bool],
) -> tuple[Tensor, ...]:
    """Return the sum, and its gradients with respect to hidden, weight, bias and the log-prior."""
    transform = ScoreTransform(scale, softcap, temperature)
    options = LossOptions(dtype, *_choose_backend(dtype, impl, memory, hidden.device), transform)
    loss = SummedLoss(hidden, weight, bias, targets, log_prior, row_weight, options)
    if not any(needs_grad):
        return loss.compute(), *_fill_unneeded(needs_grad, [None] * len(needs_grad), hidden)
    total, gradients = loss.compute_with_gradients(needs_grad)
    return total, *_fill_unneeded(needs_grad, gradients, hidden)


@_summed_loss.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, log_prior: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    *_, dtype, _, _, needs_grad = others
    total_dtype = accumulation_dtype(dtype)
    if log_prior is not None:
        total_dtype = torch.promote_types(total_dtype, log_prior.dtype)
    return hidden.new_empty((), dtype=total_dtype), *_allocate(needs_grad, (hidden, weight, bias, log_prior), hidden)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    scaled = [scale_gradient(gradient, grad_total) for gradient in ctx.saved_tensors]
    num_others = len(ctx.needs_input_grad) - len(scaled)
    return _drop_unneeded(ctx.needs_input_grad[: len(scaled)], scaled, num_others=num_others)


_summed_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)


# -- losses and summaries of rows ----------------------------------------------------------------------------------


def row_results(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    class_weight_V: Tensor | None,
    request: SummaryRequest,
    transform: ScoreTransform,
    dtype: torch.dtype,
    choice: Choice,
) -> RowResults:
    """Compute `losses.row_results` in a compiled graph."""
    tensors = (hidden_ND, weight_VD, bias_V, targets_N, class_weight_V)
    request_fields = (request.tau, request.expected, request.total, request.best)
    settings = (*request_fields, *_flatten_transform(transform), dtype, choice.impl, choice.memory)
    results = _row_results(*tensors, *settings)
    is_requested = _requested_results(request)
    wanted: list[Any] = [result if is_wanted else None for result, is_wanted in zip(results, is_requested, strict=True)]
    return RowResults(*wanted)


@custom_op(
    "reefknot::row_results",
    mutates_args=(),
    schema=f"({_HEAD}, Tensor targets, Tensor? class_weight, {_REQUEST}, {_TRANSFORM}, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _row_results(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weight: Tensor | None, *settings: Any
) -> tuple[Tensor, ...]:
    request, options = _parse_row_settings(settings, hidden.device)
    results = compute_row_results(options.loss_inputs(hidden, weight, bias, targets, class_weight), request)
    return _fill_unneeded(_requested_results(request), results, results.lse)


@_row_results.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weight: Tensor | None, *settings: Any
) -> tuple[Tensor, ...]:
    tau, expected, total, best, *_, dtype, _, _ = settings
    lse = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(dtype))
    best_class = targets.new_empty(hidden.shape[0])
    is_requested = _requested_results(SummaryRequest(tau=tau, expected=expected, total=total, best=best))
    return _allocate(is_requested, (lse, lse, lse, lse, lse, best_class), lse)


def _save_row_results(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, lse, lse_tau, entropy, _, best_class = output
    ctx.mark_non_differentiable(best_class)
    ctx.save_for_backward(*inputs[:5], lse, lse_tau, entropy)
    ctx.settings = inputs[5:]
    ctx.set_materialize_grads(False)


def _row_results_backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_grad = list(ctx.needs_input_grad[:3])
    gradients = _row_gradients(*ctx.saved_tensors, *output_grads[:-1], *ctx.settings, needs_grad)
    return _drop_unneeded(needs_grad, gradients, num_others=2 + len(ctx.settings))


_row_results.register_autograd(_row_results_backward, setup_context=_save_row_results)


@custom_op(
    "reefknot::row_gradients",
    mutates_args=(),
    schema=f"({_HEAD}, Tensor targets, Tensor? class_weight, Tensor lse, Tensor lse_tau, Tensor entropy,"
    " Tensor? grad_nll, Tensor? grad_lse, Tensor? grad_lse_tau, Tensor? grad_entropy, Tensor? grad_total,"
    f" {_REQUEST}, {_TRANSFORM}, {_OPTIONS}, bool[] needs_grad) -> (Tensor, Tensor, Tensor)",
)
def _row_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, (lse, lse_tau, entropy), grads = arguments[:5], arguments[5:8], arguments[8:13]
    *settings, needs_grad = arguments[13:]
    hidden = inputs[0]
    request, options = _parse_row_settings(settings, hidden.device)
    loss_inputs = options.loss_inputs(*inputs)
    # A result that was not requested is an empty tensor, and so is its gradient.
    is_requested = _requested_results(request)
    row_grads = RowGrads(*(grad if is_wanted else None for grad, is_wanted in zip(grads, is_requested, strict=False)))
    gradients = compute_row_gradients(loss_inputs, request, lse, lse_tau, entropy, row_grads, needs_grad)
    return _fill_unneeded(needs_grad, gradients, hidden)


@_row_gradients.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _allocate(arguments[-1], arguments[:3], arguments[0])


def _flatten_transform(transform: ScoreTransform) -> tuple[float, float | None, float]:
    return transform.scale, transform.softcap, transform.temperature


def _parse_row_settings(settings: Sequence[Any], device: torch.device) -> tuple[SummaryRequest, LossOptions]:
    """Return what the settings of `_row_results` stand for."""
    tau, expected, total, best, scale, softcap, temperature, dtype, impl, memory = settings
    request = SummaryRequest(tau=tau, expected=expected, total=total, best=best)
    transform = ScoreTransform(scale, softcap, temperature)
    return request, LossOptions(dtype, *_choose_backend(dtype, impl, memory, device), transform)


def _requested_results(request: SummaryRequest) -> tuple[bool, ...]:
    """Return which fields of `RowResults` are computed."""
    return True, True, request.tau is not None, request.expected, request.total, request.best


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
    "str kind, float beta, float temperature, ScalarType student_dtype, ScalarType teacher_dtype, str impl, int budget"
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
    tensors, weight, options, needs_grad = arguments[:6], arguments[6], arguments[7:14], arguments[14]
    inputs = DivergenceInputs.from_flat(tensors, *options)
    with torch.autocast(weight.device.type, enabled=False):
        losses, gradients = inputs.compute(weight if any(needs_grad) else None, needs_grad)
    return weighted_sum(losses, weight), *_fill_unneeded(needs_grad, gradients, weight)


@_summed_divergence.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, weight, options, needs_grad = arguments[:6], arguments[6], arguments[7:14], arguments[14]
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
    return _drop_unneeded(needs_grad, gradients, num_others=7)


_row_divergences.register_autograd(_row_divergences_backward, setup_context=_save_sides)


@custom_op(
    "reefknot::divergence_gradients",
    mutates_args=(),
    schema=f"({_SIDES}, Tensor g_losses, {_DIVERGENCE_OPTIONS}, bool[] needs_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _divergence_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, g_losses, options, needs_grad = arguments[:6], arguments[6], arguments[7:14], arguments[14]
    with torch.autocast(g_losses.device.type, enabled=False):
        _, gradients = DivergenceInputs.from_flat(tensors, *options).compute(g_losses, needs_grad)
    return _fill_unneeded(needs_grad, gradients, g_losses)


@_divergence_gradients.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _allocate(arguments[14], arguments[:6], arguments[6])


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
