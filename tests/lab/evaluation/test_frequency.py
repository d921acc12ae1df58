"""Loss by frequency: bands hold every token once and add up to the total."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from reefknot.lab.evaluation.comparison import block_boundaries, compare
from reefknot.lab.evaluation.frequency import (
    EDGES,
    FIGURE_3,
    PairedLosses,
    compare_by_previous,
    compare_by_target,
    compare_on_symbols,
    loss_by_frequency,
)
from reefknot.lab.evaluation.perplexity import Score, score
from reefknot.lab.runs.scores import ScoredText
from reefknot.lab.text.dataset import Dataset, Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import BPESettings, VocabularySettings
from reefknot.nn.models.language_model import LanguageModel


@pytest.mark.parametrize("end_of_line", [True, False])
def test_bands_add_up_to_the_total_loss(
    opened: Callable[..., Dataset], model_for: Callable[[int], LanguageModel], end_of_line: bool
) -> None:
    dataset = opened(end_of_line=end_of_line)
    scored = score(model_for(len(dataset.vocabulary)), dataset.splits["test"], dataset.vocabulary)
    by_frequency = loss_by_frequency(scored, dataset.splits["test"], dataset.vocabulary)
    for bands in (by_frequency.target, by_frequency.previous):
        assert sum(band.tokens for band in bands) == len(scored.nll)
        total = sum(band.tokens * band.nll for band in bands)
        assert total == pytest.approx(float(scored.nll.sum(dtype=np.float64)))
        assert [band.low for band in bands] == sorted(band.low for band in bands)


def test_bands_match_values_computed_by_hand() -> None:
    vocabulary = Vocabulary(("<eos>", "often", "some", "rare", "<unk>"), (20_000, 1_000, 10, 9, 0))
    ids = np.array([1, 3, 4, 2, 0], dtype=np.int32)
    losses = np.array([1.0, 2.0, 4.0, 8.0, 16.0], dtype=np.float32)
    split = Split("test", ids, words=4, lines=1, bytes=20, unknown=1)
    losses_by_band = loss_by_frequency(Score(losses, 5, 20, ScoredText(split="test"), "float32"), split, vocabulary)
    assert losses_by_band.record()["target"] == [
        {"low": 0, "high": 9, "tokens": 2, "types": 2, "nll": 3.0},
        {"low": 10, "high": 99, "tokens": 1, "types": 1, "nll": 8.0},
        {"low": 1_000, "high": 9_999, "tokens": 1, "types": 1, "nll": 1.0},
        {"low": 10_000, "high": 99_999, "tokens": 1, "types": 1, "nll": 16.0},
    ]
    # <eos> precedes the first word.
    previous = {band.low: (band.tokens, band.nll) for band in losses_by_band.previous}
    assert previous == {0: (2, 6.0), 10: (1, 16.0), 1_000: (1, 2.0), 10_000: (1, 1.0)}


def test_without_eos_the_first_token_is_only_context() -> None:
    vocabulary = Vocabulary(("a", "b"), (500, 5))
    split = Split("test", np.array([1, 0, 0], dtype=np.int32), words=3, lines=1, bytes=6, unknown=0)
    losses = np.array([1.0, 3.0], dtype=np.float32)
    losses_by_band = loss_by_frequency(Score(losses, 2, 6, ScoredText(split="test"), "float32"), split, vocabulary)
    assert [(band.low, band.tokens, band.nll) for band in losses_by_band.target] == [(100, 2, 2.0)]
    assert [(band.low, band.nll) for band in losses_by_band.previous] == [(0, 1.0), (100, 3.0)]


@pytest.mark.parametrize("scores_first", [True, False])
def test_sub_words_of_counted_words_give_losses_of_words(scores_first: bool) -> None:
    counts = {"low": 500, "lower": 20, "slow": 3, "rare": 1, "<eos>": 50}
    settings = VocabularySettings(bpe=BPESettings(merges=2), min_count=2)
    vocabulary = Vocabulary.from_counts(counts, settings)
    words = ["lower", "low", "rare", "slow", "<eos>"]
    tokens = [token for word in words for token in vocabulary.split_word(word)]
    assert len(tokens) > len(words)
    ids = np.array(vocabulary.encode(words), dtype=np.int32)
    losses = np.random.default_rng(0).random(len(ids)).astype(np.float32)
    word_losses = {}
    position = 0
    for word in words:
        length = len(vocabulary.split_word(word))
        word_losses[word] = losses[position : position + length].sum(dtype=np.float64)
        position += length
    if not scores_first:
        losses = losses[1:]
        del word_losses["lower"]
    split = Split("test", ids, words=4, lines=1, bytes=20, unknown=1)
    scored = Score(losses, len(losses), 20, ScoredText(split="test"), "float32")
    by_frequency = loss_by_frequency(scored, split, vocabulary)

    # <unk> stands for "rare", which was seen once.
    expected = {0: [word_losses["rare"], word_losses["slow"]], 10: [word_losses["<eos>"]], 100: [word_losses["low"]]}
    if scores_first:
        expected[10].append(word_losses["lower"])
    assert {band.low: band.tokens for band in by_frequency.target} == {low: len(nll) for low, nll in expected.items()}
    for band in by_frequency.target:
        assert band.nll == pytest.approx(np.mean(expected[band.low]))
    previous = {band.low: band.tokens for band in by_frequency.previous}
    assert previous == ({0: 2, 10: 2, 100: 1} if scores_first else {0: 2, 10: 1, 100: 1})
    assert {band.low: band.types for band in by_frequency.target} == {0: 2, 10: 2, 100: 1}


def test_band_edges_increase_from_zero() -> None:
    for edges in (EDGES, FIGURE_3):
        assert edges[0] == 0
        assert list(edges) == sorted(set(edges))


def make_pair(a: Sequence[float], b: Sequence[float]) -> PairedLosses:
    """Return a pair of systems with one run each, where every token is a unit."""
    return PairedLosses([np.array(a)], [np.array(b)], np.arange(len(a) + 1))


def test_interval_of_a_band_uses_only_its_tokens() -> None:
    """The interval equals a comparison of a text that has only these tokens."""
    random = np.random.default_rng(0)
    runs = [random.normal(4.0, 1.0, 600) for _ in range(4)]
    inside_N = random.random(600) < 0.3
    pair = PairedLosses(runs[:2], runs[2:], block_boundaries(600, 20))
    comparison = pair.compare_on(inside_N)
    inside_runs = [run[inside_N] for run in runs]
    ends = np.cumsum([0, *(int(part.sum()) for part in np.split(inside_N, 30))])
    expected = compare(inside_runs[:2], inside_runs[2:], ends)
    assert (comparison.tokens, comparison.interval) == (inside_N.sum(), expected.interval)
    assert comparison.difference == pytest.approx(expected.difference)
    one_block = np.arange(600) < 20
    assert pair.compare_on(one_block).interval is None


def test_comparison_by_frequency_matches_values_by_hand() -> None:
    words = ("<eos>", "the", "often", "some", "rare", "<unk>")
    vocabulary = Vocabulary(words, (6_000, 5_000, 99, 50, 49, 0))
    ids = np.array([4, 2, 4, 3, 1, 5, 0], dtype=np.int32)
    split = Split("test", ids, words=6, lines=1, bytes=20, unknown=1)
    a = np.array([2.0, 1.0, 6.0, 4.0, 1.0, 3.0, 1.0])
    b = np.array([1.0, 1.0, 3.0, 6.0, 3.0, 3.0, 2.0])
    pair = make_pair(a, b)
    bands = compare_by_target(pair, split, vocabulary)
    assert [(band.low, band.high, band.tokens, band.types) for band in bands] == [
        (0, 0, 1, 1),
        (1, 49, 2, 1),
        (50, 99, 2, 2),
        (5_000, None, 2, 2),
    ]
    assert [(band.nll_a, band.nll_b) for band in bands] == [(3.0, 3.0), (4.0, 2.0), (2.5, 3.5), (1.0, 2.5)]
    # Totals from A to B: rare 8 to 4; often 1 to 1 and some 4 to 6; the 1 to 3 and <eos> 1 to 2.
    # Relative differences are relative to B and averaged over types, not tokens.
    assert [band.relative for band in bands] == pytest.approx([0.0, -100.0, 100 / 6, (200 / 3 + 50) / 2])
    # The previous tokens are <eos>, rare, often, rare, some, the, <unk>.
    before = compare_by_previous(pair, split, vocabulary)
    assert [band.difference for band in bands] == [0.0, -2.0, 1.0, 1.5]
    assert {band.interval for band in bands} == {None}, "seven units are too few to resample"
    symbols = compare_on_symbols(pair, split, vocabulary)
    assert {name: (loss.tokens, loss.nll_a, loss.nll_b) for name, loss in symbols.items()} == {
        "<unk>": (1, 3.0, 3.0),
        "<eos>": (1, 1.0, 2.0),
    }
    assert [(band.low, band.tokens, band.nll_a, band.nll_b) for band in before] == [
        (0, 1, 1.0, 2.0),
        (1, 2, 2.5, 3.5),
        (50, 2, 3.5, 3.0),
        (5_000, 2, 2.5, 2.0),
    ]


def test_type_without_loss_has_no_relative_difference() -> None:
    vocabulary = Vocabulary(("a", "b"), (9, 5))
    split = Split("test", np.array([0, 0, 1], dtype=np.int32), words=3, lines=1, bytes=6, unknown=0)
    (band,) = compare_by_target(make_pair([1.0, 3.0], [0.0, 2.0]), split, vocabulary)
    assert (band.types, band.relative) == (2, -50.0)
    split = Split("test", np.array([0, 0], dtype=np.int32), words=2, lines=1, bytes=4, unknown=0)
    (band,) = compare_by_target(make_pair([1.0], [0.0]), split, vocabulary)
    assert (band.types, band.relative) == (1, None)


def test_bands_of_two_systems_add_up_to_the_total_loss(
    opened: Callable[..., Dataset], model_for: Callable[[int], LanguageModel]
) -> None:
    dataset = opened()
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    a = score(model_for(len(vocabulary)), split, vocabulary).nll
    b = a[::-1].copy()
    pair = PairedLosses([a, b], [b, b], block_boundaries(len(a), 5))
    for bands in (compare_by_target(pair, split, vocabulary), compare_by_previous(pair, split, vocabulary)):
        assert sum(band.tokens for band in bands) == len(a)
        for side in ("nll_a", "nll_b"):
            total = sum(band.tokens * getattr(band, side) for band in bands)
            assert total == pytest.approx(float(a.sum(dtype=np.float64)))
