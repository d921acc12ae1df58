"""`linear_divergence` equals its formulas in float64, with every gradient, and invalid arguments raise clear errors.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels import ops
from reefknot.kernels.divergence import linear_divergence

from .dense import largest_error, relative_error
from .memory import MEBIBYTE, peak

Side = tuple[Tensor, Tensor, Tensor | None]
KINDS = ("forward", "reverse", "jsd")
SMALL, WHOLE = 0.02, 64.0
"""Memory in MiB: blocks of a few rows, and one block."""


def make_side(rows: int, dim: int, classes: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> Side:
    hidden, weight = torch.randn(rows, dim, dtype=torch.float64), torch.randn(classes, dim, dtype=torch.float64)
    tensors = [hidden, weight / dim**0.5, torch.randn(classes, dtype=torch.float64)]
    hidden, weight, bias_V = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    return hidden, weight, bias_V if bias else None


def leaves(*sides: Side) -> list[Tensor]:
    return [tensor for side in sides for tensor in side if tensor is not None]


def torch_divergence(student: Side, teacher: Side, kind: str, beta: float, temperature: float) -> Tensor:
    """Return the divergence of each row, computed by torch's kl_div."""
    logp = F.log_softmax(F.linear(*student) / temperature, -1)
    logq = F.log_softmax(F.linear(*teacher) / temperature, -1)

    def kl(logp: Tensor, logq: Tensor) -> Tensor:
        """Return KL(q || p)."""
        return F.kl_div(logp, logq, reduction="none", log_target=True).sum(-1)

    if kind == "forward":
        return kl(logp, logq)
    if kind == "reverse":
        return kl(logq, logp)
    logm = torch.log(beta * logq.exp() + (1 - beta) * logp.exp())
    return beta * kl(logm, logq) + (1 - beta) * kl(logm, logp)


# -- values and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("settings", [{"impl": "reference"}, {"memory": SMALL}, {"memory": WHOLE}], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_torch(kind: Any, reduction: Any, settings: dict[str, Any], bias: bool) -> None:
    torch.manual_seed(0)
    student, teacher = make_side(37, 11, 203, bias), make_side(37, 7, 203, bias)
    mask = torch.rand(37) > 0.3
    options = {"beta": 0.3, "temperature": 1.7}
    rows = torch_divergence(student, teacher, kind, **options).where(mask, 0.0)
    expected = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / mask.sum()}[reduction]
    actual = linear_divergence(
        student, teacher, kind, mask=mask, reduction=reduction, teacher_grad=True, **options, **settings
    )
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) < 1e-12
    weights = torch.randn_like(expected)
    gradients, expected_gradients = (
        torch.autograd.grad((loss * weights).sum(), leaves(student, teacher)) for loss in (actual, expected)
    )
    assert largest_error(gradients, expected_gradients) < 1e-12


@given(
    rows=st.integers(0, 9),
    classes=st.integers(1, 40),
    dims=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    kind=st.sampled_from(KINDS),
    beta=st.floats(0.05, 0.95),
    temperature=st.floats(0.2, 5.0),
    memory=st.sampled_from([1e-6, SMALL, WHOLE]),
)
def test_any_shape_equals_the_reference(
    rows: int, classes: int, dims: tuple[int, int], kind: Any, beta: float, temperature: float, memory: float
) -> None:
    torch.manual_seed(rows + 10 * classes)
    student, teacher = make_side(rows, dims[0], classes), make_side(rows, dims[1], classes)
    options: dict[str, Any] = {"beta": beta, "temperature": temperature, "teacher_grad": True}
    losses = [
        linear_divergence(student, teacher, kind, **options, **settings)
        for settings in ({"impl": "reference"}, {"memory": memory})
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-12)
    expected, actual = (torch.autograd.grad(loss, leaves(student, teacher)) for loss in losses)
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_classifiers_have_no_divergence(kind: Any) -> None:
    student = make_side(9, 5, 31)
    loss = linear_divergence(student, student, kind)
    assert abs(loss.item()) < 1e-14
    assert all(float(gradient.abs().max()) < 1e-15 for gradient in torch.autograd.grad(loss, leaves(student)))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_gradients_are_close_to_float64(kind: Any) -> None:
    torch.manual_seed(1)
    exact_student, exact_teacher = make_side(300, 64, 1000), make_side(300, 48, 1000)
    student, teacher = (
        tuple(tensor.detach().bfloat16().requires_grad_() for tensor in side if tensor is not None)
        for side in (exact_student, exact_teacher)
    )
    rounded = [tuple(x.detach().double().requires_grad_() for x in side) for side in (student, teacher)]
    actual = linear_divergence(student, teacher, kind, memory=1.0)  # type: ignore[arg-type]
    expected = linear_divergence(*rounded, kind, impl="reference")
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected) < 1e-5
    gradients = torch.autograd.grad(actual, student)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 3
    assert largest_error(gradients, torch.autograd.grad(expected, rounded[0])) < 5e-3


