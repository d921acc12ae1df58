"""Cross-entropy of a linear classifier, computed in blocks of scores, so that the logits are never all in memory.

    loss = rk.linear_cross_entropy(input, linear_weight, target)     # (B, T, D), (V, D), (B, T) -> ()

`linear_cross_entropy` is the public function. It has the arguments of `torch.nn.functional.linear_cross_entropy` and
more. It checks them and calls `summed_loss` or `row_results` of `losses`.

    z_nv = softcap(logit_scale (h_n . w_v + b_v)) / temperature     the score (logit) of class v for row n
    nll_n = logsumexp_v(z_nv) - z_ny                                the loss of row n, with y the target of the row

Shapes: N rows (tokens), D dimensions, V classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.arguments import (
    check_classifier,
    check_devices,
    check_float_tensor,
    check_has_classes,
    check_integer,
    check_is_number,
    check_is_tensor,
    check_number,
    check_target_type,
    check_target_values,
    choose,
    is_distributed,
    replace_ignore_index,
    score_transform,
)
from reefknot.kernels.autograd import RowResults
from reefknot.kernels.choice import Choice, Impl
from reefknot.kernels.columns import ClassVectors
from reefknot.kernels.losses import row_results, smoothing_losses, summed_loss
from reefknot.kernels.parallel import (
    ClassShard,
    ShardTensors,
    open_shard,
    report_failure,
    transform_numbers,
)
from reefknot.kernels.reference import transform_scores
from reefknot.kernels.scores import IGNORE, ScoreTransform, SummaryRequest, accumulation_dtype, safe_class_ids
from reefknot.kernels.small import is_small_problem, small_mean_loss, stored_losses, stores_scores

Reduction = Literal["mean", "sum", "none"]
_FUNCTION = "linear_cross_entropy"
"""The name of the public function, with which error messages begin."""
_OLD_NAMES = {"hidden": "input", "targets": "target", "bias": "linear_bias"}
"""Keywords of earlier versions, and today's names, which are torch's."""
_SHARED_SETTINGS = (
    "logit_scale",
    "softcap",
    "temperature",
    "label_smoothing",
    "z_loss",
    "ignore_index",
    "reduction",
)
"""Settings that must be the same in all processes of a group."""


def linear_cross_entropy(
    input: Tensor | None = None,
    linear_weight: Tensor | None = None,
    target: Tensor | None = None,
    linear_bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    divisor: float | Tensor | None = None,
    check_targets: bool = True,
    impl: Impl | None = None,
    memory: float | None = None,
    group: dist.ProcessGroup | None = None,
    **old_names: Any,
) -> Tensor:
    """Compute the cross-entropy of a linear classifier without storing all scores at once.

        loss = rk.linear_cross_entropy(hidden, head.weight, target)     # (B, T, D), (V, D), (B, T) -> ()

    This replaces `F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)` and has the arguments of
    torch's own `F.linear_cross_entropy`. It returns the same loss, with three differences. At any time, only as many
    scores exist as fit into `memory`. Sums over classes and over blocks of rows are computed at least in float32,
    whatever the input types. If all targets are ignored, the mean is zero and not NaN.

    The gradients of a sum or a mean are computed in the forward pass and stored for the backward pass. Second
    derivatives are available only with `impl = "reference"`.

    Args:
        input: Hidden states, with shape (..., D).
        linear_weight: One vector per class, with shape (V, D), in any floating-point type. Its gradient has the same
            type.
        target: Class ids, with the shape of `input` without its last dimension, (...).
        linear_bias: One number per class, with shape (V,), or None.
        weight: The weight of each class in the loss, with shape (V,), as in `F.cross_entropy`. It gets no gradient.
        reduction: `mean` over the targets that are not ignored, `sum`, or `none` for one loss per target. With
            `weight`, the mean is divided by the sum of the targets' weights, as in torch. Training with `none` takes a
            third more arithmetic, and so does training with label smoothing, the z-loss or float16.
        ignore_index: Targets with this value have a loss of zero and no gradient. The default is -100.
        label_smoothing: The share of every target that is spread over all classes, from 0 to 1.
        options: Accepted so that calls of torch's function work, and not used: `memory` sets the size of the blocks.
        z_loss: Weight of the z-loss, the squared log-sum-exp of a row's scores. It does not depend on `weight`.
        logit_scale: The scores are multiplied by this number first.
        softcap: If given, the scaled scores x become softcap * tanh(x / softcap), as in Gemma 2.
        temperature: The scores are divided by this number last.
        divisor: With `reduction="mean"`, the sum is divided by this number, or tensor of shape (), instead of the
            number of targets: for example the number of targets in all micro-batches of a step.
        check_targets: Raise an error if a target is out of range. On a GPU this check synchronises with the device.
            Without it, and in a compiled or captured graph, the loss of such a target is NaN.
        impl: The implementation: `reference`, `chunked`, `triton` or `auto` (see `using`). The default is the choice
            of `using`.
        memory: Working memory in MiB, not counting inputs and gradients. More memory is faster on a GPU. The default
            is the choice of `using`.
        group: A group of processes that divide the classes among them. Every process passes the same `input`,
            `target` and settings, and its own consecutive rows of `linear_weight`, `linear_bias` and `weight`, in the
            order of the ranks; their numbers may differ. Targets are ids of all classes. Every process gets the same
            loss, the gradients of its own rows, and the whole gradient of `input`, which is summed over the group. All
            processes call the backward pass. Training takes a third more arithmetic. A `linear_weight` that is a
            `DTensor`, divided with `Shard(0)` over a one-dimensional mesh, needs no `group`; it gets a `DTensor` as its
            gradient. Not for compiled graphs or `impl = "reference"`.
        **old_names: The names of earlier versions: `hidden`, `targets` and `bias`.

    Like torch's function, it also accepts class probabilities as `target`, (N, V), and a `linear_weight` of shape (V,
    d_1, ..., d_K, D) with targets (N, d_1, ..., d_K). Both store all scores.

    Returns:
        The mean or the sum, with shape (), or one loss per target, with the shape of `target`; at least in float32.
    """
    if (
        weight is None
        and divisor is None
        and softcap is None
        and impl is None
        and memory is None
        and group is None
        and reduction == "mean"
        and (ignore_index is None or ignore_index == IGNORE)
        and not (label_smoothing or z_loss or old_names)
        and logit_scale == temperature == 1
        and is_small_problem(input, linear_weight, target, linear_bias)
    ):
        return small_mean_loss(input, linear_weight, target, linear_bias, check_targets)  # type: ignore[arg-type]
    if old_names or linear_weight is None or input is None or target is None:
        arguments = {"input": input, "linear_weight": linear_weight, "target": target, "linear_bias": linear_bias}
        arguments = _rename_old_names(arguments, old_names, weight)
        input, linear_weight, target, linear_bias = arguments.values()
    parts = ShardTensors(input, linear_weight, target, linear_bias, weight)  # type: ignore[arg-type]
    is_parallel = group is not None or is_distributed(linear_weight)
    try:
        check_settings(reduction, label_smoothing, z_loss, ignore_index, divisor)
        transform = score_transform(_FUNCTION, logit_scale, softcap, temperature)
        choice = choose(impl, memory)
    except ArgumentError as error:
        if is_parallel:
            report_failure(_FUNCTION, group, parts, _SHARED_SETTINGS, error)
        raise
    settings = _Settings(transform, float(label_smoothing), float(z_loss))
    ignored = IGNORE if ignore_index is None else int(ignore_index)
    shard = None
    if is_parallel:
        numbers = settings.numbers() | {"ignore_index": ignored, "reduction": get_args(Reduction).index(reduction)}
        shard, parts = open_shard(_FUNCTION, group, parts, _check_shard, choice, numbers, check_targets)
        input, linear_weight, target, linear_bias, weight = parts
    elif _needs_plain_formula(linear_weight, target):
        return _plain_formula(*parts, reduction, ignore_index, divisor, settings)
    else:
        _check_tensors(input, linear_weight, target, linear_bias, weight)

    assert input is not None
    assert linear_weight is not None
    assert target is not None
    num_classes = linear_weight.shape[0] if shard is None else shard.num_classes
    hidden_ND = input.reshape(-1, input.shape[-1])
    targets_N = replace_ignore_index(target.reshape(-1).long(), ignored, num_classes)
    if check_targets:
        check_target_values(_FUNCTION, targets_N, target, num_classes, ignored)

    row_weight_N = _row_weights(weight, targets_N, accumulation_dtype(input.dtype), shard)
    tensors = (hidden_ND, linear_weight, linear_bias, targets_N)
    can_store = shard is None and check_targets and not z_loss and isinstance(linear_weight, Tensor)
    if can_store and stores_scores(hidden_ND, num_classes, choice):
        if reduction == "none":
            return stored_losses(*tensors, transform, "none", weight, label_smoothing).view(target.shape)
        total = stored_losses(*tensors, transform, "sum", weight, label_smoothing)
    elif shard is None and reduction != "none" and not label_smoothing and not z_loss:
        total = summed_loss(*tensors, row_weight_N=row_weight_N, transform=transform, choice=choice)
    else:
        loss_N = _losses_of_rows(*tensors, weight, row_weight_N, settings, choice, shard)
        if reduction == "none":
            return loss_N.view(target.shape)
        total = loss_N.sum()
    if reduction == "sum":
        return total
    return _divide(total, targets_N, row_weight_N, divisor)


@dataclass(frozen=True)
class _Settings:
    """What is computed of each row."""

    transform: ScoreTransform
    label_smoothing: float
    z_loss: float

    def numbers(self) -> dict[str, float]:
        """Return the settings by the names of the arguments. A softcap of 0 stands for none."""
        return transform_numbers(self.transform) | {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}


def _losses_of_rows(
    hidden_ND: Tensor,
    weight_VD: ClassVectors,
    bias_V: Tensor | None,
    targets_N: Tensor,
    class_weight_V: Tensor | None,
    row_weight_N: Tensor | None,
    settings: _Settings,
    choice: Choice,
    shard: ClassShard | None,
) -> Tensor:
    """Return one loss per row, with the weights of the classes, label smoothing and the z-loss."""
    smoothing = settings.label_smoothing
    # Without transform and class weights, the mean score follows from the mean class vector.
    is_simple = settings.transform.is_identity and class_weight_V is None and shard is None
    request = SummaryRequest(total=bool(smoothing) and not (is_simple and isinstance(weight_VD, Tensor)))
    compute_results: Callable[..., RowResults] = row_results if shard is None else shard.row_results
    results = compute_results(
        hidden_ND, weight_VD, bias_V, targets_N, request, settings.transform, class_weight_V, choice=choice
    )
    nll_N, lse_N, total_N = results.nll, results.lse, results.total
    is_scored_N = targets_N != IGNORE

    loss_N = nll_N if row_weight_N is None else nll_N * row_weight_N
    if smoothing and is_simple and isinstance(weight_VD, Tensor):
        target_score_N = lse_N - nll_N
        loss_N = loss_N + smoothing * smoothing_losses(hidden_ND, weight_VD, bias_V, targets_N, target_score_N)
    elif smoothing:
        assert total_N is not None
        # sum_v c_v (-log p_v), with c_v the weight of class v, is lse sum_v c_v - sum_v c_v z_v.
        num_classes = weight_VD.shape[0] if shard is None else shard.num_classes
        sum_of_weights: float | Tensor = num_classes
        if class_weight_V is not None:
            sum_of_weights = class_weight_V.sum(dtype=lse_N.dtype) if shard is None else shard.sum_of_weights
        uniform_loss_N = (lse_N * sum_of_weights - total_N) / num_classes
        loss_N = (1 - smoothing) * loss_N + smoothing * uniform_loss_N.where(is_scored_N, 0.0)
    if settings.z_loss:
        loss_N = loss_N + settings.z_loss * lse_N.square().where(is_scored_N, 0.0)
    return loss_N


def _divide(total: Tensor, targets_N: Tensor, row_weight_N: Tensor | None, divisor: float | Tensor | None) -> Tensor:
    """Return a sum of losses divided by `divisor`, or else by the sum of the targets' weights or their number."""
    if divisor is not None:
        return total / _scalar(divisor)
    is_scored_N = targets_N != IGNORE
    if row_weight_N is None:
        return total / is_scored_N.sum().clamp(min=1)
    return total / row_weight_N.sum().where(is_scored_N.any(), 1.0)


