"""The vocabulary: order, size limits, unknown words and file format."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reefknot.errors import DataError
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.text.vocabulary_settings import BPESettings, VocabularySettings, fairseq_dictionary_size

COUNTS = {"the": 5, "<eos>": 4, "cat": 2, "bird": 2, "fish": 1, "ant": 1}


def vocabulary(counts: dict[str, int] = COUNTS, **settings: object) -> Vocabulary:
    return Vocabulary.from_counts(counts, VocabularySettings.model_validate(settings))


def test_words_are_ordered_by_frequency_then_alphabetically() -> None:
    made = vocabulary()
    assert made.words == ("the", "<eos>", "bird", "cat", "ant", "fish", "<unk>")
    assert made.counts == (5, 4, 2, 2, 1, 1, 0)
    assert (made.eos, made.unk) == (1, 6)


@pytest.mark.parametrize(
    ("settings", "words", "unknown"),
    [
        ({"min_count": 2}, ("the", "<eos>", "<unk>", "bird", "cat"), 2),
        ({"max_size": 4}, ("the", "<eos>", "<unk>", "bird"), 4),
        ({"min_count": 3, "max_size": 4}, ("<unk>", "the", "<eos>"), 6),
        ({"min_count": 2, "max_size": 3}, ("<unk>", "the", "<eos>"), 6),
    ],
)
def test_unk_counts_the_words_it_replaces(settings: dict[str, int], words: tuple[str, ...], unknown: int) -> None:
    made = vocabulary(**settings)
    assert made.words == words
    assert made.counts[made.id_of("never seen")] == unknown
    assert sum(made.counts) == sum(COUNTS.values())


def test_literal_unk_in_the_text_is_counted() -> None:
    made = vocabulary({**COUNTS, "<unk>": 3}, min_count=2)
    assert dict(zip(made.words, made.counts, strict=True))["<unk>"] == 5


def test_unknown_refuse_has_unk_only_if_the_text_has_it() -> None:
    assert vocabulary(unknown="refuse").unk is None
    with_unknown = vocabulary({**COUNTS, "<unk>": 3}, unknown="refuse")
    assert with_unknown.words[2] == "<unk>"
    with pytest.raises(DataError, match="'wolf' is not in the vocabulary"):
        with_unknown.encode(["the", "wolf"], "refuse")


def test_end_of_line_adds_eos_even_if_never_seen() -> None:
    assert vocabulary({"a": 1}).words == ("a", "<eos>", "<unk>")
    assert vocabulary({"a": 1}, end_of_line=False).eos is None


def test_encode_and_decode_map_between_words_and_ids() -> None:
    made = vocabulary()
    assert made.encode(["the", "wolf", "cat"]) == [0, 6, 3]
    assert made.decode([0, 6, 3]) == ["the", "<unk>", "cat"]
    assert "cat" in made
    assert "wolf" not in made
    assert len(made) == 7
    with pytest.raises(DataError, match="'wolf' is not in the vocabulary"):
        vocabulary(unknown="refuse").id_of("wolf")


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 2**62)))
def test_save_and_load_preserve_any_word(tmp_path_factory: pytest.TempPathFactory, counts: dict[str, int]) -> None:
    path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.json"
    made = Vocabulary.from_counts(counts, VocabularySettings())
    made.save(path)
    assert Vocabulary.load(path) == made
    assert Vocabulary.load(path).fingerprint == made.fingerprint


def test_fingerprint_depends_on_words_and_counts() -> None:
    different = [vocabulary(), vocabulary({**COUNTS, "cat": 3}), vocabulary({**COUNTS, "wolf": 1})]
    assert len({made.fingerprint for made in different}) == 3
    assert vocabulary().fingerprint == vocabulary(dict(reversed(COUNTS.items()))).fingerprint


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (b"", "is truncated or not valid JSON"),
        (b"\x80\x04]\x94.", "is truncated or not valid JSON"),
        (b'{"format": 1, "words": ["a"', "is truncated or not valid JSON"),
        (b"[" * 100_000, "is truncated or not valid JSON"),
        (b'["a"]', "does not hold a JSON object"),
        ({"format": 2, "words": ["a"], "counts": [1]}, "must hold format 1, words and counts"),
        ({"format": 1, "words": ["a"]}, "must hold format 1, words and counts"),
        ({"format": 1, "words": ["a"], "counts": [1], "more": 1}, "must hold format 1, words and counts"),
        ({"format": 1, "words": "a", "counts": [1]}, "no words"),
        ({"format": 1, "words": ["a"], "counts": {"a": 1}}, "no words"),
        ({"format": 1, "words": ["a"], "counts": ["1"]}, "a count is not a whole number"),
        ({"format": 1, "words": ["a"], "counts": [-1]}, "a count is not a whole number"),
        ({"format": 1, "words": ["a"], "counts": [True]}, "a count is not a whole number"),
        ({"format": 1, "words": ["a"], "counts": [1.0]}, "a count is not a whole number"),
        ({"format": 1, "words": [1], "counts": [1]}, "a word is not a valid string"),
        ({"format": 1, "words": ["\ud800"], "counts": [1]}, "a word is not a valid string"),
        ({"format": 1, "words": ["a", "b"], "counts": [1]}, "2 words but 1 counts"),
        ({"format": 1, "words": ["a", "a"], "counts": [1, 1]}, "twice"),
        ({"format": 1, "words": ["a", "b", "a"], "counts": [3, 2, 1]}, "twice"),
        ({"format": 1, "words": ["a", "b"], "counts": [1, 2]}, "not in order"),
        ({"format": 1, "words": ["b", "a"], "counts": [1, 1]}, "not in order"),
        ({"format": 1, "words": ["b", "a"], "counts": [1, 1], "ordered": 0}, "neither true nor false"),
        ({"format": 1, "words": [], "counts": []}, "no words"),
        ({"format": 1, "words": ["a"], "counts": [1], "spelled": "b"}, "a word in `spelled` is not a valid string"),
        ({"format": 1, "words": ["a"], "counts": [1], "spelled": [1]}, "a word in `spelled` is not a valid string"),
        ({"format": 1, "words": ["a"], "counts": [1], "spelled": ["a"]}, "a word in `spelled` occurs twice"),
        ({"format": 1, "words": ["a"], "counts": [1], "spelled": ["b", "b"]}, "a word in `spelled` occurs twice"),
    ],
)
def test_invalid_vocabulary_file_is_rejected(stored: object, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_bytes(stored if isinstance(stored, bytes) else json.dumps(stored).encode())
    with pytest.raises(DataError, match=rf"vocabulary\.json .*{problem}"):
        Vocabulary.load(path)


def test_save_and_load_preserve_a_foreign_word_order(tmp_path: Path) -> None:
    made = Vocabulary(("<pad>", "b", "a"), (0, 1, 1), ordered=False)
    made.save(tmp_path / "vocabulary.json")
    assert Vocabulary.load(tmp_path / "vocabulary.json") == made
    assert made.encode(["a", "b"], "refuse") == [2, 1]
    assert made.fingerprint != Vocabulary(made.words, made.counts).fingerprint


def test_missing_vocabulary_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocabulary\.json is missing"):
        Vocabulary.load(tmp_path / "vocabulary.json")


@pytest.mark.parametrize(
    "settings",
    [
        {"min_count": 0},
        {"max_size": 2},
        {"unknown": "drop"},
        {"end_of_line": "yes"},
        {"dictionary": "other"},
        {"bpe": {"merges": 0}},
        {"bpe": {}, "min_count": 2, "unknown": "refuse"},
        {"bpe": {"unknown": "character"}, "max_size": 100},
        {"bpe": {}, "min_count": 2, "sides": "joint_bpe"},
        {"bpe": {}, "text": "all"},
        {"text": "valid"},
        {"bpe": {}, "keep_spellings": True},
        {"unknown": "refuse", "keep_spellings": True},
        {"sides": "joint_bpe"},
    ],
)
def test_invalid_vocabulary_settings_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        VocabularySettings.model_validate(settings)


@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=1),
    st.integers(1, 4),
    st.none() | st.integers(3, 8),
)
def test_every_token_is_counted_once(tokens: list[str], min_count: int, max_size: int | None) -> None:
    settings = VocabularySettings(min_count=min_count, max_size=max_size)
    made = Vocabulary.from_counts(Counter(tokens), settings)
    assert sum(made.counts) == len(tokens)
    assert max_size is None or len(made) <= max_size
    encoded = Counter(made.decode(made.encode(tokens)))
    assert {word: count for word, count in zip(made.words, made.counts, strict=True) if count} == encoded


def test_default_settings_keep_the_identity_of_older_texts() -> None:
    first = {"min_count": 1, "max_size": None, "unknown": "replace", "end_of_line": True}
    assert VocabularySettings().identity == first
    assert VocabularySettings(dictionary="fairseq").identity == {**first, "dictionary": "fairseq"}
    pieces = VocabularySettings.model_validate({"bpe": {}}).identity
    assert pieces == {**first, "bpe": {"merges": 32_000}}
    assert VocabularySettings(sides="separate").identity == {**first, "sides": "separate"}


def test_sub_words_are_counted_and_ordered_by_frequency() -> None:
    made = vocabulary({"abab": 3, "ab": 4, "ba": 1, "<eos>": 6}, bpe={"merges": 2})
    # "a b</w>" occurs 7 times, then "a b" 3 times. The words become ab ab</w>, ab</w> and b a</w>.
    seen = {"<eos>": 6, "ab</w>": 7, "ab": 3, "b": 1, "a</w>": 1, "a": 0, "b</w>": 0, "<unk>": 0}
    assert dict(zip(made.words, made.counts, strict=True)) == seen
    assert list(made.counts) == sorted(made.counts, reverse=True)


def test_bpe_vocabulary_encodes_and_decodes_words() -> None:
    made = vocabulary({"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}, bpe={"merges": 3})
    words = ["lowest", "<eos>", "l\u00f6w", "newt", "<unk>"]
    ids = made.encode(words)
    assert [made.words[index] for index in ids] == [
        "lo", "w", "est</w>", "<eos>", "<unk>", "n", "e", "w", "t</w>", "<unk>",
    ]  # fmt: skip
    assert made.decode(ids) == ["lowest", "<eos>", "<unk>", "newt", "<unk>"]
    assert made.decode_text(ids) == "lowest\n<unk> newt <unk>"
    assert made.encode_inputs(words) == ids
    assert "lowest" in made
    assert "l\u00f6w" not in made
    assert made.decode([made.id_of("est</w>")]) == ["est"]
    assert [made.ends_word(made.words[index]) for index in ids].count(True) == len(words)


def test_word_with_unknown_character_is_rejected_by_name() -> None:
    made = vocabulary({"low": 5}, bpe={"merges": 1}, unknown="refuse")
    assert made.unk is None
    with pytest.raises(DataError, match="'l\u00f6w' is not in the vocabulary"):
        made.encode(["low", "l\u00f6w"])


def test_split_at_unknown_replaces_unseen_characters_by_unk() -> None:
    counts = {"low": 5, "<eos>": 1}
    words = ["löw", "<eos>", "low", "ÄÖ"]
    made = vocabulary(counts, bpe={"merges": 5})
    assert made.split_at_unknown(words) == ["l", "<unk>", "w", "<eos>", "low", "<unk>"]
    assert made.decode(made.encode(made.split_at_unknown(words))) == ["l", "<unk>", "w", "<eos>", "low", "<unk>"]
    assert vocabulary(counts).split_at_unknown(words) == words  # without BPE words have no parts
    assert vocabulary(counts, bpe={"merges": 5}, unknown="refuse").split_at_unknown(words) == words


def test_tokenizer_file_is_saved_and_checked_with_the_vocabulary(tmp_path: Path) -> None:
    made = vocabulary(bpe={"merges": 5})
    made.save(tmp_path / "vocabulary.json")
    loaded = Vocabulary.load(tmp_path / "vocabulary.json")
    assert loaded == made
    assert loaded.encode(["cat", "fishcat"]) == made.encode(["cat", "fishcat"])
    tokenizer = tmp_path / "tokenizer.json"
    intact = tokenizer.read_bytes()
    tokenizer.write_bytes(intact[:-1])
    with pytest.raises(DataError, match=r"tokenizer\.json is damaged, or was not written together with vocab"):
        Vocabulary.load(tmp_path / "vocabulary.json")
    tokenizer.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json is missing"):
        Vocabulary.load(tmp_path / "vocabulary.json")


def test_fingerprint_depends_on_merges() -> None:
    vocabularies = [vocabulary(), *(vocabulary(bpe={"merges": merges}) for merges in (5, 6))]
    assert len({made.fingerprint for made in vocabularies}) == 3


@pytest.mark.parametrize(("types", "size"), [(267_735, 267_744), (10_000, 10_008), (6, 8), (7, 16)])
def test_fairseq_dictionary_size_is_a_multiple_of_eight(types: int, size: int) -> None:
    assert fairseq_dictionary_size(types) == size


def test_fairseq_dictionary_is_padded_with_unused_types() -> None:
    plain, made = vocabulary(), vocabulary(dictionary="fairseq")
    assert len(made) == fairseq_dictionary_size(len(plain)) == 16
    assert made.words[:6] == plain.words[:6]
    fillers = [f"<filler{number}>" for number in range(7)]
    assert made.words[6:] == (*fillers, "<pad>", "<s>", "<unk>")
    assert made.counts[6:] == (0,) * 10


def test_fairseq_symbols_in_the_text_keep_their_counts() -> None:
    made = vocabulary({**COUNTS, "<s>": 3, "<filler0>": 1}, dictionary="fairseq")
    assert len(made) == 16
    assert made.counts[made.id_of("<s>")] == 3
    assert made.words.count("<filler0>") == 1
    assert "<filler1>" in made


def test_spelled_words_have_input_ids_after_the_classes(tmp_path: Path) -> None:
    made = Vocabulary(("the", "<unk>"), (5, 2), spelled_words=("wolf", "ant"))
    assert len(made) == 2
    assert made.encode(["wolf", "the", "ant", "bee"]) == [1, 0, 1, 1]
    assert made.encode_inputs(["wolf", "the", "ant", "bee"]) == [2, 0, 3, 1]
    assert "wolf" not in made
    made.save(tmp_path / "vocabulary.json")
    assert Vocabulary.load(tmp_path / "vocabulary.json") == made
    assert made.fingerprint != Vocabulary(("the", "<unk>"), (5, 2)).fingerprint


def test_spelling_appends_each_new_word_once() -> None:
    made = Vocabulary(("the", "<unk>"), (5, 2), spelled_words=("wolf",))
    more = made.with_spelled_words(["ant", "the", "wolf", "ant", "bee"])
    assert more.spelled_words == ("wolf", "ant", "bee")
    assert more.encode_inputs(["wolf", "bee", "cow"]) == [2, 4, 1]
    assert more.encode(["bee"]) == [1]
    assert (more.id_of("the"), more.id_of("bee"), more.id_of("cow")) == (0, 4, 1)
    assert [vocabulary.can_read("bee") for vocabulary in (made, more)] == [False, True]
    assert more.can_read("the")
    assert more.fingerprint != made.fingerprint


def test_can_read_is_false_for_unknown_characters() -> None:
    made = vocabulary({"low": 5}, bpe={"merges": 5})
    assert made.can_read("low")
    assert not made.can_read("l\u00f6w")


def test_sides_are_joint_if_vocabularies_or_sizes_are_equal() -> None:
    counts = {"a": 2, "<eos>": 1}, {"a": 1, "b": 1, "<eos>": 1}
    joint = VocabularyPair.from_counts(*counts, VocabularySettings())
    assert joint.joint
    assert joint.vocabularies == (joint.source, joint.target)
    assert dict(zip(joint.vocabularies[0].words, joint.vocabularies[0].counts, strict=True)) == {
        "a": 3,
        "<eos>": 2,
        "b": 1,
        "<unk>": 0,
    }
    separate = VocabularyPair.from_counts(*counts, VocabularySettings(sides="separate"))
    assert not separate.joint
    assert [len(words) for words in separate.vocabularies] == [3, 4]
    assert VocabularyPair(5, 5).joint
    assert not VocabularyPair(5, 6).joint
    with pytest.raises(TypeError, match="only the sizes"):
        _ = VocabularyPair(5, 5).vocabularies


def test_joint_bpe_shares_merges_but_not_sub_words(tmp_path: Path) -> None:
    """Press & Wolf (2017): a side has the sub-words that occur on it, and its characters."""
    counts = {"low": 5, "lower": 2, "<eos>": 3}, {"low": 1, "slow": 4, "ower": 1, "wer": 9, "<eos>": 3}
    settings = VocabularySettings.model_validate({"bpe": {"merges": 6}, "sides": "joint_bpe"})
    sides = VocabularyPair.from_counts(*counts, settings)
    assert not sides.joint
    together = vocabulary(dict(Counter(counts[0]) + Counter(counts[1])), bpe={"merges": 6})
    assert together.bpe is not None
    for made, side_counts in zip(sides.vocabularies, counts, strict=True):
        assert made.bpe is not None
        assert made.bpe.file_content == together.bpe.file_content
        assert [made.split_word(word) for word in side_counts] == [together.split_word(word) for word in side_counts]
        seen = {token for word in side_counts for token in together.split_word(word)}
        characters = {character for word in side_counts if word != "<eos>" for character in word}
        assert set(made.words) == seen | characters | {f"{c}</w>" for c in characters} | {"<unk>", "<eos>"}
        assert {word for word, count in zip(made.words, made.counts, strict=True) if count} == seen
        made.save(tmp_path / "vocabulary.json")
        assert Vocabulary.load(tmp_path / "vocabulary.json") == made
    source, target = sides.vocabularies
    # Only the target has the character s and the sub-word wer</w>; both have low</w>; neither has lo.
    assert target.split_word("slow") != ("slow",)
    assert source.split_word("slow") == ("slow",)
    assert source.decode(source.encode(source.split_at_unknown(["slow"]))) == ["<unk>", "low"]
    assert "wer</w>" in target.words
    assert "wer</w>" not in source.words
    assert source.decode(source.encode(["wer"])) == ["wer"]
    assert len(source.encode(["wer"])) > len(target.encode(["wer"])) == 1
    assert settings.identity["sides"] == "joint_bpe"


def test_rare_words_are_unknown_before_words_are_split() -> None:
    counts = {"low": 5, "lower": 4, "th": 1, "then": 3, "zq": 1, "<eos>": 2}
    settings = VocabularySettings(bpe=BPESettings(merges=20), min_count=3)
    vocabulary = Vocabulary.from_counts(counts, settings)
    whole_words = Vocabulary.from_counts(counts, VocabularySettings(min_count=3))
    assert vocabulary.split_words == {"low": 5, "lower": 4, "then": 3, "<eos>": 2, "<unk>": 2}
    assert vocabulary.split_words == dict(zip(whole_words.words, whole_words.counts, strict=True))
    assert "z" not in vocabulary.words, "characters and merges are learned without rare words"

    text = ["then", "th", "low", "zq", "lower", "<eos>", "<unk>"]
    expected = ["then", "<unk>", "low", "<unk>", "lower", "<eos>", "<unk>"]
    assert vocabulary.decode(vocabulary.encode(text)) == expected
    assert whole_words.decode(whole_words.encode(text)) == expected
    assert "th" not in vocabulary
    assert "then" in vocabulary
    assert vocabulary.counts[vocabulary.unk or 0] == 2


def test_words_that_are_split_are_saved(tmp_path: Path) -> None:
    counts = {"low": 5, "lower": 4, "slow": 1, "<eos>": 2}
    settings = VocabularySettings(bpe=BPESettings(merges=20), min_count=3)
    vocabulary = Vocabulary.from_counts(counts, settings)
    vocabulary.save(tmp_path / "vocabulary.json")
    loaded = Vocabulary.load(tmp_path / "vocabulary.json")
    assert loaded == vocabulary
    assert loaded.encode(["slow", "low"]) == vocabulary.encode(["slow", "low"])
    everything = Vocabulary.from_counts(counts, VocabularySettings(bpe=BPESettings(merges=20)))
    assert loaded.tokens_sha256 != everything.tokens_sha256


def test_tokens_of_a_larger_text_have_the_counts_of_the_training_text() -> None:
    settings = VocabularySettings(text="all", min_count=2)
    counts = {"a": 1, "b": 3, "rare": 1, "<eos>": 2}
    all_counts = {"a": 5, "b": 4, "c": 2, "rare": 1, "<eos>": 4}
    vocabulary = Vocabulary.from_counts(counts, settings, all_counts=all_counts)
    assert list(zip(vocabulary.words, vocabulary.counts, strict=True)) == [
        ("b", 3),
        ("<eos>", 2),
        ("<unk>", 1),
        ("a", 1),
        ("c", 0),
    ]
