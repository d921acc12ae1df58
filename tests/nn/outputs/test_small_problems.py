"""Small problems on a GPU store their scores. Their losses and gradients equal those of the general code.

On a CPU, the tests replace the function that finds out whether operations take longer to launch than to run.
Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels import linear_cross_entropy as function_module
from reefknot.kernels import losses, small
from reefknot.kernels.choice import using
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.kernels.reference import reference_results
from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs import augmented as augmented_module
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

WORDS, DIM = 30, 8
TARGETS = torch.tensor([3, 0, IGNORE, 29, 17, 3, IGNORE, 12, 11])


def adaptive() -> AdaptiveSoftmax:
    table = BandedTable(WORDS, DIM, cutoffs=(10, 16), factor=2)
    return AdaptiveSoftmax(table, BandProjections(table, DIM, head=False))


def augmented() -> Augmented:
    table = WordTable(WORDS, DIM)
    return Augmented(Plain(table), table, tau=3.0, gamma=0.5)


ENDS: dict[str, Callable[[], OutputEnd]] = {
    "plain": lambda: Softmax(Plain(WordTable(WORDS, DIM))),
    "smoothing": lambda: Softmax(Plain(WordTable(WORDS, DIM), bias=False), smoothing=0.1),
    "capped": lambda: Softmax(Plain(WordTable(WORDS, DIM)), softcap=2.0),
    "capped smoothing": lambda: Softmax(Plain(WordTable(WORDS, DIM)), smoothing=0.1, softcap=2.0),
    "drill": lambda: Softmax(Drill(WordTable(WORDS, DIM))),
    "mixture": lambda: MixtureOfSoftmaxes(Plain(WordTable(WORDS, DIM)), DIM, experts=3),
    "adaptive": adaptive,
    "augmented": augmented,
}


@pytest.fixture
def count_stored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let small problems on a CPU store their scores. Return a list to which every such loss adds its name."""
    calls: list[str] = []

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            return function(*arguments, **keywords)

        monkeypatch.setattr(module, name, counted)

    monkeypatch.setattr(small, "_waits_for_python", lambda _: True)
    count(losses, "stored_losses")
    count(losses, "stored_mixture_loss")
    count(small, "stored_losses")
    count(function_module, "stored_losses")
    count(augmented_module, "stored_augmented_losses")
    return calls


def hidden_states() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(len(TARGETS), DIM, dtype=torch.float64, requires_grad=True)


