"""Scores of sentences: the model's own log-probabilities, word by word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from reefknot.errors import DataError
from reefknot.lab.evaluation.sentences import score_sentence, score_sentences
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]


@torch.no_grad()
def by_log_probs(model: LanguageModel, ids: list[int]) -> list[float]:
    model.eval()
    logp_NV = model.output.log_probs(model(torch.tensor([ids[:-1]])).output[0])
    return logp_NV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def test_words_and_the_end_of_the_line_are_scored(opened: Open, model_for: Build) -> None:
    vocabulary = opened().vocabulary
    model = model_for(len(vocabulary)).train()
    words = ["the", "zebra", "sat"]
    found = score_sentence(model, words, vocabulary)
    assert model.training
    assert vocabulary.eos is not None
    ids = [vocabulary.eos, *vocabulary.encode(words), vocabulary.eos]
    assert [word.word for word in found] == [*words, "<eos>"]
    assert [word.log_prob for word in found] == pytest.approx(by_log_probs(model, ids), abs=1e-5)
    assert [word.unknown for word in found] == [False, True, False, False]


def test_sentences_start_afresh(opened: Open, model_for: Build) -> None:
    vocabulary = opened().vocabulary
    model = model_for(len(vocabulary))
    first = score_sentence(model, ["the", "cat"], vocabulary)
    score_sentence(model, ["a", "dog"], vocabulary)
    assert score_sentence(model, ["the", "cat"], vocabulary) == first


def test_an_empty_sentence_is_the_end_of_a_line(opened: Open, model_for: Build) -> None:
    vocabulary = opened().vocabulary
    found = score_sentence(model_for(len(vocabulary)), [], vocabulary)
    assert [word.word for word in found] == ["<eos>"]


def test_without_eos_the_first_word_only_stands_before(opened: Open, model_for: Build) -> None:
    vocabulary = opened(end_of_line=False).vocabulary
    model = model_for(len(vocabulary))
    found = score_sentence(model, ["the", "cat", "sat"], vocabulary)
    assert [word.word for word in found] == ["cat", "sat"]
    expected = by_log_probs(model, vocabulary.encode(["the", "cat", "sat"]))
    assert [word.log_prob for word in found] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("words", [[], ["cat"]])
def test_too_short_without_eos(opened: Open, model_for: Build, words: list[str]) -> None:
    vocabulary = opened(end_of_line=False).vocabulary
    with pytest.raises(DataError, match="at least two words"):
        score_sentence(model_for(len(vocabulary)), words, vocabulary)


def test_an_unknown_word_is_refused_where_there_is_no_unk(model_for: Build) -> None:
    vocabulary = Vocabulary(("<eos>", "the", "cat"), (3, 2, 1))
    with pytest.raises(DataError, match="'zebra' is not in the vocabulary"):
        score_sentence(model_for(len(vocabulary)), ["the", "zebra"], vocabulary)


def test_pieces_are_shown_and_scored(opened: Open, model_for: Build) -> None:
    vocabulary = opened(bpe={"merges": 2}).vocabulary
    model = model_for(len(vocabulary))
    found = score_sentence(model, ["mad", "zebra"], vocabulary)
    assert [word.word for word in found] == ["m", "a", "d</w>", "zebra", "<eos>"]
    assert [word.unknown for word in found] == [False, False, False, True, False]
    assert vocabulary.eos is not None
    ids = [vocabulary.eos, *vocabulary.encode(["mad", "zebra"]), vocabulary.eos]
    assert [word.log_prob for word in found] == pytest.approx(by_log_probs(model, ids), abs=1e-5)


def test_a_word_outside_the_vocabulary_is_read_as_it_is_spelled(opened: Open, model_for: Build) -> None:
    vocabulary = opened(keep_spellings=True).vocabulary
    model = model_for(len(vocabulary) + 2)
    zebra, horse = (score_sentence(model, [word, "sat"], vocabulary) for word in ("zebra", "horse"))
    assert [word.unknown for word in zebra] == [word.unknown for word in horse] == [True, False, False]
    assert zebra[0].log_prob == horse[0].log_prob
    assert zebra[1].log_prob != horse[1].log_prob


@pytest.mark.parametrize("at_once", [1, 4, 10_000])
def test_sentences_together_score_as_alone(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("reefknot.lab.evaluation.sentences.ROWS_AT_ONCE", at_once)
    vocabulary = opened().vocabulary
    model = model_for(len(vocabulary)).double()
    sentences = [["the", "cat"], [], ["a", "zebra", "sat", "the"], ["the"], ["the", "cat"]]
    together = score_sentences(model, sentences, vocabulary)
    for found, words in zip(together, sentences, strict=True):
        alone = score_sentence(model, words, vocabulary)
        assert [(each.word, each.unknown) for each in found] == [(each.word, each.unknown) for each in alone]
        assert [each.log_prob for each in found] == pytest.approx([each.log_prob for each in alone], rel=1e-12)
    assert score_sentences(model, [], vocabulary) == []
