"""Random choices of skip-gram: probabilities equal word2vec, and single draws equal vectorised draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reefknot.errors import ArgumentError, DataError
from reefknot.kernels.skip_gram_draws import (
    MAX_EFFECTIVE_RATE,
    TWO_TO_32,
    PairSampler,
    build_pairs,
    find_kept_words,
    mask_learned_words,
    random_bits,
    random_bits_tensor,
)
from reefknot.kernels.skip_gram_reference import iterate_pairs

from .skip_gram_texts import EOS, UNKNOWN, draws_of, text

COUNTS = [50, 7, 1000, 300, 120, 40, 40, 3]


def draws(**settings: float) -> PairSampler:
    arguments = {"window": 5, "negatives": 5, "power": 0.75, "sample": 1e-2} | settings
    return PairSampler.from_counts(COUNTS, eos=EOS, unknown=UNKNOWN, **arguments)  # type: ignore[arg-type]


def test_splitmix64_gives_the_published_numbers() -> None:
    # The first numbers of the generator seeded with 1234567, as its authors print them.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [random_bits(1234567, number) for number in (1, 2, 3)] == published


def test_vectorised_draws_equal_single_draws() -> None:
    numbers = torch.tensor([0, 1, 2, 10**6, 10**12])
    for key in (0, 5, 2**63 + 11, 2**64 - 1):
        vectorised = [int(value) % 2**64 for value in random_bits_tensor(key, numbers)]
        assert vectorised == [random_bits(key, int(number)) for number in numbers]


def test_subsampling_probabilities_equal_word2vec() -> None:
    words = np.array(COUNTS[2:], dtype=np.float64)
    share = words / words.sum() / 1e-2
    expected = np.minimum(1.0, (np.sqrt(share) + 1.0) / share)
    np.testing.assert_allclose(draws().keep.numpy()[2:] / TWO_TO_32, expected, atol=1e-9)
    assert draws().keep[:2].tolist() == [0, 0]
    assert draws(sample=0.0).keep[2:].tolist() == [TWO_TO_32] * 6


def test_subsampling_probabilities_equal_gensim() -> None:
    gensim = pytest.importorskip("gensim.models")
    model = gensim.Word2Vec(sample=1e-2, min_count=1)
    model.build_vocab_from_freq({str(word): count for word, count in enumerate(COUNTS) if word > UNKNOWN})
    gensim_probabilities = [model.wv.get_vecattr(str(word), "sample_int") / 2**32 for word in range(2, len(COUNTS))]
    np.testing.assert_allclose(draws().keep.numpy()[2:] / TWO_TO_32, gensim_probabilities, atol=1e-6)


@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
def test_negatives_follow_powers_of_the_counts(power: float) -> None:
    choices = draws(power=power)
    # The exact probabilities that follow from the alias table.
    shares = np.zeros(len(COUNTS))
    accepted = choices.accept.numpy() / TWO_TO_32
    np.add.at(shares, np.arange(len(COUNTS)), accepted)
    np.add.at(shares, choices.alias.numpy(), 1.0 - accepted)
    expected = np.array([0.0, 0.0, *(count**power for count in COUNTS[2:])])
    np.testing.assert_allclose(shares / len(COUNTS), expected / expected.sum(), atol=1e-8)


def test_batch_limit_depends_on_the_most_frequent_word() -> None:
    choices = draws()
    kept = np.array(COUNTS) * choices.keep.numpy() / TWO_TO_32
    noise = np.array([0.0, 0.0, *(count**0.75 for count in COUNTS[2:])])
    busiest = float(np.max(kept / kept.sum() + 5 * noise / noise.sum()))
    assert choices.max_row_share == pytest.approx(busiest)
    assert choices.max_parallel_pairs(0.001) == int(MAX_EFFECTIVE_RATE / (0.001 * busiest))
    assert choices.max_parallel_pairs(1e6) == 1


def test_window_radii_are_uniform() -> None:
    radii = [draws().sample_radius(99, position) for position in range(5000)]
    assert set(radii) == {1, 2, 3, 4, 5}
    assert max(abs(radii.count(radius) - 1000) for radius in set(radii)) < 120


def test_vectorised_pairs_equal_the_loop() -> None:
    ids = text(300)
    choices = draws_of(ids)
    key = choices.key(3)
    for start, stop in ((0, 300), (0, 0), (17, 18), (100, 180)):
        pairs = build_pairs(choices, key, find_kept_words(choices, key, ids, start, stop))
        expected = list(iterate_pairs(ids, start, stop, choices, key))
        assert list(zip(*(part.tolist() for part in pairs), strict=True)) == expected


def test_windows_stop_at_line_ends_and_skip_unknown_words() -> None:
    ids = np.array([2, 3, EOS, 4, UNKNOWN, 5, EOS, EOS, 6], np.int32)
    choices = draws(sample=0.0, window=4)
    pairs = [(centre, context) for centre, context, *_ in iterate_pairs(ids, 0, 9, choices, choices.key(1))]
    assert pairs == [(2, 3), (3, 2), (4, 5), (5, 4)]


def test_epochs_and_seeds_have_different_keys() -> None:
    keys = {draws(seed=seed).key(epoch) for seed in range(3) for epoch in range(3)}
    assert len(keys) == 9


def test_only_learned_words_are_drawn() -> None:
    counts = [9, 4, 0, 3, 2]
    assert mask_learned_words(counts, eos=0, unknown=1).tolist() == [False, False, False, True, True]
    assert mask_learned_words(counts, eos=None, unknown=None).tolist() == [True, True, False, True, True]
    choices = PairSampler.from_counts(counts, window=1, negatives=1, power=0.75, sample=0.0, eos=0, unknown=1)
    assert (choices.keep > 0).tolist() == [False, False, False, True, True]
    negatives = {choices.sample_negative(choices.key(1), position, 0) for position in range(200)}
    assert negatives == {3, 4}


def test_too_few_words_and_empty_windows_are_rejected() -> None:
    with pytest.raises(DataError, match=r"has 1 besides <unk> and <eos>; lower vocabulary\.min_count"):
        PairSampler.from_counts([5, 4, 3], window=1, negatives=1, power=0.75, sample=0.0, eos=0, unknown=1)
    with pytest.raises(DataError, match="at least two words"):
        PairSampler.from_counts([10, 0, 0], window=5, negatives=5, power=0.75, sample=0.0)
    with pytest.raises(ArgumentError, match="window = 0"):
        draws(window=0)
