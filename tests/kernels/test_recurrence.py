"""The recurrence of an LSTM in plain torch: against nn.LSTM where nothing is dropped, by differences where it is.

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
from reefknot.kernels.recurrence import lstm_scan, lstm_stack_scan, outruns_cudnn

KINDS = ("none", "shared", "per gate")


def problem(
    T: int, B: int, H: int, kind: str, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor | None]:
    """x, h, c, w, and a mask whose factors all differ."""
    draw = torch.Generator().manual_seed(T + 10 * B + 100 * H)
    shapes = [(T, B, 4 * H), (B, H), (B, H), (4 * H, H)]
    x, h, c, w = (torch.randn(*shape, generator=draw, dtype=dtype) for shape in shapes)
    mask = {"none": None, "shared": (B, H), "per gate": (4, B, H)}[kind]
    factors = None if mask is None else 2 * torch.rand(*mask, generator=draw, dtype=dtype)
    return [
        x.requires_grad_(),
        h.mul_(0.5).requires_grad_(),
        c.requires_grad_(),
        w.div_(H**0.5).requires_grad_(),
    ], factors


def everything(inputs: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Outputs, last cells, and the gradients of all inputs from both."""
    h_TBH, c_BH = lstm_scan(*inputs, mask)  # type: ignore[call-arg, arg-type]
    sent = [torch.linspace(-1, 1, each.numel(), device=each.device).view_as(each).to(each) for each in (h_TBH, c_BH)]
    return [h_TBH.detach(), c_BH.detach(), *torch.autograd.grad([h_TBH, c_BH], inputs, sent)]


def stack_problem(
    L: int, T: int, B: int, H: int, kind: str, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor | None]:
    """x, h, c, the recurrent and upward weights and biases, and masks whose factors all differ."""
    draw = torch.Generator().manual_seed(L + 10 * T + 100 * B + 1000 * H)
    shapes = [(T, B, 4 * H), (L, B, H), (L, B, H), *[(4 * H, H)] * (2 * L - 1), *[(4 * H,)] * (L - 1)]
    x, h, c, *weights = (torch.randn(*shape, generator=draw, dtype=dtype) for shape in shapes)
    mask = {"none": None, "shared": (L, B, H), "per gate": (L, 4, B, H)}[kind]
    factors = None if mask is None else 2 * torch.rand(*mask, generator=draw, dtype=dtype)
    inputs = [x, h.mul_(0.5), c, *(w.div_(H**0.5) for w in weights)]
    return [each.requires_grad_() for each in inputs], factors


