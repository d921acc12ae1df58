"""Byte-pair encoding: the merges by hand, the same file every time, and words that come back as they were."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reefknot.errors import SettingsError
from reefknot.lab.text.bpe import BPE, readable

COUNTS = {"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 9, "<unk>": 4}  # the example of Sennrich et al.


def merges(bpe: BPE) -> list[list[str]]:
    found: list[list[str]] = json.loads(bpe.file)["model"]["merges"]
    return found


def test_pairs_are_joined_by_frequency() -> None:
    # e s and s t</w> stand together 9 times each; joining the first leaves es t</w> 9 times, then l o 7 times.
    bpe = BPE.train(COUNTS, 3)
    assert merges(bpe) == [["e", "s"], ["es", "t</w>"], ["l", "o"]]
    assert bpe.cut("newest") == ("n", "e", "w", "est</w>")
    assert bpe.cut("lowest") == ("lo", "w", "est</w>")


def test_as_many_merges_as_asked_for_where_the_text_allows() -> None:
    assert len(merges(BPE.train(COUNTS, 7))) == 7
    all_of_them = BPE.train(COUNTS, 10_000)
    assert 7 < len(merges(all_of_them)) < 40
    assert [all_of_them.cut(word) for word in COUNTS] == [
        ("low</w>",), ("lower</w>",), ("newest</w>",), ("widest</w>",), ("<eos>",), ("<unk>",),
    ]  # fmt: skip


def test_two_ways_to_one_piece_are_two_merges() -> None:
    bpe = BPE.train({"abc": 10, "xab": 9, "xbc": 9, "ab": 9, "bcx": 8, "abcd": 7}, 8)
    assert len(merges(bpe)) == 8


def test_characters_are_pieces_inside_and_at_the_end_of_words() -> None:
    bpe = BPE.train({"ab": 1}, 1)
    assert bpe.pieces == {"a", "b", "a</w>", "b</w>", "ab</w>"}
    assert bpe.cut("ba") == ("b", "a</w>")


def test_symbols_and_words_that_cannot_be_spelled_stay_whole() -> None:
    bpe = BPE.train(COUNTS, 4)
    for word in ("<unk>", "<eos>", "löw", "X"):
        assert bpe.cut(word) == (word,)
        assert word not in bpe.pieces
        assert bpe.ends_word(word)
    assert not {"<", ">", "u", "k"} & bpe.pieces  # nothing was learned from <unk>


@pytest.mark.parametrize("word", ["a</w>b", "<unk>s", "x<eos>", "<s>", "<pad>"])
def test_no_piece_looks_like_a_symbol_or_like_the_end_of_a_word(word: str) -> None:
    bpe = BPE.train({word: 50, "abs": 3}, 100)
    assert bpe.cut(word) == (*word[:-1], word[-1] + "</w>")
    assert {piece for piece in bpe.pieces if len(piece.removesuffix("</w>")) > 1} <= {"ab", "bs</w>", "abs</w>"}
    assert bpe.join(bpe.cut(word)) == [word]


@given(st.lists(st.text(st.sampled_from("ab<>/ws\u00a0é"), min_size=1, max_size=6), max_size=8), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_words_come_back(words: list[str], number: int) -> None:
    bpe = BPE.train(dict.fromkeys(words, 2), number)
    tokens = [token for word in words for token in bpe.cut(word)]
    assert bpe.join(tokens) == words
    assert sum(map(bpe.ends_word, tokens)) == len(words)


def test_a_word_is_cut_around_characters_that_training_has_not_seen() -> None:
    bpe = BPE.train(COUNTS, 3)
    assert bpe.known_parts("löwëäst") == ["l", "<unk>", "w", "<unk>", "st"]
    assert bpe.known_parts("XYlow") == ["<unk>", "low"]
    assert bpe.known_parts("lowX") == ["low", "<unk>"]
    assert bpe.known_parts("ÄÖ") == ["<unk>"]
    for whole in ("lowest", "<eos>", "<unk>"):
        assert bpe.known_parts(whole) == [whole]
    assert BPE.train({"<eos>s": 1}, 3).known_parts("X<eos>") == ["<unk>", "<unk>"]  # no line ends inside a word
    lines = BPE.train({"猫がいる": 2, "犬がいる": 1}, 4)
    assert lines.known_parts("犬が鳥いる") == ["犬が", "<unk>", "いる"]


def test_a_piece_that_a_text_does_not_have_is_cut_into_those_that_it_has() -> None:
    bpe = BPE.train(COUNTS, 5)
    assert merges(bpe)[1:] == [["es", "t</w>"], ["l", "o"], ["e", "w"], ["n", "ew"]]
    part = bpe.of_text(["low", "wen", "tests", "<eos>"])
    assert part.pieces == {"lo", "es", *"lowents", *(f"{character}</w>" for character in "lowents")}
    assert part.cut("newest") == ("n", "e", "w", "es", "t</w>")  # of new and est</w>
    assert part.cut("lowest") == ("lo", "w", "es", "t</w>")
    assert part.cut("wide") == ("wide",)
    assert part.known_parts("wide") == ["w", "<unk>", "e"]  # i and d are characters of other texts
    assert part.file == bpe.file
    assert bpe.restricted(part.pieces) == part
    assert bpe.restricted([*bpe.pieces, "other"]) is bpe


@given(
    st.lists(st.text(st.sampled_from("abc<>/w"), min_size=1, max_size=8), min_size=1, max_size=8),
    st.lists(st.text(st.sampled_from("abc<>/w"), min_size=1, max_size=8), max_size=8),
    st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_words_come_back_whatever_pieces_are_kept(one: list[str], other: list[str], number: int) -> None:
    bpe = BPE.train(dict.fromkeys([*one, *other], 2), number)
    part = bpe.of_text(one)
    assert [part.cut(word) for word in one] == [bpe.cut(word) for word in one]
    for word in other:
        known = set(word) <= set("".join(one))
        assert part.pieces.issuperset(part.cut(word)) == known
        assert part.join(part.cut(word)) == [word]


def test_merges_of_a_very_long_piece_are_undone() -> None:
    word = "".join(map(chr, range(0x4E00, 0x4E00 + 3_000)))
    bpe = BPE.train({word: 2}, 10_000)
    assert bpe.cut(word) == (f"{word}</w>",)
    assert len(bpe.of_text(word).cut(word)) == len(word)


def test_unfinished_words_are_words_too() -> None:
    bpe = BPE.train(COUNTS, 3)
    assert bpe.join(["lo", "<eos>", "est</w>", "lo", "w"]) == ["lo", "<eos>", "est", "low"]


def test_counts_are_those_of_the_pieces() -> None:
    bpe = BPE.train(COUNTS, 3)
    counts = bpe.count(COUNTS)
    assert counts["est</w>"] == 6 + 3
    assert counts["lo"] == 5 + 2
    assert (counts["<eos>"], counts["<unk>"]) == (9, 4)
    assert counts["es"] == 0  # a step to est</w>, which a word to come may still need
    assert set(counts) == bpe.pieces | {"<eos>", "<unk>"}
    assert sum(counts.values()) == sum(count * len(bpe.cut(word)) for word, count in COUNTS.items())


TRAIN = """
import sys
from reefknot.lab.text.bpe import BPE
words = [f"{a}{b}{c}" for a in "abcdef" for b in "ghijkl" for c in "mnopqr"]
if sys.argv[1] == "reversed":
    words.reverse()
