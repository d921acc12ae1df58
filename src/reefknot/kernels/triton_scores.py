"""Compute blocks of scores on a GPU with Triton kernels that consume each matrix product in registers.

`TritonBackend` is the class to start from. It has the methods of `TorchBackend` (`scores`), so the passes over blocks
(`passes`) use either. The methods allocate outputs and launch the kernels of `triton_kernels`; `_TileConfig` chooses
the tile sizes and launches the kernels that work on tiles. Every argument goes to a kernel by name.

Half-precision scores are never stored. `loss_and_gradient` stores exp(score - score of the target) instead. The
exponent of bfloat16 has the range of float32, so a separate pass for the largest score is not needed. The row sums are
computed from the same tiles, and one factor per row turns the stored values into the gradient. A row would overflow if
its target were less probable than 2^-100, which can happen early in training. A tile that would overflow is therefore
stored relative to its largest score, and its row is rescaled afterwards. All sums are computed in a fixed order.

In float32, torch computes the matrix products, with or without TF32 as its settings say. The same kernels then make one
pass over the products in place.

`weight` holds one vector per class. `nll` stands for negative log-likelihoods (the losses), and `lse` for log-sum-exps.
Shapes: N rows of the block, D dimensions, V classes of the block, T tiles of classes, C dimensions of the values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from reefknot.kernels.scores import (
    IDENTITY,
    GradientTerms,
    KeptBlock,
    LossAndGradient,
    RowSummary,
    ScoreTransform,
    SoftTargetTerms,
    SummaryRequest,
    TorchBackend,
    is_class,
    matmul_into,
    padded_classes,
)
from reefknot.kernels.triton_kernels import (
    loss_and_gradient_kernel,
    score_gradient_kernel,
    soft_target_gradients_kernel,
    summary_kernel,
)
from reefknot.kernels.triton_row_kernels import (
    finish_rows_kernel,
    rescale_rows_kernel,
    scale_kernel,
    target_scores_kernel,
)


class TritonBackend(TorchBackend):
    """Computes blocks of scores h W^T + b in Triton kernels. `TorchBackend` documents the methods."""

    size_multiple = 128  # the rows of a tile

    def min_rows(self, dtype: torch.dtype) -> int:
        # Torch's products of float32 matrices are fast with few rows. The kernels need several tiles of rows.
        return super().min_rows(dtype) if dtype == torch.float32 else 512

    def needs_widening(self, hidden_ND: Tensor, dtype: torch.dtype) -> bool:
        return False

    def bytes_per_score(self, dtype: torch.dtype, gradients: bool) -> float:
        # Without gradients only the normalisers of tiles are stored, unless torch computes the scores first.
        return dtype.itemsize if gradients or dtype == torch.float32 else 0.1

    def operations_per_byte(self, dtype: torch.dtype) -> float | None:
        # An H200 multiplies 790 x 10^12 numbers in bfloat16 and moves 4.3 x 10^12 bytes per second. Ratios of other
        # GPUs are similar.
        return 50.0 if dtype == torch.float32 else 180.0

    def target_scores(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        centre_D: Tensor | None = None,
        transform: ScoreTransform = IDENTITY,
    ) -> Tensor:
        num_rows, dim = hidden_ND.shape
        out_N = hidden_ND.new_empty(num_rows, dtype=torch.float32)
        target_scores_kernel[(num_rows,)](
            hidden_ptr=hidden_ND,
            weight_ptr=weight_VD.contiguous(),
            bias_ptr=_contiguous(bias_V),
            targets_ptr=targets_N.contiguous(),
            centre_ptr=centre_D,
            out_ptr=out_N,
            V=weight_VD.shape[0],
            D=dim,
            BLOCK_D=min(triton.next_power_of_2(dim), 1024),
            BIAS=bias_V is not None,
            CENTRED=centre_D is not None,
            num_warps=4,
        )
        return transform.apply_in_place(out_N)

    def loss_and_gradient(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        transform: ScoreTransform = IDENTITY,
    ) -> LossAndGradient:
        tiles = _TileConfig.choose(hidden_ND, weight_VD)
        num_rows, num_classes = hidden_ND.shape[0], weight_VD.shape[0]
        num_tiles = tiles.count_tiles(num_classes)
        bias_V, targets_N = _contiguous(bias_V), targets_N.contiguous()
        target_score_N = self.target_scores(hidden_ND, weight_VD, bias_V, targets_N, transform=transform)
        out_NV = tiles.allocate_block(hidden_ND, weight_VD)
        shifts_NT, sums_NT = _compute_exponentials(
            tiles, hidden_ND, weight_VD, bias_V, targets_N, target_score_N, transform, out_NV
        )
        nll_N, scale_N = hidden_ND.new_empty(2, num_rows, dtype=torch.float32).unbind()
        finish_rows_kernel[(num_rows,)](
            targets_ptr=targets_N,
            out_ptr=out_NV,
            target_scores_ptr=target_score_N,
            shifts_ptr=shifts_NT,
            sums_ptr=sums_NT,
            nll_ptr=nll_N,
            scale_ptr=scale_N,
            V=num_classes,
            T=num_tiles,
            stride=out_NV.stride(0),
            **_transform_arguments(transform),
            **_ROW_BLOCKS,
            TILE_V=tiles.block_v,
        )
        return LossAndGradient(out_NV, nll_N, scale_N)

    def kept_bytes(self, num_rows: int, num_classes: int, dtype: torch.dtype) -> int:
        return num_rows * padded_classes(num_classes) * dtype.itemsize

    def keep_block(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        target_score_N: Tensor,
        transform: ScoreTransform,
        memory: Tensor,
    ) -> tuple[KeptBlock, Tensor]:
        tiles = _TileConfig.choose(hidden_ND, weight_VD)
        num_rows, num_classes = hidden_ND.shape[0], weight_VD.shape[0]
        out_NV = memory.view(hidden_ND.dtype).view(num_rows, -1)[:, :num_classes]
        tiles.fill_block(out_NV, hidden_ND, weight_VD)
        is_inside_N = is_class(targets_N, num_classes)
        # The kernel leaves out the class of the target, and takes a negative target for class 0.
        shifts_NT, sums_NT = _compute_exponentials(
            *(tiles, hidden_ND, weight_VD, _contiguous(bias_V), targets_N.where(is_inside_N, num_classes)),
            *(target_score_N, transform, out_NV),
        )
        reference_N = shifts_NT.amax(-1)
        _rescale_rows(out_NV, shifts_NT, reference_N, tiles.block_v)
        sum_N = (sums_NT * torch.exp(shifts_NT - reference_N[:, None])).sum(-1)
        sum_N += torch.exp(target_score_N - reference_N).where(is_inside_N, 0.0)
        return KeptBlock(out_NV, reference_N), sum_N.log_().add_(reference_N)

    def kept_gradient(
        self, block: KeptBlock, reference_N: Tensor, transform: ScoreTransform, dtype: torch.dtype, in_place: bool
    ) -> Tensor:
        assert block.reference is not None
        out_NV = block.scores
        if not in_place:
            out_NV = _new_block(out_NV, *out_NV.shape)
            out_NV.copy_(block.scores)
        _rescale_rows(out_NV, block.reference[:, None], reference_N, ALL_CLASSES)
        return out_NV

    def scale_in_place(self, x: Tensor, factor: Tensor) -> None:
        if x.numel() < 2**23:
            # Launching the kernel would take longer than running it. A factor of one dimension is not rounded to x.
            torch.mul(x, factor.to(torch.float32).reshape(1), out=x)
            return
        block_size = 8192
        grid = (triton.cdiv(x.numel(), block_size),)
        scale_kernel[grid](x, factor.to(torch.float32), x.numel(), BLOCK=block_size, num_warps=8)

    def summarise(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        request: SummaryRequest,
        transform: ScoreTransform = IDENTITY,
        class_weight_V: Tensor | None = None,
    ) -> RowSummary:
        tiles = _TileConfig.choose(hidden_ND, weight_VD)
        shape_NT = hidden_ND.shape[0], tiles.count_tiles(weight_VD.shape[0])

        def allocate(is_needed: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return hidden_ND.new_empty(shape_NT, dtype=dtype) if is_needed else None

        by_tile = RowSummary(
            lse=allocate(request.lse),
            lse_tau=allocate(request.tau is not None),
            expected=allocate(request.expected),
            total=allocate(request.total),
            best_score=allocate(request.best),
            best_class=allocate(request.best, torch.int64),
        )
        scores_NV = tiles.allocate_block(hidden_ND, weight_VD) if tiles.reads_scores else None
        tiles.launch(
            summary_kernel,
            inputs={"hidden": hidden_ND, "weight": weight_VD},
            outputs={},
            stored_ptr=scores_NV,
            bias_ptr=_contiguous(bias_V),
            class_weight_ptr=_contiguous_float32(class_weight_V),
            lse_ptr=by_tile.lse,
            lse_tau_ptr=by_tile.lse_tau,
            expected_ptr=by_tile.expected,
            total_ptr=by_tile.total,
            best_score_ptr=by_tile.best_score,
            best_class_ptr=by_tile.best_class,
            stride=0 if scores_NV is None else scores_NV.stride(0),
            inverse_tau=1.0 if request.tau is None else 1.0 / request.tau,
            BIAS=bias_V is not None,
            **_transform_arguments(transform),
            PLAIN=request.lse,
            TEMPERED=request.tau is not None,
            EXPECTED=request.expected,
            TOTAL=request.total,
            CLASS_WEIGHT=class_weight_V is not None,
            BEST=request.best,
        )
        return _combine_tiles(by_tile)

    def score_gradient(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        terms: GradientTerms,
        bias_gradient: bool,
        class_weight_V: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        tiles = _TileConfig.choose(hidden_ND, weight_VD)
        out_NV = tiles.allocate_block(hidden_ND, weight_VD)
        bias_sums = None  # one sum per tile of rows, and class
        if bias_gradient:
            num_row_tiles = triton.cdiv(hidden_ND.shape[0], tiles.block_n)
            bias_sums = hidden_ND.new_empty(num_row_tiles, weight_VD.shape[0], dtype=torch.float32)
        tiles.launch(
            score_gradient_kernel,
            inputs={"hidden": hidden_ND, "weight": weight_VD},
            outputs={"out": out_NV},
            bias_ptr=_contiguous(bias_V),
            targets_ptr=targets_N.contiguous(),
            lse_ptr=_contiguous_float32(terms.lse),
            plain_weight_ptr=_contiguous_float32(terms.plain_weight),
            target_weight_ptr=_contiguous_float32(terms.target_weight),
            entropy_weight_ptr=_contiguous_float32(terms.entropy_weight),
            expected_ptr=_contiguous_float32(terms.expected),
            total_weight_ptr=_contiguous_float32(terms.total_weight),
            class_weight_ptr=_contiguous_float32(class_weight_V),
            lse_tau_ptr=_contiguous_float32(terms.lse_tau),
            tempered_weight_ptr=_contiguous_float32(terms.tempered_weight),
            bias_sums_ptr=bias_sums,
            stride=out_NV.stride(0),
            inverse_tau=1.0 / terms.tau,
            uniform=terms.uniform,
            BIAS=bias_V is not None,
            BIAS_SUMS=bias_gradient,
            **_transform_arguments(terms.transform),
            PLAIN=terms.plain_weight is not None,
            ENTROPY=terms.entropy_weight is not None,
            TOTAL=terms.total_weight is not None,
            CLASS_WEIGHT=class_weight_V is not None,
            TEMPERED=terms.tempered_weight is not None,
            DTYPE=_TRITON_DTYPES[hidden_ND.dtype],
        )
        return out_NV, None if bias_sums is None else bias_sums.sum(0)

    def soft_target_gradients(
        self, queries_ND: Tensor, grad_mean_NC: Tensor, keys_VD: Tensor, values_VC: Tensor, terms: SoftTargetTerms
    ) -> Tensor:
        num_rows, num_classes = queries_ND.shape[0], keys_VD.shape[0]
        probs_and_grads = _new_block(queries_ND, 2 * num_rows, num_classes)
        probs_NV, grad_scores_NV = probs_and_grads[:num_rows], probs_and_grads[num_rows:]
        tiles = _TileConfig.choose(queries_ND, grad_mean_NC, keys_VD, values_VC)
        if tiles.reads_scores:
            matmul_into(probs_NV, queries_ND, keys_VD.T)
            matmul_into(grad_scores_NV, grad_mean_NC, values_VC.T)
        if tiles.block_v > 128:  # two accumulators and another operand need smaller tiles and fewer stages
            tiles = replace(tiles, block_v=128, num_stages=3)
        tiles.launch(
            soft_target_gradients_kernel,
            inputs={"queries": queries_ND, "keys": keys_VD, "grad_mean": grad_mean_NC, "values": values_VC},
            outputs={"probs_out": probs_NV, "grad_out": grad_scores_NV},
            lse_ptr=_contiguous_float32(terms.lse_tau),
            negentropy_gradient_ptr=_contiguous_float32(terms.negentropy_gradient),
            expected_gradient_ptr=_contiguous_float32(terms.expected_gradient),
            stride=probs_and_grads.stride(0),
            inverse_tau=1.0 / terms.tau,
            uniform=terms.uniform,
            C=grad_mean_NC.shape[1],
            KEYS_ARE_VALUES=keys_VD is values_VC,
            DTYPE=_TRITON_DTYPES[queries_ND.dtype],
        )
        return probs_and_grads


@dataclass(frozen=True)
class _TileConfig:
    """The tile sizes of a matrix product, and how its kernel is launched."""

    block_n: int
    """Rows of a tile."""
    block_v: int
    """Classes of a tile."""
    block_d: int
    """Dimensions that are loaded and multiplied at a time."""
    num_warps: int
    num_stages: int
    """Depth of the pipeline: how many loads of `block_d` dimensions are under way at once."""
    uses_tma: bool
    """Whether the GPU's copy engine (TMA) loads the tiles."""
    reads_scores: bool = False
    """Whether torch computes and stores the products first, and the kernel reads them from memory."""

    @classmethod
    def choose(cls, *matrices: Tensor) -> _TileConfig:
        """Choose tiles for products of these matrices.

        The copy engine of Hopper and Blackwell needs rows that begin at multiples of 16 bytes. Other GPUs have less
        shared memory for tiles.
        """
        first = matrices[0]
        size = first.element_size()
        if torch_multiplies(first):
            return cls(32, 128, 16, num_warps=4, num_stages=2, uses_tma=False, reads_scores=True)
        is_aligned = all(matrix.shape[1] * size % 16 == 0 and matrix.data_ptr() % 16 == 0 for matrix in matrices)
        if not first.is_cuda:
            # Small tiles for the interpreter, so that the small shapes of tests have several tiles.
            return cls(16, 32, 16, num_warps=4, num_stages=2, uses_tma=is_aligned)
        device = _device_properties(first.device)
        if is_aligned and device.major in (9, 10):
            return cls(128, 256, 64, num_warps=8, num_stages=4, uses_tma=True)
        if getattr(device, "shared_memory_per_block_optin", 0) > 160_000:
            return cls(128, 128, 64, num_warps=8, num_stages=3, uses_tma=False)
        return cls(128, 128, 32, num_warps=8, num_stages=2, uses_tma=False)

    def count_tiles(self, num_classes: int) -> int:
        """Return the number of tiles, T, into which the classes are cut."""
        num_tiles: int = triton.cdiv(num_classes, self.block_v)
        return num_tiles

    def allocate_block(self, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        """Allocate a block of rows x classes. If the kernel reads scores, the block has them: h W^T, by torch."""
        block_NV = _new_block(hidden_ND, hidden_ND.shape[0], weight_VD.shape[0])
        self.fill_block(block_NV, hidden_ND, weight_VD)
        return block_NV

    def fill_block(self, block_NV: Tensor, hidden_ND: Tensor, weight_VD: Tensor) -> None:
        """Store h W^T in a block, by torch, if the kernel reads scores."""
        if self.reads_scores:
            matmul_into(block_NV, hidden_ND, weight_VD.T)

    def launch(self, kernel: Any, inputs: dict[str, Tensor], outputs: dict[str, Tensor], **arguments: Any) -> None:
        """Launch a kernel over all tiles.

        All matrices and arguments go to the kernel by name. N, V, T, D and the sizes of the tiles are added here.

        Args:
            kernel: A kernel of `triton_kernels` that works on tiles.
            inputs: The matrices that are multiplied: one of rows, one of classes, and so on in turn.
            outputs: Matrices of rows x classes.
            **arguments: The other arguments of the kernel.
        """
        hidden_ND, weight_VD = list(inputs.values())[:2]
        num_rows, dim = hidden_ND.shape
        num_classes = weight_VD.shape[0]
        num_programs = self._count_programs(hidden_ND.device)
        # The column sums of a gradient take shared memory too.
        num_stages = self.num_stages - 1 if arguments.get("BIAS_SUMS") else self.num_stages
        kernel[(num_programs,)](
            **(self._describe(inputs, outputs) if self.uses_tma else inputs | outputs),
            **arguments,
            N=num_rows,
            V=num_classes,
            T=self.count_tiles(num_classes),
            D=dim,
            BLOCK_N=self.block_n,
            BLOCK_V=self.block_v,
            BLOCK_D=self.block_d,
            TMA=self.uses_tma,
            STORED=self.reads_scores,
            NUM_PROGRAMS=num_programs,
            num_warps=self.num_warps,
            num_stages=num_stages,
        )

    def _describe(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, TensorDescriptor]:
        """Describe the matrices to the copy engine, each with the shape of the box that is moved at a time."""
        row_box, class_box = [self.block_n, self.block_d], [self.block_v, self.block_d]
        output_box = [self.block_n, self.block_v // 2]  # outputs are stored in two halves
        boxes = [row_box, class_box] * (len(inputs) // 2) + [output_box] * len(outputs)
        return {
            name: TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box)
            for (name, matrix), box in zip((inputs | outputs).items(), boxes, strict=True)
        }

    def _count_programs(self, device: torch.device) -> int:
        """Return the number of programs that the device runs at once.

        It does not depend on the size of the batch, because every other number would trigger a recompilation.
        """
        if device.type != "cuda":
            return 4
        return int(_device_properties(device).multi_processor_count) * self._programs_per_processor

    @property
    def _programs_per_processor(self) -> int:
        """Number of programs that a multiprocessor runs at once. Tiles of the copy engine fill its shared memory."""
        if self.reads_scores:
            return 8
        return 1 if self.uses_tma else 2


def torch_multiplies(hidden_ND: Tensor) -> bool:
    """Return whether torch computes the products with these rows. Tests of the interpreter replace this function."""
    return hidden_ND.is_cuda and hidden_ND.dtype == torch.float32


_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def _new_block(like: Tensor, num_rows: int, num_classes: int) -> Tensor:
    """Allocate a block of scores. Padding aligns its rows for the copy engine and the matrix units."""
    return like.new_empty(num_rows, padded_classes(num_classes))[:, :num_classes]


def _compute_exponentials(
    tiles: _TileConfig,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    target_score_N: Tensor,
    transform: ScoreTransform,
    out_NV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Store exponentials of the scores in `out_NV`. Return their shifts and sums, (N, T) (see the kernel)."""
    num_tiles = tiles.count_tiles(weight_VD.shape[0])
    shifts_NT, sums_NT = hidden_ND.new_empty(2, hidden_ND.shape[0], num_tiles, dtype=torch.float32).unbind()
    tiles.launch(
        loss_and_gradient_kernel,
        inputs={"hidden": hidden_ND, "weight": weight_VD},
        outputs={"out": out_NV},
        bias_ptr=bias_V,
        targets_ptr=targets_N,
        target_scores_ptr=target_score_N,
        shifts_ptr=shifts_NT,
        sums_ptr=sums_NT,
        stride=out_NV.stride(0),
        BIAS=bias_V is not None,
        **_transform_arguments(transform),
        DTYPE=_TRITON_DTYPES[hidden_ND.dtype],
    )
    return shifts_NT, sums_NT


ALL_CLASSES = 2**30
"""The size of a tile that has all classes of a block."""
_ROW_BLOCKS = {"BLOCK_T": 256, "BLOCK_V": 1024, "num_warps": 4}
"""Constants of the kernels that work on rows of a block."""


def _rescale_rows(block_NV: Tensor, shifts_NT: Tensor, reference_N: Tensor, tile_classes: int) -> None:
    """From exp(z - shift), with a shift for each tile of this many classes, compute exp(z - reference), in place."""
    rescale_rows_kernel[(block_NV.shape[0],)](
        out_ptr=block_NV,
        shifts_ptr=shifts_NT,
        row_shifts_ptr=reference_N,
        V=block_NV.shape[1],
        T=shifts_NT.shape[1],
        stride=block_NV.stride(0),
        **_ROW_BLOCKS,
        TILE_V=tile_classes,
    )


def _combine_tiles(by_tile: RowSummary) -> RowSummary:
    """Return the summaries over all classes, given the summaries of tiles of classes, (N, T)."""
    if all(tensor is None or tensor.shape[1] == 1 for tensor in by_tile):
        return RowSummary(*(None if tensor is None else tensor[:, 0] for tensor in by_tile))
    lse = None if by_tile.lse is None else torch.logsumexp(by_tile.lse, -1)
    lse_tau = None if by_tile.lse_tau is None else torch.logsumexp(by_tile.lse_tau, -1)
    expected = best_score = best_class = None
    if by_tile.expected is not None and by_tile.lse is not None and lse is not None:
        # As in `combine_summaries`, rounding errors of the tiles' probabilities multiply small differences.
        shares = (by_tile.lse - lse[:, None]).exp_()
        expected = lse + (shares * (by_tile.expected - lse[:, None])).sum(-1)
    total = None if by_tile.total is None else by_tile.total.sum(-1)
    if by_tile.best_score is not None and by_tile.best_class is not None:
        best_score, best_tile = by_tile.best_score.max(-1)
        best_class = by_tile.best_class.gather(1, best_tile[:, None])[:, 0]
    return RowSummary(lse, lse_tau, expected, total, best_score, best_class)


def _transform_arguments(transform: ScoreTransform) -> dict[str, Any]:
    """Return the arguments of a kernel that transforms scores."""
    return {
        "scale": transform.scale,
        "softcap": 1.0 if transform.softcap is None else transform.softcap,
        "inverse_temperature": 1.0 / transform.temperature,
        "TRANSFORM": not transform.is_identity,
        "SOFTCAP": transform.softcap is not None,
    }


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _contiguous_float32(x: Tensor | None) -> Tensor | None:
    """Return a contiguous float32 copy, because autograd may pass expanded tensors, such as the gradient of a sum."""
    return None if x is None else x.to(torch.float32).contiguous()


@cache
def _device_properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)