def test_scores_far_apart_stay_finite() -> None:
    student, teacher = (make_side(4, 3, 11) for _ in range(2))
    with torch.no_grad():
        student[0].mul_(1000)
        teacher[0].mul_(-1000)
    for kind in KINDS:
        loss = linear_divergence(student, teacher, kind, teacher_grad=True)  # type: ignore[arg-type]
        assert loss.isfinite()
        assert all(x.isfinite().all() for x in torch.autograd.grad(loss, leaves(student, teacher)))


# -- options -------------------------------------------------------------------------------------------------------


def test_only_the_student_gets_a_gradient_by_default() -> None:
    student, teacher = make_side(5, 4, 13), make_side(5, 3, 13)
    linear_divergence(student, teacher).backward()
    assert all(tensor.grad is not None for tensor in leaves(student))
    assert all(tensor.grad is None for tensor in leaves(teacher))


@pytest.mark.parametrize("settings", [{"impl": "reference"}, {"memory": SMALL}], ids=str)
def test_classes_restrict_both_softmaxes(settings: dict[str, Any]) -> None:
    student, teacher = make_side(9, 4, 30), make_side(9, 3, 30)
    classes = torch.tensor([3, 29, 0, 17, 4])
    actual = linear_divergence(student, teacher, classes=classes, teacher_grad=True, **settings)
    parts = [(h, w[classes], None if b is None else b[classes]) for h, w, b in (student, teacher)]
    expected = torch_divergence(*parts, "forward", 0.5, 1.0).mean()
    assert relative_error(actual, expected) < 1e-12
    gradients, expected_gradients = (torch.autograd.grad(loss, leaves(student, teacher)) for loss in (actual, expected))
    assert largest_error(gradients, expected_gradients) < 1e-12


def test_student_rows_share_teacher_rows() -> None:
    student, (hidden, weight, bias) = make_side(6, 4, 30), make_side(3, 5, 30)
    rows = torch.tensor([[2, 0, 2], [1, 1, 0]])
    shaped = student[0].view(2, 3, 4)
    actual = linear_divergence(
        (shaped, *student[1:]), (hidden, weight, bias), reduction="none", teacher_rows=rows, teacher_grad=True
    )
    expected = torch_divergence(student, (hidden[rows.flatten()], weight, bias), "forward", 0.5, 1.0)
    assert actual.shape == (2, 3)
    assert relative_error(actual.flatten(), expected) < 1e-12
    gradients, expected_gradients = (torch.autograd.grad(loss.sum(), hidden) for loss in (actual, expected))
    assert largest_error(gradients, expected_gradients) < 1e-12


def test_mean_of_no_rows_is_zero() -> None:
    student, teacher = make_side(5, 4, 13), make_side(5, 3, 13)
    loss = linear_divergence(student, teacher, mask=torch.zeros(5, dtype=torch.bool))
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, leaves(student)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("teacher_grad", [True, False])
def test_working_memory_fits_the_budget(kind: Any, teacher_grad: bool, tmp_path: Path) -> None:
    student, teacher = make_side(200, 4, 5000), make_side(200, 3, 5000)
    inputs = leaves(student, teacher) if teacher_grad else leaves(student)

    def step() -> object:
        loss = linear_divergence(student, teacher, kind, memory=8.0, teacher_grad=teacher_grad)
        return torch.autograd.grad(loss, inputs)

    gradients = sum(tensor.nbytes for tensor in inputs)
    assert 4 * MEBIBYTE < peak(step, tmp_path) - gradients < 8.5 * MEBIBYTE


