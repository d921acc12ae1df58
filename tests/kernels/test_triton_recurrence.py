"""The kernels of the recurrence against float64: small shapes in triton's interpreter on a CPU, the papers' on a GPU.

TRITON_INTERPRET=1 pytest tests/kernels/test_triton_recurrence.py      the interpreter's part by itself

Shapes: L layers, T steps, B rows of the batch, H units, G = 4H gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.choice import using
from reefknot.kernels.recurrence import lstm_loop, lstm_scan
from reefknot.nn.encoders.awd_lstm import AWDLSTM

from .interpreter import INTERPRETED, anywhere, on_a_gpu, run_in_interpreter, starts_the_interpreter
from .test_recurrence import KINDS, everything, problem, stack_everything, stack_problem, stacked

pytest.importorskip("triton", reason="triton is not installed")

from reefknot.kernels.triton_recurrence import Plan

DEVICE = "cpu" if INTERPRETED else "cuda"

# Rows, steps and units of the papers' models; the last has more rows than one launch.
PAPERS = [(20, 35, 200), (20, 35, 650), (20, 35, 1500), (20, 70, 400), (20, 70, 1150), (80, 70, 1150), (300, 5, 1500)]
# Layers, rows, steps and units: all layers in one launch, with weights that are held or not, one tile of rows or two.
STACKS = [(2, 20, 35, 200), (3, 20, 35, 200), (2, 20, 35, 650), (3, 20, 35, 650), (2, 80, 5, 200), (2, 20, 70, 400)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@starts_the_interpreter
def test_the_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def by_the_kernels() -> Iterator[None]:
    with using("triton"):
        yield


def given(T: int, B: int, H: int, kind: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    inputs, mask = problem(T, B, H, kind)
    x, h, c, w = (each.detach().to(DEVICE, dtype).requires_grad_() for each in inputs)
    return [x, h, c.detach().float().requires_grad_(), w], None if mask is None else mask.to(DEVICE, torch.float32)


def off(T: int, B: int, H: int, kind: str, dtype: torch.dtype) -> dict[str, float]:
    """How far everything is from the loop in float64 on the same numbers."""
    inputs, mask = given(T, B, H, kind, dtype)
    exact = everything(
        [each.detach().double().requires_grad_() for each in inputs], None if mask is None else mask.double()
    )
    names = ("h", "c", "dx", "dh0", "dc0", "dw")
    found = everything(inputs, mask)
    assert [each.dtype for each in found] == [dtype, torch.float32, dtype, dtype, torch.float32, dtype]
    pairs = zip(names, found, exact, strict=True)
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in pairs}


@anywhere
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 2, 17), (1, 20, 40)])  # one program, slices of units, tiles of rows
def test_values_and_gradients_in_small(shape: tuple[int, int, int], kind: str) -> None:
    found = off(*shape, kind, torch.float32)
    assert max(found.values()) < TOLERANCE[torch.float32], found


def stack_given(L: int, T: int, B: int, H: int, kind: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    inputs, masks = stack_problem(L, T, B, H, kind)
    x, h, c, *weights = (each.detach().to(DEVICE, dtype).requires_grad_() for each in inputs)
    masks = None if masks is None else masks.to(DEVICE, torch.float32)
    return [x, h, c.detach().float().requires_grad_(), *weights], masks


def stack_off(L: int, T: int, B: int, H: int, kind: str, dtype: torch.dtype) -> dict[str, float]:
    inputs, masks = stack_given(L, T, B, H, kind, dtype)
    exact = stack_everything([each.detach().double().requires_grad_() for each in inputs], masks)
    found = stack_everything(inputs, masks)
    weights = [*(f"dw{layer}" for layer in range(L)), *(f"du{layer}" for layer in range(1, L))]
    names = ["h", "hs", "cs", "dx", "dh0", "dc0", *weights, *(f"db{layer}" for layer in range(1, L))]
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in zip(names, found, exact, strict=True)}


@anywhere
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("shape", [(3, 2, 5), (2, 18, 19)])  # held; read in parts, with two tiles of rows
def test_a_stack_in_small(layers: int, shape: tuple[int, int, int], kind: str) -> None:
    found = stack_off(layers, *shape, kind, torch.float32)
    assert max(found.values()) < TOLERANCE[torch.float32], found


@anywhere
@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_output_of_a_stack_may_be_the_only_one_used(given: int) -> None:
    inputs, masks = stack_given(2, 3, 2, 5, "shared", torch.float32)
    found = torch.autograd.grad(stacked(inputs, masks)[given].square().sum(), inputs)
    with using("reference"):
        exact = torch.autograd.grad(stacked(inputs, masks)[given].square().sum(), inputs)
    torch.testing.assert_close(found, exact)


@anywhere
def test_where_not_all_layers_have_room_each_has_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, asked = Plan.choose, []

    def one_layer(*given: Any) -> Plan | None:
        asked.append(given[4] if len(given) > 4 else 1)
        return choose(*given) if asked[-1] == 1 else None

    inputs, masks = stack_given(2, 3, 2, 5, "shared", torch.float32)
    expected = stack_everything(inputs, masks)
    monkeypatch.setattr(Plan, "choose", one_layer)
    torch.testing.assert_close(stack_everything(inputs, masks), expected)
    assert asked[0] == 2
    assert set(asked[1:]) == {1}


@anywhere
def test_inputs_may_lie_in_memory_in_any_order() -> None:
    inputs, mask = given(3, 2, 5, "per gate", torch.float32)
    assert mask is not None
    x, h, c, w = inputs
    turned = [x.mT.contiguous().mT, h.T.contiguous().T, c.T.contiguous().T, w.T.contiguous().T]
    turned = [each.detach().requires_grad_() for each in turned]
    torch.testing.assert_close(everything(turned, mask.mT.contiguous().mT), everything(inputs, mask))


@anywhere
def test_what_is_not_asked_for_is_not_made() -> None:
    (x, h, c, w), mask = given(3, 2, 5, "shared", torch.float32)
    h_TBH, _ = lstm_scan(x, h.detach(), c.detach(), w.detach(), mask)
    exact, _ = lstm_loop(x, h, c, w, mask, torch.float32)
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), x)[0] for each in (h_TBH, exact)))


@anywhere
def test_second_derivatives_are_refused() -> None:
    (x, h, c, w), mask = given(2, 1, 3, "shared", torch.float32)
    h_TBH, _ = lstm_scan(x, h, c, w, mask)
    with pytest.raises(ArgumentError, match="no second derivatives"):
        torch.autograd.grad(h_TBH.sum(), x, create_graph=True)


@anywhere
def test_a_weight_dropped_lstm_is_the_one_that_torch_runs() -> None:
    torch.manual_seed(0)
    encoder = AWDLSTM(3, 5, dropout_hidden=0.3, weight_drop=0.5).to(DEVICE)
    x_BTD = torch.randn(2, 4, 3, device=DEVICE, requires_grad=True)
    state = {name: part + 0.1 for name, part in encoder.initial_state(2, x_BTD.device).items()}
    found = {}
    for impl in ("reference", "triton"):
        torch.manual_seed(1)
        with using(impl):  # type: ignore[arg-type]
            encoded = encoder(x_BTD, state)
            loss = encoded.output.square().sum() + sum(part.sum() for part in encoded.state.values())
        found[impl] = (encoded.raw, *encoded.state.values(), *torch.autograd.grad(loss, [x_BTD, *encoder.parameters()]))
    assert "_ScanBackward" in names(loss.grad_fn)
    # On a GPU both round to TF32, each in its own order.
    within = 1e-5 if INTERPRETED else 1e-3
    torch.testing.assert_close(found["triton"], found["reference"], atol=within, rtol=within)


def names(node: Any) -> set[str]:
    """Of the functions that a gradient goes through."""
    seen, left = set(), [node]
    while left:
        each = left.pop()
        if each is not None and each not in seen:
            seen.add(each)
            left += [below for below, _ in each.next_functions]
    return {each.name() for each in seen}


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", PAPERS)
def test_the_shapes_of_the_papers(shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    B, T, H = shape
    found = off(T, B, H, kind, dtype)
    assert max(found.values()) < TOLERANCE[dtype], found


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "shared"])
@pytest.mark.parametrize("shape", STACKS)
def test_stacks_of_the_papers(shape: tuple[int, int, int, int], kind: str, dtype: torch.dtype) -> None:
    L, B, T, H = shape
    if Plan.choose(B, H, dtype, torch.device(DEVICE), L) is None:
        pytest.skip("this device has no room for all layers at once")
    found = stack_off(L, T, B, H, kind, dtype)
    assert max(found.values()) < L * TOLERANCE[dtype], found


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", STACKS)
def test_equal_stacks_give_equal_bits(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    L, B, T, H = shape
    inputs, masks = stack_given(L, T, B, H, "shared", dtype)
    first, second = (stack_everything(inputs, masks) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", PAPERS)
def test_equal_calls_give_equal_bits(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    B, T, H = shape
    inputs, mask = given(T, B, H, "shared", dtype)
    first, second = (everything(inputs, mask) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@on_a_gpu
def test_under_autocast_weights_in_float32_get_gradients_in_float32() -> None:
    inputs, mask = given(5, 3, 40, "shared", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = everything(inputs, mask)
    assert found[0].dtype == torch.bfloat16
    assert all(each.dtype == torch.float32 for each in found[1:])
    exact = everything([each.detach().double().requires_grad_() for each in inputs], mask)
    for a, b in zip(found, exact, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < TOLERANCE[torch.bfloat16]


def captured_repeats(call: Callable[[], list[Tensor]]) -> None:
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for _ in range(3):
        for each in found:
            each.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_a_gpu
@pytest.mark.parametrize("shape", [(20, 35, 200), (80, 70, 1150)])
def test_a_captured_graph_repeats_it(shape: tuple[int, int, int]) -> None:
    B, T, H = shape
    inputs, mask = given(T, B, H, "shared", torch.bfloat16)
    captured_repeats(lambda: everything(inputs, mask))


@on_a_gpu
@pytest.mark.parametrize("shape", [(2, 20, 35, 200), (2, 20, 35, 650)])
def test_a_captured_graph_repeats_a_stack(shape: tuple[int, int, int, int]) -> None:
    L, B, T, H = shape
    inputs, masks = stack_given(L, T, B, H, "shared", torch.bfloat16)
    captured_repeats(lambda: stack_everything(inputs, masks))


@on_a_gpu
def test_more_than_the_device_can_share_has_no_plan() -> None:
    assert Plan.choose(1, 10**6, torch.bfloat16, torch.device("cuda")) is None
    assert Plan.choose(20, 1500, torch.bfloat16, torch.device("cuda"), 10) is None
