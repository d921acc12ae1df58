"""Losses of a classifier whose classes are divided among the processes of a group (vocabulary parallelism).

    loss = rk.linear_cross_entropy(hidden, my_rows, target, group=group)     # my_rows: some of the V rows, (v, D)

Every process has the same hidden states and targets, and its own consecutive classes, in the order of the ranks.
`open_shard` compares what the processes pass, and returns a `ClassShard`: where the classes of this process lie among
all classes. `ClassShard.row_results` has the arguments and results of `losses.row_results`:

- Forward, every process summarises the scores of its classes in blocks (`passes`). One exchange of a few numbers per
  row then gives every process the summaries of all classes.
- Backward, every process computes the gradients of its classes with the log-sum-exps of all classes. Each class adds
  to the gradient of the hidden states, so this gradient is summed over the processes, in float32 or wider.

`sharded_embedding` looks up vectors in the same shards, for a model whose two ends are tied.

The results of the processes are combined in the order of their ranks, so every process gets the same bits.
Shapes: N rows (tokens), D dimensions, v classes of this process, V classes of all processes, F facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import ArgumentError, describe_type
from reefknot.kernels.arguments import check_is_tensor, is_distributed, needs_operators
from reefknot.kernels.autograd import (
    LossOptions,
    RowGrads,
    RowResults,
    build_gradient_terms,
    compute_once_differentiable,
)
from reefknot.kernels.choice import Choice, resolve_impl
from reefknot.kernels.passes import (
    LossInputs,
    combine_normalisers,
    combine_summaries,
    compute_gradients,
    compute_losses,
)
from reefknot.kernels.reference import compute_dtype
from reefknot.kernels.scores import (
    IDENTITY,
    RowSummary,
    ScoreTransform,
    SummaryRequest,
    accumulation_dtype,
    at_least_float32,
    get_backend,
    is_class,
    mask_ignored,
    safe_class_ids,
)


class ShardTensors(NamedTuple):
    """The tensors of a loss, named as the arguments of `linear_cross_entropy`, in the order of its arguments."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    weight: Tensor | None = None


