"""Class vectors that are stored as several matrices side by side, such as a weight and its LoRA adapter.

The scores of a layer with an adapter are h W^T + a B^T, with low-rank rows a. They equal [h a] [W B]^T, so our kernels
compute them like the scores of any other classifier. `JoinedColumns` stands for [W B]. Its rows are joined when they
are used, so at most a block of W is copied, and W gets no gradient if it is frozen.

Shapes: V classes, D dimensions of all matrices together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class JoinedColumns:
    """A matrix (V, D) whose columns are those of several matrices.

    Args:
        parts: Matrices with V rows. Joined rows have the type of the first matrix.
        needs_grad: Whether each matrix needs a gradient.
    """

    def __init__(self, parts: Sequence[Tensor], needs_grad: Sequence[bool]) -> None:
        self.parts = tuple(parts)
        self.needs_grad = tuple(needs_grad)
        widths = [part.shape[1] for part in parts]
        self.shape = torch.Size((parts[0].shape[0], sum(widths)))
        self.dtype = parts[0].dtype
        self.device = parts[0].device
        trained = [index for index, is_needed in enumerate(needs_grad) if is_needed] or [0]
        self.trained = slice(sum(widths[: trained[0]]), sum(widths[: trained[-1] + 1]))
        """The smallest range of columns that contains all matrices that need a gradient."""
        self.gradient_dtype = parts[trained[0]].dtype

    def __getitem__(self, rows: Any) -> Tensor:
        """Return some of the rows as a new tensor."""
        return torch.cat([part[rows].to(self.dtype) for part in self.parts], -1)

    def select(self, rows: slice) -> JoinedColumns:
        """Return some of the rows, without copying them."""
        return JoinedColumns([part[rows] for part in self.parts], self.needs_grad)

    def split_gradient(self, grad: Tensor | None) -> list[Tensor | None]:
        """Return the gradient of each matrix, given the gradient of the trained columns."""
        gradients: list[Tensor | None] = []
        start = -self.trained.start
        for part, is_needed in zip(self.parts, self.needs_grad, strict=True):
            stop = start + part.shape[1]
            gradients.append(grad[:, start:stop].to(part.dtype) if is_needed and grad is not None else None)
            start = stop
        return gradients


ClassVectors = Tensor | JoinedColumns
"""One vector per class, (V, D)."""


def join_columns(parts: Sequence[Tensor], needs_grad: Sequence[bool] | None = None) -> ClassVectors:
    """Return class vectors from the matrices that hold them. By default, `requires_grad` says which are trained."""
    if len(parts) == 1:
        return parts[0]
    if needs_grad is None:
        needs_grad = [torch.is_grad_enabled() and part.requires_grad for part in parts]
    return JoinedColumns(parts, needs_grad)


def column_parts(weight: ClassVectors) -> tuple[Tensor, ...]:
    """Return the matrices that hold the class vectors."""
    return weight.parts if isinstance(weight, JoinedColumns) else (weight,)
