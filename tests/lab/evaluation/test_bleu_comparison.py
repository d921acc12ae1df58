"""BLEU from summed statistics equals sacrebleu, intervals cover, and verdicts agree with its paired bootstrap."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.lab.evaluation.bleu import BleuSettings, create_metrics
from reefknot.lab.evaluation.bleu_comparison import BleuComparison, bleu_of_sums, compare_bleu, sentence_statistics
from reefknot.lab.evaluation.comparison import resample_counts

WORDS = [f"word{number}" for number in range(40)] + [".", "Über,", "日本語", "3.14"]
Lines = list[str]


def make_text(sentences: int, seed: int = 0) -> Lines:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 25))) for _ in range(sentences)]


def make_translation(references: Lines, right: float, seed: int) -> Lines:
    """Replace each word with probability 1 - `right`; some lines are truncated, and some are empty."""
    draw = random.Random(seed)
    lines = []
    for line in references:
        words = [word if draw.random() < right else draw.choice(WORDS) for word in line.split()]
        lines.append(" ".join(words[: draw.randint(0, len(words))] if draw.random() < 0.1 else words))
    return lines


def compare_untokenised(a: list[Lines], b: list[Lines], references: Lines, **options: Any) -> BleuComparison:
    return compare_bleu(create_metrics(BleuSettings(tokenize="none")).bleu, a, b, references, **options)


@pytest.mark.parametrize(
    "settings", [BleuSettings(), BleuSettings(tokenize="none"), BleuSettings(tokenize="char", lowercase=True)]
)
@pytest.mark.parametrize("right", [0.0, 0.3, 0.9])
def test_bleu_of_summed_statistics_equals_sacrebleu(settings: BleuSettings, right: float) -> None:
    bleu = create_metrics(settings).bleu
    references = make_text(60)
    lines = make_translation(references, right, seed=1)
    statistics_NK = sentence_statistics(bleu, lines, references)
    assert bleu_of_sums(bleu, statistics_NK.sum(axis=0)) == bleu.corpus_score(lines, [references]).score
    chosen = np.random.default_rng(0).integers(60, size=60)
    drawn = [[text[i] for i in chosen] for text in (lines, references)]
    assert bleu_of_sums(bleu, statistics_NK[chosen].sum(axis=0)) == bleu.corpus_score(drawn[0], [drawn[1]]).score


def test_empty_translations_have_bleu_zero() -> None:
    references = make_text(30)
    comparison = compare_untokenised([[""] * 30], [make_translation(references, 0.5, 1)], references)
    assert comparison.bleu_a == (0.0,)
    assert comparison.verdict.startswith("B is better: ")


def test_interval_equals_scores_of_resampled_texts() -> None:
    """Each resampled text is scored as a whole by sacrebleu."""
    references = make_text(40)
    a, b = (make_translation(references, right, seed) for right, seed in ((0.6, 1), (0.65, 2)))
    bleu = create_metrics(BleuSettings(tokenize="none")).bleu
    (times_RN,) = resample_counts(40, 50, np.random.default_rng(7))
    differences = []
    for times_N in times_RN:
        chosen = np.repeat(np.arange(40), times_N.astype(int))
        assert len(chosen) == 40
        score_a, score_b = (
            bleu.corpus_score([lines[i] for i in chosen], [[references[i] for i in chosen]]).score for lines in (a, b)
        )
        differences.append(score_b - score_a)
    comparison = compare_untokenised([a], [b], references, resamples=50, seed=7)
    assert comparison.interval == pytest.approx(tuple(np.quantile(differences, [0.025, 0.975])), rel=1e-12)
    assert comparison.resamples == 50


def test_equal_systems_differ_by_exactly_zero() -> None:
    references = make_text(50)
    a = make_translation(references, 0.5, 1)
    same = compare_untokenised([a], [list(a)], references, resamples=1_000)
    assert (same.difference, same.interval, same.is_significant) == (0.0, (0.0, 0.0), False)
    assert same.verdict.startswith("no difference seen (B - A +0.00, 95 % interval over sentences +0.00 to +0.00)")


def test_same_seed_gives_the_same_interval() -> None:
    references = make_text(50)
    a, b = (make_translation(references, 0.5, seed) for seed in (1, 2))
    first, again, other = (compare_untokenised([a], [b], references, resamples=1_000, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.interval != other.interval


def test_swapping_systems_swaps_the_verdict() -> None:
    references = make_text(100)
    a = make_translation(references, 0.5, 1)
    b = make_translation(references, 0.8, 2)
    forward = compare_untokenised([a], [b], references, resamples=1_000)
    backward = compare_untokenised([b], [a], references, resamples=1_000)
    assert forward.difference == -backward.difference
    assert forward.interval == pytest.approx((-backward.interval[1], -backward.interval[0]))
    assert forward.verdict.startswith(f"B is better: {forward.difference:.2f} BLEU more")
    assert backward.verdict.startswith(f"A is better: {forward.difference:.2f} BLEU more")


def test_interval_covers_the_difference_of_a_long_text() -> None:
    long = make_text(3_600)
    a = make_translation(long, 0.60, 1)
    b = make_translation(long, 0.63, 2)
    true = compare_untokenised([a], [b], long, resamples=2).difference
    parts = [slice(start, start + 60) for start in range(0, 3_600, 60)]
    intervals = [compare_untokenised([a[part]], [b[part]], long[part], resamples=400).interval for part in parts]
    assert 0.87 <= np.mean([low <= true <= high for low, high in intervals]) <= 0.99


def test_seeds_are_averaged_and_widen_the_interval() -> None:
    references = make_text(100)
    a = [make_translation(references, right, seed) for seed, right in enumerate((0.5, 0.55, 0.6))]
    b = [make_translation(references, right, seed) for seed, right in enumerate((0.56, 0.62), start=5)]
    comparison = compare_untokenised(a, b, references, resamples=1_000)
    alone = [compare_untokenised([lines], [lines], references, resamples=1).bleu_a[0] for lines in (*a, *b)]
    assert (*comparison.bleu_a, *comparison.bleu_b) == tuple(alone)
    assert comparison.difference == pytest.approx(np.mean(alone[3:]) - np.mean(alone[:3]))
    assert comparison.spreads == pytest.approx((np.std(alone[:3], ddof=1), np.std(alone[3:], ddof=1)))
    assert comparison.interval_with_seeds is not None
    (low, high), (wide_low, wide_high) = comparison.interval, comparison.interval_with_seeds
    assert wide_low < low < comparison.difference < high < wide_high
    assert f"interval over sentences and seeds {wide_low:+.2f} to {wide_high:+.2f}" in comparison.verdict
    assert f"Over the sentences alone the interval is {low:+.2f} to {high:+.2f}" in comparison.verdict


def test_difference_within_the_spread_of_seeds_is_not_seen() -> None:
    comparison = BleuComparison((30.0, 31.0), (31.0, 32.5), (0.4, 2.1), (-2.0, 4.5), 0.95, 1_000, 1_000)
    assert not comparison.is_significant
    assert comparison.verdict == (
        "no difference seen (B - A +1.25, 95 % interval over sentences and seeds -2.00 to +4.50): a difference "
        "below about 3.25 BLEU cannot be seen here. Over the sentences alone the interval is +0.40 to +2.10"
    )
    assert replace(comparison, interval_with_seeds=(0.1, 2.4)).verdict.startswith("B is better: 1.25 BLEU more")


def test_repeated_runs_do_not_narrow_the_interval() -> None:
    """All runs of a system are resampled on the same sentences."""
    references = make_text(60)
    a, b = (make_translation(references, right, 1) for right in (0.5, 0.6))
    once = compare_untokenised([a], [b], references, resamples=1_000)
    twice = compare_untokenised([a, a], [b, b, b], references, resamples=1_000)
    assert twice.interval == pytest.approx(once.interval)
    assert twice.spreads == pytest.approx((0.0, 0.0))
    assert twice.interval_with_seeds == pytest.approx(once.interval)


def test_verdict_states_its_limits() -> None:
    references = make_text(10)
    a, b = (make_translation(references, 0.6, seed) for seed in (1, 2))
    once = compare_untokenised([a], [b], references, resamples=1_000)
    assert "Both were trained once: the interval reflects the choice of sentences, not the spread" in once.verdict
    assert "Only 10 sentences: the interval is approximate" in once.verdict
    assert once.interval_with_seeds is None
    assert once.spreads == (None, None)
    mixed = compare_untokenised([a, b], [b], references, resamples=1_000)
    assert "B was trained once: the interval does not reflect the spread" in mixed.verdict
    assert mixed.interval_with_seeds is None


def test_incomparable_translations_are_rejected() -> None:
    references = make_text(10)
    with pytest.raises(DataError, match="run 2 of system B has 9 translations, but there are 10 references"):
        compare_untokenised([references], [references, references[1:]], references)
    with pytest.raises(DataError, match="system A has no translations"):
        compare_untokenised([], [references], references)
    with pytest.raises(DataError, match="fewer than two sentences"):
        compare_untokenised([["a"]], [["a"]], ["a"])


@pytest.mark.parametrize("differs", [True, False], ids=["clear", "equal"])
def test_verdict_agrees_with_sacrebleu_paired_bootstrap(tmp_path: Path, differs: bool) -> None:
    """`--paired-bs` prints the scores, their means over its resamples, and a p-value."""
    half = make_text(100)
    references = half + half
    first, second = (make_translation(half, right, seed) for right, seed in ((0.6, 1), (0.8, 2)))
    # The text occurs twice, and B has the translations of A in another order: sentences differ, BLEU does not.
    a, b = (first + first, second + second) if differs else (first + second, second + first)
    for name, lines in {"references": references, "a": a, "b": b}.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    words = ["references", "-i", "a", "b", "--paired-bs", "--format", "json", "--width", "6", "--tokenize", "none"]
    printed = subprocess.run(
        [sys.executable, "-m", "sacrebleu", *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    theirs_a, theirs_b = (system["BLEU"] for system in json.loads(printed.stdout))
    comparison = compare_untokenised([a], [b], references)
    assert comparison.means == pytest.approx((theirs_a["score"], theirs_b["score"]), abs=1e-5)
    low, high = comparison.interval
    assert theirs_b["mean"] - theirs_a["mean"] == pytest.approx(comparison.difference, abs=0.1 * (high - low))
    assert (theirs_b["p_value"] < 0.05, comparison.is_significant) == (differs, differs)
    assert low < comparison.difference < high