@dataclass(frozen=True)
class ClassShard:
    """The classes of this process, among the classes of all processes of a group."""

    group: dist.ProcessGroup
    start: int
    """The id of this process's first class."""
    num_classes: int
    """Number of classes of all processes, V."""
    sum_of_weights: float
    """The sum of the weights of all classes. It is 0 if classes have no weights."""
    watched: tuple[tuple[Tensor, int], ...] = ()
    """The arguments of type `DTensor`, and their versions in the forward pass."""

    def check_unchanged(self) -> None:
        """Raise an error if a `DTensor` was changed in place. Autograd sees only its local part, and misses that."""
        for tensor, version in self.watched:
            if tensor._version != version:
                raise RuntimeError(
                    "a DTensor that the gradient depends on was changed in place after the forward pass; call "
                    "backward() before you change it"
                )

    def mean_class_vector(self, inputs: LossInputs) -> Tensor:
        """Return the mean of the class vectors of all processes, (D,)."""
        sum_D = inputs.mean_class_vector() * inputs.num_classes
        self.add_up(sum_D)
        return sum_D / self.num_classes

    def has_last_class(self, num_local: int) -> bool:
        """Return whether the last of all classes is one of this process's `num_local` classes."""
        return self.start + num_local == self.num_classes

    def combine_normalisers(self, lse_N: Tensor) -> Tensor:
        """Return the log-sum-exps over the classes of all processes, given those over the classes of this process."""
        whole = combine_normalisers(list(gather_in_order(lse_N, self.group)))
        assert whole is not None
        return whole

    def add_up(self, x: Tensor) -> None:
        """Add the tensors of the other processes, in place."""
        dist.all_reduce(x, group=self.group)

    def local_ids(self, ids: Tensor) -> Tensor:
        """Return ids that count from this process's first class. Ids of other processes are out of range."""
        return ids - self.start

    def row_weights(self, class_weight_v: Tensor, targets_N: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight of each row's target, (N,), zero if it is ignored."""
        local_targets_N = self.local_ids(targets_N)
        num_local = class_weight_v.shape[0]
        weight_N = class_weight_v.detach()[safe_class_ids(local_targets_N, num_local)].to(dtype)
        weight_N = weight_N.where(is_class(local_targets_N, num_local), 0.0)
        # One process has the weight and the others have zero, so the sum is exact.
        dist.all_reduce(weight_N, group=self.group)
        return weight_N

    def row_results(
        self,
        hidden_ND: Tensor,
        weight_vD: Tensor,
        bias_v: Tensor | None,
        targets_N: Tensor,
        request: SummaryRequest,
        transform: ScoreTransform = IDENTITY,
        class_weight_v: Tensor | None = None,
        *,
        choice: Choice,
    ) -> RowResults:
        """Return losses and summaries of each row's scores over the classes of all processes.

        Args:
            hidden_ND: Hidden states, the same in every process.
            weight_vD: The class vectors of this process.
            bias_v: The biases of this process's classes, or None.
            targets_N: Target ids from 0 to V - 1, the same in every process.
            request: Which summaries to compute.
            transform: Applied to the scores.
            class_weight_v: The weights of this process's classes in `total`. None stands for weights of 1.
            choice: Implementation and working memory.
        """
        dtype = compute_dtype(hidden_ND, weight_vD)
        backend = get_backend(resolve_impl(choice, hidden_ND.device, dtype))
        options = LossOptions(dtype, backend, choice.budget(hidden_ND.device), transform)
        tensors = (hidden_ND, weight_vD, bias_v, targets_N, class_weight_v)
        results = ParallelRowLossesFunction.apply(*tensors, request, options, self)  # type: ignore[no-untyped-call]
        return RowResults(*results)


# -- losses of rows ------------------------------------------------------------------------------------------------


class ParallelRowLossesFunction(torch.autograd.Function):
    """`RowLossesFunction` over the classes of all processes."""

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        class_weight: Tensor | None,
        request: SummaryRequest,
        options: LossOptions,
        shard: ClassShard,
    ) -> tuple[Tensor | None, ...]:
        inputs = options.loss_inputs(hidden, weight, bias, shard.local_ids(targets), class_weight)
        with torch.autocast(hidden.device.type, enabled=False):
            return tuple(_compute_row_results(inputs, targets, request, shard))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        *tensors, ctx.request, ctx.options, ctx.shard = inputs
        results = RowResults(*output)  # type: ignore[arg-type]
        if results.best_class is not None:
            ctx.mark_non_differentiable(results.best_class)
        ctx.save_for_backward(*tensors, results.lse, results.lse_tau, results.entropy)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Any, ...]:
        needs_grad, options, shard = ctx.needs_input_grad[:3], ctx.options, ctx.shard
        tau = ctx.request.tau
        shard.check_unchanged()

        def compute(*tensors: Any) -> tuple[Tensor | None, ...]:
            hidden, weight, bias, targets, class_weight, lse, lse_tau, entropy = tensors[:8]
            output_grads = RowGrads(*tensors[8:])
            # The terms are the same in every process: a target counts in the softmax, whichever process has it.
            has_target = is_class(targets, shard.num_classes)
            terms = build_gradient_terms(has_target, lse, entropy, output_grads, options.transform)
            if tau is not None and output_grads.lse_tau is not None:
                assert output_grads.lse is None, "every process would add the gradient of the mean score"
                terms = replace(
                    terms,
                    lse_tau=lse_tau,
                    tempered_weight=output_grads.lse_tau / tau,
                    tau=tau,
                    uniform=1 / shard.num_classes,
                )
            # The gradient of float32 hidden states is in float32, so that it is rounded only after the sum.
            local_targets = shard.local_ids(targets)
            inputs = options.loss_inputs(at_least_float32(hidden), weight, bias, local_targets, class_weight)
            with torch.autocast(hidden.device.type, enabled=False):
                if tau is not None:
                    inputs = replace(inputs, mean=shard.mean_class_vector(inputs))
                sums = compute_gradients(inputs, terms, needs_grad, tau)
                grad_hidden, grad_weight, grad_bias = sums.in_input_dtypes()
            if grad_hidden is not None:
                dist.all_reduce(grad_hidden, group=shard.group)
                grad_hidden = grad_hidden.to(hidden.dtype)
            return grad_hidden, grad_weight, grad_bias

        # The last output is a class, which has no gradient.
        gradients = compute_once_differentiable(compute, *ctx.saved_tensors, *output_grads[:-1])
        return (*gradients, None, None, None, None, None)


