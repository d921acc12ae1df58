"""The recurrence of an LSTM in plain torch equals nn.LSTM without dropout and passes gradcheck with dropout.

Shapes: L layers, T steps, B rows of the batch, H units, G = 4H gates.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reefknot.errors import ArgumentError
from reefknot.kernels import recurrence
from reefknot.kernels.choice import using
from reefknot.kernels.recurrence import is_faster_than_cudnn, lstm_scan, lstm_stack_scan

KINDS = ("none", "shared", "per gate")


def problem(
    T: int, B: int, H: int, kind: str, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor | None]:
    """Return x, h, c and w, and a mask with random factors."""
    generator = torch.Generator().manual_seed(T + 10 * B + 100 * H)
    shapes = [(T, B, 4 * H), (B, H), (B, H), (4 * H, H)]
    x, h, c, w = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)
    mask = {"none": None, "shared": (B, H), "per gate": (4, B, H)}[kind]
    factors = None if mask is None else 2 * torch.rand(*mask, generator=generator, dtype=dtype)
    return [
        x.requires_grad_(),
        h.mul_(0.5).requires_grad_(),
        c.requires_grad_(),
        w.div_(H**0.5).requires_grad_(),
    ], factors


def outputs_and_gradients(inputs: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Return the outputs, the last cells, and the gradients of all inputs."""
    hidden_TBH, cell_BH = lstm_scan(*inputs, mask)  # type: ignore[call-arg, arg-type]
    output_gradients = [
        torch.linspace(-1, 1, tensor.numel(), device=tensor.device).view_as(tensor).to(tensor)
        for tensor in (hidden_TBH, cell_BH)
    ]
    return [
        hidden_TBH.detach(),
        cell_BH.detach(),
        *torch.autograd.grad([hidden_TBH, cell_BH], inputs, output_gradients),
    ]


def stack_problem(
    L: int, T: int, B: int, H: int, kind: str, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor | None]:
    """Return x, h, c, the recurrent and upward weights and the biases, and masks with random factors."""
    generator = torch.Generator().manual_seed(L + 10 * T + 100 * B + 1000 * H)
    shapes = [(T, B, 4 * H), (L, B, H), (L, B, H), *[(4 * H, H)] * (2 * L - 1), *[(4 * H,)] * (L - 1)]
    x, h, c, *weights = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)
    mask = {"none": None, "shared": (L, B, H), "per gate": (L, 4, B, H)}[kind]
    factors = None if mask is None else 2 * torch.rand(*mask, generator=generator, dtype=dtype)
    inputs = [x, h.mul_(0.5), c, *(w.div_(H**0.5) for w in weights)]
    return [tensor.requires_grad_() for tensor in inputs], factors


