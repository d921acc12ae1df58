"""The kernels as operators: what torch's own checker says of them, and that a compiled loss is one graph with the eager
one's values and gradients.

Shapes: N rows, D width, V classes, K experts, U queries, C width of the values.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from reefknot.kernels import ops
from reefknot.kernels.choice import Impl, using
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy, row_losses, summed_loss
from reefknot.kernels.reference import compute_dtype
from reefknot.kernels.soft_target import soft_targets

from .dense import problem

EXPERTS = 3
HOW = ("auto", None)

types = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def given(rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Rows for each expert, classes, biases, a log-prior over the experts, and the targets."""
    p = problem(rows * EXPERTS, 6, 23).to(dtype)
    log_prior_NK = torch.randn(rows, EXPERTS, dtype=dtype).log_softmax(-1).requires_grad_()
    return [*p.leaves, log_prior_NK, p.y[:rows]]


# -- torch's checks ------------------------------------------------------------------------------------------------


def sound(operator: Any, *arguments: Any) -> None:
    """Schema, fake outputs, autograd, and all of it traced with shapes that change."""
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"}


@types
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_the_sum_is_a_sound_operator(dtype: torch.dtype, bias: bool, frozen: bool) -> None:
    h_RD, w_VD, b_V, log_prior_NK, y_N = given(5, dtype)
    w_VD = w_VD.detach() if frozen else w_VD
    b = b_V if bias else None
    sound(ops._summed_loss, h_RD, w_VD, b, log_prior_NK, y_N, dtype, *HOW, [True, not frozen, bias, True])
    h_ND = h_RD[:5].detach().requires_grad_()
    sound(ops._summed_loss, h_ND, w_VD, b, None, y_N, dtype, *HOW, [True, not frozen, bias, False])
    without = [None if each is None else each.detach() for each in (h_ND, w_VD, b)]
    sound(ops._summed_loss, *without, None, y_N, dtype, *HOW, [False] * 4)


@types
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("tau", [2.0, None])
def test_losses_of_rows_are_a_sound_operator(dtype: torch.dtype, bias: bool, tau: float | None) -> None:
    h_RD, w_VD, b_V, _, y_N = given(5, dtype)
    b, y_R = b_V if bias else None, y_N.repeat(EXPERTS)
    sound(ops._row_losses, h_RD, w_VD, b, y_R, tau, dtype, *HOW)
    h, w, b = (None if each is None else each.detach() for each in (h_RD, w_VD, b))
    _, lse, lse_tau = ops._row_losses(h, w, b, y_R, tau, dtype, *HOW)
    g = torch.randn_like(lse)
    for sent in ((g, None, None if tau is None else g), (None, g, None)):
        for needs in ([True, True, bias], [False, True, False]):
            sound(ops._row_gradients, h, w, b, y_R, lse, lse_tau, *sent, tau, dtype, *HOW, needs)


@types
@pytest.mark.parametrize("own", [True, False], ids=["values", "keys"])
def test_soft_targets_are_sound_operators(dtype: torch.dtype, own: bool) -> None:
    queries, keys, *_ = given(3, dtype)
    values = torch.randn(len(keys), 4, dtype=dtype, requires_grad=True) if own else None
    sound(ops._soft_targets, queries, keys, values, 2.0, dtype, *HOW)
    attention = [None if each is None else each.detach() for each in (queries, keys, values)]
    made = ops._soft_targets(*attention, 2.0, dtype, *HOW)
    sent = [torch.randn_like(each) for each in made[:2]]
    for needs in ([True, True, own], [False, False, own]):
        sound(ops._soft_gradients, *attention, *made, *sent, 2.0, dtype, *HOW, needs)


MIXED = [
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float64),
    (torch.float64, torch.float16, torch.float32),
]


