"""The triton kernels compile in the dtypes and tiles that GPUs use, and fit their shared memory. No GPU is needed.

The interpreter runs the kernels only in float32; these tests show that they also compile in bfloat16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from reefknot.kernels import triton_divergence_kernels as divergence_kernels  # noqa: E402
from reefknot.kernels import triton_kernels as kernels  # noqa: E402
from reefknot.kernels import triton_recurrence as recurrence  # noqa: E402
from reefknot.kernels import triton_row_kernels as row_kernels  # noqa: E402

if not hasattr(row_kernels.scale_kernel, "arg_names"):
    pytest.skip("triton is in interpreter mode", allow_module_level=True)

DIM = 1024
POINTERS = {
    "bias_ptr": "*fp32",
    "centre_ptr": "*fp32",
    "targets_ptr": "*i64",
    "hidden_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "x_ptr": "*bf16",
    "out_ptr": "*bf16",
    "stride": "i32",
    "inverse_tau": "fp32",
    "uniform": "fp32",
    "scale": "fp32",
    "softcap": "fp32",
    "inverse_temperature": "fp32",
    "best_class_ptr": "*i64",
}
GPUS = {
    "A100": (80, 163_840, (128, 128, 64, 8, 3, False)),
    "L40S": (89, 101_376, (128, 128, 32, 8, 2, False)),
    "H200": (90, 232_448, (128, 256, 64, 8, 4, True)),
}
"""Compute capability, shared memory per block, and the tiles that `_TileConfig.choose` returns for bfloat16."""
LEAST_MEMORY = min(GPUS, key=lambda gpu: GPUS[gpu][1])
"""The GPU with the least shared memory. Kernels without products use as much of it on every GPU."""
TORCH_TILES = (32, 128, 16, 4, 2, False)
"""Tiles for float32, where torch computes the products."""
UNUSED = dict.fromkeys(
    ("TRANSFORM", "SOFTCAP", "TEMPERED", "EXPECTED", "ENTROPY", "TOTAL", "CLASS_WEIGHT", "BEST", "BIAS_SUMS"), False
)
"""Flags of the kernels that a case does not set."""
SOFTCAP = {"TRANSFORM": True, "SOFTCAP": True}
TILED = [
    ("loss_and_gradient_kernel", {"hidden": "N", "weight": "V", "out": "NV"}, {}),
    ("loss_and_gradient_kernel", {"hidden": "N", "weight": "V", "out": "NV"}, SOFTCAP),
    ("summary_kernel", {"hidden": "N", "weight": "V"}, {"PLAIN": True, "TEMPERED": True}),
    (
        "summary_kernel",
        {"hidden": "N", "weight": "V"},
        {**SOFTCAP, "PLAIN": True, "EXPECTED": True, "TOTAL": True, "CLASS_WEIGHT": True, "BEST": True},
    ),
    (
        "score_gradient_kernel",
        {"hidden": "N", "weight": "V", "out": "NV"},
        {"PLAIN": True, "TEMPERED": True, "BIAS_SUMS": True},
    ),
    (
        "score_gradient_kernel",
        {"hidden": "N", "weight": "V", "out": "NV"},
        {"PLAIN": True, "TEMPERED": False, "BIAS_SUMS": False},
    ),
    (
        "score_gradient_kernel",
        {"hidden": "N", "weight": "V", "out": "NV"},
        {**SOFTCAP, "PLAIN": True, "ENTROPY": True, "TOTAL": True, "CLASS_WEIGHT": True},
    ),
    (
        "soft_target_gradients_kernel",
        {"queries": "N", "keys": "V", "grad_mean": "N", "values": "V", "probs_out": "NV", "grad_out": "NV"},
        {},
    ),
]
SMALL = [
    ("target_scores_kernel", {"BLOCK_D": 1024, "CENTRED": True}),
    ("finish_rows_kernel", {"BLOCK_T": 256, "BLOCK_V": 64, **SOFTCAP}),
    ("rescale_rows_kernel", {"BLOCK_T": 256, "BLOCK_V": 1024, "TILE_V": 256}),
    ("scale_kernel", {"BLOCK": 8192}),
    ("small_loss_kernel", {"BLOCK_V": 1024}),
]


def shared_memory(
    kernel: Any, capability: int, matrices: dict[str, str], constants: dict[str, Any], *launch: int
) -> int:
    """Compile a kernel and return the bytes of shared memory that it uses."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # Other arguments are integers or pointers to float32.
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {name: kind for name, kind in (POINTERS | matrices).items() if name in types}
    types |= {name: "constexpr" for name in constants if name in types}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items() if name in types}
    warps, stages = launch
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(ASTSource(kernel, types, values), target=target, options=options)
    return int(compiled.metadata.shared)


