"""Byte-pair encoding: merges computed by hand, reproducible files, and lossless decoding."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reefknot.lab.text.bpe import BPE, format_token
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import VocabularySettings

COUNTS = {"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 9, "<unk>": 4}  # the example of Sennrich et al.


def merges_of(bpe: BPE) -> list[list[str]]:
    merges: list[list[str]] = json.loads(bpe.file_content)["model"]["merges"]
    return merges


def test_most_frequent_pair_is_merged_first() -> None:
    # "e s" and "s t</w>" occur 9 times. After merging "e s", "es t</w>" occurs 9 times, then "l o" 7 times.
    bpe = BPE.train(COUNTS, 3)
    assert merges_of(bpe) == [["e", "s"], ["es", "t</w>"], ["l", "o"]]
    assert bpe.split_word("newest") == ("n", "e", "w", "est</w>")
    assert bpe.split_word("lowest") == ("lo", "w", "est</w>")


def test_merges_stop_when_every_word_is_one_sub_word() -> None:
    assert len(merges_of(BPE.train(COUNTS, 7))) == 7
    all_of_them = BPE.train(COUNTS, 10_000)
    assert 7 < len(merges_of(all_of_them)) < 40
    assert [all_of_them.split_word(word) for word in COUNTS] == [
        ("low</w>",), ("lower</w>",), ("newest</w>",), ("widest</w>",), ("<eos>",), ("<unk>",),
    ]  # fmt: skip


def test_two_merges_may_give_the_same_sub_word() -> None:
    bpe = BPE.train({"abc": 10, "xab": 9, "xbc": 9, "ab": 9, "bcx": 8, "abcd": 7}, 8)
    assert len(merges_of(bpe)) == 8


def test_characters_are_sub_words_inside_and_at_word_ends() -> None:
    bpe = BPE.train({"ab": 1}, 1)
    assert bpe.subwords == {"a", "b", "a</w>", "b</w>", "ab</w>"}
    assert bpe.split_word("ba") == ("b", "a</w>")


def test_symbols_and_words_with_unknown_characters_stay_whole() -> None:
    bpe = BPE.train(COUNTS, 4)
    for word in ("<unk>", "<eos>", "löw", "X"):
        assert bpe.split_word(word) == (word,)
        assert word not in bpe.subwords
        assert bpe.ends_word(word)
    assert not {"<", ">", "u", "k"} & bpe.subwords  # <unk> is not a word to learn from


@pytest.mark.parametrize("word", ["a</w>b", "<unk>s", "x<eos>", "<s>", "<pad>"])
def test_no_sub_word_equals_a_symbol_or_the_word_end_mark(word: str) -> None:
    bpe = BPE.train({word: 50, "abs": 3}, 100)
    assert bpe.split_word(word) == (*word[:-1], word[-1] + "</w>")
    assert {piece for piece in bpe.subwords if len(piece.removesuffix("</w>")) > 1} <= {"ab", "bs</w>", "abs</w>"}
    assert bpe.join(bpe.split_word(word)) == [word]


@given(st.lists(st.text(st.sampled_from("ab<>/ws\u00a0é"), min_size=1, max_size=6), max_size=8), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_join_restores_the_words(words: list[str], number: int) -> None:
    bpe = BPE.train(dict.fromkeys(words, 2), number)
    tokens = [token for word in words for token in bpe.split_word(word)]
    assert bpe.join(tokens) == words
    assert sum(map(bpe.ends_word, tokens)) == len(words)


def test_known_parts_replaces_unseen_characters_by_unk() -> None:
    bpe = BPE.train(COUNTS, 3)
    assert bpe.split_at_unknown("löwëäst") == ["l", "<unk>", "w", "<unk>", "st"]
    assert bpe.split_at_unknown("XYlow") == ["<unk>", "low"]
    assert bpe.split_at_unknown("lowX") == ["low", "<unk>"]
    assert bpe.split_at_unknown("ÄÖ") == ["<unk>"]
    for whole in ("lowest", "<eos>", "<unk>"):
        assert bpe.split_at_unknown(whole) == [whole]
    assert BPE.train({"<eos>s": 1}, 3).split_at_unknown("X<eos>") == [
        "<unk>",
        "<unk>",
    ]  # <eos> cannot occur inside a word
    lines = BPE.train({"猫がいる": 2, "犬がいる": 1}, 4)
    assert lines.split_at_unknown("犬が鳥いる") == ["犬が", "<unk>", "いる"]


def test_of_text_splits_sub_words_the_text_does_not_have() -> None:
    bpe = BPE.train(COUNTS, 5)
    assert merges_of(bpe)[1:] == [["es", "t</w>"], ["l", "o"], ["e", "w"], ["n", "ew"]]
    part = bpe.restrict_to_text(["low", "wen", "tests", "<eos>"])
    assert part.subwords == {"lo", "es", *"lowents", *(f"{character}</w>" for character in "lowents")}
    assert part.split_word("newest") == ("n", "e", "w", "es", "t</w>")  # instead of new and est</w>
    assert part.split_word("lowest") == ("lo", "w", "es", "t</w>")
    assert part.split_word("wide") == ("wide",)
    assert part.split_at_unknown("wide") == ["w", "<unk>", "e"]  # the text has no i and no d
    assert part.file_content == bpe.file_content
    assert bpe.restrict_to_tokens(part.subwords) == part
    assert bpe.restrict_to_tokens([*bpe.subwords, "other"]) is bpe


@given(
    st.lists(st.text(st.sampled_from("abc<>/w"), min_size=1, max_size=8), min_size=1, max_size=8),
    st.lists(st.text(st.sampled_from("abc<>/w"), min_size=1, max_size=8), max_size=8),
    st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_join_restores_words_after_of_text(text_words: list[str], other_words: list[str], number: int) -> None:
    bpe = BPE.train(dict.fromkeys([*text_words, *other_words], 2), number)
    part = bpe.restrict_to_text(text_words)
    assert [part.split_word(word) for word in text_words] == [bpe.split_word(word) for word in text_words]
    for word in other_words:
        known = set(word) <= set("".join(text_words))
        assert part.subwords.issuperset(part.split_word(word)) == known
        assert part.join(part.split_word(word)) == [word]


def test_of_text_splits_a_very_long_sub_word() -> None:
    word = "".join(map(chr, range(0x4E00, 0x4E00 + 3_000)))
    bpe = BPE.train({word: 2}, 10_000)
    assert bpe.split_word(word) == (f"{word}</w>",)
    assert len(bpe.restrict_to_text(word).split_word(word)) == len(word)


def test_join_keeps_unfinished_words() -> None:
    bpe = BPE.train(COUNTS, 3)
    assert bpe.join(["lo", "<eos>", "est</w>", "lo", "w"]) == ["lo", "<eos>", "est", "low"]


def test_count_counts_sub_words() -> None:
    bpe = BPE.train(COUNTS, 3)
    counts = bpe.count_subwords(COUNTS)
    assert counts["est</w>"] == 6 + 3
    assert counts["lo"] == 5 + 2
    assert (counts["<eos>"], counts["<unk>"]) == (9, 4)
    assert counts["es"] == 0  # only a step to est</w>, but other words may need it
    assert set(counts) == bpe.subwords | {"<eos>", "<unk>"}
    assert sum(counts.values()) == sum(count * len(bpe.split_word(word)) for word, count in COUNTS.items())


TRAIN = """
import sys
from reefknot.lab.text.bpe import BPE
words = [f"{a}{b}{c}" for a in "abcdef" for b in "ghijkl" for c in "mnopqr"]
if sys.argv[1] == "reversed":
    words.reverse()