def assert_equal_to_general_code(compute_loss: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    loss = compute_loss()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    with using("chunked"):
        expected = compute_loss()
        expected_gradients = torch.autograd.grad(expected, leaves, allow_unused=True)
    torch.testing.assert_close((loss, *gradients), (expected, *expected_gradients), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ENDS)
def test_losses_of_ends_equal_the_general_code(name: str, count_stored: list[str]) -> None:
    torch.manual_seed(0)
    end = ENDS[name]().double()
    with torch.no_grad():
        for parameter in end.parameters():
            parameter.normal_()
    hidden_ND = hidden_states()
    assert_equal_to_general_code(lambda: end(hidden_ND, TARGETS).loss, [hidden_ND, *end.parameters()])
    # One loss for each of the three bands. The loss of a mixture calls the other function.
    expected = {"adaptive": 3 * ["stored_losses"], "augmented": ["stored_augmented_losses"]}
    expected["capped smoothing"] = []  # the reference implementation stores the scores, too
    expected["mixture"] = ["stored_mixture_loss", "stored_losses"]
    assert count_stored == expected.get(name, ["stored_losses"])


@pytest.mark.parametrize("ignored", [True, False])
def test_mean_of_the_function_equals_the_general_code(ignored: bool, count_stored: list[str]) -> None:
    torch.manual_seed(0)
    weight_VD, bias_V = (torch.randn(*shape, dtype=torch.float64) for shape in ((WORDS, DIM), (WORDS,)))
    leaves = [hidden_states(), weight_VD.requires_grad_(), bias_V.requires_grad_()]
    targets_N = TARGETS if ignored else TARGETS.clamp(min=0)

    def compute_loss() -> Tensor:
        if small.stores_scores(leaves[0], WORDS):
            return small.small_mean_loss(leaves[0], leaves[1], targets_N, leaves[2], True)
        return linear_cross_entropy(leaves[0], leaves[1], targets_N, leaves[2])

    assert_equal_to_general_code(compute_loss, leaves)
    assert count_stored == ["stored_losses"]
    with pytest.raises(ArgumentError, match="target 30 of row 0 is not a class"):
        small.small_mean_loss(leaves[0], leaves[1], targets_N.index_fill(0, torch.tensor(0), WORDS), leaves[2], True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"label_smoothing": 0.1},
        {"logit_scale": 0.7, "softcap": 5.0, "temperature": 1.3},
        {"weight": torch.arange(1.0, WORDS + 1), "label_smoothing": 0.2, "softcap": 5.0},
        {"weight": torch.arange(1.0, WORDS + 1).double()},
    ],
    ids=["", "smoothing", "transform", "weight, smoothing and transform", "weight"],
)
def test_options_of_the_function_equal_the_general_code(
    settings: dict[str, Any], reduction: Any, count_stored: list[str]
) -> None:
    torch.manual_seed(0)
    leaves = [hidden_states(), torch.randn(WORDS, DIM, dtype=torch.float64).requires_grad_()]
    factors_N = torch.randn(len(TARGETS), dtype=torch.float64)

    def compute_loss() -> Tensor:
        loss = linear_cross_entropy(*leaves, TARGETS, reduction=reduction, **settings)
        return factors_N @ loss if reduction == "none" else loss

    assert_equal_to_general_code(compute_loss, leaves)
    assert count_stored == ["stored_losses"]


@pytest.mark.parametrize("name", ENDS)
def test_losses_of_rows_equal_the_general_code(name: str, count_stored: list[str]) -> None:
    torch.manual_seed(0)
    end = ENDS[name]().double()
    hidden_ND, factors_N = hidden_states(), torch.randn(len(TARGETS), dtype=torch.float64)

    def compute_loss() -> Tensor:
        return factors_N @ end(hidden_ND, TARGETS, reduction="none").loss

    with mock.patch.object(losses, "reference_results", wraps=reference_results) as reference:
        assert_equal_to_general_code(compute_loss, [hidden_ND, *end.parameters()])
    assert reference.call_count == (3 if name == "adaptive" else 1)
    assert not count_stored


def test_scores_are_stored_only_if_they_are_few_and_the_step_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_ND = hidden_states()
    assert not small.stores_scores(hidden_ND, WORDS)  # a CPU does not wait for Python
    monkeypatch.setattr(small, "_waits_for_python", lambda _: True)
    assert small.stores_scores(hidden_ND, WORDS)
    assert not small.stores_scores(hidden_ND, small.MAX_STORED_SCORES)
    with using("auto", memory=1e-3):
        assert not small.stores_scores(hidden_ND, WORDS)
    with using("chunked"):
        assert not small.stores_scores(hidden_ND, WORDS)
    with torch.no_grad():
        assert not small.stores_scores(hidden_ND, WORDS)


def test_scores_of_few_classes_fit_the_budget_with_their_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of two scores is padded to 64: 6 MiB for the scores in float32 and their gradients in bfloat16."""
    monkeypatch.setattr(small, "_waits_for_python", lambda _: True)
    monkeypatch.setattr(small, "resolve_impl", lambda *_: "triton")
    hidden_ND = torch.randn(2**14, 8, dtype=torch.bfloat16, requires_grad=True)
    problem = hidden_ND, torch.randn(2, 8, dtype=torch.bfloat16), torch.zeros(2**14, dtype=torch.int64)
    for memory, is_small in ((1, False), (8, True)):
        with using("auto", memory=memory):
            assert small.is_small_problem(*problem) == is_small