def test_least_memory_is_that_of_one_row(tmp_path: Path) -> None:
    student, teacher = make_side(20, 2, 50_000), make_side(20, 2, 50_000)
    assert peak(lambda: linear_divergence(student, teacher, memory=0.5).backward(), tmp_path) < 12 * 50_000 * 8


def test_second_backward_pass_gives_the_same_gradients() -> None:
    student, teacher = make_side(5, 4, 13), make_side(5, 3, 13)
    loss = linear_divergence(student, teacher)
    first = torch.autograd.grad(loss, leaves(student), retain_graph=True)
    assert largest_error(torch.autograd.grad(loss, leaves(student)), first) == 0


def test_second_derivatives_need_the_reference() -> None:
    student, teacher = make_side(5, 4, 13), make_side(5, 3, 13)
    for reduction in ("mean", "none"):
        loss = linear_divergence(student, teacher, reduction=reduction).sum()  # type: ignore[arg-type]
        gradient, *_ = torch.autograd.grad(loss, leaves(student), create_graph=True)
        with pytest.raises(ArgumentError, match="impl = 'reference'"):
            gradient.square().sum().backward()
    loss = linear_divergence(student, teacher, impl="reference")
    (gradient,) = torch.autograd.grad(loss, student[0], create_graph=True)
    gradient.square().sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_function_is_one_graph_and_equals_eager(reduction: Any) -> None:
    student, teacher = make_side(12, 4, 33), make_side(12, 3, 33, bias=False)
    function = torch.compile(linear_divergence, backend="aot_eager", fullgraph=True)
    results = []
    for divergence in (linear_divergence, function):
        loss = divergence(student, teacher, "jsd", reduction=reduction, teacher_grad=True)
        results.append((loss, *torch.autograd.grad(loss.square().sum(), leaves(student, teacher))))
    assert largest_error(results[1], results[0]) < 1e-12


def test_operators_pass_opcheck() -> None:
    student, teacher = make_side(5, 4, 13), make_side(5, 3, 13, bias=False)
    options = ("jsd", 0.4, 1.5, torch.float64, torch.float64, "chunked", 2**20)
    needs_grad = [True, True, True, False, True, False]
    teacher = (teacher[0].detach(), teacher[1], None)
    weight_N, grad_N = torch.rand(2, 5, dtype=torch.float64)
    for operator, arguments in (
        (ops._summed_divergence, (*student, *teacher, weight_N, *options, needs_grad)),
        (ops._row_divergences, (*student, *teacher, *options)),
    ):
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}
    detached = [None if tensor is None else tensor.detach() for tensor in (*student, *teacher)]
    results = torch.library.opcheck(ops._divergence_gradients, (*detached, grad_N, *options, needs_grad))
    assert set(results.values()) == {"SUCCESS"}


