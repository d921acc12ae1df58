"""Predictions against all log-probabilities written out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.lab.evaluation import predictions as module
from reefknot.lab.evaluation.predictions import predict, tendency, watched_ids
from reefknot.lab.evaluation.windows import Sliding
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]


@torch.no_grad()
def probabilities(model: LanguageModel, ids: list[int]) -> np.ndarray:
    """p_NV after each of some ids."""
    model.eval()
    found: np.ndarray = model.output.log_probs(model(torch.tensor([ids])).output[0]).double().exp().numpy()
    return found


def test_the_most_probable_words_after_a_phrase(opened: Open, model_for: Build) -> None:
    vocabulary = opened().vocabulary
    model = model_for(len(vocabulary)).train()
    assert vocabulary.eos is not None
    p_V = probabilities(model, [vocabulary.eos, *vocabulary.encode(["the", "cat"])])[-1]
    found = predict(model.train(), ["the", "cat"], vocabulary, 4)
    order = np.argsort(-p_V)[:4]
    assert [word for word, _ in found.words] == [vocabulary.words[index] for index in order]
    assert [value for _, value in found.words] == pytest.approx(p_V[order].tolist(), rel=1e-5)
    assert list(found.watched) == ["<unk>", "a", "the"]  # no "an" in this text
    assert list(found.watched.values()) == pytest.approx([p_V[vocabulary.id_of(word)] for word in found.watched])
    assert model.training


def test_a_phrase_may_be_empty_and_the_list_is_never_longer_than_the_vocabulary(opened: Open, model_for: Build) -> None:
    for vocabulary in (opened().vocabulary, opened(end_of_line=False).vocabulary):
        found = predict(model_for(len(vocabulary)), [], vocabulary, 10_000)
        assert sum(value for _, value in found.words) == pytest.approx(1.0, abs=1e-5)
        assert {word for word, _ in found.words} == set(vocabulary.words)


def test_an_unknown_word_is_read_as_unknown(opened: Open, model_for: Build) -> None:
    vocabulary = opened().vocabulary
    model = model_for(len(vocabulary))
    assert predict(model, ["the", "zebra"], vocabulary) == predict(model, ["the", "<unk>"], vocabulary)


def test_only_tokens_are_watched(opened: Open) -> None:
    words = Vocabulary(("the", "an"), (9, 1))
    assert watched_ids(words) == {"an": 1, "the": 0}
    pieces = opened(bpe={"merges": 8}).vocabulary
    found = watched_ids(pieces, ["the", "a", "saw", "<eos>"])
    assert pieces.words[found["the"]] == "the</w>"
    assert "saw" not in found  # cut into pieces
    assert found["<eos>"] == pieces.eos


def expected_tendency(model: LanguageModel, ids: list[int], k: int) -> tuple[float, float, np.ndarray]:
    vectors = model.input.vectors().detach().double().numpy()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit.T - 3 * np.eye(len(unit))
    p_NV = probabilities(model, ids[:-1])
    target = [p_V[y] for p_V, y in zip(p_NV, ids[1:], strict=True)]
    near = [p_V[np.argsort(-cosines[y])[:k]].sum() for p_V, y in zip(p_NV, ids[1:], strict=True)]
    return float(np.mean(target)), float(np.mean(near)), p_NV.mean(axis=0)


@pytest.mark.parametrize("scores", [1, 100, 2**24])
def test_means_over_a_text(opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    dataset = opened()
    vocabulary, split = dataset.vocabulary, dataset.splits["test"]
    model = model_for(len(vocabulary))
    monkeypatch.setattr(module, "SCORES_AT_ONCE", scores)
    found = tendency(model, split, vocabulary, k=3)
    target, near, mean_V = expected_tendency(model, split.ids.tolist(), 3)
    assert (found.contexts, found.k) == (227, 3)
    assert found.target == pytest.approx(target, rel=1e-5)
    assert found.neighbors == pytest.approx(near, rel=1e-5)
    assert list(found.watched) == ["<unk>", "a", "the"]
    assert [found.watched[word] for word in found.watched] == pytest.approx(
        [mean_V[vocabulary.id_of(word)] for word in found.watched], rel=1e-5
    )


def test_all_neighbours_and_the_target_have_all_the_probability(opened: Open, model_for: Build) -> None:
    dataset = opened()
    size = len(dataset.vocabulary)
    model = model_for(size)
    found = tendency(model, dataset.splits["test"], dataset.vocabulary, k=size - 1)
    assert found.target + found.neighbors == pytest.approx(1.0, abs=1e-5)
    for k in (0, size):
        with pytest.raises(SettingsError, match=f"{k} of {size - 1} other words"):
            tendency(model, dataset.splits["test"], dataset.vocabulary, k=k)


def test_means_over_windows(opened: Open, transformer_for: Build) -> None:
    dataset = opened()
    vocabulary, split = dataset.vocabulary, dataset.splits["test"]
    model = transformer_for(len(vocabulary))
    ids = split.ids.tolist()
    targets = []
    for start in range(0, len(ids) - 1, 10):
        part = ids[max(0, start - 4) : start + 11]
        p_NV = probabilities(model, part[:-1])
        targets += [p_V[y] for p_V, y in zip(p_NV, part[1:], strict=True)][min(start, 4) :]
    found = tendency(model, split, vocabulary, k=3, windows=Sliding(4, 10))
    assert found.contexts == len(targets) == 227
    assert found.target == pytest.approx(np.mean(targets), rel=1e-6)
    with pytest.raises(SettingsError, match="Transformer carries no state"):
        tendency(model, split, vocabulary)
