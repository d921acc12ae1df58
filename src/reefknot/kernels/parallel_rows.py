"""Losses and lookups over a divided vocabulary, for processes that have different rows (data parallelism).

    vectors = parallel_embedding(my_ids, my_table_rows, shard)
    losses = parallel_row_results(my_hidden, my_table_rows, None, my_targets, SummaryRequest(), shard)

`parallel.py` divides the classes among processes that all have the same rows. Processes that train on different parts
of a text have different rows, so they exchange them first: every process gets the rows of all processes, computes what
its own classes add to each of them, and keeps the results of its own rows. The gradients take the same way back. The
number of rows may differ between the processes. Missing rows are padded, and padding has no loss and no gradient.

A process's gradient of its own table rows is that of the sum of all processes' objectives.
Shapes: N rows of this process, R rows of all processes with padding, D dimensions, v classes of this process, U
queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from reefknot.kernels.autograd import RowResults
from reefknot.kernels.choice import Choice, current_choice
from reefknot.kernels.parallel import ClassShard, gather_in_order, sum_over_processes
from reefknot.kernels.scores import IDENTITY, IGNORE, ScoreTransform, SummaryRequest, is_class, safe_class_ids
from reefknot.kernels.soft_target import SoftTargets, parallel_soft_targets_of_all


def parallel_row_results(
    hidden_ND: Tensor,
    weight_vD: Tensor,
    bias_v: Tensor | None,
    targets_N: Tensor,
    request: SummaryRequest,
    shard: ClassShard,
    transform: ScoreTransform = IDENTITY,
    choice: Choice | None = None,
) -> RowResults:
    """Return losses and summaries of this process's rows, over the classes of all processes.

    Args:
        hidden_ND: Hidden states of this process.
        weight_vD: The class vectors of this process.
        bias_v: The biases of this process's classes, or None.
        targets_N: Target ids of this process's rows, from 0 to V - 1, or `IGNORE`.
        request: Which summaries to compute.
        shard: Where the classes of this process lie.
        transform: Applied to the scores.
        choice: Implementation and working memory. The default is the choice of `using`.
    """
    exchange = _RowExchange.of(hidden_ND, shard.group)
    results = shard.row_results(
        exchange.gather(hidden_ND),
        weight_vD,
        bias_v,
        exchange.gather_values(targets_N, IGNORE),
        request,
        transform,
        choice=choice or current_choice(),
    )
    return RowResults(*(None if result is None else exchange.keep_own(result) for result in results))  # type: ignore[arg-type]


def parallel_embedding(ids: Tensor, table_vD: Tensor, shard: ClassShard) -> Tensor:
    """Return the vectors of this process's ids, (..., D), from a table whose rows are divided among the processes.

    Args:
        ids: Ids of rows of the whole table, with shape (...).
        table_vD: The rows of this process.
        shard: Where the rows of this process lie.
    """
    ids_N = ids.reshape(-1)
    exchange = _RowExchange.of(ids_N, shard.group)
    local_ids_R = shard.local_ids(exchange.gather_values(ids_N, IGNORE))
    num_local = table_vD.shape[0]
    vectors_RD = F.embedding(safe_class_ids(local_ids_R, num_local), table_vD)
    vectors_RD = vectors_RD.where(is_class(local_ids_R, num_local)[:, None], 0.0)
    vectors_ND = exchange.keep_own(sum_over_processes(vectors_RD, shard.group))
    return vectors_ND.view(*ids.shape, table_vD.shape[1])


def parallel_soft_targets(
    queries_UD: Tensor, keys_vD: Tensor, values_vC: Tensor, tau: float, shard: ClassShard
) -> SoftTargets:
    """Return `soft_targets` of this process's queries over the keys and values of all processes."""
    exchange = _RowExchange.of(queries_UD, shard.group)
    results = parallel_soft_targets_of_all(exchange.gather(queries_UD), keys_vD, values_vC, tau, shard)
    return SoftTargets(*(exchange.keep_own(result) for result in results))


# -- the exchange of rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RowExchange:
    """The rows of all processes: those of each process, padded to the same number, in the order of the ranks."""

    group: dist.ProcessGroup
    num_rows: int
    """Number of rows of this process, N."""
    padded_rows: int
    """Number of rows of every process with padding. All processes together have R."""

    @classmethod
    def of(cls, rows: Tensor, group: dist.ProcessGroup) -> _RowExchange:
        """Exchange the number of rows. On a GPU this waits for the device."""
        num_rows = torch.tensor(rows.shape[0], device=rows.device)
        dist.all_reduce(num_rows, dist.ReduceOp.MAX, group=group)
        # Without any row, one row of padding keeps the losses defined.
        return cls(group, rows.shape[0], max(int(num_rows), 1))

    @property
    def own(self) -> slice:
        """The rows of this process among all rows, without padding."""
        start = dist.get_rank(self.group) * self.padded_rows
        return slice(start, start + self.num_rows)

    def gather(self, x_ND: Tensor) -> Tensor:
        """Return the rows of all processes, (R, D). Every process must compute the same gradient of the result."""
        return cast(Tensor, _GatherRows.apply(x_ND, self))  # type: ignore[no-untyped-call]

    def keep_own(self, x_R: Tensor) -> Tensor:
        """Return this process's rows of a tensor that all processes have. Its gradient is that of all rows."""
        return cast(Tensor, _KeepOwnRows.apply(x_R, self))  # type: ignore[no-untyped-call]

    def gather_values(self, x_N: Tensor, padding: float = 0.0) -> Tensor:
        """Return the rows of all processes without a gradient, with `padding` in missing rows."""
        padded = x_N.new_full((self.padded_rows, *x_N.shape[1:]), padding)
        padded[: self.num_rows] = x_N
        return torch.cat(gather_in_order(padded, self.group))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather_values(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.exchange.own], None


class _KeepOwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _RowExchange) -> Tensor:
        ctx.exchange = exchange
        own = x[exchange.own].clone()
        if not own.is_floating_point():
            ctx.mark_non_differentiable(own)
        return own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.gather_values(grad), None
