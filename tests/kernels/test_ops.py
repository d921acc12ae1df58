"""The kernels as operators: they pass torch's opcheck, and a compiled loss is one graph that equals the eager loss.

Shapes: N rows, R = N K rows, D dimensions, V classes, K experts, U queries, C dimensions of the values.
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
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.kernels.losses import row_losses, summed_loss
from reefknot.kernels.reference import compute_dtype
from reefknot.kernels.soft_target import soft_targets
from tiny import PATIENCE

from .dense import problem

EXPERTS = 3
AUTO = ("auto", None)
PLAIN = (1.0, None, 1.0)
"""Scale, softcap and temperature of scores that are not transformed."""
CAPPED = (0.5, 3.0, 2.0)

dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def make_arguments(rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return rows for every expert, classes, biases, a log-prior over the experts, and targets."""
    p = problem(rows * EXPERTS, 6, 23).to(dtype)
    log_prior_NK = torch.randn(rows, EXPERTS, dtype=dtype).log_softmax(-1).requires_grad_()
    return [*p.leaves, log_prior_NK, p.y[:rows]]


# -- opcheck ------------------------------------------------------------------------------------------------------


def assert_opcheck_passes(operator: Any, *arguments: Any) -> None:
    """Check schema, fake outputs and autograd of an operator, also with dynamic shapes."""
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"}


@dtypes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_summed_loss_passes_opcheck(dtype: torch.dtype, bias: bool, frozen: bool) -> None:
    hidden_RD, weight_VD, bias_V, log_prior_NK, targets_N = make_arguments(5, dtype)
    weight_VD = weight_VD.detach() if frozen else weight_VD
    b = bias_V if bias else None
    assert_opcheck_passes(
        ops._summed_loss,
        hidden_RD,
        weight_VD,
        b,
        log_prior_NK,
        targets_N,
        None,
        *PLAIN,
        dtype,
        *AUTO,
        [True, not frozen, bias, True],
    )
    hidden_ND = hidden_RD[:5].detach().requires_grad_()
    row_weight_N = torch.rand(5, dtype=dtype)
    assert_opcheck_passes(
        ops._summed_loss,
        hidden_ND,
        weight_VD,
        b,
        None,
        targets_N,
        row_weight_N,
        *CAPPED,
        dtype,
        *AUTO,
        [True, not frozen, bias, False],
    )
    no_gradients = [None if tensor is None else tensor.detach() for tensor in (hidden_ND, weight_VD, b)]
    assert_opcheck_passes(ops._summed_loss, *no_gradients, None, targets_N, None, *PLAIN, dtype, *AUTO, [False] * 4)


@dtypes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("request_fields", "transform"),
    [((2.0, False, False, False), PLAIN), ((None, False, False, False), PLAIN), ((None, True, True, True), CAPPED)],
    ids=["tempered", "plain", "everything"],
)
def test_row_results_pass_opcheck(
    dtype: torch.dtype, bias: bool, request_fields: tuple[Any, ...], transform: tuple[Any, ...]
) -> None:
    hidden_RD, weight_VD, bias_V, _, targets_N = make_arguments(5, dtype)
    used_bias, targets_R = bias_V if bias else None, targets_N.repeat(EXPERTS)
    tau, expected, total, _ = request_fields
    class_weight_V = torch.rand(len(weight_VD), dtype=dtype) if total else None
    settings = (*request_fields, *transform, dtype, *AUTO)
    assert_opcheck_passes(ops._row_results, hidden_RD, weight_VD, used_bias, targets_R, class_weight_V, *settings)
    inputs = [None if tensor is None else tensor.detach() for tensor in (hidden_RD, weight_VD, used_bias)]
    _, lse, lse_tau, entropy, _, _ = ops._row_results(*inputs, targets_R, class_weight_V, *settings)
    grad = torch.randn_like(lse)
    all_grads = (grad, None, None if tau is None else grad, grad if expected else None, grad if total else None)
    for output_grads in (all_grads, (None, grad, None, None, None)):
        for needs in ([True, True, bias], [False, True, False]):
            results = (lse, lse_tau, entropy)
            assert_opcheck_passes(
                ops._row_gradients, *inputs, targets_R, class_weight_V, *results, *output_grads, *settings, needs
            )


