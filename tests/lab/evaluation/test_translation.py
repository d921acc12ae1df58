"""Translation of lines: order, batches, empty and unusual lines, and scores equal to the sacrebleu command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reefknot.errors import ArgumentError, DataError
from reefknot.lab.evaluation.beam import Hypothesis, SearchSettings
from reefknot.lab.evaluation.bleu import BleuSettings
from reefknot.lab.evaluation.decoding import Decoder
from reefknot.lab.evaluation.references import score_references
from reefknot.lab.evaluation.translation import (
    LineTranslator,
    Translation,
    batches_by_length,
    beam_decoder,
    evaluate_translations,
    rerank,
    shorten_dataset,
    translate,
    translate_examples,
)
from reefknot.lab.text.corpus import CorpusSettings, PairsSettings
from reefknot.lab.text.pair_dataset import PairDataset, open_pairs
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.attention_gru import AttentionGRU
from reefknot.nn.encoders.contract import SourceEncoder
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.translator import Translator
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable
from reefknot.storage.lines import read_text

from .test_bleu import run_sacrebleu

PAIRS = [
    ("the cat sat on the mat", "die katze saß auf der matte"),
    ("a dog ran", "ein hund lief"),
    ("the dog saw a cat and ran to the house", "der hund sah eine katze und lief zum haus"),
    ("cats", "katzen"),
    ("日本語の文は空白なしで書く", "ein satz ohne leerzeichen"),
]
SEARCH = SearchSettings(beam=3, beyond=4)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., PairDataset]:
    """Return a function that opens pairs; held-out ones include an empty line and unseen words."""

    def open_text(**settings: object) -> PairDataset:
        held_out = [*PAIRS[:3], ("", ""), ("the zürich cat ran ran ran ran ran ran ran ran", "die zürcher katze")]
        for name, pairs in (("train", PAIRS * 5), ("valid", held_out), ("test", held_out[::-1])):
            for side, language in enumerate(("en", "de")):
                text = "".join(f"{pair[side]}\n" for pair in pairs)
                (tmp_path / f"{name}.{language}").write_text(text, encoding="utf-8")
        corpus = CorpusSettings(name=str(tmp_path), pairs=PairsSettings(source="en", target="de"))
        return open_pairs(corpus, VocabularySettings.model_validate(settings), cache=tmp_path / "cache")

    return open_text


ENCODERS: dict[str, Callable[[], SourceEncoder]] = {
    "attention_gru": lambda: AttentionGRU(8, 8, units=12, dropout=0.5),
    "encoder_decoder": lambda: EncoderDecoder(8, 8, 2, 2, 16, dropout=0.5),
}


def model_for(dataset: PairDataset, encoder: str = "encoder_decoder") -> Translator:
    """Return a float64 model with dropout, whose predictions are far from uniform."""
    torch.manual_seed(0)
    source, target = (WordTable(len(words), 8) for words in dataset.vocabulary_pair.vocabularies)
    model = Translator(Lookup(source), Lookup(target), ENCODERS[encoder](), Softmax(Plain(target)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.6)
    return model.double()


@pytest.fixture(params=ENCODERS)
def encoder(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_translations_are_in_the_order_of_the_lines(opened: Callable[..., PairDataset], encoder: str) -> None:
    dataset = opened()
    model = model_for(dataset, encoder)
    lines = [source for source, _ in PAIRS] * 2 + ["", "the", "  \t "]
    batched = translate(model, lines, dataset.vocabulary_pair, SEARCH, n_best=2)
    assert model.training
    alone = [translate(model, [line], dataset.vocabulary_pair, SEARCH, n_best=2)[0] for line in lines]
    assert [[best.text for best in line] for line in batched] == [[best.text for best in line] for line in alone]
    scores = [translation.score for line in batched for translation in line]
    others = [translation.score for line in alone for translation in line]
    assert scores == pytest.approx(others, rel=1e-9)
    assert len({line[0].text for line in batched}) > 2
    for line_translations in batched[:10]:
        assert len(line_translations) == 2
        assert all(
            translation.score == SEARCH.score(translation.logp, translation.length) for translation in line_translations
        )
        assert all(
            translation.length == len(translation.text.split(" ")) + translation.finished
            for translation in line_translations
        )
        assert line_translations[0].score >= line_translations[1].score
        assert "<unk>" not in line_translations[0].text
    assert batched[10] == batched[12] == [Translation("", 0.0, 0.0, True, 1)]


def test_translations_are_independent_of_batch_tokens(opened: Callable[..., PairDataset]) -> None:
    dataset = opened()
    model = model_for(dataset)
    lines = list(read_text("".join(f"{source}\n" for source, _ in PAIRS), "here"))
    texts = []
    for tokens, batches in ((1, 5), (12, 3), (10**6, 1)):
        shapes: list[int] = []

        def decode(decoder: Decoder, source_BS: Tensor, shapes: list[int] = shapes) -> list[list[Hypothesis]]:
            shapes.append(source_BS.numel())
            return beam_decoder(dataset.vocabulary_pair, SEARCH)(decoder, source_BS)

        translator = LineTranslator(model, dataset.vocabulary_pair, decode, batch_tokens=tokens)
        texts.append([best.text for best, *_ in translator.translate(lines)])
        assert len(shapes) == batches
        assert max(shapes) <= max(tokens, 11)
    assert texts[0] == texts[1] == texts[2]


def test_batches_by_length_hold_every_nonempty_line_once() -> None:
    lengths = [3, 0, 9, 4, 4, 1, 30, 0, 2]
    batches = list(batches_by_length(lengths, 12))
    assert sorted(index for batch in batches for index in batch) == [0, 2, 3, 4, 5, 6, 8]
    assert batches[0] == [6]
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 12 for batch in batches)
    assert list(batches_by_length([0, 0], 5)) == []


def test_long_lines_and_unknown_words_are_reported(opened: Callable[..., PairDataset]) -> None:
    dataset = opened(bpe={"merges": 20})
    model = model_for(dataset)
    messages: list[str] = []
    decode = beam_decoder(dataset.vocabulary_pair, SEARCH)
    translator = LineTranslator(model, dataset.vocabulary_pair, decode, longest=8, notify=messages.append)
    text = "a dog ☃\r\nthe cat ran\n\nthe dog saw a cat and ran\n☃☃ cat"
    translations = translator.translate(list(read_text(text, "here")))
    assert len(translations) == 5
    assert translations[2][0].text == ""
    assert all(best.text for best, *_ in (translations[0], translations[1], translations[3], translations[4]))
    (message,) = messages
    assert message.startswith("line 4: ")
    assert "the longest training sentence had 8" in message
    translator.report_unknown()
    assert messages[1:] == ["2 words of the source with unknown characters, which are read as <unk>"]
    for index, line in enumerate(("a dog ☃", "the cat ran")):
        assert translations[index][0].text == translate(model, [line], dataset.vocabulary_pair, SEARCH)[0][0].text
    plain = opened()
    translator = LineTranslator(
        model_for(plain), plain.vocabulary_pair, beam_decoder(plain.vocabulary_pair, SEARCH), notify=messages.append
    )
    translator.translate(list(read_text("a zebra ran\n", "here")))
    translator.report_unknown()
    assert messages[2:] == ["1 word of the source not in the vocabulary, read as <unk>"]


def test_invalid_lines_are_rejected(opened: Callable[..., PairDataset]) -> None:
    dataset = opened()
    model = model_for(dataset)
    assert translate(model, [], dataset.vocabulary_pair, SEARCH) == []
    with pytest.raises(ArgumentError, match="holds a line end"):
        translate(model, ["a dog\na cat"], dataset.vocabulary_pair, SEARCH)
    with pytest.raises(DataError, match="line 2: NUL byte"):
        translate(model, ["a dog", "a\0cat"], dataset.vocabulary_pair, SEARCH)


@pytest.mark.parametrize("sides", ["joint", "joint_bpe", "separate"])
def test_scores_equal_sacrebleu(opened: Callable[..., PairDataset], tmp_path: Path, sides: str) -> None:
    dataset = opened(sides=sides, bpe={"merges": 10})
    model = model_for(dataset)
    progress_calls: list[tuple[str, float]] = []
    messages: list[str] = []
    settings = BleuSettings(tokenize="none")
    evaluated = evaluate_translations(
        model,
        dataset,
        "test",
        SEARCH,
        settings,
        notify=messages.append,
        progress=lambda what, done: progress_calls.append((what, done)),
    )
    references = dataset.splits["test"].read_text("target")
    printed = run_sacrebleu(tmp_path, evaluated.translations, references, "--tokenize", "none")
    scores = evaluated.scores
    assert scores.bleu == pytest.approx(printed["BLEU"]["score"], abs=1e-10)
    assert scores.chrf == pytest.approx(printed["chrF2"]["score"], abs=1e-10)
    assert scores.bleu_signature == printed["BLEU"]["signature"]
    assert scores.pairs == len(evaluated.translations) == 5
    assert evaluated.translations[1] == ""
    translations = translate(model, dataset.splits["test"].read_text("source"), dataset.vocabulary_pair, SEARCH)
    assert evaluated.translations == [best.text for best, *_ in translations]
    assert scores.unfinished == sum(not best.finished for best, *_ in translations)
    assert scores.search == SEARCH.model_dump()
    assert sum(band.pairs for band in scores.by_length) == 5
    assert len(scores.by_length) > 1
    assert progress_calls[-1] == ("translating the test text", 1.0)
    assert messages == ["1 word of the source with unknown characters, which are read as <unk>"]


def test_beginning_scores_like_the_start_of_the_text(opened: Callable[..., PairDataset]) -> None:
    dataset = opened()
    model = model_for(dataset)
    assert shorten_dataset(dataset, "valid", None) is shorten_dataset(dataset, "valid", 5) is dataset
    shortened = shorten_dataset(dataset, "valid", 2)
    assert shortened.splits["valid"].read_text("source") == [source for source, _ in PAIRS[:2]]
    assert shortened.splits["test"] is dataset.splits["test"]
    whole, part = (
        score_references(model, pairs.splits["valid"], dataset.vocabulary).nll for pairs in (dataset, shortened)
    )
    assert part == pytest.approx(whole[: len(part)], rel=1e-5)
    scores = evaluate_translations(model, shortened, "valid", SEARCH, BleuSettings()).scores
    assert scores.pairs == 2


def test_beginning_counts_words_and_bytes(tmp_path: Path) -> None:
    """Spaces and carriage returns count as bytes, not as words; a pair that training drops is not counted."""
    lines = ["ein  Hund\r\n", "Öl\u00a0und Äther\n", "\n", "ja\n", "ein sehr langer Satz ohne Ende\n"]
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.de").write_bytes("".join(lines).encode())
        (tmp_path / f"{name}.en").write_text("a dog\noil\nno\nyes\nlong\n")
    corpus = CorpusSettings(name=str(tmp_path), pairs=PairsSettings(source="en", target="de"))
    dataset = open_pairs(corpus, VocabularySettings(), cache=tmp_path / "cache")
    for split, kept_lines in (("valid", lines), ("train", [line for line in lines if line.strip()])):
        for number in range(1, len(kept_lines)):
            first = shorten_dataset(dataset, split, number).splits[split]
            counted = sum(len(line.encode().split()) for line in kept_lines[:number])
            assert (first.pairs, first.words) == (number, counted)
            assert first.bytes == sum(len(line.encode()) for line in kept_lines[:number])


RANKED = [  # by log p / length: -0.5, -0.75, -0.8
    Translation("a b c", -2.0, -0.5, True, 4),
    Translation("a", -1.5, -0.75, True, 2),
    Translation("a b c d", -4.0, -0.8, False, 5),
]


def test_rerank_adds_language_model_scores_per_length() -> None:
    ranked = rerank(RANKED, [-10.0, -1.0, -2.0], 0.5, SearchSettings())
    assert [translation.text for translation in ranked] == [
        "a",
        "a b c",
        "a b c d",
    ]  # unfinished translations come last
    assert [translation.score for translation in ranked] == pytest.approx([-2.0 / 2, -7.0 / 4, -5.0 / 5])
    assert {translation.text: translation.logp for translation in ranked} == {
        translation.text: translation.logp for translation in RANKED
    }
    (best, *_) = rerank(RANKED, [-10.0, -1.0, -2.0], 0.5, SearchSettings(length_penalty=0))
    assert (best.text, best.score) == ("a", -2.0)
    assert rerank(RANKED, [-9.0, -3.0, -1.0], 0.0, SearchSettings()) == RANKED


def test_rerank_with_weight_zero_keeps_the_order() -> None:
    """The search returns finished translations first, whatever their scores."""
    translations = [Translation("a", -3.0, -1.5, True, 2), Translation("a b c", -1.0, -0.25, False, 4)]
    assert rerank(translations, [-9.0, -1.0], 0.0, SearchSettings()) == translations


@pytest.mark.parametrize("weight", [0.1, 1.0, 100.0])
def test_rerank_with_an_agreeing_language_model_keeps_the_order(weight: float) -> None:
    """The language model agrees token by token with the translator, or scores all tokens alike."""
    for penalty in (0.0, 0.6, 1.0):
        search = SearchSettings(length_penalty=penalty)
        before = sorted(RANKED, key=lambda translation: -search.score(translation.logp, translation.length))
        assert [
            translation.text
            for translation in rerank(RANKED, [translation.logp for translation in RANKED], weight, search)
        ] == [translation.text for translation in before]
    alike = rerank(RANKED, [-3.0 * translation.length for translation in RANKED], weight, SearchSettings())
    assert [translation.text for translation in alike] == [translation.text for translation in RANKED]
    assert [translation.score for translation in alike] == pytest.approx(
        [translation.score - 3.0 * weight for translation in RANKED]
    )


def test_examples_hold_attention_over_source_tokens(opened: Callable[..., PairDataset], encoder: str) -> None:
    dataset = opened(bpe={"merges": 10}, sides="separate")
    model = model_for(dataset, encoder)
    chosen = translate_examples(model, dataset, "test", 3, SEARCH)
    assert len(chosen) == 3
    for example in chosen:
        assert (example.source, example.reference) in zip(
            dataset.splits["test"].read_text("source"), dataset.splits["test"].read_text("target"), strict=True
        )
        assert example.translation == translate(model, [example.source], dataset.vocabulary_pair, SEARCH)[0][0].text
        assert example.source_tokens[-1] == "<eos>"
        rows = example.attention
        assert len(rows) == len(example.target_tokens)
        assert {len(row) for row in rows} == {len(example.source_tokens)}
        assert [sum(row) for row in rows] == pytest.approx([1.0] * len(rows), abs=0.02)
    assert len(translate_examples(model, dataset, "test", 50, SEARCH)) == 4


def test_line_without_spaces_is_translated(opened: Callable[..., PairDataset]) -> None:
    dataset = opened(bpe={"merges": 30})
    source, _ = PAIRS[4]
    ids = dataset.vocabulary_pair.vocabularies[0].encode([source])
    assert len(ids) > 1
    assert dataset.vocabulary.unk not in ids
    translations = translate(model_for(dataset), [source], dataset.vocabulary_pair, SEARCH)
    assert translations[0][0].text


@pytest.mark.parametrize("sides", ["joint", "joint_bpe", "separate"])
def test_only_the_unseen_character_of_a_long_word_is_unknown(opened: Callable[..., PairDataset], sides: str) -> None:
    dataset = opened(bpe={"merges": 30}, sides=sides)
    read: list[list[int]] = []

    def decode(_: Decoder, source_BS: Tensor) -> list[list[Hypothesis]]:
        read.extend(source_BS.tolist())
        return [[Hypothesis((), 0.0, 0.0, True)] for _ in source_BS]

    messages: list[str] = []
    translator = LineTranslator(model_for(dataset), dataset.vocabulary_pair, decode, notify=messages.append)
    translator.translate(list(read_text("日本語の詩は空白なしで書く\n", "here")))
    translator.report_unknown()
    source, _ = dataset.vocabulary_pair.vocabularies
    assert [source.decode(ids) for ids in read] == [["日本語の", "<unk>", "は空白なしで書く", "<eos>"]]
    assert messages == ["1 word of the source with unknown characters, which are read as <unk>"]
