"""Keep blocks of scores between two passes over the classes, most of them in the memory of the classes' gradient.

If a block has only some of the classes, a loss makes two passes over them: first for the log-sum-exps, then for the
gradients. The gradient of the class vectors must exist afterwards in any case, and nothing else uses its memory during
the first pass. So the first pass keeps as many blocks of scores there as fit, and some more in the working memory that
is left (`KeptScores.add`). The second pass does not compute these blocks again (`KeptScores.gradients`).
`choose_kept_layout` decides how many classes a block has.

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
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reefknot.kernels.blocks import MIN_CLASSES, BlockCosts, BlockSize, even_size
from reefknot.kernels.scores import KeptBlock, is_class, safe_class_ids

if TYPE_CHECKING:
    from reefknot.kernels.passes import LossInputs

ALIGNMENT = 256
"""Slots begin at multiples of this number of bytes, because the copy engine of a GPU needs aligned matrices."""
MAX_BLOCKS = 128
"""The largest number of blocks that `choose_kept_layout` considers."""
SUM_BYTES = 4
"""Bytes of a number in a sum."""
MAX_DIFFERENCE = 69.0
"""How far a log-sum-exp may lie above the score that gradients are relative to. Factors up to exp(69) < 2^100 and their
inverses fit float32 and bfloat16, and so do their products with hidden states."""


@dataclass(frozen=True)
class KeptLayout:
    """How all rows and blocks of classes are computed with `KeptScores`."""

    block_size: BlockSize
    spare_blocks: int
    """Number of blocks that are kept in working memory."""
    extra_bytes: float
    """The cost of this layout: memory traffic that a single block with all scores would not have, in bytes. Products
    that are computed again count as the traffic that takes the same time."""


@lru_cache(maxsize=1024)
def choose_kept_layout(
    num_rows: int,
    num_classes: int,
    dim: int,
    costs: BlockCosts,
    budget: int,
    kept_bytes_per_score: float,
    gradient_bytes_per_class: int,
    operations_per_byte: float,
) -> KeptLayout | None:
    """Return the fastest layout of blocks with all rows, or None if such blocks do not fit the budget.

    Many small blocks waste little memory. But the gradient of the rows is read and written for each block.

    Args:
        num_rows: Number of rows.
        num_classes: Number of classes.
        dim: Number of dimensions.
        costs: The memory of the block that is being computed.
        budget: Working memory in bytes.
        kept_bytes_per_score: Bytes of a kept score.
        gradient_bytes_per_class: Bytes of the gradient of a class.
        operations_per_byte: How many operations of a product the device computes in the time of moving one byte.
    """
    free_bytes = budget - costs.total_bytes(num_rows, 0, several=False)
    layouts = []
    for max_blocks in range(1, MAX_BLOCKS + 1):
        classes = even_size(num_classes, -(-num_classes // max_blocks), max(costs.size_multiple, MIN_CLASSES))
        num_blocks = -(-num_classes // classes)
        bytes_left = free_bytes - classes * (num_rows * costs.bytes_per_score + costs.bytes_per_class)
        if bytes_left < 0 or classes < min(num_classes, costs.min_classes):
            continue
        block_bytes = num_rows * classes * kept_bytes_per_score
        slot_bytes = max(block_bytes, classes * gradient_bytes_per_class)
        num_slots = int(num_classes * gradient_bytes_per_class // slot_bytes)
        spare_blocks = min(int(bytes_left // block_bytes), max(num_blocks - num_slots, 0))
        recomputed_classes = max(num_classes - (num_slots + spare_blocks) * classes, 0)
        extra_bytes = recomputed_classes * num_rows * 2 * dim / operations_per_byte
        extra_bytes += num_blocks * 2 * num_rows * dim * SUM_BYTES
        extra_bytes += 2 * num_classes * costs.bytes_per_class  # class vectors are converted again
        layouts.append(KeptLayout(BlockSize(num_rows, classes), spare_blocks, extra_bytes))
    return min(layouts, key=lambda layout: layout.extra_bytes, default=None)


class KeptScores:
    """Blocks of the scores of some rows.

    Args:
        inputs: The inputs of the pass.
        rows: The first rows of the pass. The gradient is written, not added to, when they are finished.
        gradient: The gradient of all classes, which has no values yet.
        block_size: The size of the blocks of scores.
        spare_blocks: Number of blocks that may be kept in new memory, after the gradient's memory is full.
    """

    def __init__(
        self, inputs: LossInputs, rows: slice, gradient: Tensor, block_size: BlockSize, spare_blocks: int = 0
    ) -> None:
        self.inputs = inputs
        self.spare_blocks = spare_blocks
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
        if classes.start != self.num_classes:
            return None
        num_bytes = self._block_bytes(classes.stop - classes.start)
        memory = self._memory.slot(len(self._blocks), num_bytes)
        if memory is None and self.spare_blocks:
            self.spare_blocks -= 1
            memory = hidden_ND.new_empty(num_bytes, dtype=torch.uint8)
        if memory is None:
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
        target_entry_N = torch.expm1(self.target_score_N - reference_N) - torch.expm1(lse_N - reference_N)
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
        # The blocks that are not kept may have much larger scores.
        return torch.stack([*references, lse_N - MAX_DIFFERENCE]).amax(0) if references else lse_N


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
