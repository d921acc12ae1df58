"""Datasets of pairs: encoding, dropped pairs, counts, and how the cache is used and repaired."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from reefknot.errors import DataError, SettingsError
from reefknot.lab.text.bpe import BPE
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.pair_dataset import Lines, PairDataset, open_pairs
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.storage import cache

EN = "the cat sat\nthe dog\n\nthe cat and the dog sat\nno\n"
DE = "die Katze saß\nder Hund\nleer\ndie Katze und der Hund\n\n"
HELD_OUT = ("the bird\n\n", "der Vogel saß\nder Hund\n")
Write = Callable[..., Path]
Open = Callable[..., PairDataset]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes aligned files to a folder and returns it."""

    def write_folder(train: Sequence[str] = (EN, DE), held_out: Sequence[str] = HELD_OUT) -> Path:
        folder = tmp_path / "corpus"
        folder.mkdir(exist_ok=True)
        for split, texts in (("train", train), ("valid", held_out), ("test", held_out)):
            for language, text in zip(("en", "de"), texts, strict=True):
                (folder / f"{split}.{language}").write_bytes(text.encode())
        return folder

    return write_folder


@pytest.fixture
def opened(cache: Path) -> Open:
    """Return a function that opens a folder. `pairs` are corpus settings, keywords vocabulary settings."""

    def open_folder(
        folder: Path,
        pairs: dict[str, object] | None = None,
        notify: Callable[[str], None] = lambda _: None,
        **words: object,
    ) -> PairDataset:
        part = (pairs or {}).pop("part", None)
        corpus = {"name": str(folder), "part": part, "pairs": {"source": "en", "target": "de"} | (pairs or {})}
        settings = VocabularySettings.model_validate(words)
        return open_pairs(CorpusSettings.model_validate(corpus), settings, cache=cache, notify=notify)

    return open_folder


def decoded_pairs(dataset: PairDataset, split: str = "train") -> list[tuple[str, str]]:
    source, target = dataset.vocabulary_pair.vocabularies
    pairs = dataset.splits[split]
    return [
        (" ".join(source.decode(source_ids.tolist())), " ".join(target.decode(target_ids.tolist())))
        for source_ids, target_ids in zip(pairs.source, pairs.target, strict=True)
    ]


def test_text_without_spaces_and_without_bpe_gives_a_warning(write: Write, opened: Open) -> None:
    folder = write(("the cat sat\nthe dog ran\n", "猫が座った\n犬が走った\n"))
    warning = "train: hardly any line of the target has spaces, so every line is one word; set vocabulary.bpe"
    for words, expected in (({}, [warning]), ({"bpe": {"merges": 5}}, [])):
        messages: list[str] = []
        opened(folder, notify=messages.append, **words)
        opened(folder, notify=messages.append, **words)
        assert messages == expected * 2


def test_small_parallel_corpus_is_encoded_as_expected(write: Write, opened: Open) -> None:
    messages: list[str] = []
    dataset = opened(write(), notify=messages.append)
    assert decoded_pairs(dataset) == [
        ("the cat sat <eos>", "die Katze saß <eos>"),
        ("the dog <eos>", "der Hund <eos>"),
        ("the cat and the dog sat <eos>", "die Katze und der Hund <eos>"),
    ]
    assert decoded_pairs(dataset, "test") == [("the <unk> <eos>", "der <unk> saß <eos>"), ("<eos>", "der Hund <eos>")]
    train, test = dataset.splits["train"], dataset.splits["test"]
    assert (train.pairs, train.tokens, train.words, train.lines, train.unknown) == (3, 13, 10, 3, 0)
    assert train.bytes == len("die Katze saß\nder Hund\ndie Katze und der Hund\n".encode())
    assert (test.pairs, test.tokens, test.words, test.unknown, test.unknown_source) == (2, 7, 5, 1, 1)
    assert (train.dropped, test.dropped) == ({"empty side": 2}, {})
    assert messages == ["train: 3 pairs; left out: 2 empty side"]
    assert isinstance(train.source.ids, np.memmap)
    assert (train.source.ids.dtype, train.source.bounds.dtype) == (np.int32, np.int64)
    assert dataset.vocabulary is dataset.vocabulary_pair.target