@pytest.mark.parametrize("mixed", MIXED, ids=lambda each: "-".join(str(dtype).removeprefix("torch.") for dtype in each))
def test_types_are_told_as_they_come_out(mixed: tuple[torch.dtype, ...]) -> None:
    h, w, b = (each.detach().to(dtype).requires_grad_() for each, dtype in zip(given(5)[:3], mixed, strict=True))
    *_, log_prior_NK, y_N = given(5)
    dtype = compute_dtype(h, w)
    sound(ops._summed_loss, h, w, b, log_prior_NK, y_N, dtype, *HOW, [True] * 4)
    sound(ops._row_losses, h, w, b, y_N.repeat(EXPERTS), 2.0, dtype, *HOW)
    sound(ops._soft_targets, h, w, torch.randn(len(w), 4, requires_grad=True), 2.0, dtype, *HOW)


# -- compiled and eager --------------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def summed(h_RD: Tensor, w_VD: Tensor, b_V: Tensor, log_prior_NK: Tensor, y_N: Tensor) -> Tensor:
    """Parts of tensors, other work before and behind, and a gradient that is not one."""
    return 3 * summed_loss(h_RD.tanh()[: y_N.shape[0]], w_VD, b_V, y_N) + h_RD.square().sum()


def mixture(h_RD: Tensor, w_VD: Tensor, b_V: Tensor, log_prior_NK: Tensor, y_N: Tensor) -> Tensor:
    return summed_loss(h_RD, w_VD, b_V, y_N, log_prior_NK) / 7


def unbiased(h_RD: Tensor, w_VD: Tensor, b_V: Tensor, log_prior_NK: Tensor, y_N: Tensor) -> Tensor:
    return summed_loss(h_RD, w_VD, None, y_N.repeat(EXPERTS))


def by_row(h_RD: Tensor, w_VD: Tensor, b_V: Tensor, log_prior_NK: Tensor, y_N: Tensor) -> Tensor:
    nll_R, lse_R, _ = row_losses(h_RD, w_VD, b_V, y_N.repeat(EXPERTS))
    return (nll_R * h_RD.detach()[:, 0] + lse_R.square()).sum()


def tempered(h_RD: Tensor, w_VD: Tensor, b_V: Tensor, log_prior_NK: Tensor, y_N: Tensor) -> Tensor:
    """The losses alone of the three outputs are left out: their gradient is not made."""
    _, lse_R, lse_tau_R = row_losses(h_RD, w_VD, None, y_N.repeat(EXPERTS), tau=5.0)
    assert lse_tau_R is not None
    return (lse_R * lse_tau_R).sum()


def attended(h_RD: Tensor, w_VD: Tensor, b_V: Tensor, log_prior_NK: Tensor, y_N: Tensor) -> Tensor:
    mean_UD, negentropy_U = soft_targets(h_RD, w_VD, w_VD, 2.0)
    mean_UC, _ = soft_targets(h_RD, w_VD, w_VD[:, :4] * b_V[:, None], 2.0)
    return (mean_UD.square().sum(-1) * negentropy_U).sum() + mean_UC.pow(3).sum()


def of_a_library(h_RD: Tensor, w_VD: Tensor, b_V: Tensor, log_prior_NK: Tensor, y_N: Tensor) -> Tensor:
    h_NKD = h_RD.view(-1, EXPERTS, h_RD.shape[1])
    y_NK = y_N[:, None].expand(h_NKD.shape[:2])
    mean = linear_cross_entropy(h_NKD, w_VD, y_NK, b_V, check_targets=False)
    smoothed = linear_cross_entropy(
        *(h_NKD, w_VD, y_NK, b_V), reduction="none", label_smoothing=0.1, z_loss=0.01, check_targets=False, memory=1.0
    )
    return mean + smoothed.square().sum()


LOSSES = [summed, mixture, unbiased, by_row, tempered, attended, of_a_library]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=[loss.__name__ for loss in LOSSES])


@pytest.fixture
def compiled() -> Iterator[Callable[[Loss], tuple[Loss, CompileCounterWithBackend]]]:
    """Compiles into one graph, and counts how often; nothing is left compiled."""

    def compile_loss(loss: Loss) -> tuple[Loss, CompileCounterWithBackend]:
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        return torch.compile(loss, backend=counter, fullgraph=True), counter

    yield compile_loss
    torch.compiler.reset()


