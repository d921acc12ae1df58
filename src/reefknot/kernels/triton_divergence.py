"""Compare rows of scores on a GPU with one Triton kernel, for `linear_divergence`.

`compare_rows` takes and returns what the function of the same name in `divergence` does. The kernel reads both rows of
scores two or three times and writes only the gradients; plain torch makes about a dozen passes over matrices.

Shapes: N rows of the block, V classes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from reefknot.kernels.divergence_passes import Options, ScoredRows
from reefknot.kernels.triton_divergence_kernels import FORWARD, JSD, REVERSE, compare_rows_kernel

_KINDS = {"forward": FORWARD, "reverse": REVERSE, "jsd": JSD}


def compare_rows(student: ScoredRows, teacher: ScoredRows, options: Options, weight_N: Tensor | None) -> Tensor:
    """Return the divergences of a block of rows, and write the gradients of their weighted sum.

    Args:
        student: The student's scores, in float32.
        teacher: The teacher's scores, in float32.
        options: What is computed of each row.
        weight_N: The weight of each row in the sum. None without gradients.
    """
    num_rows, num_classes = student.scores.shape
    loss_N = student.scores.new_empty(num_rows)
    student_grad_NV, teacher_grad_NV = student.grad_scores, teacher.grad_scores
    compare_rows_kernel[(num_rows,)](
        student_ptr=student.scores,
        teacher_ptr=teacher.scores,
        student_bias_ptr=None if student.bias is None else student.bias.contiguous(),
        teacher_bias_ptr=None if teacher.bias is None else teacher.bias.contiguous(),
        weight_ptr=None if weight_N is None else weight_N.to(torch.float32).contiguous(),
        loss_ptr=loss_N,
        student_grad_ptr=student_grad_NV,
        teacher_grad_ptr=teacher_grad_NV,
        V=num_classes,
        student_stride=student.scores.stride(0),
        teacher_stride=teacher.scores.stride(0),
        student_grad_stride=0 if student_grad_NV is None else student_grad_NV.stride(0),
        teacher_grad_stride=0 if teacher_grad_NV is None else teacher_grad_NV.stride(0),
        inverse_temperature=1.0 / options.temperature,
        beta=options.beta,
        KIND=_KINDS[options.kind],
        STUDENT_BIAS=student.bias is not None,
        TEACHER_BIAS=teacher.bias is not None,
        STUDENT_GRAD=student_grad_NV is not None,
        TEACHER_GRAD=teacher_grad_NV is not None,
        BLOCK_V=min(triton.next_power_of_2(num_classes), 2048),
        num_warps=8,
    )
    return loss_N
