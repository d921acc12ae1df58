"""`linear_cross_entropy` with scale, softcap, temperature, class weights, smoothing and z-loss, in any combination.

Values and gradients are compared with torch's own functions in float64.
Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.nn.linear_cross_entropy_loss import LinearCrossEntropyLoss

from .dense import IGNORE, MEMORY, Problem, largest_error, problem, relative_error
from .scored import TRANSFORMS, Transform, dense_cross_entropy

EXTRAS = [
    {"weighted": weighted, "label_smoothing": smoothing, "z_loss": z_loss}
    for weighted, smoothing, z_loss in product((False, True), (0.0, 0.1), (0.0, 1e-2))
]


def class_weights(p: Problem) -> Tensor:
    return torch.linspace(0.2, 2.0, len(p.w), dtype=p.w.dtype)


def check(p: Problem, transform: Transform, extra: dict[str, Any], reduction: str, **choice: Any) -> None:
    """Compare value and gradients with torch's."""
    weight = class_weights(p) if extra["weighted"] else None
    arguments: dict[str, Any] = {
        "weight": weight,
        "reduction": reduction,
        "label_smoothing": extra["label_smoothing"],
        "z_loss": extra["z_loss"],
    }
    expected = dense_cross_entropy(p, transform, **arguments)
    actual = linear_cross_entropy(p.h, p.w, p.y, linear_bias=p.b, **arguments, **transform.arguments, **choice)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) < 1e-11
    factors = torch.linspace(0.5, 1.5, max(expected.numel(), 1), dtype=torch.float64).view(expected.shape)
    assert largest_error(p.gradients((actual * factors).sum()), p.gradients((expected * factors).sum())) < 1e-11


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_all_combinations_equal_torch(transform: Transform, reduction: str, bias: bool) -> None:
    p = problem(33, 12, 300, bias)
    for extra in EXTRAS:
        for memory in MEMORY:
            check(p, transform, extra, reduction, impl="chunked", memory=memory)
        check(p, transform, extra, reduction, impl="reference")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    dim=st.integers(1, 20),
    classes=st.integers(2, 700),
    bias=st.booleans(),
    ignored=st.booleans(),
    transform=st.sampled_from(list(TRANSFORMS.values())),
    extra=st.sampled_from(EXTRAS),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    memory=st.sampled_from([1e-6, 0.05, 64.0]),
)
def test_random_shapes_and_options_equal_torch(
    rows: int,
    dim: int,
    classes: int,
    bias: bool,
    ignored: bool,
    transform: Transform,
    extra: dict[str, Any],
    reduction: str,
    memory: float,
) -> None:
    p = problem(rows, dim, classes, bias, ignored)
    check(p, transform, extra, reduction, memory=memory)


def test_divisor_replaces_the_number_of_targets() -> None:
    p = problem(20, 5, 9)
    total = linear_cross_entropy(p.h, p.w, p.y, p.b, reduction="sum")
    for divisor in (7, 7.0, torch.tensor(7), torch.tensor([7.0])):
        actual = linear_cross_entropy(p.h, p.w, p.y, p.b, divisor=divisor)
        assert relative_error(actual, total / 7) < 1e-14
        smoothed = linear_cross_entropy(p.h, p.w, p.y, p.b, label_smoothing=0.1, softcap=3.0, divisor=divisor)
        whole = linear_cross_entropy(p.h, p.w, p.y, p.b, label_smoothing=0.1, softcap=3.0, reduction="sum")
        assert relative_error(smoothed, whole / 7) < 1e-14


def test_half_precision_keeps_the_digits_of_capped_scores() -> None:
    """The scores are float32 inside, so bfloat16 only rounds the operands and the results."""
    exact = problem(64, 32, 500).to(torch.bfloat16).to(torch.float64)
    transform = Transform(logit_scale=2.0, softcap=4.0, temperature=0.8)
    arguments: dict[str, Any] = {"weight": None, "reduction": "mean", "label_smoothing": 0.1, "z_loss": 1e-3}
    expected = dense_cross_entropy(exact, transform, **arguments)
    p = exact.to(torch.bfloat16)
    actual = linear_cross_entropy(p.h, p.w, p.y, p.b, **arguments, **transform.arguments)
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected) < 1e-4
    assert largest_error(p.gradients(actual), exact.gradients(expected)) < 5e-3


# -- torch's own call ----------------------------------------------------------------------------------------------

torch_function = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no such function")


@torch_function
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torchs_call_works_unchanged(weighted: bool, reduction: str) -> None:
    p = problem(33, 12, 50)
    arguments: dict[str, Any] = {
        "linear_bias": p.b,
        "weight": class_weights(p) if weighted else None,
        "reduction": reduction,
        "ignore_index": None,
        "label_smoothing": 0.2,
        "options": torch.nn.LinearCrossEntropyOptions(),
    }
    expected = F.linear_cross_entropy(p.h, p.w, p.y, **(arguments | {"options": None}))
    actual = linear_cross_entropy(p.h, p.w, p.y, **arguments)
    assert relative_error(actual, expected) < 1e-12
    assert largest_error(p.gradients(actual.sum()), p.gradients(expected.sum())) < 1e-12