def test_autocast_computes_the_products_in_bfloat16_and_the_divergence_in_float32() -> None:
    student, teacher = (make_side(40, 16, 90, dtype=torch.float32) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_divergence(student, teacher)
    rounded = [
        tuple(None if x is None else x.detach().bfloat16().double() for x in side) for side in (student, teacher)
    ]
    assert loss.dtype == torch.float32
    assert relative_error(loss, linear_divergence(*rounded, impl="reference")) < 1e-3
    assert all(gradient.dtype == torch.float32 for gradient in torch.autograd.grad(loss, leaves(student)))


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "both"}, "kind = 'both': must be one of forward, reverse, jsd"),
        ({"reduction": "max"}, "reduction = 'max'"),
        ({"beta": 1.0}, "beta = 1.0: must be above 0 and below 1"),
        ({"temperature": 0}, "temperature = 0: must be above 0"),
        ({"student": torch.zeros(3, 4)}, r"student must be \(hidden, weight\)"),
        ({"student": (torch.zeros(3, 4), torch.zeros(5, 2))}, r"hidden is \(3, 4\) and its weight is \(5, 2\)"),
        ({"teacher": (torch.zeros(3, 4).long(), torch.zeros(5, 4))}, "teacher's hidden is torch.int64"),
        ({"teacher": (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(6))}, r"bias is \(6,\)"),
        ({"teacher": (torch.zeros(3, 2), torch.zeros(6, 2))}, "student has 5 classes and the teacher 6"),
        ({"teacher": (torch.zeros(2, 2), torch.zeros(5, 2))}, "pass teacher_rows"),
        ({"teacher_rows": torch.zeros(2).long()}, r"teacher_rows is \(2,\)"),
        ({"mask": torch.ones(3)}, "mask is .* torch.float32"),
        ({"classes": torch.tensor([5])}, "ids from 0 to 4"),
        ({"classes": torch.tensor([])}, "at least one class id"),
    ],
)
def test_mistakes_raise_clear_errors(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "student": (torch.zeros(3, 4), torch.zeros(5, 4)),
        "teacher": (torch.zeros(3, 2), torch.zeros(5, 2)),
    }
    with pytest.raises(ArgumentError, match=message):
        linear_divergence(**(arguments | changes))


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("both", [True, False], ids=["both sides", "the teacher"])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_ruled_out_classes_add_nothing(kind: Any, both: bool, impl: Any) -> None:
    """A bias of minus infinity rules out a class. With both sides ruled out, the others give the divergence."""
    student, teacher = make_side(12, 4, 33), make_side(12, 3, 33)
    ruled_out_V = torch.zeros(33, dtype=torch.float64)
    ruled_out_V[20:] = -torch.inf
    masked_teacher = (*teacher[:2], ruled_out_V)
    masked_student = (*student[:2], ruled_out_V if both else torch.zeros(33, dtype=torch.float64))
    value = linear_divergence(masked_student, masked_teacher, kind, impl=impl)
    if kind == "reverse" and not both:
        assert value.isposinf()  # the student finds possible what the teacher rules out
        return
    gradients = torch.autograd.grad(value, student[:2])
    assert all(tensor.isfinite().all() for tensor in (value, *gradients))
    if both:
        kept = torch.arange(20)
        expected = linear_divergence(student[:2], teacher[:2], kind, classes=kept)
        torch.testing.assert_close(value, expected)


def test_masked_rows_may_be_nan() -> None:
    student, teacher = make_side(12, 4, 33), make_side(12, 3, 33)
    mask = torch.arange(12) != 5
    expected = linear_divergence(student, teacher, mask=mask)
    hidden = teacher[0].detach().clone()
    hidden[5] = torch.nan
    actual = linear_divergence(student, (hidden, *teacher[1:]), mask=mask)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, leaves(student)), torch.autograd.grad(expected, leaves(student))
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": [True] * 12}, "mask is a list"),
        ({"teacher_rows": [0] * 12}, "teacher_rows is a list"),
        ({"teacher_rows": torch.full((12,), 12)}, "from 0 to 11"),
        ({"teacher_rows": torch.ones(12, dtype=torch.bool)}, r"it must be \(12,\) integers"),
        ({"classes": [1, 2]}, "tensor of integers"),
        ({"classes": torch.tensor([1], device="meta")}, "on cpu and meta; put them on one device"),
        ({"classes": torch.ones(33, dtype=torch.bool)}, "tensor of integers"),
        ({"student": (torch.randn(12, 4), torch.nn.Linear(4, 33))}, "student's weight is a Linear; .*pass its weight"),
        ({"student": (torch.randn(12, 4), torch.randn(33, 4).to_sparse())}, "pass a dense tensor"),
        ({"student": (torch.randn(12, 0), torch.randn(33, 0))}, "at least one class and one dimension"),
        ({"temperature": True}, "must be a Python number"),
    ],
)
def test_plain_mistakes_get_one_clear_sentence(settings: dict[str, Any], message: str) -> None:
    arguments = {"student": make_side(12, 4, 33), "teacher": make_side(12, 3, 33)}
    with pytest.raises(ArgumentError, match=message):
        linear_divergence(**(arguments | settings))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_ids_may_have_any_integer_type(dtype: torch.dtype) -> None:
    student, teacher = make_side(12, 4, 33), make_side(12, 3, 33)
    ids = {"classes": torch.tensor([3, 0, 32]), "teacher_rows": torch.arange(12) // 2}
    expected = linear_divergence(student, teacher, **ids)
    actual = linear_divergence(student, teacher, **{name: tensor.to(dtype) for name, tensor in ids.items()})
    assert torch.equal(actual, expected)
