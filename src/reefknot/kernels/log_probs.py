"""Log-probabilities, entropies and the best class of a linear classifier, without the N x V scores.

    results = rk.linear_log_probs(hidden, head.weight, tokens)     # (B, T, D), (V, D), (B, T)
    results.log_probs, results.entropy                             # (B, T) each, with gradients

`linear_log_probs` is the public function, for reinforcement learning and for scoring text. One pass over the blocks of
scores computes all its results; the backward pass computes the scores once more.

Shapes: N rows (tokens), D dimensions, V classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.arguments import (
    check_classifier,
    check_devices,
    check_integer,
    check_target_type,
    check_target_values,
    choose,
    is_distributed,
    replace_ignore_index,
    score_transform,
)
from reefknot.kernels.choice import Impl
from reefknot.kernels.losses import row_results
from reefknot.kernels.parallel import ShardTensors, open_shard, report_failure, transform_numbers
from reefknot.kernels.scores import IGNORE, SummaryRequest

_FUNCTION = "linear_log_probs"
_SHARED_SETTINGS = ("logit_scale", "softcap", "temperature", "ignore_index")
"""Settings that must be the same in all processes of a group."""


class LogProbs(NamedTuple):
    """What `linear_log_probs` returns, each with the shape of the targets, at least in float32."""

    log_probs: Tensor
    """The log-probability of each target. It is zero for targets that are ignored."""
    entropy: Tensor
    """The entropy of each row's softmax, in nats."""
    lse: Tensor
    """The log-sum-exp of each row's scores."""
    argmax: Tensor
    """The class with the largest score, an integer without a gradient. The first one if several are equal."""


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = IGNORE,
    check_targets: bool = True,
    impl: Impl | None = None,
    memory: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> LogProbs:
    """Compute log-probabilities of targets, entropies and best classes without storing all scores at once.

        policy = rk.linear_log_probs(hidden, head.weight, tokens, temperature=0.7)
        loss = -(advantage * policy.log_probs).mean() - 0.01 * policy.entropy.mean()

    The softmax is over the scores z = softcap(logit_scale (h . w + b)) / temperature. Scores and sums are computed at
    least in float32, whatever the types of the tensors. The gradients are exact, and results that are not used do not
    take part in the backward pass.

    Args:
        input: Hidden states h, with shape (..., D).
        linear_weight: One vector w per class, with shape (V, D).
        target: Class ids, with the shape of `input` without its last dimension, (...).
        linear_bias: One number b per class, with shape (V,), or None.
        temperature: The scores are divided by this number last.
        softcap: If given, the scaled scores x become softcap * tanh(x / softcap).
        logit_scale: The scores are multiplied by this number first.
        ignore_index: Targets with this value have a log-probability of zero, without a gradient. Their rows still have
            an entropy, a log-sum-exp and a best class.
        check_targets: Raise an error if a target is out of range. On a GPU this check synchronises with the device.
            Without it, and in a compiled or captured graph, the log-probability of such a target is NaN.
        impl: The implementation, as in `linear_cross_entropy`.
        memory: Working memory in MiB, as in `linear_cross_entropy`.
        group: A group of processes that divide the classes among them, as in `linear_cross_entropy`. Every process
            gets the results over all classes.
    """
    arguments = ShardTensors(input, linear_weight, target, linear_bias)
    is_parallel = group is not None or is_distributed(linear_weight)
    try:
        check_integer(_FUNCTION, "ignore_index", ignore_index)
        transform = score_transform(_FUNCTION, logit_scale, softcap, temperature)
        choice = choose(impl, memory)
    except ArgumentError as error:
        if is_parallel:
            report_failure(_FUNCTION, group, arguments, _SHARED_SETTINGS, error)
        raise
    shard = None
    if is_parallel:
        numbers = transform_numbers(transform) | {"ignore_index": ignore_index}
        shard, arguments = open_shard(_FUNCTION, group, arguments, _check_tensors, choice, numbers, check_targets)
        input, linear_weight, target, linear_bias, _ = arguments
    else:
        _check_tensors(input, linear_weight, target, linear_bias)
    num_classes = linear_weight.shape[0] if shard is None else shard.num_classes
    hidden_ND = input.reshape(-1, input.shape[-1])
    targets_N = replace_ignore_index(target.reshape(-1).long(), ignore_index, num_classes)
    if check_targets:
        check_target_values(_FUNCTION, targets_N, target, num_classes, ignore_index)

    request = SummaryRequest(expected=True, best=True)
    compute_results = row_results if shard is None else shard.row_results
    results = compute_results(hidden_ND, linear_weight, linear_bias, targets_N, request, transform, choice=choice)
    assert results.entropy is not None
    assert results.best_class is not None
    log_probs_N = -results.nll
    per_row = (log_probs_N, results.entropy, results.lse, results.best_class)
    return LogProbs(*(result_N.view(target.shape) for result_N in per_row))


def _check_tensors(input: Any, linear_weight: Any, target: Any, linear_bias: Any, _: None = None) -> None:
    check_classifier(_FUNCTION, input, linear_weight, linear_bias)
    check_target_type(_FUNCTION, input, target)
    check_devices(_FUNCTION, input, linear_weight, target, linear_bias)
