"""The recurrence kernels match float64: small shapes in triton's interpreter on a CPU, shapes of the papers on a GPU.

TRITON_INTERPRET=1 pytest tests/kernels/test_triton_recurrence.py      runs only the interpreted tests

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

from .interpreter import INTERPRETED, gpu_only, gpu_or_interpreter
from .test_recurrence import (
    KINDS,
    outputs_and_gradients,
    problem,
    run_stack,
    stack_outputs_and_gradients,
    stack_problem,
)

pytest.importorskip("triton", reason="triton is not installed")

from reefknot.kernels.triton_recurrence import LaunchConfig

DEVICE = "cpu" if INTERPRETED else "cuda"

# Rows, steps and units of the papers' models. The last shape has more rows than one launch takes.
PAPERS = [(20, 35, 200), (20, 35, 650), (20, 35, 1500), (20, 70, 400), (20, 70, 1150), (80, 70, 1150), (300, 5, 1500)]
# Layers, rows, steps and units. All layers share one launch, with one or two tiles of rows.
STACKS = [(2, 20, 35, 200), (3, 20, 35, 200), (2, 20, 35, 650), (3, 20, 35, 650), (2, 80, 5, 200), (2, 20, 70, 400)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def use_triton() -> Iterator[None]:
    with using("triton"):
        yield


def make_inputs(T: int, B: int, H: int, kind: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    inputs, mask = problem(T, B, H, kind)
    x, h, c, w = (tensor.detach().to(DEVICE, dtype).requires_grad_() for tensor in inputs)
    return [x, h, c.detach().float().requires_grad_(), w], None if mask is None else mask.to(DEVICE, torch.float32)


def layer_errors(T: int, B: int, H: int, kind: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the relative errors of outputs and gradients, compared with the loop in float64."""
    inputs, mask = make_inputs(T, B, H, kind, dtype)
    exact = outputs_and_gradients(
        [tensor.detach().double().requires_grad_() for tensor in inputs], None if mask is None else mask.double()
    )
    names = ("h", "c", "dx", "dh0", "dc0", "dw")
    actual = outputs_and_gradients(inputs, mask)
    assert [tensor.dtype for tensor in actual] == [dtype, torch.float32, dtype, dtype, torch.float32, dtype]
    pairs = zip(names, actual, exact, strict=True)
    return {
        name: float((actual_tensor.double() - exact_tensor).norm() / exact_tensor.norm())
        for name, actual_tensor, exact_tensor in pairs
    }


@gpu_or_interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 2, 17), (1, 20, 40)])  # one program; slices of units; tiles of rows
def test_layer_matches_float64_for_small_shapes(shape: tuple[int, int, int], kind: str) -> None:
    errors = layer_errors(*shape, kind, torch.float32)
    assert max(errors.values()) < TOLERANCE[torch.float32], errors


def make_stack_inputs(
    L: int, T: int, B: int, H: int, kind: str, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor | None]:
    inputs, masks = stack_problem(L, T, B, H, kind)
    x, h, c, *weights = (tensor.detach().to(DEVICE, dtype).requires_grad_() for tensor in inputs)
    masks = None if masks is None else masks.to(DEVICE, torch.float32)
    return [x, h, c.detach().float().requires_grad_(), *weights], masks


