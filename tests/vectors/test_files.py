"""Files of word vectors: every format is read back exactly, and damaged or foreign files raise clear errors."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from reefknot.errors import DataError, ResourceError, SettingsError
from reefknot.storage import files as durable
from reefknot.vectors import binary_files, files, text_files, word_vectors
from reefknot.vectors.files import FORMATS, fingerprint, read_vectors, write_vectors
from reefknot.vectors.word_vectors import WordVectors

from .sample_words import PLAIN, STRANGE

SUPPORTED = {
    "word2vec": {"\ufeff"},
    "word2vec-binary": {"a\tb", "a\rb", "\ufeff", "\x0b", "a\x0bb"},
    "glove": set[str](),
    "projector": {"a b", " ", "\x0b", "a\x0bb"},
    "safetensors": set(STRANGE),
}


def _vectors(words: tuple[str, ...], dim: int = 5) -> WordVectors:
    generator = np.random.default_rng(0)
    scale = 10.0 ** generator.integers(-30, 30, (len(words), dim))
    return WordVectors(words, (generator.standard_normal((len(words), dim)) * scale).astype(np.float32))


def _same(first: WordVectors, second: WordVectors) -> bool:
    return first.words == second.words and first.vectors_VD.tobytes() == second.vectors_VD.tobytes()


@pytest.mark.parametrize("block_bytes", [1, 40, 1 << 24])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_read_back_bitwise(
    format: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (word_vectors, text_files, binary_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    vectors = _vectors(PLAIN)
    write_vectors(vectors, tmp_path / "out", format)
    assert _same(read_vectors(tmp_path / "out", format), vectors)
    assert _same(read_vectors(tmp_path / "out"), vectors)  # detected from the content
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dim", [1, 300])
def test_format_is_detected_for_small_and_large_dimensions(format: str, dim: int, tmp_path: Path) -> None:
    vectors = _vectors(("a", "b", "c"), dim)
    write_vectors(vectors, tmp_path / "out", format)
    assert _same(read_vectors(tmp_path / "out"), vectors)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("word", STRANGE)
def test_unsupported_word_is_rejected_with_alternatives(format: str, word: str, tmp_path: Path) -> None:
    vectors = _vectors((word, "b"))
    if word in SUPPORTED[format]:
        write_vectors(vectors, tmp_path / "out", format)
        assert _same(read_vectors(tmp_path / "out"), vectors)
        return
    alternatives = " or ".join(name for name in FORMATS if word in SUPPORTED[name])
    with pytest.raises(DataError, match=re.escape(f"cannot store the word {word!r}; use {alternatives}")):
        write_vectors(vectors, tmp_path / "out", format)
    assert not list(tmp_path.iterdir())


def test_safetensors_stores_any_word_and_counts(tmp_path: Path) -> None:
    words = (*PLAIN, *STRANGE, "\x00", "\ud7ff")
    vectors = WordVectors(words, _vectors(words).vectors_VD, np.arange(len(words)))
    write_vectors(vectors, tmp_path / "v.safetensors", "safetensors")
    loaded = read_vectors(tmp_path / "v.safetensors")
    assert _same(loaded, vectors)
    assert loaded.counts is not None
    assert loaded.counts.tolist() == list(range(len(words)))


def _word2vec(*lines: str, header: str = "2 3") -> bytes:
    """Return the content of a text file with a header, or without a header if it is empty."""
    all_lines = [header, *lines] if header else list(lines)
    return "".join(f"{line}\n" for line in all_lines).encode(errors="surrogateescape")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (_word2vec("a 1 2 3", header="2 3"), "is truncated: it has 1 of the 2 words"),
        (_word2vec("a 1 2 3", "b 4 5 6", "c 7 8 9"), "has more words than the 2 that its header declares"),
        (_word2vec("a 1 2 3", "b 4 5"), "line 3: expected 3 numbers after the word, got 2"),
        (_word2vec("a 1 2 3", "b 4 5 6 7"), "line 3: expected 3 numbers after the word, got 4"),
        (_word2vec("a 1 2 3", "b 4 x 6"), "line 3: expected 3 numbers after the word, got 'x'"),
        (_word2vec("a 1 x 3", "b 4 5 6"), "line 2: expected 3 numbers after the word, got 'x'"),
        (_word2vec("a 1 2", "b 4 5 6"), "line 2: expected 3 numbers after the word, got 2"),
        (_word2vec("a x y z", "b 4 5 6"), "line 2: expected 3 numbers after the word, got 'x'"),
        (
            _word2vec("café x.12345678 y.12345678 z", "b 4 5 6"),
            "line 2: expected 3 numbers after the word, got 'x.12345678'",
        ),
        (_word2vec("caf\udce9 1 x 3", "b 4 5 6"), "line 2: expected 3 numbers after the word, got 'x'"),
        (_word2vec("a 1", "b 2", "c 3", header="3 2"), "line 2: expected 2 numbers after the word, got 1"),
        (_word2vec("a x", "", "b y", header="2 2"), "line 2: expected 2 numbers after the word, got 0"),
        (
            _word2vec(*(f"word{number} 1" for number in range(1500)), header="1500 2"),
            "line 2: expected 2 numbers after the word, got 1",
        ),
        (_word2vec(header="3 2"), "is truncated: its header declares 3 words of 2 numbers"),
        (_word2vec("a 1 2 1_0", "b 4 5 6"), "line 2: expected 3 numbers after the word, got '1_0'"),
        (_word2vec("a 1 2 3", "b 4 5 nan"), r"the vector of 'b' \(word 2\) contains NaN"),
        (_word2vec("a 1 2 3", "b 4 -inf 5"), r"the vector of 'b' \(word 2\) contains NaN or a number too large"),
        (_word2vec("a 1 2 3", "b 4 1e99 5"), r"the vector of 'b' \(word 2\) contains NaN or a number too large"),
        (_word2vec("a 1 2 3", header="999999999999 3"), "is truncated: its header declares 999,999,999,999 words of 3"),
        (_word2vec("a 1 2 3", header="0 3"), "its header declares 0 words of 3 numbers"),
        (_word2vec("a 1 2 3", "b 1 2", header=""), "line 2: expected 3 numbers after the word, got 2"),
        (_word2vec("a 1", "b 1 2", "c 1 2", header=""), "line 1: expected 2 numbers after the word, got 1"),
        (_word2vec("a 1 2 3", "b 1 2 3", "c 1 2", header=""), "line 3: expected 3 numbers after the word, got 2"),
        (_word2vec("a 1 2 3", "b 1  2 3", header=""), "line 2: two spaces in a row"),
        (
            _word2vec("nothing", "but", "words", header=""),
            "is not a file of word vectors in any of the formats word2vec, ",
        ),
        (bytes(range(256)) * 8, "is not a file of word vectors"),
        (b"\x1f\x8b\x08\x00rest", "is compressed; unpack it"),
        (b"PK\x03\x04rest", "is compressed"),
        (b"BZh91AY&SYrest", "is compressed"),
        (b"2 3\n" + b"a " + np.ones(3, "<f4").tobytes(), "is truncated: its header declares 2 words of 3"),
        (
            b"2 3\n" + b"a " + np.ones(3, "<f4").tobytes() + b"b " + b"\x7f" * 11,
            "is truncated or not a word2vec file: .* the first 1 of the 2 words",
        ),
        (b"1 3\n" + b"a " + np.ones(3, "<f4").tobytes() + b"b " + b"\x7f" * 12, "continues after the 1 words"),
        (b"1 2\n" + b"a " + np.array([1, np.nan], "<f4").tobytes(), "the vector of 'a' .* contains NaN"),
        (b"3 2\n" + bytes(100), "truncated or not a word2vec file"),
    ],
)
def test_damaged_file_is_rejected(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        read_vectors(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_given_format_is_not_replaced_by_the_detected_one(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_bytes(_word2vec("a 1 2 3", header=""))
    for format in ("word2vec", "word2vec-binary"):
        with pytest.raises(DataError, match=r"not a word2vec header.*'400000 300'.*format glove"):
            read_vectors(path, format)
    with pytest.raises(DataError, match="not a safetensors file"):
        read_vectors(path, "safetensors")
    with pytest.raises(DataError, match="not a folder of TensorBoard's projector"):
        read_vectors(path, "projector")
    with pytest.raises(SettingsError, match="unknown format of word vectors 'fasttext'; the formats are word2vec"):
        read_vectors(path, "fasttext")


def test_missing_file_and_empty_folder_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none: No such file"):
        read_vectors(tmp_path / "none")
    with pytest.raises(DataError, match="a folder without word vectors"):
        read_vectors(tmp_path)


@pytest.mark.parametrize("header", ["3 2\n", ""])
def test_byte_order_mark_and_trailing_whitespace_are_ignored(header: str, tmp_path: Path) -> None:
    # The original C program ends its lines with a space. Some editors write a byte order mark.
    path = tmp_path / "v.txt"
    path.write_bytes(b"\xef\xbb\xbf" + f"{header}a 1 2 \r\nb 3 4 \r\nc 5 6 \r\n\r\n".encode())
    loaded = read_vectors(path)
    assert loaded.words == ("a", "b", "c")
    assert loaded.vectors_VD.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_words_of_other_programs_may_contain_spaces(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_bytes(_word2vec(". . . 1 2 3", "at name@domain.com 4 5 6", "the 7 8 9", "a 1 1 1", "b 1 1 1", header=""))
    loaded = read_vectors(path)
    assert loaded.words[:3] == (". . .", "at name@domain.com", "the")
    assert loaded.vector("at name@domain.com").tolist() == [4, 5, 6]


def test_dimension_is_detected_if_most_words_contain_spaces(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_bytes(_word2vec("x 1 2 9", "a b 1 2 3", "new york 3 4 5", ". . . 3 3 3", header=""))
    loaded = read_vectors(path)
    assert loaded.words == ("x", "a b", "new york", ". . .")
    assert loaded.vectors_VD.tolist() == [[1, 2, 9], [1, 2, 3], [3, 4, 5], [3, 3, 3]]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("1 0.25 0.3", "a 0.1 0.2"), ("1", "a")),
        (("1984 2 0 1", "2 1 1 1"), ("1984", "2")),
        (("1984 2", "a 3", "b 4"), ("1984", "a", "b")),
        (("2 0.5", "a 3", "b 4"), ("2", "a", "b")),
        (("BZhou 1 2", "b 1 2"), ("BZhou", "b")),
    ],
)
def test_first_word_like_a_header_or_archive_is_read_as_a_word(
    lines: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "v").write_bytes(_word2vec(*lines, header=""))
    assert read_vectors(tmp_path / "v").words == words


def test_sampled_lines_decide_if_the_first_line_is_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v").write_bytes(_word2vec("a 3", "new york 4", header="3 2"))
    with pytest.raises(DataError, match="line 2: expected 2 numbers after the word, got 1"):
        read_vectors(tmp_path / "v")
    monkeypatch.setattr(text_files, "_SAMPLE_LINES", 1)
    assert read_vectors(tmp_path / "v").words == ("3", "a", "new york")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_written_files_with_numeric_words_are_recognised(format: str, dim: int, tmp_path: Path) -> None:
    for words in (("1984", "a"), ("2", "a", "b"), ("1",), ("BZh", "b")):
        vectors = WordVectors(words, np.ones((len(words), dim), np.float32))
        write_vectors(vectors, tmp_path / "out", format)
        assert _same(read_vectors(tmp_path / "out"), vectors)


def test_ambiguous_file_is_not_written(tmp_path: Path) -> None:
    vectors = _vectors(("PK\x03\x04", "b"))
    with pytest.raises(
        DataError, match=r"out is not written: .*PK.* the format glove would be mistaken .*; use safetensors"
    ):
        write_vectors(vectors, tmp_path / "out", "glove")
    assert not list(tmp_path.iterdir())
    write_vectors(vectors, tmp_path / "out", "safetensors")
    assert _same(read_vectors(tmp_path / "out"), vectors)


@pytest.mark.parametrize("newline", [b"", b"\n"])
@pytest.mark.parametrize(("size", "dim"), [(1, 1), (1, 2), (2, 5)])
def test_small_binary_file_is_not_mistaken_for_text(size: int, dim: int, newline: bytes, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        rows = generator.standard_normal((size, dim)).astype("<f4")
        pairs = [b"w%d " % number + row.tobytes() + newline for number, row in enumerate(rows)]
        (tmp_path / "v.bin").write_bytes(b"%d %d\n" % (size, dim) + b"".join(pairs))
        assert np.array_equal(read_vectors(tmp_path / "v.bin").vectors_VD, rows)


@pytest.mark.parametrize(
    "numbers", [(b"printed?", b"letters>"), (b"7\n]H\xabQ4^", b"1 2 3 4?"), (b"0\n\x1a\xbd....", b"1\n2\n3\n4?")]
)
def test_binary_file_with_printable_numbers_is_recognised(numbers: tuple[bytes, bytes], tmp_path: Path) -> None:
    (tmp_path / "v.bin").write_bytes(b"2 2\na %bb %b" % numbers)
    loaded = read_vectors(tmp_path / "v.bin")
    assert loaded.words == ("a", "b")
    assert loaded.vectors_VD.tobytes() == b"".join(numbers)


def test_first_vector_of_a_repeated_word_is_kept_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_bytes(_word2vec("a 1 2 3", "b 4 5 6", "a 7 8 9", header="3 3"))
    notes: list[str] = []
    loaded = read_vectors(path, notify=notes.append)
    assert loaded.words == ("a", "b")
    assert loaded.vector("a").tolist() == [1, 2, 3]
    assert notes == [f"{path}: 1 word ('a') is repeated; only the first vector of a word is kept"]


@pytest.mark.parametrize("binary", [False, True])
def test_invalid_utf8_is_read_as_escapes_with_a_note(binary: bool, tmp_path: Path) -> None:
    path = tmp_path / "v"
    numbers = np.ones(2, "<f4").tobytes()
    if binary:
        path.write_bytes(b"2 2\ncaf\xe9 %b\nb %b\n" % (numbers, numbers))
    else:
        path.write_bytes(b"2 2\ncaf\xe9 1 1\nb 1 1\n")
    notes: list[str] = []
    loaded = read_vectors(path, notify=notes.append)
    assert loaded.words == ("caf\\xe9", "b")
    assert notes == [f"{path}: 1 word ('caf\\\\xe9') is not valid UTF-8; the invalid bytes are read as \\xNN"]
    # The escapes are ordinary text, which every format can store.
    for format in FORMATS:
        write_vectors(loaded, tmp_path / format, format)


def test_newline_after_a_binary_vector_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "v.bin"
    numbers = np.full(2, 0.5, "<f4").tobytes()
    path.write_bytes(b"2 2\na %b\nb %b\n" % (numbers, numbers))
    assert read_vectors(path).words == ("a", "b")


def test_empty_word_of_another_program_is_read(tmp_path: Path) -> None:
    numbers = np.ones(2, "<f4").tobytes()
    for content in (b"2 2\n 1 1\nb 1 1\n", b" 1 1\nb 1 1\n", b"2 2\n " + numbers + b"b " + numbers):
        (tmp_path / "v").write_bytes(content)
        assert read_vectors(tmp_path / "v").words == ("", "b")


@pytest.mark.parametrize("format", FORMATS)
def test_random_damage_is_rejected_or_gives_finite_vectors(format: str, tmp_path: Path) -> None:
    write_vectors(_vectors(PLAIN), tmp_path / "out", format)
    path = tmp_path / "out" / "vectors.tsv" if format == "projector" else tmp_path / "out"
    intact = path.read_bytes()
    generator = random.Random(0)
    num_rejected = 0
    for _ in range(300):
        # Replace a few bytes.
        start = generator.randrange(len(intact))
        length = generator.choice((0, 1, 4, 50))
        inserted = generator.randbytes(generator.choice((0, 1, 4)))
        path.write_bytes(intact[:start] + inserted + intact[start + length :])
        try:
            loaded = read_vectors(tmp_path / "out", generator.choice((format, None)))
        except DataError:
            num_rejected += 1
        else:
            assert np.isfinite(loaded.vectors_VD).all()
    assert num_rejected > 100


def test_only_leaves_out_all_other_words(tmp_path: Path) -> None:
    vectors = _vectors(PLAIN)
    for format in FORMATS:
        write_vectors(vectors, tmp_path / format, format)
        assert _same(read_vectors(tmp_path / format, only={"日本", "the", "none"}), vectors.select(["the", "日本"]))


def test_projector_metadata_may_have_columns_but_needs_every_word(tmp_path: Path) -> None:
    (tmp_path / "vectors.tsv").write_text("1\t2\n3\t4\n")
    (tmp_path / "metadata.tsv").write_text("word\tcount\nb c\t7\na\t5\n")
    assert read_vectors(tmp_path).words == ("b c", "a")
    for metadata, message in (("a\n", "fewer words"), ("a\nb\nc\n", "more words")):
        (tmp_path / "metadata.tsv").write_text(metadata)
        with pytest.raises(DataError, match=message):
            read_vectors(tmp_path)
    (tmp_path / "metadata.tsv").write_text("a\nb\n")
    for rows in ("1\t2\n3\n", "1\t2\n3\tx\n", "1\t2\n3\t\t4\n"):
        (tmp_path / "vectors.tsv").write_text(rows)
        with pytest.raises(DataError, match=r"vectors.tsv, line 2: expected 2 numbers"):
            read_vectors(tmp_path)
    (tmp_path / "metadata.tsv").unlink()
    with pytest.raises(DataError, match=r"has no metadata.tsv"):
        read_vectors(tmp_path)


def test_projector_configuration_names_the_files(tmp_path: Path) -> None:
    write_vectors(_vectors(("a", "b")), tmp_path / "out", "projector")
    config = (tmp_path / "out" / "projector_config.pbtxt").read_text()
    named = re.findall(r'_path: "(.*)"', config)
    assert sorted(named) == ["metadata.tsv", "vectors.tsv"]
    assert all((tmp_path / "out" / name).is_file() for name in named)


def test_safetensors_files_with_other_content_are_rejected(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    def encode(value: object) -> np.ndarray:
        return np.frombuffer(json.dumps(value).encode(), np.uint8)

    matrix = np.ones((2, 3), np.float64)
    path = tmp_path / "v.safetensors"
    for tensors, message in (
        ({"weight": matrix}, "needs the tensors vectors and words"),
        ({"vectors": matrix[0].copy(), "words": encode(["a", "b", "c"])}, "must be a matrix"),
        ({"vectors": matrix.astype(int), "words": encode(["a", "b"])}, "must be a matrix of floating-point"),
        (
            {"vectors": matrix * 1e300, "words": encode(["a", "b"])},
            r"the vector of 'a' \(word 1\) contains NaN or a number too",
        ),
        ({"vectors": matrix, "words": encode(["a"])}, "a JSON list of 2 strings"),
        ({"vectors": matrix, "words": encode(["a", 2])}, "a JSON list of 2 strings"),
        ({"vectors": matrix, "words": encode({"a": 1})}, "a JSON list of 2 strings"),
        ({"vectors": matrix, "words": encode("\ud800")[:-1]}, "truncated or not valid JSON"),
        ({"vectors": matrix, "words": encode(["a", "\ud800"])}, "lone surrogate"),
        ({"vectors": matrix, "words": matrix}, "truncated or not valid JSON"),
        ({"vectors": matrix, "words": encode(["a", "b"]), "counts": np.array([1])}, "counts must be"),
    ):
        save_file(tensors, path)
        with pytest.raises(DataError, match=message):
            read_vectors(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="truncated or not a safetensors"):
        read_vectors(path)


@pytest.mark.parametrize("format", FORMATS)
def test_files_that_are_not_word_vectors_are_not_replaced(format: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("keep")
    (tmp_path / "file").write_text("keep")
    taken = "file" if format == "projector" else "folder"
    with pytest.raises(SettingsError, match=r"use the path of a"):
        write_vectors(_vectors(("a",)), tmp_path / taken, format)
    if format == "projector":
        with pytest.raises(SettingsError, match="contains 'mine', which is not a file of the projector"):
            write_vectors(_vectors(("a",)), tmp_path / "folder", format)
    assert (tmp_path / "folder" / "mine").read_text() == (tmp_path / "file").read_text() == "keep"


@pytest.mark.parametrize("format", FORMATS)
def test_writing_again_replaces_the_old_file(format: str, tmp_path: Path) -> None:
    write_vectors(_vectors(("a", "b", "c")), tmp_path / "out", format)
    write_vectors(_vectors(("d",)), tmp_path / "out", format)
    assert read_vectors(tmp_path / "out").words == ("d",)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_failed_write_keeps_the_old_file_and_leaves_no_others(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _vectors(("a", "b", "c"))
    write_vectors(old, tmp_path / "out", format)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(durable, "sync", full)
        with pytest.raises(ResourceError, match=r"cannot write .*out: No space left.*free some space"):
            write_vectors(_vectors(("d",)), tmp_path / "out", format)
    with monkeypatch.context() as patched:
        patched.setattr(files, "_read_file", lambda *_, **__: _vectors(("e",)))
        with pytest.raises(DataError, match="is not written: the written data was not read back the same at 'd'"):
            write_vectors(_vectors(("d",)), tmp_path / "out", format)
    assert _same(read_vectors(tmp_path / "out"), old)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_interrupt_between_the_two_renames_loses_no_folder(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _vectors(("a", "b", "c"))
    new = _vectors(("d",))
    write_vectors(old, tmp_path / "out", "projector")
    commit = durable.commit
    renames_done = 0

    def interrupted(temporary: Path, path: Path) -> None:
        nonlocal renames_done
        if renames_done == renames:
            renames_done += 1
            raise KeyboardInterrupt
        commit(temporary, path)
        renames_done += 1
        if renames_done == renames == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(durable, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_vectors(new, tmp_path / "out", "projector")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert _same(read_vectors(tmp_path / "out"), new if renames == 2 else old)


def test_old_folder_is_kept_until_the_new_folder_is_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_vectors(_vectors(("a",)), tmp_path / "out", "projector")
    words_on_disk: list[list[tuple[str, ...]]] = []
    commit = durable.commit

    def watched(temporary: Path, path: Path) -> None:
        commit(temporary, path)
        words_on_disk.append(sorted(read_vectors(folder).words for folder in tmp_path.iterdir()))

    monkeypatch.setattr(durable, "commit", watched)
    write_vectors(_vectors(("b",)), tmp_path / "out", "projector")
    assert words_on_disk == [[("a",), ("b",)], [("a",), ("b",)]]


def test_writing_no_words_or_into_a_missing_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no words to write"):
        write_vectors(WordVectors((), np.zeros((0, 3), np.float32)), tmp_path / "out", "glove")
    with pytest.raises(ResourceError, match=r"cannot write .*: No such file or directory"):
        write_vectors(_vectors(("a",)), tmp_path / "no" / "out", "glove")


def test_fingerprint_depends_only_on_the_content(tmp_path: Path) -> None:
    for format in ("glove", "projector"):
        for name, words in (("one", ("a",)), ("two", ("a",)), ("three", ("b",))):
            write_vectors(_vectors(words), tmp_path / f"{format}{name}", format)
        one, two, three = (fingerprint(tmp_path / f"{format}{name}") for name in ("one", "two", "three"))
        assert one == two != three
    with pytest.raises(DataError, match="cannot be read"):
        fingerprint(tmp_path / "none")