def values_and_gradients(loss: Loss, arguments: list[Tensor]) -> tuple[Tensor, ...]:
    """Also where the loss asks nothing of a leaf: zero."""
    value = loss(*arguments)
    return (value, *torch.autograd.grad(value, arguments[:4], allow_unused=True, materialize_grads=True))


@every_loss
def test_compiled_is_eager_at_every_size(loss: Loss, compiled: Any) -> None:
    """The second size makes the graph one for any number of rows."""
    found, counter = compiled(loss)
    for rows in (5, 8, 4, 11):
        arguments = given(rows)
        torch.testing.assert_close(values_and_gradients(found, arguments), values_and_gradients(loss, arguments))
    assert counter.frame_count == 2


@every_loss
def test_compiled_is_eager_under_autocast(loss: Loss, compiled: Any) -> None:
    """To the bit where both round alike, and they round alike: products in bfloat16, the backward pass outside."""
    arguments = given(5, torch.float32)
    found, _ = compiled(loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, wanted = found(*arguments), loss(*arguments)
    exact = loss(*arguments)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-6)
    assert not torch.equal(value, exact), "autocast must have been seen"
    gradients = (
        torch.autograd.grad(each, arguments[:4], allow_unused=True, materialize_grads=True) for each in (value, wanted)
    )
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [summed, by_row])
def test_a_compiled_loss_without_gradients(loss: Loss, compiled: Any) -> None:
    arguments = given(5)
    found, _ = compiled(loss)
    with torch.no_grad():
        value = found(*arguments)
    assert not value.requires_grad
    torch.testing.assert_close(value, loss(*arguments).detach())


@every_loss
def test_what_is_frozen_gets_no_gradient(loss: Loss, compiled: Any) -> None:
    arguments = given(5)
    arguments[1].requires_grad_(False)
    arguments[2].requires_grad_(False)
    found, _ = compiled(loss)
    gradients = (torch.autograd.grad(each(*arguments), arguments[0])[0] for each in (found, loss))
    torch.testing.assert_close(*gradients)


def test_using_is_seen_by_what_is_compiled_already(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Impl, float | None]] = []
    kernel = ops._kernel

    def watched(dtype: torch.dtype, impl: Impl, memory: float | None, device: torch.device) -> Any:
        seen.append((impl, memory))
        return kernel(dtype, impl, memory, device)

    monkeypatch.setattr(ops, "_kernel", watched)
    arguments = given(5)
    found, _ = compiled(by_row)
    expected = values_and_gradients(by_row, arguments)
    torch.testing.assert_close(values_and_gradients(found, arguments), expected)
    with using("chunked", memory=0.001):
        value = found(*arguments)
    # The backward pass has what the forward pass had, wherever it runs.
    torch.autograd.grad(value, arguments[0])
    with using("reference"):
        torch.testing.assert_close(values_and_gradients(found, arguments), expected)
    assert seen == [("auto", None)] * 2 + [("chunked", 0.001)] * 2


def test_a_second_backward_pass_finds_the_gradients_as_they_were(compiled: Any) -> None:
    arguments = given(5)
    found, _ = compiled(summed)
    value = found(*arguments)
    first = torch.autograd.grad(2 * value, arguments[:3], retain_graph=True)
    second = torch.autograd.grad(value, arguments[:3])
    torch.testing.assert_close(first, tuple(2 * each for each in second))


def test_a_factor_is_not_rounded_to_half_precision(compiled: Any) -> None:
    *leaves, log_prior_NK, y_N = given(5)
    arguments = [*(each.detach().bfloat16().requires_grad_() for each in leaves), log_prior_NK, y_N]
    found, _ = compiled(unbiased)
    (whole,), (part,) = (torch.autograd.grad(found(*arguments) * by, arguments[1]) for by in (1.0, 1 / 700))
    assert torch.equal(part, (whole.float() * (1 / 700)).bfloat16())


def test_operators_are_registered_only_for_what_is_compiled() -> None:
    program = (
        "import sys, torch; from reefknot.kernels.linear_cross_entropy import linear_cross_entropy as loss;"
        "loss(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1]));"
        "assert 'reefknot.kernels.ops' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
