"""`linear_cross_entropy` equals torch's linear and cross_entropy, and invalid arguments raise clear errors.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.choice import Choice, Impl, current_choice, using
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy

from .dense import IGNORE, Problem, dense_losses, largest_error, problem, relative_error

FUSED = getattr(F, "linear_cross_entropy", None)
"""Only newer versions of torch have this function."""


def torch_loss(p: Problem, **settings: Any) -> Tensor:
    return F.cross_entropy(F.linear(p.h, p.w, p.b), p.y, **settings)


def loss_of(p: Problem, **settings: Any) -> Tensor:
    return linear_cross_entropy(p.h, p.w, p.y, p.b, **settings)


# -- parity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_equal_torch(reduction: str, smoothing: float, impl: str, bias: bool) -> None:
    p = problem(140, 25, 1031, bias)
    expected = torch_loss(p, reduction=reduction, label_smoothing=smoothing)
    actual = loss_of(p, reduction=reduction, label_smoothing=smoothing, impl=impl, memory=0.5)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) < 1e-12
    weights = torch.randn(expected.shape, dtype=torch.float64)
    assert largest_error(p.gradients((actual * weights).sum()), p.gradients((expected * weights).sum())) < 1e-12


def test_float32_loss_and_gradients_equal_torch() -> None:
    p = problem(140, 64, 1031).to(torch.float32)
    expected, actual = torch_loss(p), loss_of(p)
    torch.testing.assert_close(actual, expected)
    for gradient, expected_gradient in zip(p.gradients(actual), p.gradients(expected), strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.skipif(FUSED is None, reason="this torch has no linear_cross_entropy")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_equal_torchs_fused_function(smoothing: float) -> None:
    assert FUSED is not None
    p = problem(140, 64, 1031)
    expected = FUSED(p.h, p.w, p.y, linear_bias=p.b, label_smoothing=smoothing)
    actual = loss_of(p, label_smoothing=smoothing)
    assert relative_error(actual, expected) < 1e-12
    assert largest_error(p.gradients(actual), p.gradients(expected)) < 1e-12


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_z_loss_is_the_squared_log_normaliser_without_ignored_rows(impl: str, reduction: str) -> None:
    p = problem(140, 25, 1031)
    nll_N, lse_N, _ = dense_losses(p)
    expected = nll_N + 1e-2 * lse_N.square().where(p.y != IGNORE, 0.0)
    if reduction != "none":
        expected = expected.sum() / ((p.y != IGNORE).sum() if reduction == "mean" else 1)
    actual = loss_of(p, z_loss=1e-2, reduction=reduction, impl=impl)
    assert relative_error(actual, expected) < 1e-12
    assert largest_error(p.gradients(actual.sum()), p.gradients(expected.sum())) < 1e-12


@pytest.mark.parametrize("ignored", [-1, 0, 5, 10_000])
def test_any_ignore_index_works(ignored: int) -> None:
    p = problem(50, 4, 7, ignored=False)
    targets_N = p.y.clone()
    targets_N[::3] = ignored
    p = Problem(p.h, p.w, p.b, targets_N)
    expected, actual = (loss(p, ignore_index=ignored) for loss in (torch_loss, loss_of))
    assert relative_error(actual, expected) < 1e-12
    assert largest_error(p.gradients(actual), p.gradients(expected)) < 1e-12


def test_any_number_of_batch_dimensions_works() -> None:
    p = problem(12, 5, 9)
    row_losses = loss_of(p, reduction="none")
    batched = linear_cross_entropy(p.h.view(3, 4, 5), p.w, p.y.view(3, 4), p.b, reduction="none")
    assert torch.equal(batched, row_losses.view(3, 4))
    single = linear_cross_entropy(p.h[0], p.w, p.y[0], p.b, reduction="none")
    assert single.shape == ()
    torch.testing.assert_close(single, row_losses[0], rtol=1e-13, atol=0)
    assert torch.equal(linear_cross_entropy(p.h, p.w, p.y.to(torch.int32), p.b), loss_of(p))


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-4}, {"impl": "reference"}])
@pytest.mark.parametrize("rows", [0, 5])
def test_loss_without_targets_is_zero(settings: dict[str, Any], rows: int) -> None:
    p = problem(5, 4, 7)
    ignored = Problem(p.h[:rows], p.w, p.b, torch.full((rows,), IGNORE))
    loss = loss_of(ignored, **settings)
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in p.gradients(loss))


def test_label_smoothing_stays_in_float32_under_autocast() -> None:
    # The inputs are exact in bfloat16, so only results can be rounded.
    start = problem(50, 64, 300, ignored=False).to(torch.bfloat16).to(torch.float32)
    exact = Problem(start.h, start.w + 3, start.b, start.y).to(torch.bfloat16).to(torch.float64)
    p = exact.to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss_of(p, reduction="none", label_smoothing=0.9)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(
        actual.double(), torch_loss(exact, reduction="none", label_smoothing=0.9), rtol=1e-5, atol=1e-4
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1, "reduction": "none"}])
def test_compiled_loss_equals_eager_loss(settings: dict[str, Any]) -> None:
    p = problem(70, 25, 300)

    def step(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor) -> Tensor:
        return (
            linear_cross_entropy(hidden_ND.tanh(), weight_VD * 2, targets_N, bias_V, memory=0.1, **settings)
            .square()
            .sum()
        )

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager")
    eager, actual = step(p.h, p.w, p.b, p.y), compiled(p.h, p.w, p.b, p.y)
    assert relative_error(actual, eager) < 1e-13
    assert largest_error(p.gradients(actual), p.gradients(eager)) < 1e-13


# -- errors --------------------------------------------------------------------------------------------------------

H, W, Y = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([0, 1, 2, 8, IGNORE, 3])


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((H, torch.randn(9, 5), Y), {}, r"input is \(6, 4\) and linear_weight is \(9, 5\)"),
        ((H, torch.randn(4), Y), {}, r"weight is \(4,\)"),
        ((torch.tensor(1.0), W, Y), {}, r"input is \(\)"),
        ((H, W, Y[:5]), {}, r"target is \(5,\)"),
        ((H, W, Y[:, None]), {}, r"target is \(6, 1\)"),
        ((H, W, Y, torch.randn(8)), {}, r"bias is \(8,\)"),
        ((H, W, Y, torch.randn(9, 1)), {}, r"bias is \(9, 1\)"),
        ((H, W, Y.float()), {}, "must be integers"),
        ((H, W, Y > 0), {}, "must be integers"),
        ((H.long(), W, Y), {}, "input is torch.int64"),
        ((H, W.long(), Y), {}, "weight is torch.int64"),
        ((H, W, Y, torch.arange(9)), {}, "bias is torch.int64"),
        ((H, W.to("meta"), Y), {}, "cpu and meta"),
        ((H, W, Y + 1), {}, "target 9 of row 3"),
        ((H, W, Y.where(Y >= 0, -1)), {}, "target -1 of row 4"),
        ((H, W, Y), {"ignore_index": -1}, "target -100 of row 4"),
        ((H, W, Y), {"reduction": "average"}, "reduction = 'average'"),
        ((H, W, Y), {"label_smoothing": -0.1}, "label_smoothing = -0.1"),
        ((H, W, Y), {"label_smoothing": 1.5}, "label_smoothing = 1.5"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: tuple[Tensor, ...], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as error:
        linear_cross_entropy(*arguments, **settings)
    assert isinstance(error.value, ValueError)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("linear_cross_entropy: ")


@pytest.mark.parametrize("settings", [{"impl": "fastest"}, {"memory": 0.0}, {"memory": -1.0}])
def test_invalid_impl_and_memory_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(settings))):
        linear_cross_entropy(H, W, Y, **settings)
    assert current_choice() == Choice()


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("target", [9, -1, 2**40])
def test_unchecked_invalid_targets_give_nan(impl: Impl, target: int) -> None:
    targets_N = Y.where(Y != 2, target)
    assert linear_cross_entropy(H, W, targets_N, check_targets=False, impl=impl).isnan()
    rows = linear_cross_entropy(H, W, targets_N, check_targets=False, reduction="none", impl=impl)
    assert rows.isnan().tolist() == [False, False, True, False, False, False]


def test_omitted_impl_is_taken_from_using() -> None:
    p = problem(140, 25, 1031)
    with using("reference"):
        by_definition = loss_of(p)
        assert by_definition.grad_fn is not None
        assert "SummedLoss" not in str(_autograd_functions(by_definition))
        assert "SummedLoss" in str(_autograd_functions(loss_of(p, impl="chunked")))
        assert current_choice() == Choice("reference")


def _autograd_functions(loss: Tensor) -> list[str]:
    """Return the names of the autograd functions that computed a loss."""
    names, nodes = [], [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.append(node.name())
            nodes += [parent for parent, _ in node.next_functions]
    return names
