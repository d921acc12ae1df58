"""Perplexity does not depend on how the text is cut, equals brute force, and matches its stated definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from reefknot.errors import DataError, NonFiniteError
from reefknot.lab.evaluation import perplexity as module
from reefknot.lab.evaluation.perplexity import build_stream, describe_text, score, word_losses
from reefknot.lab.runs.definition import format_perplexity, perplexity
from reefknot.lab.runs.scores import Cache
from reefknot.lab.text.dataset import Dataset, Split
from reefknot.lab.text.encoding import shorten_split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.nn.models.language_model import LanguageModel

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]


@torch.no_grad()
def brute_force(model: LanguageModel, ids: list[int], first: int | None) -> list[float]:
    """Return the losses of one token at a time, from all log-probabilities."""
    model.eval()
    state = None
    losses = []
    context = ids[:-1] if first is None else [first, *ids[:-1]]
    for before, after in zip(context, ids[1:] if first is None else ids, strict=True):
        encoded = model(torch.tensor([[before]]), state)
        state = encoded.state
        losses.append(-model.output.log_probs(encoded.output[0])[0, after].item())
    return losses


@pytest.mark.parametrize("end_of_line", [True, False])
def test_losses_equal_brute_force(opened: Open, model_for: Build, end_of_line: bool) -> None:
    dataset = opened(end_of_line=end_of_line)
    vocabulary, split = dataset.vocabulary, dataset.splits["test"]
    model = model_for(len(vocabulary))
    result = score(model, split, vocabulary)
    np.testing.assert_allclose(result.nll, brute_force(model, split.ids.tolist(), vocabulary.eos), atol=1e-5)
    assert len(result.nll) == split.tokens - (0 if end_of_line else 1)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("window", [1, 7, 32, 1000])
def test_perplexity_is_independent_of_window_length(opened: Open, model_for: Build, streams: int, window: int) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    split = dataset.splits["test"]
    reference = score(model, split, dataset.vocabulary, streams=streams)
    result = score(model, split, dataset.vocabulary, streams=streams, window=window)
    assert abs(result.mean - reference.mean) < 1e-6
    np.testing.assert_allclose(result.nll, reference.nll, atol=1e-5)
    assert result.definition == reference.definition


def test_perplexity_is_independent_of_the_memory_bound(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    reference = score(model, dataset.splits["test"], dataset.vocabulary)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 1)
    assert abs(score(model, dataset.splits["test"], dataset.vocabulary).mean - reference.mean) < 1e-6


def test_stream_scores_as_it_does_alone(opened: Open, model_for: Build) -> None:
    """The third of five streams starts from an empty state and the token before it."""
    dataset = opened()
    vocabulary, split = dataset.vocabulary, dataset.splits["test"]
    model = model_for(len(vocabulary))
    result = score(model, split, vocabulary, streams=5).nll
    lengths = [len(part) for part in np.array_split(np.arange(split.tokens), 5)]
    start = sum(lengths[:2])
    stop = start + lengths[2]
    ids = split.ids.tolist()
    np.testing.assert_allclose(result[start:stop], brute_force(model, ids[start - 1 : stop], None), atol=1e-5)


@pytest.mark.parametrize("end_of_line", [True, False])
@pytest.mark.parametrize("streams", [2, 7, 20])
def test_streams_score_every_token_once(opened: Open, model_for: Build, streams: int, end_of_line: bool) -> None:
    dataset = opened(end_of_line=end_of_line)
    model = model_for(len(dataset.vocabulary))
    one = score(model, dataset.splits["test"], dataset.vocabulary)
    many = score(model, dataset.splits["test"], dataset.vocabulary, streams=streams)
    assert many.nll.shape == one.nll.shape
    assert many.mean == pytest.approx(one.mean, rel=0.1)
    assert many.mean != one.mean
    # The first stream has the same context as before.
    length = len(one.nll) // streams
    np.testing.assert_allclose(many.nll[:length], one.nll[:length], atol=1e-5)


def test_number_of_streams_is_limited_by_the_tokens(opened: Open, model_for: Build) -> None:
    dataset = opened(test="the cat\n")
    result = score(model_for(len(dataset.vocabulary)), dataset.splits["test"], dataset.vocabulary, streams=1000)
    assert len(result.nll) == 3
    assert "3 contiguous streams" in result.definition


def test_perplexities_match_values_computed_by_hand(opened: Open, model_for: Build) -> None:
    dataset = opened()
    split = dataset.splits["test"]
    result = score(model_for(len(dataset.vocabulary)), split, dataset.vocabulary)
    total = float(result.nll.sum(dtype=np.float64))
    summary = result.summary()
    # 14 words, 5 line ends and 58 + 1 bytes (ü has two) per repetition of the text.
    assert (summary.tokens, summary.words, summary.bytes) == (12 * 19, 12 * 19, 12 * 59)
    assert summary.perplexity == pytest.approx(math.exp(total / (12 * 19)))
    assert summary.word_perplexity == pytest.approx(math.exp(total / (12 * 19)))
    # zebra and "zürich " are unknown, so their 5 + 8 bytes are charged with 8 bits each.
    assert summary.unpredicted_bytes == 12 * 13
    assert summary.bits_per_byte == pytest.approx((total / math.log(2) + 8 * 12 * 13) / (12 * 59))
    assert summary.unknown_share == 2 / 19
    assert summary.nll == pytest.approx(total / (12 * 19))


@pytest.mark.parametrize("bpe", [None, {"merges": 8}])
@pytest.mark.parametrize(
    ("text", "end_of_line", "unpredicted"),
    [
        ("the cat sat\n\nthe dog\n", True, 0),
        ("  the  cat\tsat \nthe dog\n", True, 4),  # two spaces at the start, one between words, one at the end
        ("the cat sat\nthe dog\n", False, 4),  # without <eos>, the first word is not scored
        ("the zebra \n", True, 6),
    ],
)
def test_bytes_that_no_token_predicts_are_counted(
    opened: Open, model_for: Build, text: str, end_of_line: bool, unpredicted: int, bpe: dict[str, int] | None
) -> None:
    dataset = opened(test=text, end_of_line=end_of_line, bpe=bpe)
    summary = score(model_for(len(dataset.vocabulary)), dataset.splits["test"], dataset.vocabulary).summary()
    assert summary.unpredicted_bytes == unpredicted
    assert ("charged with 8 bits" in summary.definition) == (unpredicted > 0)


def test_counts_without_line_ends(opened: Open, model_for: Build) -> None:
    dataset = opened(end_of_line=False)
    result = score(model_for(len(dataset.vocabulary)), dataset.splits["test"], dataset.vocabulary)
    assert result.summary().tokens == result.summary().words == 12 * 14 - 1


def test_definition_states_tokens_context_and_unknown_words(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    text = score(model, dataset.splits["test"], dataset.vocabulary).definition
    assert "tokens: 228 scored once each, of 228 in the test text" in text
    assert "one stream; the state is empty at its start" in text
    assert "every token is scored" in text
    assert text.endswith("computed in float32; independent of how the text is divided into windows")
    assert "unknown words: 24 here (10.5 % of the words and line ends), scored as the token <unk>" in text
    assert "over 228 words and line ends; bits per byte: over 708 bytes of UTF-8 text, of which 156 that" in text
    assert "(of unknown words and additional white space) are charged with 8 bits each" in text
    assert "20 contiguous streams; each starts with an empty state" in (
        score(model, dataset.splits["test"], dataset.vocabulary, streams=20).definition
    )


def test_definition_of_a_text_without_line_ends(opened: Open, model_for: Build) -> None:
    dataset = opened(end_of_line=False, test="the cat sat\n")
    text = score(model_for(len(dataset.vocabulary)), dataset.splits["test"], dataset.vocabulary).definition
    assert "tokens: 2 scored once each, of 3 in the test text" in text
    assert "is not scored" in text
    assert "unknown words: none in this text; end of line: line ends are not tokens" in text
    assert "over 2 words; bits" in text


def test_single_token_without_context_is_rejected(opened: Open, model_for: Build) -> None:
    dataset = opened(end_of_line=False, test="cat\n")
    with pytest.raises(DataError, match="test text has one token"):
        score(model_for(len(dataset.vocabulary)), dataset.splits["test"], dataset.vocabulary)


def test_scoring_restores_training_mode_and_is_deterministic(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary)).train()
    first, second = (score(model, dataset.splits["test"], dataset.vocabulary).mean for _ in range(2))
    assert model.training
    assert first == second


def test_bfloat16_is_close_and_stated_in_the_definition(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    exact = score(model, dataset.splits["test"], dataset.vocabulary)
    rounded = score(model, dataset.splits["test"], dataset.vocabulary, precision="bfloat16")
    assert rounded.mean == pytest.approx(exact.mean, rel=0.02)
    assert "computed in bfloat16" in rounded.definition
    assert "computed in float32" in exact.definition


def test_nan_model_is_rejected(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(NonFiniteError, match="test text"):
        score(model, dataset.splits["test"], dataset.vocabulary)


def test_perplexity_never_overflows() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(120.7)) == pytest.approx(120.7)
    assert math.isfinite(perplexity(1e6))


def test_word_losses_sum_their_sub_words() -> None:
    settings = VocabularySettings.model_validate({"bpe": {"merges": 3}})
    vocabulary = Vocabulary.from_counts({"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}, settings)
    ids = np.array(vocabulary.encode(["lowest", "<unk>", "<eos>", "low", "<eos>"]), dtype=np.int32)
    losses = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], dtype=np.float32)  # lo w est</w>  ...  lo w</w>
    split = Split("test", ids, words=3, lines=2, bytes=20, unknown=1)
    assert word_losses(losses, split, vocabulary).tolist() == [7.0, 8.0, 16.0, 96.0, 128.0]
    # A first token without context is not scored, so its word has the loss of its other sub-words.
    assert word_losses(losses[1:], split, vocabulary).tolist() == [6.0, 8.0, 16.0, 96.0, 128.0]


@pytest.mark.parametrize("end_of_line", [True, False])
@pytest.mark.parametrize("merges", [1, 8])
def test_word_perplexity_of_a_sub_word_model(opened: Open, model_for: Build, merges: int, end_of_line: bool) -> None:
    dataset = opened(end_of_line=end_of_line, bpe={"merges": merges})
    vocabulary, split = dataset.vocabulary, dataset.splits["test"]
    result = score(model_for(len(vocabulary)), split, vocabulary)
    words = word_losses(result.nll, split, vocabulary)
    summary = result.summary()
    # Without <eos> the first token is not scored: all of "the" after 8 merges, its first sub-word after one.
    expected_words = 12 * 19 if end_of_line else 12 * 14 - (merges == 8)
    assert len(words) == summary.words == expected_words
    assert summary.tokens == split.tokens - (not end_of_line) > summary.words
    total = float(result.nll.sum(dtype=np.float64))
    assert words.sum() == pytest.approx(total)
    assert summary.word_perplexity == pytest.approx(math.exp(total / len(words)))
    if end_of_line:
        assert summary.unpredicted_bytes == 12 * 13  # as with words, because the sub-words of a word add up to it
    assert summary.unpredicted_bytes is not None
    total_bits = total / math.log(2) + 8 * summary.unpredicted_bytes
    assert summary.bits_per_byte == pytest.approx(total_bits / split.bytes)
    assert f"in {len(result.nll):,} sub-words; the probability of a word is the product of" in result.definition
    assert f"over {len(words):,} words" in result.definition


def test_words_of_one_sub_word_score_like_whole_words(opened: Open, model_for: Build) -> None:
    plain = opened()
    pieces = opened(bpe={"merges": 1_000})
    model = model_for(len(plain.vocabulary))
    same = model_for(len(pieces.vocabulary))
    names = [token.removesuffix("</w>") for token in pieces.vocabulary.words]
    with torch.no_grad():
        # Copy the word model to the other ids; classes that are not words get no probability.
        for name, parameter in same.named_parameters():
            values = dict(model.named_parameters())[name]
            if parameter.shape != values.shape:
                parameter.fill_(-1e9 if parameter.dim() == 1 else 0.0)
                for index, word in enumerate(names):
                    if word in plain.vocabulary and pieces.vocabulary.ends_word(pieces.vocabulary.words[index]):
                        parameter[index] = values[plain.vocabulary.id_of(word)]
            else:
                parameter.copy_(values)
    expected, result = (
        score(scorer, text.splits["test"], text.vocabulary) for scorer, text in ((model, plain), (same, pieces))
    )
    np.testing.assert_allclose(result.nll, expected.nll, atol=1e-5)
    np.testing.assert_array_equal(word_losses(result.nll, pieces.splits["test"], pieces.vocabulary), result.nll)
    for field in ("perplexity", "word_perplexity", "tokens", "words"):
        assert getattr(result.summary(), field) == pytest.approx(getattr(expected.summary(), field), rel=1e-6)


def test_spelled_words_are_read_as_spelled_and_scored_as_unk(opened: Open, model_for: Build) -> None:
    dataset = opened(keep_spellings=True)
    vocabulary, split = dataset.vocabulary, dataset.splits["test"]
    assert vocabulary.spelled_words == ("zebra", "z\u00fcrich")
    model = model_for(len(vocabulary) + 2)  # the classes beyond the vocabulary are never targets
    result = score(model, split, vocabulary)
    assert split.unknown == 24
    assert vocabulary.eos is not None
    context = [vocabulary.eos, *split.inputs[:-1].tolist()]
    with torch.no_grad():
        log_probs_TV = model.eval().output.log_probs(model(torch.tensor([context])).output[0])
    np.testing.assert_allclose(result.nll, -log_probs_TV[range(split.tokens), split.ids.tolist()].numpy(), atol=1e-5)
    as_unknown = score(model, opened().splits["test"], vocabulary)
    assert abs(result.mean - as_unknown.mean) > 1e-3


@pytest.mark.parametrize(("rows", "longest"), [(1, 20), (5, 4)])
def test_window_length_accounts_for_rows_per_token(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch, rows: int, longest: int
) -> None:
    """A token of a mixture takes one row of scores per expert, so windows are shorter."""
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    model.output.rows_per_token = rows
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 20)
    widths: list[int] = []
    original = model.target_log_probs
    monkeypatch.setattr(model, "target_log_probs", lambda x, *others: widths.append(x.shape[1]) or original(x, *others))
    score(model, dataset.splits["test"], dataset.vocabulary)
    assert max(widths) == longest


@pytest.mark.parametrize("end_of_line", [True, False])
def test_one_stream_shifts_inputs_by_one_token(opened: Open, end_of_line: bool) -> None:
    dataset = opened(end_of_line=end_of_line)
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    inputs_1T, targets_1T = build_stream(split, vocabulary)
    ids = split.ids.tolist()
    assert targets_1T[0].tolist() == (ids if end_of_line else ids[1:])
    assert inputs_1T[0].tolist() == ([vocabulary.eos, *ids[:-1]] if end_of_line else ids[:-1])
    if not end_of_line:
        with pytest.raises(DataError, match="nothing to score"):
            build_stream(shorten_split(split, 1, vocabulary), vocabulary)


def test_definition_states_the_mode_and_warns_if_it_is_worse(opened: Open, model_for: Build) -> None:
    dataset = opened()
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    plain = score(model_for(len(vocabulary)), split, vocabulary)
    *lines, last = plain.definition.splitlines()
    for shift, warning in ((-0.1, ""), (0.1, ", which is better")):
        mode = Cache(kind="cache", weight=0.1, theta=1.0, window=500, fill="partial", plain=math.exp(plain.mean))
        result = replace(plain, nll=plain.nll + np.float32(shift), mode=mode)
        assert result.definition.splitlines()[:-1] == [*lines, last]
        assert result.definition.splitlines()[-1] == (
            "continuous cache: weight 0.1, theta 1, over the last 500 positions, used from the start; "
            f"without it: perplexity {math.exp(plain.mean):,.2f}{warning}"
        )
        assert result.mean == pytest.approx(plain.mean + shift)
    assert "independent" in last


def test_scored_text_identifies_unknown_words_and_vocabulary() -> None:
    def text(*ids: int) -> Split:
        return Split("test", np.array(ids, np.int32), words=len(ids), lines=1, bytes=9, unknown=ids.count(0))

    vocabulary = Vocabulary(("<unk>", "a", "b"), (3, 2, 1))
    first, again, other = (
        describe_text(split, split.ids, vocabulary) for split in (text(1, 0), text(2, 0), text(0, 1))
    )
    assert first.unknown == again.unknown == other.unknown == 1
    assert first.unknown_sha256 == again.unknown_sha256 != other.unknown_sha256
    spelled = describe_text(text(1, 0), text(1, 0).ids, replace(vocabulary, counts=(9, 9, 9), spelled_words=("c",)))
    assert spelled.vocabulary_sha256 == first.vocabulary_sha256, "the tokens are the same"
    renamed = describe_text(text(1, 0), text(1, 0).ids, replace(vocabulary, words=("<unk>", "b", "a")))
    assert renamed.vocabulary_sha256 != first.vocabulary_sha256


def test_shown_perplexities_are_short() -> None:
    assert [format_perplexity(value) for value in (58.7, 12_345.678, perplexity(1e9))] == [
        "58.70",
        "12,345.68",
        ">1e304",
    ]
