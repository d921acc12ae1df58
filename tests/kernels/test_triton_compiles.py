"""The triton kernels, in the types and tiles that GPUs run, through triton's compiler: no GPU is needed for that.

What the interpreter runs in float32 is thereby known to compile in bfloat16, and to fit a multiprocessor's memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from reefknot.kernels import triton_kernels as kernels  # noqa: E402
from reefknot.kernels import triton_recurrence as recurrence  # noqa: E402

if not hasattr(kernels.scale_kernel, "arg_names"):
    pytest.skip("triton interprets here", allow_module_level=True)

WIDTH = 1024
POINTERS = {
    "b_ptr": "*fp32",
    "centre_ptr": "*fp32",
    "y_ptr": "*i64",
    "h_ptr": "*bf16",
    "w_ptr": "*bf16",
    "x_ptr": "*bf16",
    "out_ptr": "*bf16",
    "stride": "i32",
    "inverse_tau": "fp32",
    "uniform": "fp32",
}
GPUS = {
    "A100": (80, 163_840, (128, 128, 64, 8, 3, False)),
    "L40S": (89, 101_376, (128, 128, 32, 8, 2, False)),
    "H200": (90, 232_448, (128, 256, 64, 8, 4, True)),
}
"""Compute capability, shared memory of a block, and the tiles that `_Tiles.choose` gives them for bfloat16."""
MADE = (32, 128, 16, 4, 2, False)
"""Its tiles where torch makes the products, which are float32's."""
TILED = [
    ("exponentials_kernel", {"h": "N", "w": "V", "out": "NV"}, {}),
    ("normalisers_kernel", {"h": "N", "w": "V"}, {"PLAIN": True, "TEMPERED": True}),
    ("gradient_kernel", {"h": "N", "w": "V", "out": "NV"}, {"PLAIN": True, "TEMPERED": True, "BIAS_SUMS": True}),
    ("gradient_kernel", {"h": "N", "w": "V", "out": "NV"}, {"PLAIN": True, "TEMPERED": False, "BIAS_SUMS": False}),
    ("soft_gradients_kernel", {"h": "N", "k": "V", "m": "N", "v": "V", "q_out": "NV", "dz_out": "NV"}, {}),
]
SMALL = [
    ("target_scores_kernel", {"BD": 1024, "CENTRED": True}),
    ("finish_kernel", {"BT": 256, "BV": 64, "BD": 128}),
    ("scale_kernel", {"BLOCK": 8192}),
]


def shared_memory(kernel: Any, capability: int, matrices: dict[str, str], constants: dict[str, Any], *how: int) -> int:
    """Bytes that the compiled kernel takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # What has no other type is a number or a row of float32.
    types = {each: "*fp32" if each.endswith("_ptr") else "i32" for each in kernel.arg_names}
    types |= {each: kind for each, kind in (POINTERS | matrices).items() if each in types}
    types |= {each: "constexpr" for each in constants if each in types}
    values = {(kernel.arg_names.index(each),): value for each, value in constants.items() if each in types}
    warps, stages = how
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps, "num_stages": stages}
    done = triton.compile(ASTSource(kernel, types, values), target=target, options=options)
    return int(done.metadata.shared)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("made", [False, True], ids=["bfloat16", "float32, made by torch"])
@pytest.mark.parametrize(("name", "matrices", "flags"), TILED)
def test_kernels_over_tiles(gpu: str, made: bool, name: str, matrices: dict[str, str], flags: dict[str, Any]) -> None:
    capability, limit, tiles = GPUS[gpu]
    rows, classes, width, warps, stages, described = MADE if made else tiles
    kind, dtype = ("fp32", triton.language.float32) if made else ("bf16", triton.language.bfloat16)
    if name == "soft_gradients_kernel" and classes > 128:
        classes, stages = 128, 3
    if flags.get("BIAS_SUMS"):
        stages -= 1
    boxes = {"N": (rows, width), "V": (classes, width), "NV": (rows, classes // 2)}
    kinds = {
        each: f"tensordesc<{kind}[{boxes[place][0]}, {boxes[place][1]}]>" if described else f"*{kind}"
        for each, place in matrices.items()
    }
    cut = {"BN": rows, "BV": classes, "BD": width, "TMA": described, "STORED": made, "PROGRAMS": 132, "DTYPE": dtype}
    constants = {"D": WIDTH, "M": WIDTH, "BIAS": True, "ONE_TABLE": True, **cut, **flags}
    taken = shared_memory(getattr(kernels, name), capability, kinds, constants, warps, stages)
    assert taken <= limit
    assert made or taken > 0


@pytest.mark.parametrize(("name", "constants"), SMALL)
def test_kernels_over_rows(name: str, constants: dict[str, Any]) -> None:
    assert shared_memory(getattr(kernels, name), 90, {}, {"D": WIDTH, "BIAS": True, **constants}, 4, 3) <= 49_152


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
def test_kernels_over_steps(
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
    monkeypatch.setattr(recurrence, "_limits", lambda device: ({80: 108, 90: 132}[capability], limit))
    plan = recurrence.Plan.choose(rows, units, dtype, torch.device("cuda"), layers)
    assert plan is not None
    kind = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    made = ("x_ptr", "g_ptr", "w_ptr", "states_ptr", "h_ptr", "gates_ptr", "d_ptr")
    padded = triton.cdiv(units, 8) * 8
    cut = {"BM": plan.BM, "BH": plan.BH, "BK": plan.BK, "HOLD": plan.hold, "PRECISION": plan.precision}
    flags = {"LAYERS": layers, "H": units, "P": padded, "M": masks}
    left_out = {"bias_ptr": None} if layers == 1 else {}
    pointers = {**dict.fromkeys(made, kind), "count_ptr": "*i32"}
    how = capability, pointers, {**cut, **flags, **left_out}, plan.warps, plan.stages
    assert 0 < shared_memory(getattr(recurrence, kernel), *how) <= limit