@torch_function
def test_class_probabilities_and_groups_of_classes_equal_torch() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(6, 5, dtype=torch.float64)
    weight = torch.randn(9, 5, dtype=torch.float64)
    probabilities = torch.rand(6, 9, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, probabilities), F.linear_cross_entropy(hidden, weight, probabilities)
    )
    groups, bias = torch.randn(9, 3, 2, 5, dtype=torch.float64), torch.randn(9, 3, 2, dtype=torch.float64)
    target = torch.randint(9, (6, 3, 2))
    torch.testing.assert_close(
        linear_cross_entropy(hidden, groups, target, linear_bias=bias),
        F.linear_cross_entropy(hidden, groups, target, linear_bias=bias),
    )


@torch_function
@pytest.mark.parametrize("out_features", [(), (3, 2)])
def test_module_loads_the_state_of_torchs_module(out_features: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.LinearCrossEntropyLoss(5, 9, out_features=out_features, bias=True, label_smoothing=0.1)
    ours = LinearCrossEntropyLoss(5, 9, out_features=out_features, bias=True, label_smoothing=0.1)
    ours.load_state_dict(theirs.state_dict())
    hidden, target = torch.randn(6, 5), torch.randint(9, (6, *out_features))
    torch.testing.assert_close(ours(hidden, target), theirs(hidden, target))


def test_module_moves_with_its_class_weights_and_copies() -> None:
    p = problem(20, 5, 9)
    criterion = LinearCrossEntropyLoss(5, 9, weight=class_weights(p), softcap=3.0, dtype=torch.float64)
    loss = criterion(p.h, p.y)
    expected = linear_cross_entropy(p.h, criterion.linear.weight, p.y, weight=class_weights(p), softcap=3.0)
    assert torch.equal(loss, expected)
    copied = copy.deepcopy(criterion).to(torch.float32)
    assert copied(p.h.float(), p.y).dtype == torch.float32
    assert "softcap=3.0" in repr(criterion)


def test_old_keywords_work_with_a_warning() -> None:
    p = problem(20, 5, 9)
    expected = linear_cross_entropy(p.h, p.w, p.y, p.b)
    with pytest.warns(DeprecationWarning, match="hidden is now called input"):
        assert torch.equal(linear_cross_entropy(hidden=p.h, linear_weight=p.w, targets=p.y, bias=p.b), expected)


def test_old_keywords_work_in_a_compiled_graph() -> None:
    p = problem(12, 5, 33)

    def loss(h: Tensor, w: Tensor, y: Tensor, b: Tensor | None) -> Tensor:
        return linear_cross_entropy(hidden=h, linear_weight=w, targets=y, bias=b)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(p.h, p.w, p.y, p.b), linear_cross_entropy(p.h, p.w, p.y, p.b))


def test_divisor_works_with_probabilities_and_groups_of_classes() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 5, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    probabilities = torch.rand(6, 9, dtype=torch.float64).softmax(-1)
    groups, target = torch.randn(9, 3, 5, dtype=torch.float64), torch.randint(9, (6, 3))
    for arguments in ((hidden, weight, probabilities), (hidden, groups, target)):
        total = linear_cross_entropy(*arguments, reduction="sum")
        torch.testing.assert_close(linear_cross_entropy(*arguments, divisor=7), total / 7)
    assert linear_cross_entropy(hidden, groups, torch.full((6, 3), IGNORE)).item() == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_means_with_weights_of_zero_equal_torch(smoothing: float) -> None:
    p = problem(20, 5, 9, ignored=False)
    weight = torch.ones(9, dtype=torch.float64)
    weight[3] = 0
    settings: dict[str, Any] = {"weight": weight, "label_smoothing": smoothing}
    expected = F.cross_entropy(F.linear(p.h, p.w), p.y, **settings)
    torch.testing.assert_close(linear_cross_entropy(p.h, p.w, p.y, **settings), expected)
    # If all targets have a weight of zero, there is nothing to divide by. Torch and we differ in NaN and infinity.
    all_zero = torch.full_like(p.y, 3)
    assert not F.cross_entropy(F.linear(p.h, p.w), all_zero, **settings).isfinite()
    assert not linear_cross_entropy(p.h, p.w, all_zero, **settings).isfinite()


def test_numbers_of_numpy_are_accepted() -> None:
    p = problem(20, 5, 9)
    arguments: dict[str, Any] = {
        "softcap": np.float32(2.0),
        "temperature": np.float64(0.5),
        "ignore_index": np.int64(3),
    }
    expected = linear_cross_entropy(p.h, p.w, p.y.clamp(min=0), softcap=2.0, temperature=0.5, ignore_index=3)
    assert torch.equal(linear_cross_entropy(p.h, p.w, p.y.clamp(min=0), **arguments), expected)