@pytest.mark.parametrize(
    ("gpu", "torch_products"),
    [*((gpu, False) for gpu in GPUS), (LEAST_MEMORY, True)],
    ids=[*GPUS, f"{LEAST_MEMORY}, products by torch"],
)
@pytest.mark.parametrize(("name", "matrices", "flags"), TILED)
def test_tile_kernels_compile_and_fit_shared_memory(
    gpu: str, torch_products: bool, name: str, matrices: dict[str, str], flags: dict[str, Any]
) -> None:
    capability, limit, tiles = GPUS[gpu]
    rows, classes, dim, warps, stages, descriptors = TORCH_TILES if torch_products else tiles
    type_name, dtype = ("fp32", triton.language.float32) if torch_products else ("bf16", triton.language.bfloat16)
    if name == "soft_target_gradients_kernel" and classes > 128:
        classes, stages = 128, 3
    if flags.get("BIAS_SUMS"):
        stages -= 1
    boxes = {"N": (rows, dim), "V": (classes, dim), "NV": (rows, classes // 2)}
    matrix_types = {
        matrix: f"tensordesc<{type_name}[{boxes[axes][0]}, {boxes[axes][1]}]>" if descriptors else f"*{type_name}"
        for matrix, axes in matrices.items()
    }
    tiling = {
        "BLOCK_N": rows,
        "BLOCK_V": classes,
        "BLOCK_D": dim,
        "TMA": descriptors,
        "STORED": torch_products,
        "NUM_PROGRAMS": 132,
        "DTYPE": dtype,
    }
    constants = {"D": DIM, "C": DIM, "BIAS": True, "KEYS_ARE_VALUES": True, **UNUSED, **tiling, **flags}
    used = shared_memory(getattr(kernels, name), capability, matrix_types, constants, warps, stages)
    assert used <= limit
    assert torch_products or used > 0


@pytest.mark.parametrize(("name", "constants"), SMALL)
def test_row_kernels_compile_and_fit_shared_memory(name: str, constants: dict[str, Any]) -> None:
    assert (
        shared_memory(getattr(row_kernels, name), 90, {}, {"D": DIM, "BIAS": True, **UNUSED, **constants}, 4, 3)
        <= 49_152
    )


@pytest.mark.parametrize("kind", ["FORWARD", "REVERSE", "JSD"])
def test_divergence_kernel_compiles(kind: str) -> None:
    flags = dict.fromkeys(("STUDENT_BIAS", "TEACHER_BIAS", "STUDENT_GRAD", "TEACHER_GRAD"), True)
    constants = {"KIND": getattr(divergence_kernels, kind).value, "BLOCK_V": 2048, **flags}
    types = {"beta": "fp32", "student_grad_ptr": "*bf16", "teacher_grad_ptr": "*bf16"}
    assert shared_memory(divergence_kernels.compare_rows_kernel, 90, types, constants, 8, 3) <= 49_152


@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize(
    ("gpu", "dtype", "layers", "rows", "units", "masks"),
    [
        ("A100", torch.bfloat16, 1, 20, 650, 4),
        ("A100", torch.float32, 1, 20, 650, 1),
        ("H200", torch.bfloat16, 1, 80, 1150, 1),
        ("H200", torch.float32, 1, 20, 200, 4),
        ("A100", torch.bfloat16, 2, 20, 200, 1),
        ("A100", torch.float32, 2, 20, 650, 1),
        ("H200", torch.bfloat16, 3, 80, 200, 1),
        ("H200", torch.bfloat16, 2, 20, 650, 1),
        ("H200", torch.float32, 2, 20, 200, 1),
    ],
)
def test_recurrence_kernels_compile_and_fit_shared_memory(
    gpu: str,
    dtype: torch.dtype,
    layers: int,
    rows: int,
    units: int,
    masks: int,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability, limit, _ = GPUS[gpu]
    monkeypatch.setattr(recurrence, "_device_limits", lambda device: ({80: 108, 90: 132}[capability], limit))
    config = recurrence.LaunchConfig.choose(rows, units, dtype, torch.device("cuda"), layers)
    assert config is not None
    type_name = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    data_pointers = ("x_ptr", "g_ptr", "w_ptr", "states_ptr", "h_ptr", "gates_ptr", "d_ptr")
    padded = triton.cdiv(units, 8) * 8
    tiling = {"BLOCK_B": config.block_b, "BLOCK_H": config.block_h, "BLOCK_K": config.block_k}
    tiling |= {"HOLD": config.held_units, "PRECISION": config.precision}
    flags = {"LAYERS": layers, "H": units, "P": padded, "M": masks}
    no_bias = {"bias_ptr": None} if layers == 1 else {}
    pointers = {**dict.fromkeys(data_pointers, type_name), "count_ptr": "*i32"}
    arguments = capability, pointers, {**tiling, **flags, **no_bias}, config.num_warps, config.num_stages
    assert 0 < shared_memory(getattr(recurrence, kernel), *arguments) <= limit
