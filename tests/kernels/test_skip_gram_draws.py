"""What skip-gram draws: the shares that word2vec has, the same numbers one at a time and all at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reefknot.errors import ArgumentError, DataError
from reefknot.kernels.skip_gram_draws import CROWD, HALF, Draws, draw, draw_all, kept_words, learned, pairs_of
from reefknot.kernels.skip_gram_reference import pairs as pairs_one_by_one

from .skip_gram_texts import EOS, UNKNOWN, draws_of, text

COUNTS = [50, 7, 1000, 300, 120, 40, 40, 3]


def draws(**settings: float) -> Draws:
    given = {"window": 5, "negatives": 5, "power": 0.75, "sample": 1e-2} | settings
    return Draws.of(COUNTS, eos=EOS, unknown=UNKNOWN, **given)  # type: ignore[arg-type]


def test_splitmix64_is_the_published_one() -> None:
    # The first numbers of the generator seeded with 1234567, as its authors print them.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [draw(1234567, number) for number in (1, 2, 3)] == published


def test_one_at_a_time_and_all_at_once() -> None:
    numbers = torch.tensor([0, 1, 2, 10**6, 10**12])
    for key in (0, 5, 2**63 + 11, 2**64 - 1):
        found = [int(each) % 2**64 for each in draw_all(key, numbers)]
        assert found == [draw(key, int(number)) for number in numbers]


def test_words_are_kept_as_word2vec_keeps_them() -> None:
    words = np.array(COUNTS[2:], dtype=np.float64)
    share = words / words.sum() / 1e-2
    expected = np.minimum(1.0, (np.sqrt(share) + 1.0) / share)
    np.testing.assert_allclose(draws().keep.numpy()[2:] / HALF, expected, atol=1e-9)
    assert draws().keep[:2].tolist() == [0, 0]
    assert draws(sample=0.0).keep[2:].tolist() == [HALF] * 6


def test_gensim_keeps_as_many() -> None:
    gensim = pytest.importorskip("gensim.models")
    model = gensim.Word2Vec(sample=1e-2, min_count=1)
    model.build_vocab_from_freq({str(word): count for word, count in enumerate(COUNTS) if word > UNKNOWN})
    theirs = [model.wv.get_vecattr(str(word), "sample_int") / 2**32 for word in range(2, len(COUNTS))]
    np.testing.assert_allclose(draws().keep.numpy()[2:] / HALF, theirs, atol=1e-6)


@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
def test_negatives_follow_the_counts(power: float) -> None:
    found = draws(power=power)
    # What the columns of the alias table come to, exactly.
    shares = np.zeros(len(COUNTS))
    own = found.accept.numpy() / HALF
    np.add.at(shares, np.arange(len(COUNTS)), own)
    np.add.at(shares, found.alias.numpy(), 1.0 - own)
    expected = np.array([0.0, 0.0, *(count**power for count in COUNTS[2:])])
    np.testing.assert_allclose(shares / len(COUNTS), expected / expected.sum(), atol=1e-8)


def test_how_many_pairs_may_be_trained_at_the_same_weights() -> None:
    found = draws()
    kept = np.array(COUNTS) * found.keep.numpy() / HALF
    noise = np.array([0.0, 0.0, *(count**0.75 for count in COUNTS[2:])])
    busiest = float(np.max(kept / kept.sum() + 5 * noise / noise.sum()))
    assert found.busiest == pytest.approx(busiest)
    assert found.at_once(0.001) == int(CROWD / (0.001 * busiest))
    assert found.at_once(1e6) == 1


def test_radii_are_uniform() -> None:
    found = [draws().radius(99, place) for place in range(5000)]
    assert set(found) == {1, 2, 3, 4, 5}
    assert max(abs(found.count(each) - 1000) for each in set(found)) < 120


def test_pairs_laid_out_are_those_of_the_loop() -> None:
    ids = text(300)
    drawn = draws_of(ids)
    key = drawn.key(3)
    for start, stop in ((0, 300), (0, 0), (17, 18), (100, 180)):
        pairs = pairs_of(drawn, key, kept_words(drawn, key, ids, start, stop))
        listed = list(pairs_one_by_one(ids, start, stop, drawn, key))
        assert list(zip(*(part.tolist() for part in pairs), strict=True)) == listed


def test_no_window_reaches_over_a_line_end_or_holds_an_unknown_word() -> None:
    ids = np.array([2, 3, EOS, 4, UNKNOWN, 5, EOS, EOS, 6], np.int32)
    drawn = draws(sample=0.0, window=4)
    found = [(centre, context) for centre, context, *_ in pairs_one_by_one(ids, 0, 9, drawn, drawn.key(1))]
    assert found == [(2, 3), (3, 2), (4, 5), (5, 4)]


def test_epochs_and_seeds_draw_other_numbers() -> None:
    keys = {draws(seed=seed).key(epoch) for seed in range(3) for epoch in range(3)}
    assert len(keys) == 9


def test_what_is_learned_is_what_is_drawn() -> None:
    counts = [9, 4, 0, 3, 2]
    assert learned(counts, eos=0, unknown=1).tolist() == [False, False, False, True, True]
    assert learned(counts, eos=None, unknown=None).tolist() == [True, True, False, True, True]
    found = Draws.of(counts, window=1, negatives=1, power=0.75, sample=0.0, eos=0, unknown=1)
    assert (found.keep > 0).tolist() == [False, False, False, True, True]
    drawn = {found.negative(found.key(1), place, 0) for place in range(200)}
    assert drawn == {3, 4}


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(DataError, match=r"has 1 besides <unk> and <eos>; lower vocabulary\.min_count"):
        Draws.of([5, 4, 3], window=1, negatives=1, power=0.75, sample=0.0, eos=0, unknown=1)
    with pytest.raises(DataError, match="at least two words"):
        Draws.of([10, 0, 0], window=5, negatives=5, power=0.75, sample=0.0)
    with pytest.raises(ArgumentError, match="window = 0"):
        draws(window=0)
