"""Predictions against all log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.lab.evaluation import predictions as module
from reefknot.lab.evaluation.predictions import measure_tendency, predict, watched_ids
from reefknot.lab.evaluation.windows import Sliding
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]


@torch.no_grad()
def probabilities(model: LanguageModel, ids: list[int]) -> np.ndarray:
    """Return probs_NV after each of the ids."""
    model.eval()
    probs_NV: np.ndarray = model.output.log_probs(model(torch.tensor([ids])).output[0]).double().exp().numpy()
    return probs_NV


def test_predict_returns_the_most_probable_words(opened: Open, model_for: Build) -> None:
    vocabulary = opened().vocabulary
    model = model_for(len(vocabulary)).train()
    assert vocabulary.eos is not None
    probs_V = probabilities(model, [vocabulary.eos, *vocabulary.encode(["the", "cat"])])[-1]
    prediction = predict(model.train(), ["the", "cat"], vocabulary, 4)
    order = np.argsort(-probs_V)[:4]
    assert [word for word, _ in prediction.words] == [vocabulary.words[index] for index in order]
    assert [value for _, value in prediction.words] == pytest.approx(probs_V[order].tolist(), rel=1e-5)
    assert list(prediction.watched) == ["<unk>", "a", "the"]  # no "an" in this text
    assert list(prediction.watched.values()) == pytest.approx(
        [probs_V[vocabulary.id_of(word)] for word in prediction.watched]
    )
    assert model.training


def test_empty_phrase_predicts_at_most_the_vocabulary(opened: Open, model_for: Build) -> None:
    for vocabulary in (opened().vocabulary, opened(end_of_line=False).vocabulary):
        prediction = predict(model_for(len(vocabulary)), [], vocabulary, 10_000)
        assert sum(value for _, value in prediction.words) == pytest.approx(1.0, abs=1e-5)
        assert {word for word, _ in prediction.words} == set(vocabulary.words)


def test_unknown_word_is_read_as_unk(opened: Open, model_for: Build) -> None:
    vocabulary = opened().vocabulary
    model = model_for(len(vocabulary))
    assert predict(model, ["the", "zebra"], vocabulary) == predict(model, ["the", "<unk>"], vocabulary)


def test_watched_words_must_be_single_tokens(opened: Open) -> None:
    words = Vocabulary(("the", "an"), (9, 1))
    assert watched_ids(words) == {"an": 1, "the": 0}
    sub_words = opened(bpe={"merges": 8}).vocabulary
    ids = watched_ids(sub_words, ["the", "a", "saw", "<eos>"])
    assert sub_words.words[ids["the"]] == "the</w>"
    assert "saw" not in ids  # several sub-words
    assert ids["<eos>"] == sub_words.eos


def expected_tendency(model: LanguageModel, ids: list[int], k: int) -> tuple[float, float, np.ndarray]:
    vectors = model.input.vectors().detach().double().numpy()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit.T - 3 * np.eye(len(unit))
    probs_NV = probabilities(model, ids[:-1])
    target = [probs_V[y] for probs_V, y in zip(probs_NV, ids[1:], strict=True)]
    near = [probs_V[np.argsort(-cosines[y])[:k]].sum() for probs_V, y in zip(probs_NV, ids[1:], strict=True)]
    return float(np.mean(target)), float(np.mean(near)), probs_NV.mean(axis=0)


@pytest.mark.parametrize("scores", [1, 100, 2**24])
def test_tendency_equals_means_of_all_probabilities(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch, scores: int
) -> None:
    dataset = opened()
    vocabulary, split = dataset.vocabulary, dataset.splits["test"]
    model = model_for(len(vocabulary))
    monkeypatch.setattr(module, "SCORES_AT_ONCE", scores)
    result = measure_tendency(model, split, vocabulary, k=3)
    target, near, mean_V = expected_tendency(model, split.ids.tolist(), 3)
    assert (result.contexts, result.k) == (227, 3)
    assert result.target == pytest.approx(target, rel=1e-5)
    assert result.neighbors == pytest.approx(near, rel=1e-5)
    assert list(result.watched) == ["<unk>", "a", "the"]
    assert [result.watched[word] for word in result.watched] == pytest.approx(
        [mean_V[vocabulary.id_of(word)] for word in result.watched], rel=1e-5
    )


def test_target_and_all_neighbours_have_probability_one(opened: Open, model_for: Build) -> None:
    dataset = opened()
    size = len(dataset.vocabulary)
    model = model_for(size)
    result = measure_tendency(model, dataset.splits["test"], dataset.vocabulary, k=size - 1)
    assert result.target + result.neighbors == pytest.approx(1.0, abs=1e-5)
    for k in (0, size):
        with pytest.raises(SettingsError, match=f"{k} of {size - 1} other words"):
            measure_tendency(model, dataset.splits["test"], dataset.vocabulary, k=k)


def test_tendency_over_windows_equals_brute_force(opened: Open, transformer_for: Build) -> None:
    dataset = opened()
    vocabulary, split = dataset.vocabulary, dataset.splits["test"]
    model = transformer_for(len(vocabulary))
    ids = split.ids.tolist()
    targets = []
    for start in range(0, len(ids) - 1, 10):
        part = ids[max(0, start - 4) : start + 11]
        probs_NV = probabilities(model, part[:-1])
        targets += [probs_V[y] for probs_V, y in zip(probs_NV, part[1:], strict=True)][min(start, 4) :]
    result = measure_tendency(model, split, vocabulary, k=3, windows=Sliding(4, 10))
    assert result.contexts == len(targets) == 227
    assert result.target == pytest.approx(np.mean(targets), rel=1e-6)
    with pytest.raises(SettingsError, match="Transformer carries no state"):
        measure_tendency(model, split, vocabulary)