@dtypes
@pytest.mark.parametrize("separate_values", [True, False], ids=["separate values", "keys as values"])
def test_soft_targets_pass_opcheck(dtype: torch.dtype, separate_values: bool) -> None:
    queries, keys, *_ = make_arguments(3, dtype)
    values = torch.randn(len(keys), 4, dtype=dtype, requires_grad=True) if separate_values else None
    assert_opcheck_passes(ops._soft_targets, queries, keys, values, 2.0, dtype, *AUTO)
    attention = [None if tensor is None else tensor.detach() for tensor in (queries, keys, values)]
    outputs = ops._soft_targets(*attention, 2.0, dtype, *AUTO)
    output_gradients = [torch.randn_like(tensor) for tensor in outputs[:2]]
    for needs in ([True, True, separate_values], [False, False, separate_values]):
        assert_opcheck_passes(
            ops._soft_target_gradients, *attention, *outputs, *output_gradients, 2.0, dtype, *AUTO, needs
        )


MIXED = [
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float64),
    (torch.float64, torch.float16, torch.float32),
]


@pytest.mark.parametrize(
    "input_dtypes", MIXED, ids=lambda dtypes: "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
)
def test_mixed_dtypes_pass_opcheck(input_dtypes: tuple[torch.dtype, ...]) -> None:
    h, w, b = (
        tensor.detach().to(dtype).requires_grad_()
        for tensor, dtype in zip(make_arguments(5)[:3], input_dtypes, strict=True)
    )
    *_, log_prior_NK, targets_N = make_arguments(5)
    dtype = compute_dtype(h, w)
    assert_opcheck_passes(ops._summed_loss, h, w, b, log_prior_NK, targets_N, None, *PLAIN, dtype, *AUTO, [True] * 4)
    tempered = (2.0, False, False, False)
    assert_opcheck_passes(ops._row_results, h, w, b, targets_N.repeat(EXPERTS), None, *tempered, *PLAIN, dtype, *AUTO)
    assert_opcheck_passes(ops._soft_targets, h, w, torch.randn(len(w), 4, requires_grad=True), 2.0, dtype, *AUTO)


# -- compiled and eager --------------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def summed(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, log_prior_NK: Tensor, targets_N: Tensor) -> Tensor:
    """A loss of a slice, with operations before and after it and an upstream gradient of 3."""
    return (
        3 * summed_loss(hidden_RD.tanh()[: targets_N.shape[0]], weight_VD, bias_V, targets_N) + hidden_RD.square().sum()
    )


def mixture(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, log_prior_NK: Tensor, targets_N: Tensor) -> Tensor:
    return summed_loss(hidden_RD, weight_VD, bias_V, targets_N, log_prior_NK) / 7


def without_bias(
    hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, log_prior_NK: Tensor, targets_N: Tensor
) -> Tensor:
    return summed_loss(hidden_RD, weight_VD, None, targets_N.repeat(EXPERTS))


def by_row(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, log_prior_NK: Tensor, targets_N: Tensor) -> Tensor:
    nll_R, lse_R, _ = row_losses(hidden_RD, weight_VD, bias_V, targets_N.repeat(EXPERTS))
    return (nll_R * hidden_RD.detach()[:, 0] + lse_R.square()).sum()


def tempered(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, log_prior_NK: Tensor, targets_N: Tensor) -> Tensor:
    """A loss without the first of the three outputs, so that its gradient is None."""
    _, lse_R, lse_tau_R = row_losses(hidden_RD, weight_VD, None, targets_N.repeat(EXPERTS), tau=5.0)
    assert lse_tau_R is not None
    return (lse_R * lse_tau_R).sum()


def attended(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, log_prior_NK: Tensor, targets_N: Tensor) -> Tensor:
    mean_UD, negentropy_U = soft_targets(hidden_RD, weight_VD, weight_VD, 2.0)
    mean_UC, _ = soft_targets(hidden_RD, weight_VD, weight_VD[:, :4] * bias_V[:, None], 2.0)
    return (mean_UD.square().sum(-1) * negentropy_U).sum() + mean_UC.pow(3).sum()


def library_call(
    hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor, log_prior_NK: Tensor, targets_N: Tensor
) -> Tensor:
    hidden_NKD = hidden_RD.view(-1, EXPERTS, hidden_RD.shape[1])
    targets_NK = targets_N[:, None].expand(hidden_NKD.shape[:2])
    mean = linear_cross_entropy(hidden_NKD, weight_VD, targets_NK, bias_V, check_targets=False)
    smoothed = linear_cross_entropy(
        *(hidden_NKD, weight_VD, targets_NK, bias_V),
        reduction="none",
        label_smoothing=0.1,
        z_loss=0.01,
        check_targets=False,
        memory=1.0,
    )
    return mean + smoothed.square().sum()


LOSSES = [summed, mixture, without_bias, by_row, tempered, attended, library_call]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=[loss.__name__ for loss in LOSSES])


