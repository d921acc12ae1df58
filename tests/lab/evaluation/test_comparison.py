"""The interval covers what it should, a test over tokens does not, and the words follow the figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.signal
import scipy.stats
from numpy.typing import NDArray

from reefknot.errors import DataError
from reefknot.lab.evaluation.comparison import Comparison, blocks, compare

Scores = NDArray[np.float64]


def correlated(rng: np.random.Generator, tokens: int, memory: float) -> Scores:
    """An AR(1) series with mean 0 and variance 1."""
    noise = rng.standard_normal(tokens) * math.sqrt(1 - memory**2)
    series: Scores = scipy.signal.lfilter([1.0], [1.0, -memory], noise)
    return series


def systems(seed: int, tokens: int = 20_000, shift: float = 0.0) -> tuple[Scores, Scores]:
    rng = np.random.default_rng(seed)
    a = rng.exponential(5.0, tokens)
    return a, a + shift + 0.5 * rng.standard_normal(tokens)


def test_blocks_cover_the_text() -> None:
    assert blocks(10_400, 500).tolist() == [*range(0, 10_001, 500), 10_400]
    assert len(blocks(10_000, 500)) - 1 == 20


@pytest.mark.parametrize("tokens", [20, 21, 39, 999, 9_999])
def test_short_texts_get_shorter_blocks(tokens: int) -> None:
    ends = blocks(tokens, 500)
    assert len(ends) - 1 >= 20
    assert ends[0] == 0
    assert ends[-1] == tokens
    assert (np.diff(ends) > 0).all()


def test_no_tokens_no_blocks() -> None:
    assert blocks(3, 500).tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match="no tokens"):
        blocks(0, 500)


def test_equal_systems_differ_by_exactly_nothing() -> None:
    a, _ = systems(0)
    same = compare([a], [a.copy()], blocks(len(a)))
    assert same.difference == 0.0
    assert same.interval == (0.0, 0.0)
    assert same.ratio == 1.0
    assert same.verdict.startswith("no difference seen")


def test_the_figures_are_what_they_are_called() -> None:
    a, b = systems(1, shift=-0.05)
    found = compare([a], [b], blocks(len(a)))
    assert found.difference == pytest.approx(b.mean() - a.mean(), abs=1e-12)
    assert found.perplexity_a == pytest.approx(math.exp(a.mean()))
    assert found.perplexity_b == pytest.approx(math.exp(b.mean()))
    assert found.ratio == pytest.approx(found.perplexity_b / found.perplexity_a)
    assert found.ratio_interval == pytest.approx(tuple(np.exp(found.interval)))
    assert (found.tokens, found.units, found.seeds_a, found.seeds_b) == (20_000, 40, 1, 1)
    assert found.interval[0] < found.difference < found.interval[1] < 0
    assert found.verdict.startswith("B is better: ")


def test_the_same_seed_gives_the_same_interval() -> None:
    a, b = systems(2)
    ends = blocks(len(a))
    assert compare([a], [b], ends, seed=3) == compare([a], [b], ends, seed=3)
    assert compare([a], [b], ends, seed=3) != compare([a], [b], ends, seed=4)


def test_swapping_the_systems_swaps_the_verdict() -> None:
    a, b = systems(3, shift=0.05)
    there, back = compare([a], [b], blocks(len(a))), compare([b], [a], blocks(len(a)))
    assert there.difference == -back.difference
    assert there.interval == pytest.approx((-back.interval[1], -back.interval[0]), rel=1e-9)
    assert there.verdict.startswith("A is better: ")
    assert back.verdict.startswith("B is better: ")


def test_the_interval_covers_where_a_test_over_tokens_does_not() -> None:
    trials, tokens, ends = 300, 20_000, blocks(20_000, 200)
    rng = np.random.default_rng(0)
    ours = plain = 0
    for trial in range(trials):
        difference = correlated(rng, tokens, memory=0.9)  # the true mean is 0
        low, high = compare([np.zeros(tokens)], [difference], ends, resamples=1_000, seed=trial).interval
        ours += low <= 0.0 <= high
        half = 1.96 * difference.std() / math.sqrt(tokens)
        plain += abs(difference.mean()) <= half
    assert 0.91 <= ours / trials <= 0.985
    assert plain / trials < 0.5


def test_parity_with_scipy() -> None:
    a, b = systems(5)
    ends = blocks(len(a))
    per_block = (b - a).reshape(len(ends) - 1, -1).mean(axis=1)  # equal blocks: a plain mean of their means
    reference = scipy.stats.bootstrap((per_block,), np.mean, n_resamples=20_000, method="percentile")
    low, high = reference.confidence_interval
    ours = compare([a], [b], ends, resamples=20_000)
    assert ours.interval == pytest.approx((low, high), abs=0.03 * (high - low))


def test_documents_of_any_length_are_weighed_by_their_tokens() -> None:
    a, b = systems(6)
    ends = np.array([0, 5, 5, 9_000, 9_001, 15_000, 20_000])  # one of them empty
    found = compare([a], [b], ends)
    assert found.units == 5
    assert found.difference == pytest.approx(b.mean() - a.mean(), abs=1e-12)
    assert "Only 5 units of text" in found.verdict


def test_chunks_of_resamples_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = systems(7)
    ends = blocks(len(a))
    whole = compare([a], [b], ends, resamples=4_000)
    monkeypatch.setattr("reefknot.lab.evaluation.comparison._CHUNK", 40 * 999)
    parts = compare([a], [b], ends, resamples=4_000)
    assert parts.interval == pytest.approx(whole.interval, abs=0.1 * whole.half_width)


def with_seeds(count: int, spread: float, shift: float, seed: int) -> tuple[list[Scores], list[Scores]]:
    rng = np.random.default_rng(seed)
    text = rng.exponential(5.0, 20_000)
    runs = [text + spread * rng.standard_normal() + 0.2 * rng.standard_normal(20_000) for _ in range(2 * count)]
    return runs[:count], [run + shift for run in runs[count:]]


def test_seeds_widen_the_interval() -> None:
    a, b = with_seeds(8, spread=0.1, shift=0.0, seed=0)
    ends = blocks(20_000)
    one = compare(a[:1], b[:1], ends)
    many = compare(a, b, ends)
    assert many.half_width > 3 * one.half_width
    assert (many.seeds_a, many.seeds_b) == (8, 8)
    error = math.sqrt(sum(np.var([run.mean() for run in side], ddof=1) / 8 for side in (a, b)))
    assert many.half_width == pytest.approx(scipy.stats.t.ppf(0.975, 7) * error, rel=0.05)


def test_the_spread_of_the_seeds_is_that_of_a_t_test() -> None:
    a, _ = with_seeds(4, spread=0.1, shift=0.0, seed=1)
    constant = [np.full(20_000, run.mean()) for run in a]  # no noise from the text
    found = compare([np.zeros(20_000)], constant, blocks(20_000))
    reference = scipy.stats.ttest_1samp([run[0] for run in constant], 0.0).confidence_interval(0.95)
    assert found.interval == pytest.approx((reference.low, reference.high), rel=1e-9)


def test_runs_that_are_all_the_same_add_nothing() -> None:
    a, b = systems(10)
    ends = blocks(len(a))
    assert compare([a] * 3, [b] * 3, ends).interval == pytest.approx(compare([a], [b], ends).interval, rel=1e-6)


def false_positives(seeds_a: int, seeds_b: int, seed_noise: float, text_noise: float, trials: int = 300) -> float:
    """How often equal systems are told apart. The text is a token per unit, and shared by all runs of a trial."""
    rng = np.random.default_rng(0)
    tokens, seen = 40, 0
    for trial in range(trials):
        text = rng.exponential(5.0, tokens)
        better_at = text_noise * rng.standard_normal((2, tokens))  # what a system is better at, whatever its seed
        runs = [
            text + better_at[side] + seed_noise * rng.standard_normal() + 0.01 * rng.standard_normal(tokens)
            for side, seeds in enumerate((seeds_a, seeds_b))
            for _ in range(seeds)
        ]
        found = compare(runs[:seeds_a], runs[seeds_a:], np.arange(tokens + 1), resamples=400, seed=trial)
        seen += found.seen
    return seen / trials


@pytest.mark.parametrize("seeds", [(2, 2), (3, 3), (5, 5), (2, 10)])
def test_the_noise_of_seeds_is_not_taken_for_a_difference(seeds: tuple[int, int]) -> None:
    assert false_positives(*seeds, seed_noise=1.0, text_noise=0.0) <= 0.05
    assert false_positives(*seeds, seed_noise=0.3, text_noise=0.5) <= 0.05


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_noise_of_the_text_is_not_taken_for_a_difference(seeds: int) -> None:
    assert 0.02 <= false_positives(seeds, seeds, seed_noise=0.001, text_noise=1.0) <= 0.08


def test_a_clear_difference_is_seen_with_three_seeds() -> None:
    trials, ends = 100, blocks(20_000)
    pairs = [with_seeds(3, spread=0.01, shift=-0.08, seed=trial) for trial in range(trials)]
    seen = [compare(a, b, ends, resamples=400).verdict.startswith("B is better") for a, b in pairs]
    assert sum(seen) / trials >= 0.95


def test_notes_say_what_the_interval_does_not_cover() -> None:
    a, b = with_seeds(5, spread=0.01, shift=0.0, seed=1)
    ends = blocks(20_000)
    assert "Trained once: the interval speaks of the text" in compare(a[:1], b[:1], ends).verdict
    assert "A was trained once: the interval does not cover" in compare(a[:1], b, ends).verdict
    assert "B was trained once: the interval does not cover" in compare(a, b[:1], ends).verdict
    assert "Trained twice: the interval is wide" in compare(a[:2], b[:3], ends).verdict
    assert compare(a[:3], b, ends).notes == ()
    short = compare([a[0][:1_000]], [b[0][:1_000]], blocks(1_000))
    assert "Blocks of 50 tokens" in short.verdict


def test_verdicts() -> None:
    def verdict(difference: float, low: float, high: float) -> str:
        return Comparison(100.0, 100.0, difference, (low, high), 0.95, 1_000, 20, 5, 5, ()).verdict

    assert verdict(-0.1, -0.2, -0.01) == (
        "B is better: 9.5% lower perplexity (ratio B/A 0.9048, 95 % interval 0.8187 to 0.9900)"
    )
    assert verdict(0.1, 0.01, 0.2).startswith("A is better: 9.5% lower perplexity (ratio B/A 1.1052")
    assert verdict(0.0, -0.02, 0.02) == (
        "no difference seen (ratio B/A 1.0000, 95 % interval 0.9802 to 1.0202): "
        "one under about 0.0200 nats per token, 2.0% of perplexity, would not have shown"
    )
    assert verdict(-0.1, -0.2, 0.0).startswith("no difference seen")


def test_what_was_compared_is_called_by_its_name() -> None:
    a, _ = systems(0, tokens=100)
    found = compare([a], [a], blocks(100), of="word")
    assert "nats per word" in found.verdict
    assert "Blocks of 5 words" in found.verdict
    with pytest.raises(DataError, match="scored 99 words where 100 are compared"):
        compare([a], [a[1:]], blocks(100), of="word")


def test_a_system_that_diverged_has_infinite_perplexity() -> None:
    a, b = systems(8)
    found = compare([a], [b + 5_000], blocks(len(a)))
    assert found.perplexity_b == math.inf
    assert found.verdict.startswith("A is better: 100.0% lower")


def test_what_cannot_be_compared() -> None:
    a, b = systems(9)
    ends = blocks(len(a))
    with pytest.raises(DataError, match="run 2 of system B scored 19,999 tokens where 20,000 are compared"):
        compare([a], [b, b[:-1]], ends)
    with pytest.raises(DataError, match="run 1 of system A scored 20,000 tokens where 10,000"):
        compare([a], [b], blocks(10_000))
    with pytest.raises(DataError, match="system B has no scores"):
        compare([a], [], ends)
    with pytest.raises(DataError, match="run 1 of system A has a score that is not a finite number"):
        compare([np.where(np.arange(20_000) == 7, np.nan, a)], [b], ends)
    with pytest.raises(DataError, match="one single unit"):
        compare([a], [b], np.array([0, 20_000]))
    for wrong in ([5, 20_000], [0, 9, 3, 20_000], [0.0, 1.5, 20_000.0], [0], [[0, 20_000]]):
        with pytest.raises(DataError, match="boundaries"):
            compare([a], [b], np.array(wrong))
