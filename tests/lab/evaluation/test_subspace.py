"""Subspace distance: scipy's principal angles, the paper's own formula, and what a distance must be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import qr, subspace_angles

from reefknot.errors import ArgumentError
from reefknot.lab.evaluation.subspace import between_ends, chance_distance, subspace_distance

WORDS, WIDTH = 60, 7


def table(seed: int, width: int = WIDTH) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(WORDS, width))


@pytest.mark.parametrize("noise", [0.0, 1e-10, 1e-3, 0.3, 10.0])
def test_is_the_mean_square_of_the_sines_of_scipys_angles(noise: float) -> None:
    one = table(0)
    other = one @ np.random.default_rng(1).normal(size=(WIDTH, WIDTH)) + noise * table(2)

    expected = math.sqrt(np.mean(np.sin(subspace_angles(one, other)) ** 2))

    assert subspace_distance(one, other) == pytest.approx(expected, rel=1e-4, abs=1e-13)


def test_is_the_papers_formula() -> None:
    one, other = table(0), table(1)
    basis, _ = qr(one, mode="economic")
    another, _ = qr(other, mode="economic")
    residual = another - basis @ basis.T @ another

    assert subspace_distance(one, other) == pytest.approx(math.sqrt((residual**2).sum() / WIDTH), rel=1e-12)


def test_is_symmetric_and_between_none_and_one() -> None:
    for seed in range(20):
        one, other = table(seed), table(seed + 100)
        distance = subspace_distance(one, other)

        assert 0.0 < distance < 1.0
        assert subspace_distance(other, one) == pytest.approx(distance, rel=1e-12)


def test_knows_spaces_not_bases() -> None:
    one, other = table(0), table(1)
    for seed in range(5):
        turned = one @ np.random.default_rng(seed).normal(size=(WIDTH, WIDTH))

        assert subspace_distance(turned, other) == pytest.approx(subspace_distance(one, other), rel=1e-10)
        assert subspace_distance(one, turned) < 1e-12


def test_orthogonal_spaces_are_one_apart() -> None:
    identity = np.eye(WORDS)

    assert subspace_distance(identity[:, :WIDTH], identity[:, WIDTH : 2 * WIDTH]) == 1.0


def test_a_rounded_distance_is_not_lost_near_zero() -> None:
    one = table(0)

    assert 1e-10 < subspace_distance(one, one + 1e-9 * table(1)) < 1e-8


def test_of_dependent_columns_only_the_space_counts() -> None:
    one, other = table(0), table(1)
    doubled = np.concatenate([one, one], axis=1)

    assert subspace_distance(doubled, other) == pytest.approx(subspace_distance(one, other), rel=1e-10)


def test_a_space_inside_a_larger_one_is_not_equal_to_it() -> None:
    whole = table(0)
    part = whole.copy()
    part[:, 0] = part[:, 1]

    expected = math.sqrt(1 / WIDTH)
    assert subspace_distance(whole, part) == pytest.approx(expected, rel=1e-10)
    assert subspace_distance(part, whole) == pytest.approx(expected, rel=1e-10)


def test_unrelated_tables_are_as_far_apart_as_chance_has_it() -> None:
    squares = [subspace_distance(table(seed), table(seed + 1000)) ** 2 for seed in range(300)]

    assert math.sqrt(np.mean(squares)) == pytest.approx(chance_distance(WORDS, WIDTH), abs=0.005)


def test_float32_tables_are_compared_in_float64() -> None:
    one, other = table(0).astype(np.float32), table(1).astype(np.float32)

    assert subspace_distance(one, other) == subspace_distance(one.astype(np.float64), other.astype(np.float64))


@pytest.mark.parametrize("words", [200, 20_000])
def test_rounding_fills_no_space_that_a_float32_table_does_not_span(words: int) -> None:
    rng = np.random.default_rng(0)
    one = (rng.normal(size=(words, 36)) @ rng.normal(size=(36, 40))).astype(np.float32)
    image = one @ rng.normal(size=(40, 40)).astype(np.float32)

    assert subspace_distance(one, image) < 1e-4


def test_a_direction_that_is_short_beside_others_is_still_one() -> None:
    rng = np.random.default_rng(0)
    one = rng.normal(size=(20_000, 40)).astype(np.float32)
    one[:, 0] *= 1e-3

    assert subspace_distance(one, one[:, 1:]) == pytest.approx(math.sqrt(1 / 40), rel=1e-6)


def test_a_result_holds_the_distance_and_what_chance_would_give() -> None:
    found = between_ends(table(0), table(1))

    assert found.record() == {
        "distance": subspace_distance(table(0), table(1)),
        "chance": chance_distance(WORDS, WIDTH),
        "words": WORDS,
        "dim": WIDTH,
    }


@pytest.mark.parametrize(
    ("one", "other", "sentence"),
    [
        (table(0), table(1)[:-1], "60 x 7 and 59 x 7"),
        (table(0)[0], table(1), "7 and 60 x 7"),
        (table(0)[:5], table(1)[:5], "5 words of width 7"),
        (np.zeros((WORDS, WIDTH)), table(1), "nothing but zeros"),
        (np.full((WORDS, WIDTH), np.nan), table(1), "NaN"),
    ],
)
def test_refuses_what_spans_no_comparable_space(
    one: NDArray[np.float64], other: NDArray[np.float64], sentence: str
) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        subspace_distance(one, other)