def _scalar(divisor: float | Tensor) -> float | Tensor:
    return divisor.reshape(()) if isinstance(divisor, Tensor) else divisor


def _row_weights(
    class_weight_V: Tensor | None, targets_N: Tensor, dtype: torch.dtype, shard: ClassShard | None
) -> Tensor | None:
    """Return the weight of each row's target, zero if it is ignored."""
    if class_weight_V is None:
        return None
    if shard is not None:
        return shard.row_weights(class_weight_V, targets_N, dtype)
    weight_N = class_weight_V.detach()[safe_class_ids(targets_N, class_weight_V.shape[0])]
    return weight_N.to(dtype).where(targets_N != IGNORE, 0.0)


# -- what torch's function accepts, too ----------------------------------------------------------------------------


def _needs_plain_formula(weight: Any, target: Any) -> bool:
    """Return whether the targets are probabilities, or the weight has more than one group of classes."""
    has_probabilities = isinstance(target, Tensor) and target.is_floating_point()
    return has_probabilities or (isinstance(weight, Tensor) and weight.dim() > 2)


def _plain_formula(
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: Reduction,
    ignore_index: int | None,
    divisor: float | Tensor | None,
    settings: _Settings,
) -> Tensor:
    """Compute the loss with all scores in memory, for arguments whose loss cannot be computed in blocks."""
    if settings.z_loss:
        raise ArgumentError(f"{_FUNCTION}: z_loss works with class ids and a weight of shape (classes, dim) only")
    for name, argument in (("input", hidden), ("linear_weight", weight), ("linear_bias", bias)):
        if name != "linear_bias" or argument is not None:
            check_float_tensor(_FUNCTION, name, argument)
    check_is_tensor(_FUNCTION, "target", target)
    check_devices(_FUNCTION, hidden, weight, target, bias, class_weight)
    if hidden.dim() not in (1, 2) or weight.dim() < 2 or weight.shape[-1] != hidden.shape[-1]:
        raise ArgumentError(
            f"{_FUNCTION}: input is {tuple(hidden.shape)}, linear_weight is {tuple(weight.shape)} and target is "
            f"{target.dtype}; with class probabilities (a floating-point target) or groups of classes, input and "
            "linear_weight must be (N, dim) and (classes, ..., dim), with the same dim; class ids must be integers"
        )
    check_has_classes(_FUNCTION, weight)
    target_shape = (*hidden.shape[:-1], *(weight.shape[:-1] if target.is_floating_point() else weight.shape[1:-1]))
    if target.shape != target_shape:
        kind = "class probabilities" if target.is_floating_point() else "class ids"
        raise ArgumentError(
            f"{_FUNCTION}: target is {tuple(target.shape)} {target.dtype}; {kind} must be {target_shape}, and class "
            "ids must be integers"
        )
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ArgumentError(
            f"{_FUNCTION}: linear_bias is {tuple(bias.shape)}; with a linear_weight of {tuple(weight.shape)} it must "
            f"be {tuple(weight.shape[:-1])}"
        )
    check_class_weight(class_weight, weight.shape[0])
    ignored = IGNORE if ignore_index is None else int(ignore_index)
    if not target.is_floating_point():
        targets_N = replace_ignore_index(target.reshape(-1).long(), ignored, weight.shape[0])
        check_target_values(_FUNCTION, targets_N, target, weight.shape[0], ignored)
    elif ignore_index is not None and ignore_index >= 0:
        raise ArgumentError(f"{_FUNCTION}: ignore_index works with class ids only; drop it with class probabilities")

    scores = F.linear(hidden, weight.reshape(-1, weight.shape[-1]), None if bias is None else bias.reshape(-1))
    scores = scores.reshape(*hidden.shape[:-1], *weight.shape[:-1])
    transformed = transform_scores(scores.to(accumulation_dtype(scores.dtype)), settings.transform)
    if class_weight is not None:
        class_weight = class_weight.to(transformed.dtype)
    if target.is_floating_point():
        target = target.to(transformed.dtype)
    loss = F.cross_entropy(
        transformed,
        target,
        weight=class_weight,
        ignore_index=ignored,
        reduction="none" if reduction == "none" else "sum",
        label_smoothing=settings.label_smoothing,
    )
    if reduction != "mean":
        return loss
    if target.is_floating_point():
        return loss / _scalar(target.numel() // weight.shape[0] if divisor is None else divisor)
    row_weight_N = _row_weights(class_weight, targets_N, transformed.dtype, None)
    return _divide(loss, targets_N, row_weight_N, divisor)


# -- checks --------------------------------------------------------------------------------------------------------


def _rename_old_names(
    arguments: dict[str, Tensor | None], old_names: dict[str, Any], class_weight: Any
) -> dict[str, Any]:
    """Return the first four arguments, with those that were passed by an old name, or raise an error."""
    for old_name, value in old_names.items():
        name = _OLD_NAMES.get(old_name)
        if name is None:
            raise TypeError(f"{_FUNCTION}() got an unexpected keyword argument {old_name!r}")
        if arguments[name] is not None:
            raise ArgumentError(f"{_FUNCTION}: {old_name} is the old name of {name}; pass only {name}")
        if not torch.compiler.is_compiling():  # a graph cannot warn
            message = f"{_FUNCTION}: the keyword {old_name} is now called {name}, as in torch"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
        arguments[name] = value
    if arguments["linear_weight"] is None and class_weight is not None:
        raise ArgumentError(
            f"{_FUNCTION}: weight means the weights of the classes in the loss, as in torch; "
            "pass the classifier's weight as linear_weight"
        )
    for name in ("input", "linear_weight", "target"):
        if arguments[name] is None:
            raise ArgumentError(f"{_FUNCTION}: {name} is missing; pass (input, linear_weight, target)")
    return arguments


def check_settings(
    reduction: str, label_smoothing: float, z_loss: float, ignore_index: int | None, divisor: float | Tensor | None
) -> None:
    """Raise an error unless these settings of the loss are valid."""
    if ignore_index is not None:
        check_integer(_FUNCTION, "ignore_index", ignore_index)
    if reduction not in get_args(Reduction):
        raise ArgumentError(f"{_FUNCTION}: reduction = {reduction!r}: must be one of {', '.join(get_args(Reduction))}")
    check_is_number(_FUNCTION, "label_smoothing", label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ArgumentError(f"{_FUNCTION}: label_smoothing = {label_smoothing!r}: must be from 0 to 1")
    check_number(_FUNCTION, "z_loss", z_loss, 0)
    if divisor is None:
        return
    if reduction != "mean":
        raise ArgumentError(
            f"{_FUNCTION}: divisor replaces the number of targets of a mean; with {reduction!r} drop it"
        )
    if isinstance(divisor, Tensor):
        if divisor.numel() != 1:
            raise ArgumentError(f"{_FUNCTION}: divisor is {tuple(divisor.shape)}; it must be one number")
    else:
        check_number(_FUNCTION, "divisor", divisor, 0, above=True)


def _check_tensors(input: Any, linear_weight: Any, target: Any, linear_bias: Any, class_weight: Any) -> None:
    check_classifier(_FUNCTION, input, linear_weight, linear_bias)
    check_target_type(_FUNCTION, input, target)
    check_class_weight(class_weight, linear_weight.shape[0])
    check_devices(_FUNCTION, input, linear_weight, target, linear_bias, class_weight)


def _check_shard(input: Any, linear_weight: Any, target: Any, linear_bias: Any, class_weight: Any) -> None:
    """Check the tensors of a process that has some of the classes."""
    if _needs_plain_formula(linear_weight, target):
        raise ArgumentError(f"{_FUNCTION}: group works with class ids and a weight of shape (classes, dim) only")
    _check_tensors(input, linear_weight, target, linear_bias, class_weight)


def check_class_weight(class_weight: Any, num_classes: int) -> None:
    """Raise an error unless there is one weight per class, or None."""
    if class_weight is None:
        return
    check_is_tensor(_FUNCTION, "weight", class_weight)
    if class_weight.shape != (num_classes,) or not class_weight.is_floating_point():
        hint = "; pass the classifier's weight as linear_weight" if class_weight.dim() == 2 else ""
        raise ArgumentError(
            f"{_FUNCTION}: weight is {tuple(class_weight.shape)} {class_weight.dtype}; the weights of the classes must "
            f"be ({num_classes},) floating-point numbers{hint}"
        )