def run_stack(inputs: list[Tensor], masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Run a stack on the tensors of `stack_problem`."""
    x, h, c, *weights = inputs
    L = len(h)
    return lstm_stack_scan(x, h, c, weights[:L], weights[L : 2 * L - 1], weights[2 * L - 1 :], masks)


def stack_outputs_and_gradients(inputs: list[Tensor], masks: Tensor | None) -> list[Tensor]:
    """Return the outputs, the last states and cells, and the gradients of all inputs."""
    actual = run_stack(inputs, masks)
    output_gradients = [
        torch.linspace(-1, 1, tensor.numel(), device=tensor.device).view_as(tensor).to(tensor) for tensor in actual
    ]
    return [*(tensor.detach() for tensor in actual), *torch.autograd.grad(actual, inputs, output_gradients)]


@pytest.mark.parametrize("mask_shape", [None, (3, 6), (4, 3, 6)])
def test_layer_without_dropout_equals_torch_lstm(mask_shape: tuple[int, ...] | None) -> None:
    T, B, D, H = 5, 3, 4, 6
    torch.manual_seed(0)
    torch_lstm = nn.LSTM(D, H).double()
    inputs_TBD = torch.randn(T, B, D, dtype=torch.float64, requires_grad=True)
    hidden_BH, cell_BH = (torch.randn(B, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = [inputs_TBD, hidden_BH, cell_BH, *torch_lstm.parameters()]

    expected, (_, c_last) = torch_lstm(inputs_TBD, (hidden_BH[None], cell_BH[None]))
    w_ih, w_hh, b_ih, b_hh = torch_lstm.parameters()
    mask = None if mask_shape is None else torch.ones(mask_shape, dtype=torch.float64)
    actual = lstm_scan(inputs_TBD @ w_ih.T + b_ih + b_hh, hidden_BH, cell_BH, w_hh, mask)

    output_gradients = [torch.randn_like(tensor) for tensor in actual]
    torch.testing.assert_close(actual, (expected, c_last[0]))
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, output_gradients),
        torch.autograd.grad([expected, c_last], inputs, [output_gradients[0], output_gradients[1][None]]),
    )


@pytest.mark.parametrize("mask_shape", [None, (3, 2, 6), (3, 4, 2, 6)])
def test_stack_without_dropout_equals_torch_lstm(mask_shape: tuple[int, ...] | None) -> None:
    L, T, B, D, H = 3, 4, 2, 5, 6
    torch.manual_seed(0)
    torch_lstm = nn.LSTM(D, H, num_layers=L).double()
    inputs_TBD = torch.randn(T, B, D, dtype=torch.float64, requires_grad=True)
    hidden_LBH, cell_LBH = (torch.randn(L, B, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = [inputs_TBD, hidden_LBH, cell_LBH, *torch_lstm.parameters()]

    expected, ends = torch_lstm(inputs_TBD, (hidden_LBH, cell_LBH))
    (w_ih, *upward), recurrent, b_ih, b_hh = zip(*torch_lstm.all_weights, strict=True)
    first, *biases = (a + b for a, b in zip(b_ih, b_hh, strict=True))
    masks = None if mask_shape is None else torch.ones(mask_shape, dtype=torch.float64)
    actual = lstm_stack_scan(inputs_TBD @ w_ih.T + first, hidden_LBH, cell_LBH, recurrent, upward, biases, masks)

    output_gradients = [torch.randn_like(tensor) for tensor in actual]
    torch.testing.assert_close(actual, (expected, *ends))
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, output_gradients),
        torch.autograd.grad([expected, *ends], inputs, output_gradients),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_layer_reads_the_masked_states_of_the_layer_below(kind: str) -> None:
    """Compare a stack with its layers run one after the other, with the inputs of every gate computed separately."""
    inputs, masks = stack_problem(2, 5, 3, 4, kind)
    x, h, c, low, high, up, bias = inputs
    below, above = [None, None] if masks is None else masks
    hidden_TBH, c_low = lstm_scan(x, h[0], c[0], low, below)
    by_gate = torch.ones(4, 1, 1) if below is None else below.expand(4, *below.shape[-2:])
    shares = [(hidden_TBH * mask) @ w.T + b for mask, w, b in zip(by_gate, up.chunk(4), bias.chunk(4), strict=True)]
    raw_TBH, c_high = lstm_scan(torch.cat(shares, -1), h[1], c[1], high, above)
    expected = raw_TBH, torch.stack([hidden_TBH[-1], raw_TBH[-1]]), torch.stack([c_low, c_high])

    actual = run_stack(inputs, masks)
    output_gradients = [torch.randn_like(tensor) for tensor in actual]
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, output_gradients), torch.autograd.grad(expected, inputs, output_gradients)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_stack_passes_gradcheck(kind: str) -> None:
    inputs, masks = stack_problem(2, 2, 2, 3, kind)
    assert torch.autograd.gradcheck(lambda *tensors: run_stack(list(tensors), masks), inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_stack_of_one_layer_equals_the_layer(kind: str) -> None:
    (x, h, c, w), mask = problem(3, 2, 4, kind)
    hidden_TBH, cell_BH = lstm_scan(x, h, c, w, mask)
    actual = lstm_stack_scan(x, h[None], c[None], [w], [], [], None if mask is None else mask[None])
    assert all(torch.equal(*pair) for pair in zip(actual, (hidden_TBH, hidden_TBH[-1:], cell_BH[None]), strict=True))


def test_autocast_rounds_products_of_a_stack() -> None:
    inputs, masks = stack_problem(3, 5, 3, 8, "shared", torch.float32)
    exact = stack_outputs_and_gradients([tensor.double().detach().requires_grad_() for tensor in inputs], masks)
    with torch.autocast("cpu", torch.bfloat16):
        actual = stack_outputs_and_gradients(inputs, masks)
    assert [tensor.dtype for tensor in actual[:3]] == [torch.bfloat16, torch.float32, torch.float32]
    for actual_tensor, exact_tensor in zip(actual, exact, strict=True):
        assert 1e-5 < float((actual_tensor.double() - exact_tensor).norm() / exact_tensor.norm()) < 3e-2


@pytest.mark.parametrize("kind", KINDS)
def test_layer_passes_gradcheck(kind: str) -> None:
    inputs, mask = problem(3, 2, 4, kind)
    assert torch.autograd.gradcheck(lambda *tensors: lstm_scan(*tensors, mask), inputs)


def test_equal_masks_per_gate_equal_one_shared_mask() -> None:
    inputs, mask = problem(4, 3, 5, "shared")
    assert mask is not None
    torch.testing.assert_close(outputs_and_gradients(inputs, mask.expand(4, 3, 5)), outputs_and_gradients(inputs, mask))


def test_every_gate_uses_its_own_mask() -> None:
    (x, h, c, w), mask = problem(1, 2, 3, "per gate")
    assert mask is not None
    i, f, g, o = (x[0].chunk(4, -1)[k] + (h * mask[k]) @ w.chunk(4)[k].T for k in range(4))
    cells = f.sigmoid() * c + i.sigmoid() * g.tanh()
    torch.testing.assert_close(lstm_scan(x, h, c, w, mask), ((o.sigmoid() * cells.tanh())[None], cells))


@pytest.mark.parametrize("kind", KINDS)
def test_two_short_windows_equal_one_long_window(kind: str) -> None:
    (x, h, c, w), mask = problem(6, 2, 4, kind)
    whole, last = lstm_scan(x, h, c, w, mask)
    left, between = lstm_scan(x[:2], h, c, w, mask)
    right, end = lstm_scan(x[2:], left[-1], between, w, mask)
    assert torch.equal(torch.cat([left, right]), whole)
    assert torch.equal(end, last)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_rounds_products_but_not_cells(kind: str) -> None:
    inputs, mask = problem(6, 3, 8, kind, torch.float32)
    exact = outputs_and_gradients(
        [tensor.double().detach().requires_grad_() for tensor in inputs], None if mask is None else mask.double()
    )
    with torch.autocast("cpu", torch.bfloat16):
        actual = outputs_and_gradients(inputs, mask)
    assert actual[0].dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for tensor in actual[1:])
    for actual_tensor, exact_tensor in zip(actual, exact, strict=True):
        relative_error = float((actual_tensor.double() - exact_tensor).norm() / exact_tensor.norm())
        assert 1e-5 < relative_error < 2e-2


def test_float16_inputs_are_computed_in_float32() -> None:
    inputs, mask = problem(3, 2, 4, "shared")
    half = [tensor.half().detach().requires_grad_() for tensor in inputs]
    hidden_TBH, cell_BH = lstm_scan(*half, mask.half() if mask is not None else None)  # type: ignore[arg-type]
    assert hidden_TBH.dtype == cell_BH.dtype == torch.float32
    expected = lstm_scan(*[tensor.double() for tensor in half], mask)  # type: ignore[arg-type]
    torch.testing.assert_close(hidden_TBH.double(), expected[0], atol=1e-3, rtol=1e-3)


def test_mask_gets_no_gradient() -> None:
    (x, h, c, w), mask = problem(2, 2, 3, "shared")
    assert mask is not None
    mask.requires_grad_()
    hidden_TBH, _ = lstm_scan(x, h, c, w, mask)
    assert torch.autograd.grad(hidden_TBH.sum(), [w, mask], allow_unused=True)[1] is None


@pytest.mark.parametrize("impl", ["auto", "reference", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_implementations_without_kernels_use_the_loop(impl: Any, dtype: torch.dtype) -> None:
    inputs, mask = problem(3, 2, 4, "shared", dtype)
    with using(impl):
        actual = outputs_and_gradients(inputs, mask)
    assert all(torch.equal(a, b) for a, b in zip(actual, outputs_and_gradients(inputs, mask), strict=True))


def test_triton_kernels_are_rejected_on_a_cpu() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    inputs, mask = problem(2, 2, 3, "shared", torch.float32)
    with using("triton"), pytest.raises(ArgumentError, match="CUDA"):
        outputs_and_gradients(inputs, mask)


def test_float64_always_uses_the_loop() -> None:
    inputs, mask = problem(2, 2, 3, "shared")
    with using("triton"):
        actual = outputs_and_gradients(inputs, mask)
    assert all(torch.equal(a, b) for a, b in zip(actual, outputs_and_gradients(inputs, mask), strict=True))


def test_unmasked_layer_uses_cudnn_unless_the_kernels_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uses_kernels(dtype: torch.dtype, units: int = 1150) -> bool:
        return is_faster_than_cudnn(torch.zeros(20, 70, 8, dtype=dtype), torch.zeros(4 * units, units, dtype=dtype))

    assert not uses_kernels(torch.bfloat16)  # no GPU
    monkeypatch.setattr(recurrence, "_can_use_kernels", lambda *arguments: True)
    assert uses_kernels(torch.bfloat16)
    assert uses_kernels(torch.bfloat16, units=400)
    assert not uses_kernels(torch.bfloat16, units=399)
    assert not uses_kernels(torch.bfloat16, units=1151)
    with torch.no_grad():
        assert not uses_kernels(torch.bfloat16)
    assert not uses_kernels(torch.float32)
    assert not uses_kernels(torch.float16)
    monkeypatch.setattr(recurrence, "rounds_to_tf32", lambda: True)
    assert uses_kernels(torch.float32)
    assert not uses_kernels(torch.float64)
    with using("triton"), torch.no_grad():
        assert uses_kernels(torch.float32, units=1151)