def stack_errors(L: int, T: int, B: int, H: int, kind: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the relative errors of outputs and gradients of a stack, compared with float64."""
    inputs, masks = make_stack_inputs(L, T, B, H, kind, dtype)
    exact = stack_outputs_and_gradients([tensor.detach().double().requires_grad_() for tensor in inputs], masks)
    actual = stack_outputs_and_gradients(inputs, masks)
    weights = [*(f"dw{layer}" for layer in range(L)), *(f"du{layer}" for layer in range(1, L))]
    names = ["h", "hs", "cs", "dx", "dh0", "dc0", *weights, *(f"db{layer}" for layer in range(1, L))]
    return {
        name: float((actual_tensor.double() - exact_tensor).norm() / exact_tensor.norm())
        for name, actual_tensor, exact_tensor in zip(names, actual, exact, strict=True)
    }


@gpu_or_interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("shape", [(3, 2, 5), (2, 18, 19)])  # weights held; read in parts, with two tiles of rows
def test_stack_matches_float64_for_small_shapes(layers: int, shape: tuple[int, int, int], kind: str) -> None:
    errors = stack_errors(layers, *shape, kind, torch.float32)
    assert max(errors.values()) < TOLERANCE[torch.float32], errors


@gpu_or_interpreter
@pytest.mark.parametrize("one_output", [0, 1, 2])
def test_gradients_of_a_single_stack_output_are_correct(one_output: int) -> None:
    inputs, masks = make_stack_inputs(2, 3, 2, 5, "shared", torch.float32)
    actual = torch.autograd.grad(run_stack(inputs, masks)[one_output].square().sum(), inputs)
    with using("reference"):
        exact = torch.autograd.grad(run_stack(inputs, masks)[one_output].square().sum(), inputs)
    torch.testing.assert_close(actual, exact)


@gpu_or_interpreter
def test_layers_are_launched_separately_if_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, layer_counts = LaunchConfig.choose, []

    def choose_one_layer(*arguments: Any) -> LaunchConfig | None:
        layer_counts.append(arguments[4] if len(arguments) > 4 else 1)
        return choose(*arguments) if layer_counts[-1] == 1 else None

    inputs, masks = make_stack_inputs(2, 3, 2, 5, "shared", torch.float32)
    expected = stack_outputs_and_gradients(inputs, masks)
    monkeypatch.setattr(LaunchConfig, "choose", choose_one_layer)
    torch.testing.assert_close(stack_outputs_and_gradients(inputs, masks), expected)
    assert layer_counts[0] == 2
    assert set(layer_counts[1:]) == {1}


@gpu_or_interpreter
def test_noncontiguous_inputs_give_the_same_result() -> None:
    inputs, mask = make_inputs(3, 2, 5, "per gate", torch.float32)
    assert mask is not None
    x, h, c, w = inputs
    noncontiguous = [x.mT.contiguous().mT, h.T.contiguous().T, c.T.contiguous().T, w.T.contiguous().T]
    noncontiguous = [tensor.detach().requires_grad_() for tensor in noncontiguous]
    torch.testing.assert_close(
        outputs_and_gradients(noncontiguous, mask.mT.contiguous().mT), outputs_and_gradients(inputs, mask)
    )


@gpu_or_interpreter
def test_frozen_inputs_do_not_change_the_other_gradients() -> None:
    (x, h, c, w), mask = make_inputs(3, 2, 5, "shared", torch.float32)
    hidden_TBH, _ = lstm_scan(x, h.detach(), c.detach(), w.detach(), mask)
    expected, _ = lstm_loop(x, h, c, w, mask, torch.float32)
    torch.testing.assert_close(*(torch.autograd.grad(output.square().sum(), x)[0] for output in (hidden_TBH, expected)))


@gpu_or_interpreter
def test_second_derivatives_are_rejected() -> None:
    (x, h, c, w), mask = make_inputs(2, 1, 3, "shared", torch.float32)
    hidden_TBH, _ = lstm_scan(x, h, c, w, mask)
    with pytest.raises(ArgumentError, match="no second derivatives"):
        torch.autograd.grad(hidden_TBH.sum(), x, create_graph=True)


@gpu_or_interpreter
def test_awd_lstm_with_kernels_equals_the_reference() -> None:
    torch.manual_seed(0)
    encoder = AWDLSTM(3, 5, dropout_hidden=0.3, weight_drop=0.5).to(DEVICE)
    inputs_BTD = torch.randn(2, 4, 3, device=DEVICE, requires_grad=True)
    state = {name: part + 0.1 for name, part in encoder.initial_state(2, inputs_BTD.device).items()}
    results = {}
    for impl in ("reference", "triton"):
        torch.manual_seed(1)
        with using(impl):  # type: ignore[arg-type]
            encoded = encoder(inputs_BTD, state)
            loss = encoded.output.square().sum() + sum(part.sum() for part in encoded.state.values())
        results[impl] = (
            encoded.raw,
            *encoded.state.values(),
            *torch.autograd.grad(loss, [inputs_BTD, *encoder.parameters()]),
        )
    assert "_ScanFunctionBackward" in autograd_functions(loss.grad_fn)
    # On a GPU both round to TF32, in different orders.
    tolerance = 1e-5 if INTERPRETED else 1e-3
    torch.testing.assert_close(results["triton"], results["reference"], atol=tolerance, rtol=tolerance)


def autograd_functions(node: Any) -> set[str]:
    """Return the names of the autograd functions that a gradient passes through."""
    seen, nodes = set(), [node]
    while nodes:
        function = nodes.pop()
        if function is not None and function not in seen:
            seen.add(function)
            nodes += [parent for parent, _ in function.next_functions]
    return {function.name() for function in seen}


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", PAPERS)
def test_layer_matches_float64_for_paper_shapes(shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    B, T, H = shape
    errors = layer_errors(T, B, H, kind, dtype)
    assert max(errors.values()) < TOLERANCE[dtype], errors


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "shared"])
@pytest.mark.parametrize("shape", STACKS)
def test_stack_matches_float64_for_paper_shapes(
    shape: tuple[int, int, int, int], kind: str, dtype: torch.dtype
) -> None:
    L, B, T, H = shape
    if LaunchConfig.choose(B, H, dtype, torch.device(DEVICE), L) is None:
        pytest.skip("all layers at once do not fit this device")
    errors = stack_errors(L, T, B, H, kind, dtype)
    assert max(errors.values()) < L * TOLERANCE[dtype], errors


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", STACKS)
def test_repeated_stack_calls_are_bitwise_equal(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    L, B, T, H = shape
    inputs, masks = make_stack_inputs(L, T, B, H, "shared", dtype)
    first, second = (stack_outputs_and_gradients(inputs, masks) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", PAPERS)
def test_repeated_layer_calls_are_bitwise_equal(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    B, T, H = shape
    inputs, mask = make_inputs(T, B, H, "shared", dtype)
    first, second = (outputs_and_gradients(inputs, mask) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@gpu_only
def test_float32_weights_get_float32_gradients_under_autocast() -> None:
    inputs, mask = make_inputs(5, 3, 40, "shared", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        actual = outputs_and_gradients(inputs, mask)
    assert actual[0].dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for tensor in actual[1:])
    exact = outputs_and_gradients([tensor.detach().double().requires_grad_() for tensor in inputs], mask)
    for actual_tensor, exact_tensor in zip(actual, exact, strict=True):
        assert float((actual_tensor.double() - exact_tensor).norm() / exact_tensor.norm()) < TOLERANCE[torch.bfloat16]


def assert_replay_is_bitwise_equal(call: Callable[[], list[Tensor]]) -> None:
    """Capture a call as a CUDA graph and check that replays give the same bits."""
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    for _ in range(3):
        for tensor in outputs:
            tensor.zero_()
        graph.replay()
        assert all(
            torch.equal(output, expected_output) for output, expected_output in zip(outputs, expected, strict=True)
        )


@gpu_only
@pytest.mark.parametrize("shape", [(20, 35, 200), (80, 70, 1150)])
def test_captured_layer_replays_bitwise(shape: tuple[int, int, int]) -> None:
    B, T, H = shape
    inputs, mask = make_inputs(T, B, H, "shared", torch.bfloat16)
    assert_replay_is_bitwise_equal(lambda: outputs_and_gradients(inputs, mask))


@gpu_only
@pytest.mark.parametrize("shape", [(2, 20, 35, 200), (2, 20, 35, 650)])
def test_captured_stack_replays_bitwise(shape: tuple[int, int, int, int]) -> None:
    L, B, T, H = shape
    inputs, masks = make_stack_inputs(L, T, B, H, "shared", torch.bfloat16)
    assert_replay_is_bitwise_equal(lambda: stack_outputs_and_gradients(inputs, masks))


@gpu_only
def test_no_plan_for_layers_that_exceed_the_device() -> None:
    assert LaunchConfig.choose(1, 10**6, torch.bfloat16, torch.device("cuda")) is None
    assert LaunchConfig.choose(20, 1500, torch.bfloat16, torch.device("cuda"), 10) is None