sys.stdout.buffer.write(BPE.train(dict.fromkeys(words, 3), 60).file_content)  # nothing but ties
"""


def test_training_is_reproducible_across_processes() -> None:
    commands = [[sys.executable, "-c", TRAIN, order] for order in ("straight", "straight", "reversed")]
    files = {subprocess.run(command, check=True, capture_output=True).stdout for command in commands}
    assert len(files) == 1
    assert len(merges_of(BPE(files.pop()))) == 60


def test_file_is_read_by_hugging_face_tokenizers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    bpe = BPE.train({**COUNTS, "no\u00a0break": 2}, 12)
    (tmp_path / "tokenizer.json").write_bytes(bpe.file_content)
    reader = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "low lowest\tnewer <unk>\nno\u00a0break widest <eos>"
    words = ["low", "lowest", "newer", "<unk>", "no\u00a0break", "widest", "<eos>"]
    assert reader.encode(text).tokens == [token for word in words for token in bpe.split_word(word)]
    assert reader.encode("l\u00f6w").tokens == ["l", "<unk>", "w</w>"]
    assert reader.decode(reader.encode("low newest widest").ids) == "low newest widest"


def test_tokenizers_package_is_imported_lazily() -> None:
    program = "import sys, reefknot.lab.text.dataset; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_readable_marks_unfinished_sub_words() -> None:
    tokens = ("lo", "w", "est</w>", "<eos>", "<unk>", "</w></w>")
    assert [format_token(token) for token in tokens] == ["lo…", "w…", "est", "<eos>", "<unk>", "</w>"]


def test_very_long_word_is_learned_in_chunks() -> None:
    """A line without spaces is one word, and training time grows with the square of its length."""
    draw = random.Random(0)
    line = "".join(chr(0x4E00 + min(draw.randrange(300), draw.randrange(300))) for _ in range(20_000))
    bpe = BPE.train({line: 1}, 200)
    assert bpe == BPE.train({line[first : first + 4_096]: 1 for first in range(0, len(line), 4_096)}, 200)
    pieces = bpe.split_word(line * 10)
    assert "".join(pieces) == f"{line * 10}</w>"
    assert len(pieces) < 196_000


def test_only_unknown_characters_are_unknown_if_the_settings_say_so(tmp_path: Path) -> None:
    by_character = VocabularySettings.model_validate({"bpe": {"merges": 10, "unknown": "character"}})
    vocabulary = Vocabulary.from_counts({"天地玄黃": 5, "地玄": 3, "<eos>": 2}, by_character)
    words = [vocabulary.words[index] for index in vocabulary.encode(["天地X玄黃", "<eos>"])]
    assert words.count("<unk>") == 1
    assert "".join(words).replace("</w>", "") == "天地<unk>玄黃<eos>"
    vocabulary.save(tmp_path / "vocabulary.json")
    loaded = Vocabulary.load(tmp_path / "vocabulary.json")
    assert loaded.encode(["天地X玄黃"]) == vocabulary.encode(["天地X玄黃"])

    default = VocabularySettings.model_validate({"bpe": {"merges": 10}})
    assert default.identity["bpe"] == {"merges": 10}
    by_word = Vocabulary.from_counts({"天地玄黃": 5, "地玄": 3, "<eos>": 2}, default)
    assert by_word.tokens_sha256 != vocabulary.tokens_sha256
    assert by_word.encode(["天地X玄黃"]) == [by_word.unk]
