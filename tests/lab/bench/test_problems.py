"""Benchmark problems: Zipf targets, logits like a trained model's, and reproducible values."""

from __future__ import annotations

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.lab.bench.plain_ends import LOSSES
from reefknot.lab.bench.problems import ENDS, Shape, compute_band_dims, make_problem

SHAPE = Shape(400, 64, 1000)


@pytest.mark.parametrize("end", ENDS)
def test_problem_is_reproducible(end: str) -> None:
    first, second = (make_problem(end, Shape(16, 8, 50), "cpu", torch.float32) for _ in range(2))
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.targets, second.targets)
    assert first.weights.keys() == second.weights.keys()
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


def test_targets_follow_zipf() -> None:
    targets_N = make_problem("plain", Shape(20_000, 8, 1000), "cpu", torch.float32).targets
    counts = torch.bincount(targets_N, minlength=1000).double()
    harmonic = (1.0 / torch.arange(1, 1001, dtype=torch.float64)).sum()
    for word in (0, 1, 9):
        assert float(counts[word]) / 20_000 == pytest.approx(1 / ((word + 1) * float(harmonic)), rel=0.1)


@pytest.mark.parametrize("end", [end for end in ENDS if end != "log_probs"])
def test_loss_is_in_the_range_of_a_trained_model(end: str) -> None:
    """The loss is well below the unigram entropy and well above zero."""
    problem = make_problem(end, SHAPE, "cpu", torch.float64)
    unigram = 1.0 / torch.arange(1, SHAPE.classes + 1, dtype=torch.float64)
    unigram /= unigram.sum()
    entropy = float(-(unigram * unigram.log()).sum())
    loss = float(LOSSES[end](problem.hidden, problem.targets, problem.tensors) / SHAPE.tokens)
    assert 0.15 * entropy < loss < 0.9 * entropy


def test_logits_are_unigram_plus_boost_of_the_target() -> None:
    problem = make_problem("plain", SHAPE, "cpu", torch.float64)
    logits = problem.hidden @ problem.weights["table"].T
    log_unigram = -torch.log(torch.arange(1, SHAPE.classes + 1, dtype=torch.float64))
    residual = logits - log_unigram
    boosted = residual.gather(1, problem.targets[:, None]).mean() - residual.mean()
    assert float(boosted) == pytest.approx(3.0, abs=0.5), "4 times the squared length of the unshared part, 3/4"
    assert float(logits.mean(0).sub(log_unigram).std()) < 0.3, "rows share the unigram and differ by noise"


def test_band_dimensions_decrease() -> None:
    assert compute_band_dims(1024) == (1024, 256, 64)
    assert compute_band_dims(8) == (8, 4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64,16", "must be rows,dim,classes"),
        ("a,b,c", "must be rows,dim,classes"),
        ("1,2,3,4", "must be rows,dim,classes"),
        ("0,16,500", "at least 1 row"),
        ("64,16,10", "at least 1 row, 8 dimensions and 50 classes"),
    ],
)
def test_invalid_shape_is_rejected(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Shape.parse(text)


def test_shape_is_parsed() -> None:
    assert Shape.parse("8_192,1024,267735") == (8192, 1024, 267_735)