@pytest.fixture
def compiled() -> Iterator[Callable[[Loss], tuple[Loss, CompileCounterWithBackend]]]:
    """Compile a loss into one graph and count the compilations."""

    def compile_loss(loss: Loss) -> tuple[Loss, CompileCounterWithBackend]:
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        return torch.compile(loss, backend=counter, fullgraph=True), counter

    yield compile_loss
    torch.compiler.reset()


def values_and_gradients(loss: Loss, arguments: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the loss and its gradients, with zeros for unused inputs."""
    value = loss(*arguments)
    return (value, *torch.autograd.grad(value, arguments[:4], allow_unused=True, materialize_grads=True))


@every_loss
def test_compiled_loss_equals_eager_loss_at_every_size(loss: Loss, compiled: Any) -> None:
    """The graph of the second size has a dynamic number of rows, so later sizes are not compiled."""
    compiled_loss, counter = compiled(loss)
    for rows in (5, 8, 4, 11):
        arguments = make_arguments(rows)
        torch.testing.assert_close(
            values_and_gradients(compiled_loss, arguments), values_and_gradients(loss, arguments)
        )
    assert counter.frame_count == 2


@every_loss
def test_compiled_loss_equals_eager_loss_under_autocast(loss: Loss, compiled: Any) -> None:
    """Both round products to bfloat16. The backward pass runs outside of autocast."""
    arguments = make_arguments(5, torch.float32)
    compiled_loss, _ = compiled(loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, expected = compiled_loss(*arguments), loss(*arguments)
    exact = loss(*arguments)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(value, exact), "autocast must have an effect"
    gradients = (
        torch.autograd.grad(loss_value, arguments[:4], allow_unused=True, materialize_grads=True)
        for loss_value in (value, expected)
    )
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [summed, by_row])
def test_compiled_loss_works_without_gradients(loss: Loss, compiled: Any) -> None:
    arguments = make_arguments(5)
    compiled_loss, _ = compiled(loss)
    with torch.no_grad():
        value = compiled_loss(*arguments)
    assert not value.requires_grad
    torch.testing.assert_close(value, loss(*arguments).detach())


@every_loss
def test_compiled_loss_works_with_frozen_inputs(loss: Loss, compiled: Any) -> None:
    arguments = make_arguments(5)
    arguments[1].requires_grad_(False)
    arguments[2].requires_grad_(False)
    compiled_loss, _ = compiled(loss)
    gradients = (torch.autograd.grad(function(*arguments), arguments[0])[0] for function in (compiled_loss, loss))
    torch.testing.assert_close(*gradients)


def test_compiled_loss_follows_a_later_using(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[tuple[Impl, float | None]] = []
    choose_backend = ops._choose_backend

    def record_choice(dtype: torch.dtype, impl: Impl, memory: float | None, device: torch.device) -> Any:
        choices.append((impl, memory))
        return choose_backend(dtype, impl, memory, device)

    monkeypatch.setattr(ops, "_choose_backend", record_choice)
    arguments = make_arguments(5)
    compiled_loss, _ = compiled(by_row)
    expected = values_and_gradients(by_row, arguments)
    torch.testing.assert_close(values_and_gradients(compiled_loss, arguments), expected)
    with using("chunked", memory=0.001):
        value = compiled_loss(*arguments)
    # The backward pass uses the choice of the forward pass.
    torch.autograd.grad(value, arguments[0])
    with using("reference"):
        torch.testing.assert_close(values_and_gradients(compiled_loss, arguments), expected)
    assert choices == [("auto", None)] * 2 + [("chunked", 0.001)] * 2


def test_second_backward_pass_gives_the_same_gradients(compiled: Any) -> None:
    arguments = make_arguments(5)
    compiled_loss, _ = compiled(summed)
    value = compiled_loss(*arguments)
    first = torch.autograd.grad(2 * value, arguments[:3], retain_graph=True)
    second = torch.autograd.grad(value, arguments[:3])
    torch.testing.assert_close(first, tuple(2 * gradient for gradient in second))


def test_scaling_factor_is_not_rounded_to_half_precision(compiled: Any) -> None:
    *leaves, log_prior_NK, targets_N = make_arguments(5)
    arguments = [*(leaf.detach().bfloat16().requires_grad_() for leaf in leaves), log_prior_NK, targets_N]
    compiled_loss, _ = compiled(without_bias)
    (whole,), (part,) = (
        torch.autograd.grad(compiled_loss(*arguments) * factor, arguments[1]) for factor in (1.0, 1 / 700)
    )
    assert torch.equal(part, (whole.float() * (1 / 700)).bfloat16())


def test_eager_losses_do_not_import_the_operators() -> None:
    program = (
        "import sys, torch; from reefknot.kernels.linear_cross_entropy import linear_cross_entropy as loss;"
        "loss(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1]));"
        "assert 'reefknot.kernels.ops' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)
