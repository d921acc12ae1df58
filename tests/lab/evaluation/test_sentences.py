"""Scores of sentences are the log-probabilities of the model, word by word."""

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
    log_probs_NV = model.output.log_probs(model(torch.tensor([ids[:-1]])).output[0])
    return log_probs_NV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def test_words_and_eos_are_scored(opened: Open, model_for: Build) -> None:
    vocabulary = opened().vocabulary
    model = model_for(len(vocabulary)).train()
    words = ["the", "zebra", "sat"]
    scores = score_sentence(model, words, vocabulary)
    assert model.training
    assert vocabulary.eos is not None
    ids = [vocabulary.eos, *vocabulary.encode(words), vocabulary.eos]
    assert [word.word for word in scores] == [*words, "<eos>"]
    assert [word.log_prob for word in scores] == pytest.approx(by_log_probs(model, ids), abs=1e-5)
    assert [word.unknown for word in scores] == [False, True, False, False]


def test_sentence_scores_do_not_depend_on_earlier_sentences(opened: Open, model_for: Build) -> None:
    vocabulary = opened().vocabulary
    model = model_for(len(vocabulary))
    first = score_sentence(model, ["the", "cat"], vocabulary)
    score_sentence(model, ["a", "dog"], vocabulary)
    assert score_sentence(model, ["the", "cat"], vocabulary) == first


def test_empty_sentence_scores_eos(opened: Open, model_for: Build) -> None:
    vocabulary = opened().vocabulary
    scores = score_sentence(model_for(len(vocabulary)), [], vocabulary)
    assert [word.word for word in scores] == ["<eos>"]


def test_without_eos_the_first_word_is_only_context(opened: Open, model_for: Build) -> None:
    vocabulary = opened(end_of_line=False).vocabulary
    model = model_for(len(vocabulary))
    scores = score_sentence(model, ["the", "cat", "sat"], vocabulary)
    assert [word.word for word in scores] == ["cat", "sat"]
    expected = by_log_probs(model, vocabulary.encode(["the", "cat", "sat"]))
    assert [word.log_prob for word in scores] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("words", [[], ["cat"]])
def test_without_eos_two_words_are_needed(opened: Open, model_for: Build, words: list[str]) -> None:
    vocabulary = opened(end_of_line=False).vocabulary
    with pytest.raises(DataError, match="at least two words"):
        score_sentence(model_for(len(vocabulary)), words, vocabulary)


def test_unknown_word_is_rejected_without_unk(model_for: Build) -> None:
    vocabulary = Vocabulary(("<eos>", "the", "cat"), (3, 2, 1))
    with pytest.raises(DataError, match="'zebra' is not in the vocabulary"):
        score_sentence(model_for(len(vocabulary)), ["the", "zebra"], vocabulary)


def test_sub_words_are_shown_and_scored(opened: Open, model_for: Build) -> None:
    vocabulary = opened(bpe={"merges": 2}).vocabulary
    model = model_for(len(vocabulary))
    scores = score_sentence(model, ["mad", "zebra"], vocabulary)
    assert [word.word for word in scores] == ["m", "a", "d</w>", "zebra", "<eos>"]
    assert [word.unknown for word in scores] == [False, False, False, True, False]
    assert vocabulary.eos is not None
    ids = [vocabulary.eos, *vocabulary.encode(["mad", "zebra"]), vocabulary.eos]
    assert [word.log_prob for word in scores] == pytest.approx(by_log_probs(model, ids), abs=1e-5)


def test_spelled_word_is_read_as_it_is_spelled(opened: Open, model_for: Build) -> None:
    vocabulary = opened(keep_spellings=True).vocabulary
    model = model_for(len(vocabulary) + 2)
    zebra, horse = (score_sentence(model, [word, "sat"], vocabulary) for word in ("zebra", "horse"))
    assert [word.unknown for word in zebra] == [word.unknown for word in horse] == [True, False, False]
    assert zebra[0].log_prob == horse[0].log_prob
    assert zebra[1].log_prob != horse[1].log_prob


@pytest.mark.parametrize("at_once", [1, 4, 10_000])
def test_batched_sentences_score_as_they_do_alone(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("reefknot.lab.evaluation.sentences.ROWS_AT_ONCE", at_once)
    vocabulary = opened().vocabulary
    model = model_for(len(vocabulary)).double()
    sentences = [["the", "cat"], [], ["a", "zebra", "sat", "the"], ["the"], ["the", "cat"]]
    together = score_sentences(model, sentences, vocabulary)
    for scores, words in zip(together, sentences, strict=True):
        alone = score_sentence(model, words, vocabulary)
        assert [(word.word, word.unknown) for word in scores] == [(word.word, word.unknown) for word in alone]
        assert [word.log_prob for word in scores] == pytest.approx([word.log_prob for word in alone], rel=1e-12)
    assert score_sentences(model, [], vocabulary) == []