def _compute_row_results(
    inputs: LossInputs, targets_N: Tensor, request: SummaryRequest, shard: ClassShard
) -> RowResults:
    """Return losses and summaries over the classes of all processes.

    Args:
        inputs: The classes of this process, with targets that count from its first class.
        targets_N: Targets that count from the first of all classes.
        request: Which summaries to compute.
        shard: Where the classes of this process lie.
    """
    if request.tau is not None:
        inputs = replace(inputs, mean=shard.mean_class_vector(inputs))
    _, local = compute_losses(inputs, request)
    if local.best_class is not None:
        local = local._replace(best_class=local.best_class + shard.start)
    dtype = accumulation_dtype(inputs.dtype)
    # All of it goes into one exchange. Float64 holds float32 numbers and class ids exactly.
    columns = {name: value for name, value in local._asdict().items() if value is not None}
    message = torch.stack([column.double() for column in (*columns.values(), _local_target_scores(inputs))])
    processes = gather_in_order(message, shard.group)

    target_score_N = torch.stack([process[-1] for process in processes]).sum(0)
    whole = combine_summaries([RowSummary(**dict(zip(columns, process, strict=False))) for process in processes])
    assert whole.lse is not None
    nll_N = mask_ignored(whole.lse - target_score_N, targets_N, shard.num_classes)
    entropy_N = None if whole.expected is None else (whole.lse - whole.expected).to(dtype)
    total_N = None if whole.total is None else whole.total.to(dtype)
    best_class_N = None if whole.best_class is None else whole.best_class.long()
    lse_tau_N = None if whole.lse_tau is None else whole.lse_tau.to(dtype)
    return RowResults(nll_N.to(dtype), whole.lse.to(dtype), lse_tau_N, entropy_N, total_N, best_class_N)


def _local_target_scores(inputs: LossInputs) -> Tensor:
    """Return the score of each row's target, (N,), and zero if the target is not a class of this process."""
    scores_N = inputs.hidden.new_zeros(inputs.num_rows, dtype=accumulation_dtype(inputs.dtype))
    for rows in inputs.block_size(gradients=False).row_slices(inputs.num_rows):
        scores_N[rows] = inputs.target_scores(inputs.hidden_block(rows), inputs.targets[rows])
    return scores_N.where(inputs.has_target(slice(None)), 0.0)