def test_text_returns_the_lines_exactly_as_in_the_files(write: Write, opened: Open) -> None:
    held_out = ("  the\u2028  bird \r\n\nlast", "der  Vogel\n x \n\n")
    dataset = opened(write(held_out=held_out))
    test = dataset.splits["test"]
    assert test.read_text("source") == ["  the\u2028  bird ", "", "last"]
    assert test.read_text("target") == ["der  Vogel", " x ", ""]
    train = dataset.splits["train"]
    assert train.read_text("source") == ["the cat sat", "the dog", "the cat and the dog sat"]
    assert train.line_numbers.tolist() == [1, 2, 4]


def test_changed_reference_file_is_rejected(write: Write, opened: Open) -> None:
    folder = write()
    dataset = opened(folder)
    (folder / "test.de").write_text("der Vogel saß\nder Hunt\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"test\.en or \S*test\.de has changed since the pairs were encoded"):
        dataset.splits["test"].read_text("source")


def test_unchanged_files_are_not_hashed_again(write: Write, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write()
    monkeypatch.setattr(cache, "_MIN_AGE_NS", -1)  # hashes of files that were just written are kept, too
    test = opened(folder).splits["test"]
    source, target = test.read_text("source"), test.read_text("target")
    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        assert (test.read_text("source"), test.read_text("target")) == (source, target)
    (folder / "test.de").write_text("der Vogel sah\nder Hund\n", encoding="utf-8")
    with pytest.raises(DataError, match="has changed since the pairs were encoded"):
        test.read_text("target")


def test_joint_vocabulary_is_one_object_separate_ones_are_two(write: Write, opened: Open) -> None:
    joint, separate = opened(write()), opened(write(), sides="separate")
    assert joint.vocabulary_pair.joint
    assert joint.vocabulary_pair.source is joint.vocabulary_pair.target
    assert not separate.vocabulary_pair.joint
    source, target = separate.vocabulary_pair.vocabularies
    assert "cat" in source
    assert "cat" not in target
    assert set(joint.vocabulary.words) == {*source.words, *target.words}
    assert sum(joint.vocabulary.counts) == sum(source.counts) + sum(target.counts)
    assert joint.fingerprint != separate.fingerprint
    assert decoded_pairs(joint) == decoded_pairs(separate)
    same = opened(write(train=("a b\n", "a b\n")), sides="separate")
    assert not same.vocabulary_pair.joint  # even if both sides have the same words


def test_bpe_is_learned_jointly_or_per_side(write: Write, opened: Open) -> None:
    counts = [Counter([*text.split(), *["<eos>"] * 5]) for text in (EN, DE)]
    joint, separate = (opened(write(), bpe={"merges": 6}, sides=sides) for sides in ("joint", "separate"))
    assert joint.vocabulary.bpe == BPE.train(counts[0] + counts[1], 6)
    assert [words.bpe for words in separate.vocabulary_pair.vocabularies] == [BPE.train(count, 6) for count in counts]
    assert (
        joint.vocabulary.split_word("Katze")
        != separate.vocabulary_pair.vocabularies[0].split_word("Katze")
        == ("Katze",)
    )
    assert decoded_pairs(joint) == decoded_pairs(separate)


def test_joint_bpe_shares_merges_but_not_sub_words(write: Write, opened: Open) -> None:
    held_out = ("the Hund sat\n", "der dog\n")
    joint, sides = (
        opened(write(held_out=held_out), bpe={"merges": 20}, sides=setting) for setting in ("joint", "joint_bpe")
    )
    source, target = sides.vocabulary_pair.vocabularies
    assert source.bpe is not None
    assert target.bpe is not None
    assert joint.vocabulary.bpe is not None
    assert source.bpe.file_content == target.bpe.file_content == joint.vocabulary.bpe.file_content
    assert source.words != target.words
    assert {*source.words, *target.words} < {*joint.vocabulary.words}
    train, same = sides.splits["train"], joint.splits["train"]
    for vocabulary, side_lines, joint_lines in (
        (source, train.source, same.source),
        (target, train.target, same.target),
    ):
        assert [vocabulary.words[index] for index in side_lines.ids] == [
            joint.vocabulary.words[index] for index in joint_lines.ids
        ]
    # Only the German text has H and u; only the English text has o and g.
    assert decoded_pairs(sides, "test") == [("the <unk> nd sat <eos>", "der d <unk> <eos>")]
    assert (sides.splits["test"].unknown_source, sides.splits["test"].unknown) == (1, 1)
    assert len({joint.fingerprint, sides.fingerprint, opened(write(), sides="separate").fingerprint}) == 3
    assert "merges of both sides together, sub-words of each side separately" in sides.describe()


@pytest.mark.parametrize(
    ("pairs", "remaining", "dropped"),
    [
        ({"longest": None}, 3, {"empty side": 2}),
        ({"longest": 6}, 3, {"empty side": 2}),
        ({"longest": 5}, 2, {"empty side": 2, "too long": 1}),
        ({"longest": 5, "ratio": 1.1}, 2, {"empty side": 2, "too long": 1}),
        ({"longest": None, "ratio": 1.1}, 2, {"empty side": 2, "ratio": 1}),
        ({"part": "1/2"}, 2, {}),
    ],
)
def test_filters_count_the_pairs_they_drop(
    pairs: dict[str, object], remaining: int, dropped: dict[str, int], write: Write, opened: Open
) -> None:
    dataset = opened(write(), pairs)
    assert dataset.splits["train"].pairs == remaining
    assert dataset.splits["train"].dropped == dropped
    assert dataset.splits["valid"].pairs == 2, "held-out pairs are never left out"
    assert all(f"{number} {reason}" in dataset.describe() for reason, number in dropped.items())


def test_longest_counts_sub_words(write: Write, opened: Open) -> None:
    train = ("abcdefgh a\nb c\n", "x\ny\n")
    assert opened(write(train), {"longest": 4}).splits["train"].pairs == 2
    assert opened(write(train), {"longest": 4}, bpe={"merges": 1}).splits["train"].dropped == {"too long": 1}


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        (("a\n", "\n"), HELD_OUT, r"every pair is left out \(1 empty side\), so there is no train text"),
        (("a\n", "b\n"), ("\n\n", "c\nd\n"), r"one side has no words, so there is no valid text"),
        (("a\n", "b\nc\n"), HELD_OUT, r"train\.en has 1 lines and \S*train\.de has 2"),
        (("", ""), HELD_OUT, r"are empty"),
    ],
)
def test_rejected_text_leaves_no_cache_entry(
    train: Sequence[str], held_out: Sequence[str], message: str, write: Write, opened: Open, cache: Path
) -> None:
    with pytest.raises(DataError, match=message):
        opened(write(train, held_out))
    assert list((cache / "datasets").iterdir()) == []


