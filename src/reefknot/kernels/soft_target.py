"""Softmax-weighted means of class vectors for the augmented loss (Inan et al. 2017): attention over a word table.

`soft_targets` is the public function. For each query it returns the mean of the values under a softmax over the keys,
as attention does, and the negative entropy of the softmax. The queries l are the input vectors of the targets, the keys
k are all input vectors, and the values w are all class vectors:

    q_u = softmax_v(k_v . l_u / tau)    mean_u = sum_v (q_uv - 1 / V) w_v    negentropy_u = sum_v q_uv log q_uv

The mean of all values is subtracted, because a divergence between softmaxes over the values does not depend on it. The
U x V weights are computed in blocks (`Attention`), like the scores of a loss, and again in the backward pass.

`lse` stands for log-sum-exps of the scores k_v . l_u / tau. The gradient of `x` is `grad_x`.
Shapes: U queries (distinct targets), V classes, D dimensions of queries and keys, C dimensions of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from reefknot.kernels.autograd import compute_once_differentiable
from reefknot.kernels.blocks import BlockSize
from reefknot.kernels.choice import current_choice, resolve_impl
from reefknot.kernels.passes import LossInputs, allocate_gradient, combine_normalisers
from reefknot.kernels.reference import compute_dtype, reference_soft_targets
from reefknot.kernels.scores import (
    GradientTerms,
    SoftTargetTerms,
    SummaryRequest,
    TorchBackend,
    accumulation_dtype,
    add_class_gradient,
    add_row_gradient,
    get_backend,
)

if TYPE_CHECKING:
    from reefknot.kernels.parallel import ClassShard


class SoftTargets(NamedTuple):
    """Means of the values, (U, C), and negative entropies, (U,), at least in float32."""

    mean: Tensor
    negentropy: Tensor


def soft_targets(queries_UD: Tensor, keys_VD: Tensor, values_VC: Tensor, tau: float) -> SoftTargets:
    """Return the means of the values under each query's softmax over the keys, and the softmaxes' negative entropies.

    Args:
        queries_UD: One query per distinct target.
        keys_VD: One key per class.
        values_VC: One value per class. It may be the same tensor as the keys.
        tau: Temperature of the softmax.
    """
    choice = current_choice()
    dtype = compute_dtype(queries_UD, keys_VD)
    # If the same tensor is keys and values, its gradient is summed in one tensor.
    values = None if values_VC is keys_VD else values_VC
    if torch.compiler.is_compiling() and choice.impl != "reference":
        from reefknot.kernels import ops

        return ops.soft_targets(queries_UD, keys_VD, values, tau, dtype, choice)
    impl = resolve_impl(choice, queries_UD.device, dtype)
    if impl == "reference":
        return SoftTargets(*reference_soft_targets(queries_UD, keys_VD, values_VC, tau))
    options = tau, dtype, get_backend(impl), choice.budget(queries_UD.device)
    return SoftTargets(*_SoftTargetsFunction.apply(queries_UD, keys_VD, values, *options))  # type: ignore[no-untyped-call]


def parallel_soft_targets_of_all(
    queries_UD: Tensor, keys_vD: Tensor, values_vC: Tensor, tau: float, shard: ClassShard
) -> SoftTargets:
    """Return `soft_targets` over keys and values that are divided among processes.

    Args:
        queries_UD: The queries, the same in every process.
        keys_vD: The keys of this process.
        values_vC: The values of this process. It may be the same tensor as the keys.
        tau: Temperature of the softmax.
        shard: Where the classes of this process lie.
    """
    choice = current_choice()
    dtype = compute_dtype(queries_UD, keys_vD)
    values = None if values_vC is keys_vD else values_vC
    backend = get_backend(resolve_impl(choice, queries_UD.device, dtype))
    options = tau, dtype, backend, choice.budget(queries_UD.device), shard
    return SoftTargets(*_SoftTargetsFunction.apply(queries_UD, keys_vD, values, *options))  # type: ignore[no-untyped-call]


class _SoftTargetsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None,
        tau: float,
        dtype: torch.dtype,
        backend: TorchBackend,
        budget: int,
        shard: ClassShard | None = None,
    ) -> tuple[Tensor, Tensor]:
        ctx.options = tau, dtype, backend, budget, shard
        with torch.autocast(queries.device.type, enabled=False):
            mean, negentropy, lse = Attention(queries, keys, values, *ctx.options).forward()
        ctx.save_for_backward(queries, keys, values, mean, negentropy, lse)
        return mean, negentropy

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Any, ...]:
        needs_grad, options = ctx.needs_input_grad[:3], ctx.options

        def compute(*tensors: Any) -> tuple[Tensor | None, ...]:
            (queries, keys, values), results, grads = tensors[:3], tensors[3:6], tensors[6:]
            with torch.autocast(queries.device.type, enabled=False):
                return Attention(queries, keys, values, *options).backward(results, grads, needs_grad)

        gradients = compute_once_differentiable(compute, *ctx.saved_tensors, *output_grads)
        return (*gradients, *[None] * len(options))


class Attention:
    """The forward and backward pass over blocks of scores of queries and keys.

    Args:
        queries: (U, D).
        keys: (V, D).
        values: (V, C), or None if the keys are also the values.
        tau: Temperature of the softmax.
        dtype: The type of the matrix products.
        backend: Computes the blocks of scores.
        budget: Working memory in bytes.
        shard: Where the keys and values lie, if they are only those of this process.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None,
        tau: float,
        dtype: torch.dtype,
        backend: TorchBackend,
        budget: int,
        shard: ClassShard | None = None,
    ) -> None:
        no_targets = queries.new_full((len(queries),), -1, dtype=torch.long)
        # Queries and keys are the hidden states and class vectors of a loss without targets.
        inputs = LossInputs(
            hidden=queries, weight=keys, bias=None, targets=no_targets, dtype=dtype, backend=backend, budget=budget
        )
        self.shard = shard
        if shard is not None:
            inputs = replace(inputs, mean=shard.mean_class_vector(inputs))
        self.mean_key = inputs.mean_class_vector()
        self.key_inputs = inputs.subtract_mean(self.mean_key)
        self.values = values
        self.value_inputs = self.key_inputs
        if values is not None and not _is_same_memory(values, keys):
            value_inputs = replace(inputs, weight=values, mean=None)
            if shard is not None:
                value_inputs = replace(value_inputs, mean=shard.mean_class_vector(value_inputs))
            self.value_inputs = value_inputs.subtract_mean(value_inputs.mean_class_vector())
        self.has_own_values = self.value_inputs is not self.key_inputs
        self.tau = tau
        self.uniform = 1 / (keys.shape[0] if shard is None else shard.num_classes)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, negative entropies and log-sum-exps, in two passes over the classes: normalisers, then means.

        If the classes are divided among processes, the processes add up their results after each pass.
        """
        inputs = self.key_inputs
        if not inputs.num_rows:
            empty = inputs.hidden.new_zeros(0, dtype=accumulation_dtype(inputs.dtype))
            return empty.new_zeros(0, self.value_inputs.weight.shape[1]), empty, empty.clone()
        block_size = inputs.block_size()
        row_slices = list(block_size.row_slices(inputs.num_rows))
        lse = torch.cat([self._compute_normalisers(rows, block_size) for rows in row_slices])
        if self.shard is not None:
            lse = self.shard.combine_normalisers(lse)
        means = [self._compute_means(rows, lse[rows], block_size) for rows in row_slices]
        key_means = torch.cat([key_means for key_means, _ in means])
        value_means = torch.cat([value_means for _, value_means in means]) if self.has_own_values else key_means
        if self.shard is not None:
            self.shard.add_up(key_means)
            if self.has_own_values:
                self.shard.add_up(value_means)
        # The mean of the keys gives the mean score: sum_v q_v log q_v = sum_v q_v z_v / tau - lse.
        expected_keys = key_means if inputs.centre is not None else key_means + self.mean_key
        expected_scores = [
            (inputs.hidden_block(rows) * expected_keys[rows]).sum(-1) / self.tau - lse[rows] for rows in row_slices
        ]
        return value_means, torch.cat(expected_scores), lse

    def _compute_normalisers(self, rows: slice, block_size: BlockSize) -> Tensor:
        """Return the log-sum-exps of some queries' scores."""
        inputs = self.key_inputs
        queries = inputs.hidden_block(rows)
        request = SummaryRequest(lse=False, tau=self.tau)
        normalisers: list[Tensor | None] = []
        for classes in block_size.class_slices(inputs.num_classes):
            keys, _ = inputs.class_block(classes)
            normalisers.append(inputs.backend.summarise(queries, keys, None, request).lse_tau)
        lse = combine_normalisers(normalisers)
        assert lse is not None
        return lse

    def _compute_means(self, rows: slice, lse: Tensor, block_size: BlockSize) -> tuple[Tensor, Tensor]:
        """Return the sums of keys and of values, weighted by q - 1 / V, for some queries."""
        inputs = self.key_inputs
        queries = inputs.hidden_block(rows)
        key_means = queries.new_empty(queries.shape, dtype=accumulation_dtype(queries.dtype))
        value_means = key_means
        if self.has_own_values:
            value_means = key_means.new_empty(queries.shape[0], self.value_inputs.weight.shape[1])
        for classes in block_size.class_slices(inputs.num_classes):
            keys, _ = inputs.class_block(classes)
            q = self._softmax(queries, keys, inputs.targets[rows], lse)
            add_row_gradient(key_means, q, keys, overwrite=classes.start == 0)
            if self.has_own_values:
                values, _ = self.value_inputs.class_block(classes)
                add_row_gradient(value_means, q, values, overwrite=classes.start == 0)
            del q  # free it before the next block is computed
        return key_means, value_means

    def backward(
        self, results: Sequence[Tensor], output_grads: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of queries, keys and values. If the keys are also the values, the second is for both.

        Args:
            results: The results of `forward`.
            output_grads: The gradients of means and negative entropies.
            needs_grad: Whether the gradients of queries, keys and values are needed.
        """
        (mean, negentropy, lse), (grad_mean, grad_negentropy) = results, output_grads
        needs_queries, needs_keys, needs_values = needs_grad
        inputs = self.key_inputs
        values_mean = mean if self.value_inputs.centre is not None else mean + self.value_inputs.mean_class_vector()
        expected_gradient = (grad_mean * values_mean).sum(-1) + grad_negentropy * negentropy
        terms = SoftTargetTerms(lse, grad_negentropy, expected_gradient, self.tau, self.uniform)
        needs_scores = needs_queries or needs_keys
        block_size = inputs.block_size(matrices=2 if needs_scores else 1)
        grad_queries = grad_keys = grad_values = None
        if needs_queries:
            grad_queries = torch.empty_like(inputs.hidden, memory_format=torch.contiguous_format)
        if needs_keys:
            grad_keys = allocate_gradient(inputs.weight, inputs.num_rows, block_size)
        if needs_values and self.values is not None:
            grad_values = allocate_gradient(self.values, inputs.num_rows, block_size)
        sums = _AttentionGradients(grad_queries, grad_keys, grad_values)
        for rows in block_size.row_slices(inputs.num_rows):
            if needs_scores:
                self._backward_rows(rows, grad_mean[rows], terms.select(rows), block_size, sums)
            elif grad_values is not None:
                self._backward_rows_of_values(rows, grad_mean[rows], lse[rows], block_size, grad_values)
        if grad_queries is not None and self.shard is not None:
            self.shard.add_up(grad_queries)
        if grad_keys is not None:
            grad_keys = grad_keys.to(inputs.weight.dtype)
        if grad_values is not None and self.values is not None:
            grad_values = grad_values.to(self.values.dtype)
        return grad_queries, grad_keys, grad_values

    def _backward_rows(
        self,
        rows: slice,
        grad_mean: Tensor,
        terms: SoftTargetTerms,
        block_size: BlockSize,
        sums: _AttentionGradients,
    ) -> None:
        """Add the gradients of some queries, one block of classes after the other."""
        inputs = self.key_inputs
        queries, grad_mean = inputs.hidden_block(rows), grad_mean.to(inputs.dtype).contiguous()
        num_queries, is_first = queries.shape[0], rows.start == 0
        grad_queries = None
        if sums.queries is not None:
            grad_queries = queries.new_empty(queries.shape, dtype=accumulation_dtype(queries.dtype))
        for classes in block_size.class_slices(inputs.num_classes):
            keys, _ = inputs.class_block(classes)
            values = self.value_inputs.class_block(classes)[0] if self.has_own_values else keys
            # Two matrices in one, (2U, V): the softmax q, and below it the gradient of the scores.
            probs_and_grads = inputs.backend.soft_target_gradients(queries, grad_mean, keys, values, terms)
            q, dz = probs_and_grads[:num_queries], probs_and_grads[num_queries:]
            if sums.keys is not None and self.values is None:
                # The keys are also the values, so one product adds both of their gradients.
                add_class_gradient(
                    sums.keys[classes], probs_and_grads, torch.cat([grad_mean, queries]), overwrite=is_first
                )
            elif sums.keys is not None:
                add_class_gradient(sums.keys[classes], dz, queries, overwrite=is_first)
            if grad_queries is not None:
                add_row_gradient(grad_queries, dz, keys, overwrite=classes.start == 0)
            if sums.values is not None:
                add_class_gradient(sums.values[classes], q, grad_mean, overwrite=is_first)
            del probs_and_grads, q, dz  # free them before the next block is computed
        if sums.queries is not None and grad_queries is not None:
            sums.queries[rows] = grad_queries

    def _backward_rows_of_values(
        self, rows: slice, grad_mean: Tensor, lse: Tensor, block_size: BlockSize, grad_values: Tensor
    ) -> None:
        """Add the gradient of the values alone, for which the softmax is enough."""
        inputs = self.key_inputs
        queries, grad_mean = inputs.hidden_block(rows), grad_mean.to(inputs.dtype).contiguous()
        for classes in block_size.class_slices(inputs.num_classes):
            keys, _ = inputs.class_block(classes)
            q = self._softmax(queries, keys, inputs.targets[: len(queries)], lse)
            add_class_gradient(grad_values[classes], q, grad_mean, overwrite=rows.start == 0)
            del q  # free it before the next block is computed

    def _softmax(self, queries: Tensor, keys: Tensor, no_targets: Tensor, lse: Tensor) -> Tensor:
        """Return q - 1 / V for a block, where q is the softmax."""
        terms = GradientTerms(lse_tau=lse, tempered_weight=torch.ones_like(lse), tau=self.tau, uniform=self.uniform)
        # The gradient of a log-sum-exp is the softmax.
        q, _ = self.key_inputs.backend.score_gradient(queries, keys, None, no_targets, terms, bias_gradient=False)
        return q


@dataclass(frozen=True)
class _AttentionGradients:
    """The tensors in which the gradients are summed. None for a gradient that is not needed."""

    queries: Tensor | None
    keys: Tensor | None
    values: Tensor | None


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same memory, although autograd sees two different tensors."""
    has_same_layout = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return has_same_layout and a.data_ptr() == b.data_ptr()