def gather_in_order(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all processes, in the order of their ranks."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


# -- the arguments of all processes --------------------------------------------------------------------------------


def transform_numbers(transform: ScoreTransform) -> dict[str, float]:
    """Return the settings of a transform by the names of the arguments. A softcap of 0 stands for none."""
    return {
        "logit_scale": transform.scale,
        "softcap": transform.softcap or 0.0,
        "temperature": transform.temperature,
    }


def open_shard(
    function: str,
    group: dist.ProcessGroup | None,
    tensors: ShardTensors,
    check: Callable[..., None],
    choice: Choice,
    settings: dict[str, float],
    check_targets: bool,
) -> tuple[ClassShard, ShardTensors]:
    """Compare the arguments of all processes, or raise an error in every process.

    On a GPU this waits for the device, because the sizes of the other processes' shards are read.

    Args:
        function: The name of the public function, with which error messages begin.
        group: The group, or None if `linear_weight` is a `DTensor`, whose mesh has the group.
        tensors: The arguments of this process. They may be of type `DTensor`.
        check: Called with the five tensors of this process. It raises an `ArgumentError` if they do not fit together.
        choice: The implementation.
        settings: Other arguments that must be the same in every process, by name.
        check_targets: Compare the targets of the processes too.

    Returns:
        Where the classes of this process lie, and its tensors, none of which is a `DTensor`.
    """
    if choice.impl == "reference":
        raise ArgumentError(
            f"{function}: impl = 'reference' does not divide the classes among processes; use impl = 'auto'"
        )
    group = _find_group(function, group, tensors)
    distributed: list[Any] = [tensor for tensor in tensors if is_distributed(tensor)]
    watched = tuple((tensor, tensor._version) for tensor in distributed if not tensor.is_inference())
    tensors = ShardTensors(*(_to_local(function, name, tensor) for name, tensor in tensors._asdict().items()))
    check_is_tensor(function, "input", tensors.input)
    if needs_operators(tensors.input):
        raise ArgumentError(
            f"{function}: group does not work in a compiled graph or without values; call the function outside of the "
            "graph"
        )
    failure = None
    try:
        check(*tensors)
        facts = _Facts.of(tensors, settings, check_targets)
    except ArgumentError as error:
        # The other processes wait for this one, so the error is raised after the exchange.
        failure = error
        facts = _Facts.of_failure(tensors.input, settings)
    shard = facts.exchange(function, group, failure)
    return replace(shard, watched=watched), tensors


def report_failure(
    function: str,
    group: dist.ProcessGroup | None,
    tensors: ShardTensors,
    setting_names: Sequence[str],
    failure: ArgumentError,
) -> None:
    """Raise an error about a setting of this process, after the other processes, which wait for it, know of it.

    Args:
        function: The name of the public function.
        group: The group, or None if `linear_weight` is a `DTensor`.
        tensors: The arguments of this process.
        setting_names: The names of the settings that the other processes exchange.
        failure: The error.
    """
    group = _find_group(function, group, tensors)
    hidden = _to_local(function, "input", tensors.input)
    check_is_tensor(function, "input", hidden)
    facts = _Facts.of_failure(hidden, dict.fromkeys(setting_names, 0.0))
    facts.exchange(function, group, failure)


@dataclass(frozen=True)
class _Facts:
    """What the processes exchange about their arguments: F numbers each."""

    shared: dict[str, float]
    """Numbers that must be the same in every process, by name."""
    num_local: int
    """Number of classes of this process, v. It is 0 if the arguments of this process are wrong."""
    sum_of_weights: Tensor
    """The sum of the weights of this process's classes, ()."""
    target_checksum: Tensor
    """A number that depends on all targets and their order, ()."""

    @classmethod
    def of(cls, tensors: ShardTensors, settings: dict[str, float], check_targets: bool) -> _Facts:
        hidden, weight, target, bias, class_weight = tensors
        no_number = hidden.new_zeros((), dtype=torch.float64)
        numbers = (
            target.numel(),
            hidden.shape[-1],
            _DTYPES.index(hidden.dtype),
            _DTYPES.index(weight.dtype),
            bias is not None,
            class_weight is not None,
            torch.is_grad_enabled() and hidden.requires_grad,
        )
        return cls(
            dict(zip(_SHARED_FACTS, numbers, strict=True)) | settings,
            weight.shape[0],
            no_number if class_weight is None else class_weight.detach().sum(dtype=torch.float64),
            _checksum(target).double() if check_targets else no_number,
        )

    @classmethod
    def of_failure(cls, hidden: Tensor, settings: dict[str, float]) -> _Facts:
        """Return as many numbers as `of` does, for a process whose arguments are wrong."""
        no_number = hidden.new_zeros((), dtype=torch.float64)
        return cls(dict.fromkeys((*_SHARED_FACTS, *settings), 0.0), 0, no_number, no_number)

    def exchange(self, function: str, group: dist.ProcessGroup, failure: ArgumentError | None) -> ClassShard:
        """Return the shard of this process, or raise an error if the arguments of the processes do not fit together."""
        known = torch.tensor([self.num_local, *self.shared.values()], dtype=torch.float64)
        facts_F = torch.cat(
            [known.to(self.sum_of_weights.device), torch.stack([self.sum_of_weights, self.target_checksum])]
        )
        processes = torch.stack(gather_in_order(facts_F, group)).tolist()  # one list of F numbers per process
        if failure is not None:
            raise failure
        sizes = [int(process[0]) for process in processes]
        if 0 in sizes:
            raise ArgumentError(
                f"{function}: process {sizes.index(0)} of the group rejects its arguments; see its own error"
            )
        names = ["", *self.shared, "", "target"]
        for rank, process in enumerate(processes):
            for name, number, first in zip(names, process, processes[0], strict=True):
                if name and number != first:
                    raise ArgumentError(
                        f"{function}: {name} differs between processes 0 and {rank} of the group; pass the same input, "
                        "target and settings in every process, and its own rows of linear_weight"
                    )
        sum_of_weights = sum(process[-2] for process in processes)
        return ClassShard(group, sum(sizes[: dist.get_rank(group)]), sum(sizes), sum_of_weights)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHARED_FACTS = (
    "the number of rows of input",
    "the dimension of input",
    "the type of input",
    "the type of linear_weight",
    "whether there is a bias",
    "whether classes have a weight",
    "whether input needs a gradient",
)
"""What must be the same in every process, besides the settings and the targets."""


def _checksum(targets: Tensor) -> Tensor:
    """Return a number that changes if a target changes or two targets change places, (). It fits into float64."""
    targets_N = targets.reshape(-1).long() + 1
    factors_N = torch.arange(targets_N.shape[0], device=targets.device) % 8191 + 1
    return (targets_N * factors_N).sum() % 2**50


def _find_group(function: str, group: Any, tensors: ShardTensors) -> dist.ProcessGroup:
    """Return the group that divides the classes: `group`, or that of the `DTensor`s."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"{function}: group is {describe_type(group)}; pass a torch.distributed.ProcessGroup of which this "
            "process is a member"
        )
    for name in ("linear_weight", "linear_bias", "weight"):
        tensor: Any = getattr(tensors, name)
        if not is_distributed(tensor):
            continue
        mesh = tensor.device_mesh
        ranks = mesh.mesh.tolist()
        if mesh.ndim != 1 or ranks != sorted(ranks):
            raise ArgumentError(
                f"{function}: {name} is a DTensor on the mesh {ranks}; it must be on a one-dimensional mesh, with its "
                "processes in the order of their ranks"
            )
        if group is not None and dist.get_process_group_ranks(group) != ranks:
            raise ArgumentError(
                f"{function}: {name} is divided among the processes {ranks}, and the group has the processes "
                f"{dist.get_process_group_ranks(group)}; divide all arguments in one way"
            )
        group = mesh.get_group() if group is None else group
    if dist.get_rank(group) < 0:
        raise ArgumentError(f"{function}: this process is not a member of the group; call it in its members only")
    return cast(dist.ProcessGroup, group)


def _to_local(function: str, name: str, tensor: Any) -> Any:
    """Return the part of a `DTensor` that this process holds, or raise an error unless the part is the right one."""
    if not is_distributed(tensor):
        return tensor
    placements = tensor.placements
    if name in ("input", "target"):
        if not all(placement.is_replicate() for placement in placements):
            raise ArgumentError(
                f"{function}: {name} is a DTensor with the placements {placements}; every process needs all of it, so "
                "redistribute it to Replicate()"
            )
    elif len(placements) != 1 or not placements[0].is_shard(0):
        raise ArgumentError(
            f"{function}: {name} is a DTensor with the placements {placements}; its classes must be divided, Shard(0)"
        )
    return tensor.to_local()


# -- lookup --------------------------------------------------------------------------------------------------------


def sharded_embedding(ids: Tensor, table_vD: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the vectors of ids, (..., D), from a table whose rows are divided among the processes of a group.

        vectors = sharded_embedding(ids, my_rows, group)
        loss = rk.linear_cross_entropy(encoder(vectors), my_rows, target, group=group)     # tied

    Every process gets the vectors of all ids. The backward pass expects the same gradient in every process, as
    `linear_cross_entropy` with `group` returns it, and gives every process the gradient of its rows.

    Args:
        ids: Ids of rows of the whole table, with shape (...), the same in every process.
        table_vD: The consecutive rows of this process, in the order of the ranks; or a `DTensor` with `Shard(0)`.
        group: The group, or None if the table is a `DTensor`.
    """
    function = "sharded_embedding"
    if group is None and not is_distributed(table_vD):
        return F.embedding(ids, table_vD)

    def check(_: Any, table: Any, ids: Any, *others: None) -> None:
        check_is_tensor(function, "ids", ids)
        if ids.is_floating_point() or table.dim() != 2 or not table.shape[0]:
            raise ArgumentError(f"{function}: ids must be integers and the table (rows, dim), with at least one row")

    local_table: Tensor = cast(Any, table_vD).to_local() if is_distributed(table_vD) else table_vD
    no_rows_0D = local_table.detach()[:0]  # a lookup has no hidden states
    tensors = ShardTensors(no_rows_0D, table_vD, ids)
    shard, (_, table_vD, ids, _, _) = open_shard(function, group, tensors, check, Choice(), {}, check_targets=True)
    if not is_class(ids, shard.num_classes).all():
        raise ArgumentError(f"{function}: an id is not a row of the table; use 0 to {shard.num_classes - 1}")
    local_ids = shard.local_ids(ids)
    num_local = table_vD.shape[0]
    vectors = F.embedding(safe_class_ids(local_ids, num_local), table_vD)
    vectors = vectors.where(is_class(local_ids, num_local)[..., None], 0.0)
    return sum_over_processes(vectors, shard.group)


def sum_over_processes(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the processes. The gradient must be the same in every process."""
    return cast(Tensor, _SumOverProcesses.apply(x, group))  # type: ignore[no-untyped-call]


class _SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over the processes. Its gradient, the same in every process, is that of every term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None]:
        return grad_total, None
