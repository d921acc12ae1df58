"""Subspace distance: scipy's principal angles, the paper's formula, and properties of a distance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.linalg import qr, subspace_angles

from reefknot.errors import ArgumentError
from reefknot.lab.evaluation.subspace import between_ends, chance_distance, subspace_distance

WORDS, DIM = 60, 7


def table(seed: int, dim: int = DIM) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(WORDS, dim))


@pytest.mark.parametrize("noise", [0.0, 1e-10, 1e-3, 0.3, 10.0])
def test_distance_equals_root_mean_square_sine_of_scipy_angles(noise: float) -> None:
    first = table(0)
    second = first @ np.random.default_rng(1).normal(size=(DIM, DIM)) + noise * table(2)

    expected = math.sqrt(np.mean(np.sin(subspace_angles(first, second)) ** 2))

    assert subspace_distance(first, second) == pytest.approx(expected, rel=1e-4, abs=1e-13)


def test_distance_equals_the_papers_formula() -> None:
    first = table(0)
    second = table(1)
    basis, _ = qr(first, mode="economic")
    another, _ = qr(second, mode="economic")
    residual = another - basis @ basis.T @ another

    assert subspace_distance(first, second) == pytest.approx(math.sqrt((residual**2).sum() / DIM), rel=1e-12)


def test_distance_is_symmetric_and_between_zero_and_one() -> None:
    for seed in range(20):
        first = table(seed)
        second = table(seed + 100)
        distance = subspace_distance(first, second)

        assert 0.0 < distance < 1.0
        assert subspace_distance(second, first) == pytest.approx(distance, rel=1e-12)


def test_distance_does_not_depend_on_the_basis() -> None:
    first = table(0)
    second = table(1)
    for seed in range(5):
        transformed = first @ np.random.default_rng(seed).normal(size=(DIM, DIM))

        assert subspace_distance(transformed, second) == pytest.approx(subspace_distance(first, second), rel=1e-10)
        assert subspace_distance(first, transformed) < 1e-12


def test_orthogonal_spaces_have_distance_one() -> None:
    identity = np.eye(WORDS)

    assert subspace_distance(identity[:, :DIM], identity[:, DIM : 2 * DIM]) == 1.0


def test_tiny_distance_is_not_rounded_to_zero() -> None:
    first = table(0)

    assert 1e-10 < subspace_distance(first, first + 1e-9 * table(1)) < 1e-8


def test_dependent_columns_do_not_change_the_distance() -> None:
    first = table(0)
    second = table(1)
    doubled = np.concatenate([first, first], axis=1)

    assert subspace_distance(doubled, second) == pytest.approx(subspace_distance(first, second), rel=1e-10)


def test_subspace_of_lower_dimension_is_not_at_distance_zero() -> None:
    whole = table(0)
    part = whole.copy()
    part[:, 0] = part[:, 1]

    expected = math.sqrt(1 / DIM)
    assert subspace_distance(whole, part) == pytest.approx(expected, rel=1e-10)
    assert subspace_distance(part, whole) == pytest.approx(expected, rel=1e-10)


def test_random_tables_have_the_chance_distance() -> None:
    squares = [subspace_distance(table(seed), table(seed + 1000)) ** 2 for seed in range(300)]

    assert math.sqrt(np.mean(squares)) == pytest.approx(chance_distance(WORDS, DIM), abs=0.005)


def test_float32_tables_are_compared_in_float64() -> None:
    first = table(0).astype(np.float32)
    second = table(1).astype(np.float32)

    assert subspace_distance(first, second) == subspace_distance(first.astype(np.float64), second.astype(np.float64))


@pytest.mark.parametrize("words", [200, 20_000])
def test_float32_rounding_adds_no_dimensions(words: int) -> None:
    rng = np.random.default_rng(0)
    first = (rng.normal(size=(words, 36)) @ rng.normal(size=(36, 40))).astype(np.float32)
    image = first @ rng.normal(size=(40, 40)).astype(np.float32)

    assert subspace_distance(first, image) < 1e-4


def test_short_direction_counts_as_a_dimension() -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(size=(20_000, 40)).astype(np.float32)
    first[:, 0] *= 1e-3

    assert subspace_distance(first, first[:, 1:]) == pytest.approx(math.sqrt(1 / 40), rel=1e-6)


def test_result_holds_distance_and_chance_distance() -> None:
    result = between_ends(table(0), table(1))

    assert result.record() == {
        "distance": subspace_distance(table(0), table(1)),
        "chance": chance_distance(WORDS, DIM),
        "words": WORDS,
        "dim": DIM,
        "centred_distance": subspace_distance(table(0) - table(0).mean(axis=0), table(1) - table(1).mean(axis=0)),
    }


def test_untrained_mean_of_the_class_vectors_limits_only_the_plain_distance() -> None:
    first = table(0)
    centred = first - first.mean(axis=0)
    untrained_mean = np.random.default_rng(2).normal(size=DIM)
    second = centred @ np.random.default_rng(1).normal(size=(DIM, DIM)) + 30 * untrained_mean

    result = between_ends(first - first.mean(axis=0), second)

    assert result.distance == pytest.approx(math.sqrt(1 / DIM), rel=1e-2)
    assert result.centred_distance is not None
    assert result.centred_distance < 1e-12


def test_softmax_does_not_train_the_mean_of_the_class_vectors() -> None:
    logits = torch.nn.functional.linear(torch.randn(50, DIM), weights := torch.randn(WORDS, DIM, requires_grad=True))
    torch.nn.functional.cross_entropy(logits, torch.arange(50)).backward()
    assert weights.grad is not None
    assert weights.grad.abs().max() > 1e-3
    assert weights.grad.sum(dim=0).abs().max() < 1e-6


def test_table_of_equal_rows_has_no_centred_distance() -> None:
    assert between_ends(table(0), np.ones((WORDS, DIM))).centred_distance is None


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (table(0), table(1)[:-1], "60 x 7 and 59 x 7"),
        (table(0)[0], table(1), "7 and 60 x 7"),
        (table(0)[:5], table(1)[:5], "5 words of dimension 7"),
        (np.zeros((WORDS, DIM)), table(1), "only zeros"),
        (np.full((WORDS, DIM), np.nan), table(1), "NaN"),
    ],
)
def test_incomparable_tables_are_rejected(
    first: NDArray[np.float64], second: NDArray[np.float64], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        subspace_distance(first, second)