def test_unknown_word_error_names_word_file_and_line(write: Write, opened: Open) -> None:
    with pytest.raises(DataError, match=r"valid\.en, line 1: 'bird' is not in the vocabulary"):
        opened(write(), unknown="refuse")


@pytest.mark.parametrize(
    ("words", "message"),
    [({"end_of_line": False}, "a translation must end with <eos>"), ({"keep_spellings": True}, "for language models")],
)
def test_vocabulary_settings_unusable_for_translation_are_rejected(
    words: dict[str, object], message: str, write: Write, opened: Open
) -> None:
    with pytest.raises(SettingsError, match=message):
        opened(write(), **words)


def test_equal_settings_share_a_cache_entry_others_do_not(write: Write, opened: Open, cache: Path) -> None:
    folder = write()
    first = opened(folder)
    [entry] = (cache / "datasets").iterdir()
    made = (entry / "train.source.ids").stat().st_mtime_ns
    moved = folder.rename(folder.with_name("moved"))
    again = opened(moved)
    assert again.fingerprint == first.fingerprint
    assert (entry / "train.source.ids").stat().st_mtime_ns == made
    others = [opened(moved, {"longest": 5}), opened(moved, {"ratio": 2.0}), opened(moved, {"part": "1/2"})]
    others += [opened(moved, sides="separate"), opened(moved, {"source": "de", "target": "en"})]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 6


