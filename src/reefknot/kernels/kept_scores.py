"""Keep blocks of scores in the memory of the classes' gradient until the gradient is written there.

If memory is short, a loss computes its scores twice: first for the log-sum-exps, then for the gradients. The gradient
of the class vectors must exist afterwards in any case, and nothing else uses its memory during the first pass. So the
first pass keeps as many blocks of scores there as fit (`KeptScores.add`), and the second pass does not compute these
blocks again (`KeptScores.gradients`).

    R    bytes of the gradient of one block of classes
    S    bytes of one kept block of scores

    scores      |------- slot 0 -------|------- slot 1 -------| ...      slots of max(R, S) bytes
    gradient    |- block 0 -|- block 1 -|- block 2 -| ...

The second pass works through the blocks in order. The gradient of block j ends at byte (j + 1) R, and slot j + 1 does
not begin before that byte, so the gradient overwrites only scores that have been used.

With scores in half precision and a gradient in float32, 2 D / N of the scores are kept, or all of them if N <= 2 D. If
the rows are cut into blocks too, this applies to the first block of rows, before anything is written to the gradient.
Shapes: N rows of a block, D dimensions, V classes of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reefknot.kernels.blocks import BlockSize
from reefknot.kernels.scores import KeptBlock, is_class, safe_class_ids

if TYPE_CHECKING:
    from reefknot.kernels.passes import LossInputs

ALIGNMENT = 256
"""Slots begin at multiples of this number of bytes, because the copy engine of a GPU needs aligned matrices."""
MAX_EXPONENT = 85.0
"""exp() overflows float32 above 88."""


class KeptScores:
    """Blocks of the scores of some rows, in the memory of the classes' gradient.

    Args:
        inputs: The inputs of the pass.
        rows: The first rows of the pass. The gradient is written, not added to, when they are finished.
        gradient: The gradient of all classes, which has no values yet.
        block_size: The size of the blocks of scores.
    """

    def __init__(self, inputs: LossInputs, rows: slice, gradient: Tensor, block_size: BlockSize) -> None:
        self.inputs = inputs
        self.targets_N = inputs.targets[rows]
        self.target_score_N = inputs.target_scores(inputs.hidden_block(rows), self.targets_N)
        self._memory = _GradientMemory.divide(gradient, block_size.classes, self._block_bytes(block_size.classes))
        self._blocks: list[tuple[slice, KeptBlock]] = []

    @property
    def num_classes(self) -> int:
        """The number of classes whose scores are kept, from class 0 on."""
        return self._blocks[-1][0].stop if self._blocks else 0

    def add(self, classes: slice, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor | None:
        """Compute and keep the scores of the next block. Return their log-sum-exps, (N,), or None if no memory is left.

        Args:
            classes: The classes of the block.
            hidden_ND: The hidden states in the type of the matrix products.
            weight_VD: Class vectors of the block.
            bias_V: Biases of the block, or None.
        """
        memory = self._memory.slot(len(self._blocks), self._block_bytes(classes.stop - classes.start))
        if memory is None or classes.start != self.num_classes:
            return None
        block, lse_N = self.inputs.backend.keep_block(
            hidden_ND,
            weight_VD,
            bias_V,
            self.targets_N - classes.start,
            self.target_score_N,
            self.inputs.transform,
            memory,
        )
        self._blocks.append((classes, block))
        return lse_N

    def scale(self, lse_N: Tensor) -> Tensor:
        """Return the factor of each row that turns the matrices of `gradients` into the gradients of the losses, (N,).

        Args:
            lse_N: The log-sum-exps over all classes.
        """
        return torch.exp(self._reference(lse_N) - lse_N)

    def gradients(self, lse_N: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield each block of classes, in order, with the gradient of its scores divided by `scale`, (N, V).

        The caller writes the gradient of a block of classes before it asks for the next block.

        Args:
            lse_N: The log-sum-exps over all classes.
        """
        reference_N, backend = self._reference(lse_N), self.inputs.backend
        # The gradient at the target is p_y - 1.
        target_entry_N = torch.expm1(self.target_score_N - reference_N)
        target_entry_N -= torch.expm1((lse_N - reference_N).clamp(max=MAX_EXPONENT))
        self.inputs.transform.multiply_by_slope_in_place(target_entry_N, self.target_score_N)
        for index, (classes, block) in enumerate(self._blocks):
            in_place = not self._memory.overlaps_gradient(index)
            grad_NV = backend.kept_gradient(block, reference_N, self.inputs.transform, self.inputs.dtype, in_place)
            _replace_entries(grad_NV, self.targets_N - classes.start, target_entry_N)
            yield classes, grad_NV

    def _block_bytes(self, num_classes: int) -> int:
        return self.inputs.backend.kept_bytes(len(self.targets_N), num_classes, self.inputs.dtype)

    def _reference(self, lse_N: Tensor) -> Tensor:
        """Return the score of each row to which the gradients are relative, (N,)."""
        references = [block.reference for _, block in self._blocks if block.reference is not None]
        return torch.stack(references).amax(0) if references else lse_N


def _replace_entries(matrix_NV: Tensor, columns_N: Tensor, values_N: Tensor) -> None:
    """Set one entry of each row whose column is inside the matrix."""
    num_columns = matrix_NV.shape[1]
    index_N1 = safe_class_ids(columns_N, num_columns)[:, None]
    values_N1 = values_N.to(matrix_NV.dtype)[:, None]
    old_values_N1 = matrix_NV.gather(1, index_N1)
    matrix_NV.scatter_(1, index_N1, torch.where(is_class(columns_N, num_columns)[:, None], values_N1, old_values_N1))


@dataclass(frozen=True)
class _GradientMemory:
    """The memory of the classes' gradient, divided into slots for blocks of scores."""

    memory: Tensor
    """All bytes of the gradient, uint8."""
    gradient_bytes: int
    """Bytes of the gradient of one block of classes."""
    slot_bytes: int

    @classmethod
    def divide(cls, gradient_VD: Tensor, block_classes: int, block_bytes: int) -> _GradientMemory:
        """Divide the memory of a gradient into slots for blocks of this number of classes and bytes."""
        gradient_bytes = block_classes * gradient_VD.shape[1] * gradient_VD.element_size()
        slot_bytes = -(-max(gradient_bytes, block_bytes) // ALIGNMENT) * ALIGNMENT
        return cls(gradient_VD.view(-1).view(torch.uint8), gradient_bytes, slot_bytes)

    def slot(self, index: int, num_bytes: int) -> Tensor | None:
        """Return the first bytes of a slot, or None if the memory ends before them."""
        start = index * self.slot_bytes
        return self.memory[start : start + num_bytes] if start + num_bytes <= len(self.memory) else None

    def overlaps_gradient(self, index: int) -> bool:
        """Return whether the gradient of a block of classes is written over the slot of the same block."""
        return (index + 1) * self.gradient_bytes > index * self.slot_bytes
