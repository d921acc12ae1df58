"""Blocks of scores on a GPU: each kernel computes a matrix product and consumes it in registers.

Half-precision scores are never stored. `exponentials` stores exp(score - score of the target) instead. The exponent of
bfloat16 has the range of float32, so a separate pass for the largest score is not needed. The row sums are computed
from the same tiles, and one factor per row turns the stored values into the gradient. A row would overflow if its
target were less probable than 2^-100, which can happen early in training. A tile that would overflow is therefore
stored relative to its largest score, and its row is rescaled afterwards. All sums are computed in a fixed order.

In float32, torch computes the matrix products, with or without TF32 as its settings say. The same kernels then make one
pass over the products in place.

Shapes: N rows of the block, D dimensions, V classes of the block, T tiles of classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from reefknot.kernels.scores import Exponentials, RowTerms, Scores, SoftTerms, product_into
from reefknot.kernels.triton_kernels import (
    exponentials_kernel,
    finish_kernel,
    gradient_kernel,
    normalisers_kernel,
    scale_kernel,
    soft_gradients_kernel,
    target_scores_kernel,
)


@dataclass(frozen=True)
class _Tiles:
    """The tile sizes of a matrix product, and whether the GPU's copy engine (TMA) loads the tiles."""

    BN: int
    BV: int
    BD: int
    warps: int
    stages: int
    TMA: bool
    stored: bool = False
    """Whether torch has computed and stored the products."""

    @classmethod
    def choose(cls, *matrices: Tensor) -> _Tiles:
        """Choose tiles for products of these matrices.

        The copy engine of Hopper and Blackwell needs rows that begin at multiples of 16 bytes. Other GPUs have less
        shared memory for tiles.
        """
        first = matrices[0]
        size = first.element_size()
        if torch_multiplies(first):
            return cls(32, 128, 16, 4, 2, False, stored=True)
        aligned = all(matrix.shape[1] * size % 16 == 0 and matrix.data_ptr() % 16 == 0 for matrix in matrices)
        if not first.is_cuda:
            # Small tiles for the interpreter, so that the small shapes of tests have several tiles.
            return cls(16, 32, 16, 4, 2, aligned)
        device = _device(first.device)
        if aligned and device.major in (9, 10):
            return cls(128, 256, 64, 8, 4, True)
        if getattr(device, "shared_memory_per_block_optin", 0) > 160_000:
            return cls(128, 128, 64, 8, 3, False)
        return cls(128, 128, 32, 8, 2, False)

    def launch(
        self,
        kernel: Any,
        rows: Sequence[Tensor],
        classes: Sequence[Tensor],
        out: Sequence[Tensor],
        *arguments: Any,
        **flags: Any,
    ) -> None:
        """Launch a kernel over all tiles. It reads pairs of row and class matrices, and writes rows x classes."""
        h_ND = rows[0]
        # As many programs as the device runs at once, however small the batch. A different number would trigger a
        # recompilation.
        per_processor = 8 if self.stored else 1 if self.TMA else 2
        programs = 4 if not h_ND.is_cuda else _device(h_ND.device).multi_processor_count * per_processor
        boxes = [[self.BN, self.BD], [self.BV, self.BD]] * len(rows) + [[self.BN, self.BV // 2]] * len(out)
        matrices: list[Any] = [*chain(*zip(rows, classes, strict=True)), *out]
        if self.TMA:
            matrices = [
                TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box)
                for matrix, box in zip(matrices, boxes, strict=True)
            ]
        sizes = {"BN": self.BN, "BV": self.BV, "BD": self.BD}
        modes = {"TMA": self.TMA, "STORED": self.stored, "PROGRAMS": programs}
        # The column sums of a gradient take shared memory too.
        stages = self.stages - 1 if flags.get("BIAS_SUMS") else self.stages
        kernel[(programs,)](
            *matrices, *arguments, D=h_ND.shape[1], **sizes, **modes, **flags, num_warps=self.warps, num_stages=stages
        )


class TritonScores(Scores):
    """Blocks of scores h W^T + b by triton kernels."""

    multiple = 128

    def fewest_rows(self, dtype: torch.dtype) -> int:
        return super().fewest_rows(dtype) if dtype == torch.float32 else 512

    def widens(self, h_ND: Tensor, dtype: torch.dtype) -> bool:
        return False

    def bytes_per_score(self, dtype: torch.dtype, gradients: bool) -> float:
        # Without gradients only the normalisers of tiles are stored, unless torch computes the scores first.
        return dtype.itemsize if gradients or dtype == torch.float32 else 0.1

    def target_scores(
        self, h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, y_N: Tensor, centre_D: Tensor | None = None
    ) -> Tensor:
        out_N = h_ND.new_empty(h_ND.shape[0], dtype=torch.float32)
        dim = h_ND.shape[1]
        target_scores_kernel[(h_ND.shape[0],)](
            *(h_ND, w_VD.contiguous(), _contiguous(b_V), y_N.contiguous(), centre_D, out_N, w_VD.shape[0]),
            D=dim,
            BD=min(triton.next_power_of_2(dim), 1024),
            BIAS=b_V is not None,
            CENTRED=centre_D is not None,
            num_warps=4,
        )
        return out_N

    def exponentials(self, h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, y_N: Tensor) -> Exponentials:
        tiles = _Tiles.choose(h_ND, w_VD)
        rows, classes = h_ND.shape[0], w_VD.shape[0]
        across = triton.cdiv(classes, tiles.BV)
        b_V, y_N = _contiguous(b_V), y_N.contiguous()
        offset_N = self.target_scores(h_ND, w_VD, b_V, y_N)
        out_NV, stride = _matrix(h_ND, classes)
        if tiles.stored:
            product_into(out_NV, h_ND, w_VD.T)
        tops_NT, sums_NT = h_ND.new_empty(2, rows, across, dtype=torch.float32).unbind()
        nll_N, scale_N = h_ND.new_empty(2, rows, dtype=torch.float32).unbind()
        tiles.launch(
            exponentials_kernel,
            *([h_ND], [w_VD], [out_NV]),
            *(b_V, y_N, offset_N, tops_NT, sums_NT, rows, classes, across, stride),
            BIAS=b_V is not None,
            DTYPE=_TYPES[h_ND.dtype],
        )
        finish_kernel[(rows,)](
            *(y_N, out_NV, offset_N, tops_NT, sums_NT, nll_N, scale_N, classes, across, stride),
            BT=256,
            BV=1024,
            TILE=tiles.BV,
            num_warps=4,
        )
        return Exponentials(out_NV, nll_N, scale_N)

    def scale(self, x: Tensor, factor: Tensor) -> None:
        if x.numel() < 2**22 and x.dtype == torch.float32:
            x.mul_(factor)  # launching the kernel would take longer than running it
            return
        block = 8192
        grid = (triton.cdiv(x.numel(), block),)
        scale_kernel[grid](x, factor.to(torch.float32), x.numel(), BLOCK=block, num_warps=8)

    def normalisers(
        self, h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, tau: float | None, plain: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        tiles = _Tiles.choose(h_ND, w_VD)
        rows, classes = h_ND.shape[0], w_VD.shape[0]
        across = triton.cdiv(classes, tiles.BV)
        lse_NT, lse_tau_NT = (
            h_ND.new_empty(rows, across, dtype=torch.float32) if needed else None for needed in (plain, tau is not None)
        )
        stored_NV, stride = _matrix(h_ND, classes) if tiles.stored else (None, 0)
        if stored_NV is not None:
            product_into(stored_NV, h_ND, w_VD.T)
        tiles.launch(
            normalisers_kernel,
            *([h_ND], [w_VD], []),
            *(stored_NV, _contiguous(b_V), lse_NT, lse_tau_NT, rows, classes, across, stride, 1.0 / (tau or 1.0)),
            BIAS=b_V is not None,
            PLAIN=plain,
            TEMPERED=tau is not None,
        )
        lse_N, lse_tau_N = (
            None if parts is None else parts[:, 0] if across == 1 else torch.logsumexp(parts, -1)
            for parts in (lse_NT, lse_tau_NT)
        )
        return lse_N, lse_tau_N

    def gradient(
        self, h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, y_N: Tensor, terms: RowTerms, bias_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        tiles = _Tiles.choose(h_ND, w_VD)
        rows, classes = h_ND.shape[0], w_VD.shape[0]
        across = triton.cdiv(classes, tiles.BV)
        out_NV, stride = _matrix(h_ND, classes)
        if tiles.stored:
            product_into(out_NV, h_ND, w_VD.T)
        sums_RV = h_ND.new_empty(triton.cdiv(rows, tiles.BN), classes, dtype=torch.float32) if bias_gradient else None
        tiles.launch(
            gradient_kernel,
            *([h_ND], [w_VD], [out_NV]),
            *(
                _contiguous(b_V),
                y_N.contiguous(),
                *map(_row, (terms.lse, terms.plain, terms.target, terms.lse_tau, terms.tempered)),
                sums_RV,
            ),
            *(rows, classes, across, stride, 1.0 / terms.tau, terms.uniform),
            BIAS=b_V is not None,
            BIAS_SUMS=bias_gradient,
            PLAIN=terms.plain is not None,
            TEMPERED=terms.tempered is not None,
            DTYPE=_TYPES[h_ND.dtype],
        )
        return out_NV, None if sums_RV is None else sums_RV.sum(0)

    def soft_gradients(self, h_ND: Tensor, m_ND: Tensor, k_VD: Tensor, v_VD: Tensor, terms: SoftTerms) -> Tensor:
        rows, classes = h_ND.shape[0], k_VD.shape[0]
        out_RV, stride = _matrix(h_ND, classes, rows=2 * rows)
        tiles = _Tiles.choose(h_ND, m_ND, k_VD, v_VD)
        if tiles.stored:
            product_into(out_RV[:rows], h_ND, k_VD.T)
            product_into(out_RV[rows:], m_ND, v_VD.T)
        if tiles.BV > 128:  # two accumulators and another operand need smaller tiles and fewer stages
            tiles = replace(tiles, BV=128, stages=3)
        tiles.launch(
            soft_gradients_kernel,
            *([h_ND, m_ND], [k_VD, v_VD], [out_RV[:rows], out_RV[rows:]]),
            *map(_row, (terms.lse_tau, terms.negentropy, terms.mean)),
            *(rows, classes, triton.cdiv(classes, tiles.BV), stride, 1.0 / terms.tau, terms.uniform),
            M=m_ND.shape[1],
            ONE_TABLE=k_VD is v_VD,
            DTYPE=_TYPES[h_ND.dtype],
        )
        return out_RV


def torch_multiplies(h_ND: Tensor) -> bool:
    """Return whether torch computes the products with these rows. Tests of the interpreter replace this function."""
    return h_ND.is_cuda and h_ND.dtype == torch.float32


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def _matrix(h_ND: Tensor, classes: int, rows: int | None = None) -> tuple[Tensor, int]:
    """Allocate a block of scores, with rows aligned for the copy engine and the matrix units."""
    stride = triton.cdiv(classes, 64) * 64
    return h_ND.new_empty(rows or h_ND.shape[0], stride)[:, :classes], stride


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _row(x: Tensor | None) -> Tensor | None:
    """Return a contiguous float32 copy, because autograd may pass expanded tensors, such as the gradient of a sum."""
    return None if x is None else x.to(torch.float32).contiguous()


@cache
def _device(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)