@pytest.mark.parametrize(
    "file",
    ["train.source.ids", "test.target.ids", "valid.target.bounds", "train.numbers", "counts.json", "vocabulary.json",
     "source/vocabulary.json"],
)  # fmt: skip
@pytest.mark.parametrize("damage", ["gone", "short", "long", "other"])
def test_damaged_cache_entry_is_encoded_again(file: str, damage: str, write: Write, opened: Open, cache: Path) -> None:
    folder = write()
    before = opened(folder, sides="separate")
    [entry] = (cache / "datasets").iterdir()
    intact = (entry / file).read_bytes()
    if damage == "gone":
        (entry / file).unlink()
    elif damage == "other" and file.endswith(".json"):
        (entry / file).write_bytes(intact.replace(b"1", b"2"))
    elif damage == "other" and file.endswith(".bounds"):
        (entry / file).write_bytes(intact[8:] + intact[:8])
    else:
        (entry / file).write_bytes(intact[:-1] if damage == "short" else intact + b"x")
    messages: list[str] = []
    after = opened(folder, notify=messages.append, sides="separate")
    assert "damaged and is written again" in messages[0]
    assert (entry / file).read_bytes() == intact
    assert decoded_pairs(after) == decoded_pairs(before)
    assert [path.name for path in (cache / "datasets").iterdir()] == [entry.name]


def test_describe_states_languages_filters_and_vocabulary(write: Write, opened: Open) -> None:
    dataset = opened(write(), {"ratio": 2.5, "part": "1/1"}, min_count=2, sides="separate")
    text = dataset.describe()
    sizes = " + ".join(str(len(words)) for words in dataset.vocabulary_pair.vocabularies)
    assert text.startswith(f"corpus/: a folder of parallel text; {sizes} types; hash {dataset.fingerprint[:12]}\n")
    for phrase in (
        "en is translated into de",
        "pairs with an empty side or more than 100 tokens on a side or one side more than 2.5 times as long as the",
        "vocabulary: the words of the training text, seen at least 2 times, each side separately",
        "only part 1/1 of the training pairs is used",
    ):
        assert phrase in text
    assert dataset.summary == f"corpus/ (hash {dataset.fingerprint[:12]}): 3 / 2 / 2 pairs, {sizes} types"


def test_bpe_splits_text_without_spaces(write: Write, opened: Open) -> None:
    train = ("the cat\nthe dog\nthe cat sat\n", "猫がいる\n犬がいる\n猫が座った\n")
    held_out = ("the dog sat\nthe cat\n", "犬が座った\n鳥がいる 猫\n")
    dataset = opened(write(train, held_out), bpe={"merges": 8})
    assert decoded_pairs(dataset, "test") == [
        ("the dog sat <eos>", "犬が座った <eos>"),
        ("the cat <eos>", "<unk> がいる 猫 <eos>"),
    ]
    assert dataset.splits["test"].unknown == 1
    assert dataset.splits["test"].read_text("target") == ["犬が座った", "鳥がいる 猫"]
    assert len(dataset.splits["test"].target[0]) > 2, "a line is split into several sub-words"


def test_lines_can_be_made_from_lists() -> None:
    lines = Lines.from_lists([[1, 2, 0], [0], [3, 0]])
    assert len(lines) == 3
    assert [line.tolist() for line in lines] == [[1, 2, 0], [0], [3, 0]]
    assert lines[-1].tolist() == [3, 0]
    assert lines.lengths.tolist() == [3, 1, 2]
    assert (lines.ids.dtype, lines.bounds.dtype) == (np.int32, np.int64)
    assert len(Lines.from_lists([])) == 0
