"""Comparisons of perplexities: coverage of the interval, agreement with scipy, and the wording of verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.signal
import scipy.stats
from numpy.typing import NDArray

from reefknot.errors import DataError
from reefknot.lab.evaluation.comparison import Comparison, block_boundaries, compare

Scores = NDArray[np.float64]


def autocorrelated(rng: np.random.Generator, tokens: int, autocorrelation: float) -> Scores:
    """An AR(1) series with mean 0 and variance 1."""
    noise = rng.standard_normal(tokens) * math.sqrt(1 - autocorrelation**2)
    series: Scores = scipy.signal.lfilter([1.0], [1.0, -autocorrelation], noise)
    return series


def systems(seed: int, tokens: int = 20_000, shift: float = 0.0) -> tuple[Scores, Scores]:
    rng = np.random.default_rng(seed)
    a = rng.exponential(5.0, tokens)
    return a, a + shift + 0.5 * rng.standard_normal(tokens)


def test_blocks_cover_the_text() -> None:
    assert block_boundaries(10_400, 500).tolist() == [*range(0, 10_001, 500), 10_400]
    assert len(block_boundaries(10_000, 500)) - 1 == 20


@pytest.mark.parametrize("tokens", [100, 101, 199, 999, 9_999])
def test_short_texts_get_shorter_blocks(tokens: int) -> None:
    ends = block_boundaries(tokens, 500)
    assert len(ends) - 1 >= 20
    assert ends[0] == 0
    assert ends[-1] == tokens
    assert (np.diff(ends) > 0).all()


@pytest.mark.parametrize("tokens", [0, 3, 99])
def test_text_too_short_for_blocks_is_rejected(tokens: int) -> None:
    with pytest.raises(DataError, match=f"too short to compare models: {tokens} tokens, but an interval needs 100"):
        block_boundaries(tokens, 500)


def test_equal_systems_differ_by_exactly_zero() -> None:
    a, _ = systems(0)
    same = compare([a], [a.copy()], block_boundaries(len(a)))
    assert same.difference == 0.0
    assert same.interval == (0.0, 0.0)
    assert same.ratio == 1.0
    assert same.verdict.startswith("no difference seen: the loss of A and B is equal for every token. ")


def test_difference_ratio_and_perplexities_are_consistent() -> None:
    a, b = systems(1, shift=-0.05)
    comparison = compare([a], [b], block_boundaries(len(a)))
    assert comparison.difference == pytest.approx(b.mean() - a.mean(), abs=1e-12)
    assert comparison.perplexity_a == pytest.approx(math.exp(a.mean()))
    assert comparison.perplexity_b == pytest.approx(math.exp(b.mean()))
    assert comparison.ratio == pytest.approx(comparison.perplexity_b / comparison.perplexity_a)
    assert comparison.ratio_interval == pytest.approx(tuple(np.exp(comparison.interval)))
    assert (comparison.tokens, comparison.units, comparison.seeds_a, comparison.seeds_b) == (20_000, 40, 1, 1)
    assert comparison.interval[0] < comparison.difference < comparison.interval[1] < 0
    assert comparison.verdict.startswith("B is better: ")


def test_same_seed_gives_the_same_interval() -> None:
    a, b = systems(2)
    ends = block_boundaries(len(a))
    assert compare([a], [b], ends, seed=3) == compare([a], [b], ends, seed=3)
    assert compare([a], [b], ends, seed=3) != compare([a], [b], ends, seed=4)


def test_swapping_systems_swaps_the_verdict() -> None:
    a, b = systems(3, shift=0.05)
    forward = compare([a], [b], block_boundaries(len(a)))
    backward = compare([b], [a], block_boundaries(len(a)))
    assert forward.difference == -backward.difference
    assert forward.interval == pytest.approx((-backward.interval[1], -backward.interval[0]), rel=1e-9)
    assert forward.verdict.startswith("A is better: ")
    assert backward.verdict.startswith("B is better: ")


def test_interval_covers_correlated_losses_unlike_a_token_test() -> None:
    trials = 300
    tokens = 20_000
    ends = block_boundaries(20_000, 200)
    rng = np.random.default_rng(0)
    ours = plain = 0
    for trial in range(trials):
        difference = autocorrelated(rng, tokens, autocorrelation=0.9)  # the true mean is 0
        low, high = compare([np.zeros(tokens)], [difference], ends, resamples=1_000, seed=trial).interval
        ours += low <= 0.0 <= high
        half = 1.96 * difference.std() / math.sqrt(tokens)
        plain += abs(difference.mean()) <= half
    assert 0.91 <= ours / trials <= 0.985
    assert plain / trials < 0.5


def test_interval_equals_scipy_bootstrap() -> None:
    a, b = systems(5)
    ends = block_boundaries(len(a))
    per_block = (
        (b - a).reshape(len(ends) - 1, -1).mean(axis=1)
    )  # blocks have equal sizes, so the mean of their means is the mean
    reference = scipy.stats.bootstrap((per_block,), np.mean, n_resamples=20_000, method="percentile")
    low, high = reference.confidence_interval
    ours = compare([a], [b], ends, resamples=20_000)
    assert ours.interval == pytest.approx((low, high), abs=0.03 * (high - low))


def test_documents_are_weighted_by_their_tokens() -> None:
    a, b = systems(6)
    ends = np.array([0, 5, 5, 9_000, 9_001, 15_000, 20_000])  # one document is empty
    comparison = compare([a], [b], ends)
    assert comparison.units == 5
    assert comparison.difference == pytest.approx(b.mean() - a.mean(), abs=1e-12)
    assert "Only 5 units of text" in comparison.verdict


def test_interval_is_independent_of_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = systems(7)
    ends = block_boundaries(len(a))
    whole = compare([a], [b], ends, resamples=4_000)
    monkeypatch.setattr("reefknot.lab.evaluation.comparison._MAX_COUNTS", 40 * 999)
    parts = compare([a], [b], ends, resamples=4_000)
    assert parts.interval == pytest.approx(whole.interval, abs=0.1 * whole.half_width)


def with_seeds(count: int, spread: float, shift: float, seed: int) -> tuple[list[Scores], list[Scores]]:
    rng = np.random.default_rng(seed)
    text = rng.exponential(5.0, 20_000)
    runs = [text + spread * rng.standard_normal() + 0.2 * rng.standard_normal(20_000) for _ in range(2 * count)]
    return runs[:count], [run + shift for run in runs[count:]]


def test_seeds_widen_the_interval() -> None:
    a, b = with_seeds(8, spread=0.1, shift=0.0, seed=0)
    ends = block_boundaries(20_000)
    one = compare(a[:1], b[:1], ends)
    many = compare(a, b, ends)
    assert many.half_width > 3 * one.half_width
    assert (many.seeds_a, many.seeds_b) == (8, 8)
    error = math.sqrt(sum(np.var([run.mean() for run in side], ddof=1) / 8 for side in (a, b)))
    assert many.half_width == pytest.approx(scipy.stats.t.ppf(0.975, 7) * error, rel=0.05)


def test_interval_over_seeds_equals_a_t_test() -> None:
    a, _ = with_seeds(4, spread=0.1, shift=0.0, seed=1)
    constant = [np.full(20_000, run.mean()) for run in a]  # no variation over the text
    comparison = compare([np.zeros(20_000)], constant, block_boundaries(20_000))
    reference = scipy.stats.ttest_1samp([run[0] for run in constant], 0.0).confidence_interval(0.95)
    assert comparison.interval == pytest.approx((reference.low, reference.high), rel=1e-9)


def test_identical_runs_do_not_change_the_interval() -> None:
    a, b = systems(10)
    ends = block_boundaries(len(a))
    assert compare([a] * 3, [b] * 3, ends).interval == pytest.approx(compare([a], [b], ends).interval, rel=1e-6)


def false_positives(seeds_a: int, seeds_b: int, seed_noise: float, text_noise: float, trials: int = 300) -> float:
    """Return how often equal systems appear different. Every token is a unit, and all runs share the text."""
    rng = np.random.default_rng(0)
    tokens, seen = 40, 0
    for trial in range(trials):
        text = rng.exponential(5.0, tokens)
        better_at = text_noise * rng.standard_normal(
            (2, tokens)
        )  # per-token advantage of a system, the same for all its seeds
        runs = [
            text + better_at[side] + seed_noise * rng.standard_normal() + 0.01 * rng.standard_normal(tokens)
            for side, seeds in enumerate((seeds_a, seeds_b))
            for _ in range(seeds)
        ]
        comparison = compare(runs[:seeds_a], runs[seeds_a:], np.arange(tokens + 1), resamples=400, seed=trial)
        seen += comparison.is_significant
    return seen / trials


@pytest.mark.parametrize("seeds", [(2, 2), (3, 3), (5, 5), (2, 10)])
def test_seed_noise_rarely_gives_false_positives(seeds: tuple[int, int]) -> None:
    assert false_positives(*seeds, seed_noise=1.0, text_noise=0.0) <= 0.05
    assert false_positives(*seeds, seed_noise=0.3, text_noise=0.5) <= 0.05


@pytest.mark.parametrize("seeds", [1, 3])
def test_text_noise_gives_few_false_positives(seeds: int) -> None:
    assert 0.02 <= false_positives(seeds, seeds, seed_noise=0.001, text_noise=1.0) <= 0.08


def test_clear_difference_is_seen_with_three_seeds() -> None:
    trials = 100
    ends = block_boundaries(20_000)
    pairs = [with_seeds(3, spread=0.01, shift=-0.08, seed=trial) for trial in range(trials)]
    seen = [compare(a, b, ends, resamples=400).verdict.startswith("B is better") for a, b in pairs]
    assert sum(seen) / trials >= 0.95


def test_notes_state_what_the_interval_does_not_cover() -> None:
    a, b = with_seeds(5, spread=0.01, shift=0.0, seed=1)
    ends = block_boundaries(20_000)
    assert "Both were trained once: the interval reflects the choice of text" in compare(a[:1], b[:1], ends).verdict
    assert "A was trained once: the interval does not reflect" in compare(a[:1], b, ends).verdict
    assert "B was trained once: the interval does not reflect" in compare(a, b[:1], ends).verdict
    assert "Trained only twice: the interval is wide" in compare(a[:2], b[:3], ends).verdict
    assert compare(a[:3], b, ends).notes == ()
    short = compare([a[0][:1_000]], [b[0][:1_000]], block_boundaries(1_000))
    assert "blocks have 50 tokens" in short.verdict


def test_verdict_wording() -> None:
    def verdict(difference: float, low: float, high: float) -> str:
        return Comparison(100.0, 100.0, difference, (low, high), 0.95, 1_000, 20, 5, 5, ()).verdict

    assert verdict(-0.1, -0.2, -0.01) == (
        "B is better: 9.5% lower perplexity (ratio B/A 0.9048, 95 % interval 0.8187 to 0.9900)"
    )
    assert verdict(0.1, 0.01, 0.2).startswith("A is better: 9.5% lower perplexity (ratio B/A 1.1052")
    assert verdict(0.0, -0.02, 0.02) == (
        "no difference seen (ratio B/A 1.0000, 95 % interval 0.9802 to 1.0202): "
        "a difference below about 0.0200 nats per token, 2.0% of perplexity, cannot be seen here"
    )
    assert verdict(-0.1, -0.2, 0.0).startswith("no difference seen")


def test_verdict_names_the_unit_compared() -> None:
    a, _ = systems(0, tokens=100)
    b = a[::-1]
    comparison = compare([a], [b], block_boundaries(100), loss_unit="word")
    assert "nats per word" in comparison.verdict
    assert "blocks have 5 words" in comparison.verdict
    with pytest.raises(DataError, match="scored 99 words, but 100 are compared"):
        compare([a], [a[1:]], block_boundaries(100), loss_unit="word")


def test_diverged_system_has_infinite_perplexity() -> None:
    a, b = systems(8)
    comparison = compare([a], [b + 5_000], block_boundaries(len(a)))
    assert comparison.perplexity_b == math.inf
    assert comparison.verdict.startswith("A is better: 100.0% lower")


def test_incomparable_scores_are_rejected() -> None:
    a, b = systems(9)
    ends = block_boundaries(len(a))
    with pytest.raises(DataError, match="run 2 of system B scored 19,999 tokens, but 20,000 are compared"):
        compare([a], [b, b[:-1]], ends)
    with pytest.raises(DataError, match="run 1 of system A scored 20,000 tokens, but 10,000"):
        compare([a], [b], block_boundaries(10_000))
    with pytest.raises(DataError, match="system B has no scores"):
        compare([a], [], ends)
    with pytest.raises(DataError, match="run 1 of system A has a score that is not a finite number"):
        compare([np.where(np.arange(20_000) == 7, np.nan, a)], [b], ends)
    with pytest.raises(DataError, match="only one unit"):
        compare([a], [b], np.array([0, 20_000]))
    for boundaries in ([5, 20_000], [0, 9, 3, 20_000], [0.0, 1.5, 20_000.0], [0], [[0, 20_000]]):
        with pytest.raises(DataError, match="boundaries"):
            compare([a], [b], np.array(boundaries))