def stacked(inputs: list[Tensor], masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    x, h, c, *weights = inputs
    L = len(h)
    return lstm_stack_scan(x, h, c, weights[:L], weights[L : 2 * L - 1], weights[2 * L - 1 :], masks)


def stack_everything(inputs: list[Tensor], masks: Tensor | None) -> list[Tensor]:
    """Outputs, last states and cells, and the gradients of all inputs from the three."""
    found = stacked(inputs, masks)
    sent = [torch.linspace(-1, 1, each.numel(), device=each.device).view_as(each).to(each) for each in found]
    return [*(each.detach() for each in found), *torch.autograd.grad(found, inputs, sent)]


@pytest.mark.parametrize("mask_shape", [None, (3, 6), (4, 3, 6)])
def test_undropped_it_is_the_lstm_of_torch(mask_shape: tuple[int, ...] | None) -> None:
    T, B, D, H = 5, 3, 4, 6
    torch.manual_seed(0)
    theirs = nn.LSTM(D, H).double()
    x_TBD = torch.randn(T, B, D, dtype=torch.float64, requires_grad=True)
    h_BH, c_BH = (torch.randn(B, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = [x_TBD, h_BH, c_BH, *theirs.parameters()]

    expected, (_, c_last) = theirs(x_TBD, (h_BH[None], c_BH[None]))
    w_ih, w_hh, b_ih, b_hh = theirs.parameters()
    mask = None if mask_shape is None else torch.ones(mask_shape, dtype=torch.float64)
    found = lstm_scan(x_TBD @ w_ih.T + b_ih + b_hh, h_BH, c_BH, w_hh, mask)

    sent = [torch.randn_like(each) for each in found]
    torch.testing.assert_close(found, (expected, c_last[0]))
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, sent),
        torch.autograd.grad([expected, c_last], inputs, [sent[0], sent[1][None]]),
    )


@pytest.mark.parametrize("mask_shape", [None, (3, 2, 6), (3, 4, 2, 6)])
def test_undropped_a_stack_is_that_of_torch(mask_shape: tuple[int, ...] | None) -> None:
    L, T, B, D, H = 3, 4, 2, 5, 6
    torch.manual_seed(0)
    theirs = nn.LSTM(D, H, num_layers=L).double()
    x_TBD = torch.randn(T, B, D, dtype=torch.float64, requires_grad=True)
    h_LBH, c_LBH = (torch.randn(L, B, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = [x_TBD, h_LBH, c_LBH, *theirs.parameters()]

    expected, ends = theirs(x_TBD, (h_LBH, c_LBH))
    (w_ih, *upward), recurrent, b_ih, b_hh = zip(*theirs.all_weights, strict=True)
    first, *biases = (a + b for a, b in zip(b_ih, b_hh, strict=True))
    masks = None if mask_shape is None else torch.ones(mask_shape, dtype=torch.float64)
    found = lstm_stack_scan(x_TBD @ w_ih.T + first, h_LBH, c_LBH, recurrent, upward, biases, masks)

    sent = [torch.randn_like(each) for each in found]
    torch.testing.assert_close(found, (expected, *ends))
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, sent), torch.autograd.grad([expected, *ends], inputs, sent)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_a_stack_reads_what_recurs_in_the_one_below(kind: str) -> None:
    """By the equations of one step for a gate at a time, and by layers one after the other for a window."""
    inputs, masks = stack_problem(2, 5, 3, 4, kind)
    x, h, c, low, high, up, bias = inputs
    below, above = [None, None] if masks is None else masks
    h_TBH, c_low = lstm_scan(x, h[0], c[0], low, below)
    by_gate = torch.ones(4, 1, 1) if below is None else below.expand(4, *below.shape[-2:])
    shares = [(h_TBH * mask) @ w.T + b for mask, w, b in zip(by_gate, up.chunk(4), bias.chunk(4), strict=True)]
    raw_TBH, c_high = lstm_scan(torch.cat(shares, -1), h[1], c[1], high, above)
    expected = raw_TBH, torch.stack([h_TBH[-1], raw_TBH[-1]]), torch.stack([c_low, c_high])

    found = stacked(inputs, masks)
    sent = [torch.randn_like(each) for each in found]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, sent), torch.autograd.grad(expected, inputs, sent))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_stack_are_those_of_the_differences(kind: str) -> None:
    inputs, masks = stack_problem(2, 2, 2, 3, kind)
    assert torch.autograd.gradcheck(lambda *given: stacked(list(given), masks), inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_of_one_is_a_layer(kind: str) -> None:
    (x, h, c, w), mask = problem(3, 2, 4, kind)
    h_TBH, c_BH = lstm_scan(x, h, c, w, mask)
    found = lstm_stack_scan(x, h[None], c[None], [w], [], [], None if mask is None else mask[None])
    assert all(torch.equal(*pair) for pair in zip(found, (h_TBH, h_TBH[-1:], c_BH[None]), strict=True))


def test_a_stack_under_autocast_is_rounded_as_a_layer_is() -> None:
    inputs, masks = stack_problem(3, 5, 3, 8, "shared", torch.float32)
    exact = stack_everything([each.double().detach().requires_grad_() for each in inputs], masks)
    with torch.autocast("cpu", torch.bfloat16):
        found = stack_everything(inputs, masks)
    assert [each.dtype for each in found[:3]] == [torch.bfloat16, torch.float32, torch.float32]
    for a, b in zip(found, exact, strict=True):
        assert 1e-5 < float((a.double() - b).norm() / b.norm()) < 3e-2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_differences(kind: str) -> None:
    inputs, mask = problem(3, 2, 4, kind)
    assert torch.autograd.gradcheck(lambda *given: lstm_scan(*given, mask), inputs)


def test_equal_masks_for_all_gates_are_one_mask() -> None:
    inputs, mask = problem(4, 3, 5, "shared")
    assert mask is not None
    torch.testing.assert_close(everything(inputs, mask.expand(4, 3, 5)), everything(inputs, mask))


def test_each_gate_has_the_mask_of_its_place() -> None:
    (x, h, c, w), mask = problem(1, 2, 3, "per gate")
    assert mask is not None
    i, f, g, o = (x[0].chunk(4, -1)[k] + (h * mask[k]) @ w.chunk(4)[k].T for k in range(4))
    cells = f.sigmoid() * c + i.sigmoid() * g.tanh()
    torch.testing.assert_close(lstm_scan(x, h, c, w, mask), ((o.sigmoid() * cells.tanh())[None], cells))


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_in_two_parts_is_the_window(kind: str) -> None:
    (x, h, c, w), mask = problem(6, 2, 4, kind)
    whole, last = lstm_scan(x, h, c, w, mask)
    left, between = lstm_scan(x[:2], h, c, w, mask)
    right, end = lstm_scan(x[2:], left[-1], between, w, mask)
    assert torch.equal(torch.cat([left, right]), whole)
    assert torch.equal(end, last)


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_products_are_rounded_and_cells_are_not(kind: str) -> None:
    inputs, mask = problem(6, 3, 8, kind, torch.float32)
    exact = everything(
        [each.double().detach().requires_grad_() for each in inputs], None if mask is None else mask.double()
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = everything(inputs, mask)
    assert found[0].dtype == torch.bfloat16
    assert all(each.dtype == torch.float32 for each in found[1:])
    for a, b in zip(found, exact, strict=True):
        off = float((a.double() - b).norm() / b.norm())
        assert 1e-5 < off < 2e-2


def test_float16_is_rounded_no_further_than_its_inputs() -> None:
    inputs, mask = problem(3, 2, 4, "shared")
    half = [each.half().detach().requires_grad_() for each in inputs]
    h_TBH, c_BH = lstm_scan(*half, mask.half() if mask is not None else None)  # type: ignore[arg-type]
    assert h_TBH.dtype == c_BH.dtype == torch.float32
    expected = lstm_scan(*[each.double() for each in half], mask)  # type: ignore[arg-type]
    torch.testing.assert_close(h_TBH.double(), expected[0], atol=1e-3, rtol=1e-3)


def test_the_mask_gets_no_gradient() -> None:
    (x, h, c, w), mask = problem(2, 2, 3, "shared")
    assert mask is not None
    mask.requires_grad_()
    h_TBH, _ = lstm_scan(x, h, c, w, mask)
    assert torch.autograd.grad(h_TBH.sum(), [w, mask], allow_unused=True)[1] is None


@pytest.mark.parametrize("impl", ["auto", "reference", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_implementation_but_the_kernels_is_the_loop(impl: Any, dtype: torch.dtype) -> None:
    inputs, mask = problem(3, 2, 4, "shared", dtype)
    with using(impl):
        found = everything(inputs, mask)
    assert all(torch.equal(a, b) for a, b in zip(found, everything(inputs, mask), strict=True))


def test_the_kernels_are_refused_where_they_cannot_run() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    inputs, mask = problem(2, 2, 3, "shared", torch.float32)
    with using("triton"), pytest.raises(ArgumentError, match="CUDA"):
        everything(inputs, mask)


def test_in_float64_the_loop_runs_whatever_is_chosen() -> None:
    inputs, mask = problem(2, 2, 3, "shared")
    with using("triton"):
        found = everything(inputs, mask)
    assert all(torch.equal(a, b) for a, b in zip(found, everything(inputs, mask), strict=True))


def test_a_layer_without_a_mask_is_left_to_cudnn_but_where_it_was_measured_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(dtype: torch.dtype, units: int = 1150) -> bool:
        return outruns_cudnn(torch.zeros(20, 70, 8, dtype=dtype), torch.zeros(4 * units, units, dtype=dtype))

    assert not chosen(torch.bfloat16)  # no GPU
    monkeypatch.setattr(recurrence, "_has_kernels", lambda *given: True)
    assert chosen(torch.bfloat16)
    assert chosen(torch.bfloat16, units=400)
    assert not chosen(torch.bfloat16, units=399)
    assert not chosen(torch.bfloat16, units=1151)
    with torch.no_grad():
        assert not chosen(torch.bfloat16)
    assert not chosen(torch.float32)
    assert not chosen(torch.float16)
    monkeypatch.setattr(recurrence, "rounds_to_tf32", lambda: True)
    assert chosen(torch.float32)
    assert not chosen(torch.float64)
    with using("triton"), torch.no_grad():
        assert chosen(torch.float32, units=1151)