# -- errors --------------------------------------------------------------------------------------------------------

H, W, Y = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([0, 1, 2, 8, IGNORE, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input": H, "weight": W, "target": Y}, "pass the classifier's weight as linear_weight"),
        ({"input": H, "linear_weight": W}, "target is missing"),
        ({"input": H, "hidden": H, "linear_weight": W, "target": Y}, "hidden is the old name of input"),
        ({"input": H, "linear_weight": W, "target": Y, "weight": W}, "pass the classifier's weight as linear_weight"),
        ({"input": H, "linear_weight": W, "target": Y, "weight": torch.ones(8)}, r"must be \(9,\)"),
        ({"input": H, "linear_weight": W, "target": Y, "softcap": 0.0}, "softcap = 0.0"),
        ({"input": H, "linear_weight": W, "target": Y, "softcap": float("nan")}, "softcap = nan"),
        ({"input": H, "linear_weight": W, "target": Y, "temperature": -1.0}, "temperature = -1.0"),
        ({"input": H, "linear_weight": W, "target": Y, "logit_scale": 0}, "logit_scale = 0"),
        ({"input": H, "linear_weight": W, "target": Y, "divisor": 0}, "divisor = 0"),
        ({"input": H, "linear_weight": W, "target": Y, "divisor": torch.ones(3)}, r"divisor is \(3,\)"),
        ({"input": H, "linear_weight": W, "target": Y, "divisor": 3, "reduction": "sum"}, "divisor replaces"),
        ({"input": H, "linear_weight": W, "target": Y, "ignore_index": 2**70}, "ignore_index"),
        ({"input": H[:, :0], "linear_weight": W[:, :0], "target": Y}, "at least one class and one dimension"),
        ({"input": H, "linear_weight": W[:0], "target": Y}, "at least one class and one dimension"),
        ({"input": H, "linear_weight": W.to(torch.float8_e4m3fn), "target": Y}, "float8_e4m3fn; it must be float16"),
        ({"input": H, "linear_weight": W.to_sparse(), "target": Y}, "layout sparse_coo; pass a dense tensor"),
        ({"input": torch.nested.nested_tensor([H, H]), "linear_weight": W, "target": Y}, "nested tensor"),
        ({"input": H, "linear_weight": torch.nn.Linear(4, 9), "target": Y}, "pass its weight, not the layer"),
        ({"input": H, "linear_weight": W, "target": torch.rand(6, 8)}, r"class probabilities must be \(6, 9\)"),
        (
            {"input": H, "linear_weight": W, "target": torch.rand(6, 9), "linear_bias": torch.rand(8)},
            r"linear_bias is \(8,\)",
        ),
        ({"input": H, "linear_weight": W, "target": torch.rand(6, 9), "weight": torch.rand(8)}, r"weight is \(8,\)"),
        ({"input": H.view(2, 3, 4), "linear_weight": W, "target": torch.rand(2, 3, 9)}, r"must be \(N, dim\)"),
        ({"input": H, "linear_weight": Y, "target": W}, "linear_weight is torch.int64"),
        ({"input": H, "linear_weight": W, "target": torch.rand(6, 9), "ignore_index": 3}, "class ids only"),
        ({"input": H, "linear_weight": W[:0], "target": torch.rand(6, 0)}, "at least one class and one dimension"),
        ({"input": H[:, :0], "linear_weight": W[:, None, :0], "target": Y[:, None]}, "at least one class and one"),
        ({"input": H, "linear_weight": W[:, None].to(torch.float8_e4m3fn), "target": Y[:, None]}, "float8_e4m3fn; it"),
        ({"input": H, "linear_weight": W, "target": Y, "temperature": torch.tensor(2.0)}, "must be a Python number"),
        ({"input": H, "linear_weight": W, "target": Y, "logit_scale": torch.tensor(2.0)}, "scale that is learned"),
        ({"input": H, "linear_weight": W, "target": Y, "label_smoothing": True}, "must be a Python number"),
    ],
)
def test_mistakes_get_one_clear_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as error:
        linear_cross_entropy(**arguments)
    assert "\n" not in str(error.value)


def test_unknown_keywords_are_rejected() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'wieght'"):
        linear_cross_entropy(H, W, Y, wieght=None)


@pytest.mark.parametrize(
    "settings",
    [
        {"reduction": "average"},
        {"temperature": 0.0},
        {"memory": -2.0},
        {"impl": "fastest"},
        {"label_smoothing": 2.0},
        {"weight": torch.ones(8)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_module_rejects_settings_when_it_is_built(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(settings))):
        LinearCrossEntropyLoss(5, 9, **settings)
