"""Pairs scored in batches score as they do alone: every target token once, in text order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from reefknot.errors import DataError, NonFiniteError
from reefknot.lab.evaluation import references
from reefknot.lab.evaluation.references import score_references
from reefknot.lab.text.corpus import CorpusSettings, PairsSettings
from reefknot.lab.text.pair_dataset import Lines, PairDataset, open_pairs
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.attention_gru import AttentionGRU
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.translator import Translator
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

DIM = 8
LINES = [
    ("a cat sat on the mat", "eine katze saß auf der matte"),
    ("a dog ran", "ein hund lief"),
    ("the dog saw a cat and ran", "der hund sah eine katze und lief"),
    ("the mat", "die matte"),
    ("ran", "er lief und lief und lief bis auf die matte"),
]
HELD_OUT = [*LINES[2:], ("a cat saw a zebra in zürich", "eine katze sah ein zebra in zürich"), *LINES[:2]]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., PairDataset]:
    """Return a function that opens small pairs with unknown words; keywords are vocabulary settings."""

    def open_text(**settings: object) -> PairDataset:
        for name, lines in (("train", LINES * 4), ("valid", HELD_OUT), ("test", HELD_OUT)):
            for language, side in zip(("en", "de"), zip(*lines, strict=True), strict=True):
                (tmp_path / f"{name}.{language}").write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
        corpus = CorpusSettings(name=str(tmp_path), pairs=PairsSettings(source="en", target="de"))
        return open_pairs(corpus, VocabularySettings.model_validate(settings), cache=tmp_path / "cache")

    return open_text


def translator(dataset: PairDataset, encoder: str = "encoder_decoder", output: str = "softmax") -> Translator:
    torch.manual_seed(0)
    source, target = (WordTable(len(words), DIM) for words in dataset.vocabulary_pair.vocabularies)
    classifier = Plain(target)
    body = (
        AttentionGRU(DIM, DIM, units=6, dropout=0.5)
        if encoder == "attention_gru"
        else EncoderDecoder(DIM, DIM, layers=2, heads=2, ffn_dim=12, dropout=0.5)
    )
    end = MixtureOfSoftmaxes(classifier, DIM, experts=3) if output == "mixture" else Softmax(classifier)
    model = Translator(Lookup(source), Lookup(target), body, end)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.double()


@pytest.mark.parametrize("encoder", ["attention_gru", "encoder_decoder"])
@pytest.mark.parametrize("output", ["softmax", "mixture"])
def test_batched_pairs_score_as_they_do_alone(
    opened: Callable[..., PairDataset], encoder: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(sides="separate")
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    model = translator(dataset, encoder, output)
    scores = score_references(model, split, vocabulary)
    assert model.training
    model.eval()
    alone = []
    for source, target in zip(split.source, split.target, strict=True):
        pairs_1U = torch.tensor([[*source, vocabulary.eos, *target[:-1]]])
        with torch.no_grad():
            alone.append(-model.target_log_probs(pairs_1U, torch.tensor(target[None], dtype=torch.long))[0][0].numpy())
    np.testing.assert_allclose(scores.nll, np.concatenate(alone), rtol=1e-6)
    for capacity in (1, 20, 60):
        monkeypatch.setattr(references, "ROWS_AT_ONCE", capacity)
        np.testing.assert_allclose(score_references(model, split, vocabulary).nll, scores.nll, rtol=1e-6)


def test_batches_fill_their_capacity_and_group_by_length(opened: Callable[..., PairDataset]) -> None:
    split = opened().splits["test"]
    random = np.random.default_rng(0)
    sides = (Lines.from_lists([0] * n for n in random.integers(1, 50, 400)) for _ in range(2))
    many = replace(split, **dict(zip(("source", "target"), sides, strict=True)))
    batches = list(references._batches(many, rows_per_token=4))
    assert sorted(np.concatenate(batches).tolist()) == list(range(400))
    longer = np.maximum(many.source.lengths, many.target.lengths)
    capacity = references.ROWS_AT_ONCE // 4
    assert all(len(batch) * longer[batch].max() <= capacity for batch in batches)
    assert len(batches) < 1.3 * longer.sum() / capacity + 1
    longest = [longer[batch].max() for batch in batches]
    assert longest == sorted(longest, reverse=True)


def test_counts_and_definition_of_scored_pairs(opened: Callable[..., PairDataset]) -> None:
    dataset = opened(sides="separate")
    split = dataset.splits["test"]
    scores = score_references(translator(dataset).float(), split, dataset.vocabulary)
    targets = [target for _, target in HELD_OUT]
    words = sum(len(target.split()) + 1 for target in targets)
    assert scores.words == words == len(scores.nll) == split.tokens
    assert scores.bytes == sum(len(target.encode()) + 1 for target in targets)
    summary = scores.summary()
    assert summary.perplexity == summary.word_perplexity == pytest.approx(float(np.exp(scores.nll.mean())))
    assert f"tokens: {words} scored once each, of {words} in the test text" in scores.definition
    assert "6 pairs, each computed independently, target tokens given the source" in scores.definition
    assert "every line ends with the token <eos>, which is scored" in scores.definition
    assert "unknown words: 3 here (7.3 % of the words and line ends), scored as the token <unk>" in scores.definition
    assert "computed in float32; independent of which pairs are computed together" in scores.definition


def test_word_perplexity_of_sub_words(opened: Callable[..., PairDataset]) -> None:
    dataset = opened(bpe={"merges": 10})
    scores = score_references(translator(dataset), dataset.splits["valid"], dataset.vocabulary, precision="bfloat16")
    assert scores.words == sum(len(target.split()) + 1 for _, target in HELD_OUT)
    assert len(scores.nll) > scores.words
    assert f"in {len(scores.nll):,} sub-words" in scores.definition
    assert "computed in bfloat16" in scores.definition
    assert scores.summary().word_perplexity > scores.summary().perplexity


def test_unscorable_pairs_are_rejected(opened: Callable[..., PairDataset]) -> None:
    dataset = opened()
    split = dataset.splits["test"]
    model = translator(dataset)
    with pytest.raises(DataError, match="the test text has no pairs"):
        score_references(
            model, replace(split, source=Lines.from_lists([]), target=Lines.from_lists([])), dataset.vocabulary
        )
    with pytest.raises(DataError, match="the target side has no <eos>"):
        score_references(model, split, Vocabulary(("a", "b"), (2, 1)))
    with torch.no_grad():
        next(model.encoder.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="test text is NaN or infinite"):
        score_references(model, split, dataset.vocabulary)
