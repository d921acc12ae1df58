"""Reading words from bytes: line ends, whitespace, byte order marks and invalid text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import DataError
from reefknot.storage.lines import read_file, read_text, words_in


def words_of(data: bytes, tmp_path: Path) -> list[list[str]]:
    path = tmp_path / "text"
    path.write_bytes(data)
    return [line.words for line in read_file(path)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"one", [["one"]]),
        (b"one\n", [["one"]]),
        (b"one\n\n", [["one"], []]),
        (b"a b\r\nc\r\n", [["a", "b"], ["c"]]),
        (b"\xef\xbb\xbfa b\n\xef\xbb\xbfc\n", [["a", "b"], ["\ufeffc"]]),
        (b" \ta\x0b\x0cb \n", [["a", "b"]]),
        ("a\xa0b c\u2028d \u3000\n".encode(), [["a\xa0b", "c\u2028d", "\u3000"]]),
        (b"a\rb\n", [["a", "b"]]),
    ],
)
def test_lines_end_at_newlines_and_words_at_ascii_whitespace(
    data: bytes, expected: list[list[str]], tmp_path: Path
) -> None:
    assert words_of(data, tmp_path) == expected


def test_line_sizes_count_bytes_without_the_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbf" + "é b\r\n\nlast".encode())
    assert [line.size for line in read_file(path)] == [6, 1, 4]


def test_long_line_is_read_as_one_line(tmp_path: Path) -> None:
    [words] = words_of(b"word " * 200_000 + b"\n", tmp_path)
    assert len(words) == 200_000


@pytest.mark.parametrize(
    ("data", "line", "byte"),
    [
        (b"fine\nbad \0 here\n", 2, 9),
        (b"\0", 1, 0),
        (b"fine\nbad \xff here\n", 2, 9),
        (b"\xef\xbb\xbfab\xc3", 1, 5),
        (b"a\n\xed\xa0\x80\n", 2, 2),
        (b"\xff\xfea\0", 1, 3),
    ],
)
def test_invalid_text_error_names_file_line_and_byte(data: bytes, line: int, byte: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"text, line {line}: .*\bbyte {byte}\b"):
        words_of(data, tmp_path)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: cannot be read: No such file"):
        list(read_file(tmp_path / "absent"))


def test_lone_surrogate_is_rejected() -> None:
    with pytest.raises(DataError, match="the sentence: character 2 is not valid Unicode"):
        list(read_text("ab\ud800", "the sentence"))


WORD = st.text(st.characters(exclude_characters="\0 \t\n\v\f\r\ufeff", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(st.lists(WORD)))
def test_words_survive_joining_and_reading(lines: list[list[str]]) -> None:
    text = "".join(" ".join(words) + "\n" for words in lines)
    assert [line.words for line in read_text(text, "text")] == lines


def test_sentence_is_split_like_a_corpus() -> None:
    assert words_in("\ufeffa  b\u00a0c\r\nd", "the sentence") == ["a", "b\u00a0c", "d"]
    with pytest.raises(DataError, match="the sentence"):
        words_in("a\0b", "the sentence")