sys.stdout.buffer.write(BPE.train(dict.fromkeys(words, 3), 60).file)  # nothing but ties
"""


def test_every_process_learns_the_same() -> None:
    commands = [[sys.executable, "-c", TRAIN, order] for order in ("straight", "straight", "reversed")]
    files = {subprocess.run(command, check=True, capture_output=True).stdout for command in commands}
    assert len(files) == 1
    assert len(merges(BPE(files.pop()))) == 60


def test_the_file_reads_elsewhere(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    bpe = BPE.train({**COUNTS, "no\u00a0break": 2}, 12)
    (tmp_path / "tokenizer.json").write_bytes(bpe.file)
    reader = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "low lowest\tnewer <unk>\nno\u00a0break widest <eos>"
    words = ["low", "lowest", "newer", "<unk>", "no\u00a0break", "widest", "<eos>"]
    assert reader.encode(text).tokens == [token for word in words for token in bpe.cut(word)]
    assert reader.encode("l\u00f6w").tokens == ["l", "<unk>", "w</w>"]
    assert reader.decode(reader.encode("low newest widest").ids) == "low newest widest"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SettingsError, match=r"vocabulary\.bpe needs the package tokenizers"):
        BPE.train(COUNTS, 3)


def test_the_package_is_imported_only_where_words_are_cut() -> None:
    program = "import sys, reefknot.lab.text.dataset; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_pieces_as_people_read_them() -> None:
    tokens = ("lo", "w", "est</w>", "<eos>", "<unk>", "</w></w>")
    assert [readable(token) for token in tokens] == ["lo…", "w…", "est", "<eos>", "<unk>", "</w>"]


def test_a_very_long_word_teaches_as_its_stretches_do() -> None:
    """A line of a script without spaces is one word, and learning from one takes time with the square of its length."""
    draw = random.Random(0)
    line = "".join(chr(0x4E00 + min(draw.randrange(300), draw.randrange(300))) for _ in range(20_000))
    bpe = BPE.train({line: 1}, 200)
    assert bpe == BPE.train({line[first : first + 4_096]: 1 for first in range(0, len(line), 4_096)}, 200)
    pieces = bpe.cut(line * 10)
    assert "".join(pieces) == f"{line * 10}</w>"
    assert len(pieces) < 196_000
