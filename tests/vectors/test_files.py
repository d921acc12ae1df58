"""Word vectors in files: every format there and back, and every way in which a file of a stranger is not sound."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from reefknot.errors import DataError, ResourceError, SettingsError
from reefknot.storage import files as durable
from reefknot.vectors import contract, files, text_files
from reefknot.vectors.files import FORMATS, fingerprint, read_vectors, write_vectors
from reefknot.vectors.word_vectors import WordVectors

from .odd_words import PLAIN, STRANGE

HELD = {
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


def _same(one: WordVectors, other: WordVectors) -> bool:
    return one.words == other.words and one.vectors_VD.tobytes() == other.vectors_VD.tobytes()


@pytest.mark.parametrize("block", [1, 40, 1 << 24])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_comes_back_to_the_bit(
    format: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (contract, text_files, files.read_binary, files.read_projector):
        place = module if hasattr(module, "BLOCK") else __import__(module.__module__, fromlist=["BLOCK"])  # type: ignore[union-attr]
        monkeypatch.setattr(place, "BLOCK", block)
    vectors = _vectors(PLAIN)
    write_vectors(vectors, tmp_path / "out", format)
    assert _same(read_vectors(tmp_path / "out", format), vectors)
    assert _same(read_vectors(tmp_path / "out"), vectors)  # found out from the file
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dim", [1, 300])
def test_a_format_is_found_out_whatever_the_width(format: str, dim: int, tmp_path: Path) -> None:
    vectors = _vectors(("a", "b", "c"), dim)
    write_vectors(vectors, tmp_path / "out", format)
    assert _same(read_vectors(tmp_path / "out"), vectors)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("word", STRANGE)
def test_a_word_comes_back_or_is_refused_with_the_formats_that_hold_it(format: str, word: str, tmp_path: Path) -> None:
    vectors = _vectors((word, "b"))
    if word in HELD[format]:
        write_vectors(vectors, tmp_path / "out", format)
        assert _same(read_vectors(tmp_path / "out"), vectors)
        return
    able = " or ".join(name for name in FORMATS if word in HELD[name])
    sentence = f"the format {format} cannot hold the word {word!r}; use {able}"
    with pytest.raises(DataError, match=f"^{re.escape(sentence)}$"):
        write_vectors(vectors, tmp_path / "out", format)
    assert not list(tmp_path.iterdir())


def test_safetensors_holds_any_word_and_counts(tmp_path: Path) -> None:
    words = (*PLAIN, *STRANGE, "\x00", "\ud7ff")
    vectors = WordVectors(words, _vectors(words).vectors_VD, np.arange(len(words)))
    write_vectors(vectors, tmp_path / "v.safetensors", "safetensors")
    found = read_vectors(tmp_path / "v.safetensors")
    assert _same(found, vectors)
    assert found.counts is not None
    assert found.counts.tolist() == list(range(len(words)))


def _w2v(*lines: str, header: str = "2 3") -> bytes:
    return "\n".join([*([header] if header else []), *lines, ""]).encode(errors="surrogateescape")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (_w2v("a 1 2 3", header="2 3"), "is cut off: it has 1 of the 2 words"),
        (_w2v("a 1 2 3", "b 4 5 6", "c 7 8 9"), "has more words than the 2 that its header promises"),
        (_w2v("a 1 2 3", "b 4 5"), "line 3: 2 numbers after the word where 3 are expected"),
        (_w2v("a 1 2 3", "b 4 5 6 7"), "line 3: 4 numbers after the word where 3"),
        (_w2v("a 1 2 3", "b 4 x 6"), "line 3: 'x' where one of 3 numbers"),
        (_w2v("a 1 x 3", "b 4 5 6"), "line 2: 'x' where one of 3 numbers"),
        (_w2v("a 1 2", "b 4 5 6"), "line 2: 2 numbers after the word where 3"),
        (_w2v("a x y z", "b 4 5 6"), "line 2: 'x' where one of 3 numbers"),
        (_w2v("café x.12345678 y.12345678 z", "b 4 5 6"), "line 2: 'x.12345678' where one of 3 numbers"),
        (_w2v("caf\udce9 1 x 3", "b 4 5 6"), "line 2: 'x' where one of 3 numbers"),
        (_w2v("a 1", "b 2", "c 3", header="3 2"), "line 2: 1 number after the word where 2 are expected"),
        (_w2v("a x", "", "b y", header="2 2"), "line 2: 0 numbers after the word where 2 are expected"),
        (_w2v(*(f"w{n} 1" for n in range(1500)), header="1500 2"), "line 2: 1 number after the word where 2"),
        (_w2v(header="3 2"), "is cut off: its header promises 3 words of 2 numbers"),
        (_w2v("a 1 2 1_0", "b 4 5 6"), "line 2: '1_0' where one of 3 numbers"),
        (_w2v("a 1 2 3", "b 4 5 nan"), r"the vector of 'b' \(word 2\) holds NaN"),
        (_w2v("a 1 2 3", "b 4 -inf 5"), r"the vector of 'b' \(word 2\) holds NaN or a number too large"),
        (_w2v("a 1 2 3", "b 4 1e99 5"), r"the vector of 'b' \(word 2\) holds NaN or a number too large"),
        (_w2v("a 1 2 3", header="999999999999 3"), "is cut off: its header promises 999,999,999,999 words of 3"),
        (_w2v("a 1 2 3", header="0 3"), "its header says 0 words of 3 numbers"),
        (_w2v("a 1 2 3", "b 1 2", header=""), "line 2: 2 numbers after the word where 3"),
        (_w2v("a 1", "b 1 2", "c 1 2", header=""), "line 1: 1 number after the word where 2"),
        (_w2v("a 1 2 3", "b 1 2 3", "c 1 2", header=""), "line 3: 2 numbers after the word where 3"),
        (_w2v("a 1 2 3", "b 1  2 3", header=""), "line 2: two spaces in a row"),
        (_w2v("nothing", "but", "words", header=""), "is no file of word vectors; the formats are: word2vec, "),
        (bytes(range(256)) * 8, "is no file of word vectors"),
        (b"\x1f\x8b\x08\x00rest", "is compressed; unpack it"),
        (b"PK\x03\x04rest", "is compressed"),
        (b"BZh91AY&SYrest", "is compressed"),
        (b"2 3\n" + b"a " + np.ones(3, "<f4").tobytes(), "is cut off: its header promises 2 words of 3"),
        (
            b"2 3\n" + b"a " + np.ones(3, "<f4").tobytes() + b"b " + b"\x7f" * 11,
            "is cut off or no word2vec file: after 1",
        ),
        (b"1 3\n" + b"a " + np.ones(3, "<f4").tobytes() + b"b " + b"\x7f" * 12, "goes on after the 1 words"),
        (b"1 2\n" + b"a " + np.array([1, np.nan], "<f4").tobytes(), "the vector of 'a' .* holds NaN"),
        (b"3 2\n" + bytes(100), "cut off or no word2vec file"),
    ],
)
def test_a_file_that_is_not_sound_is_refused_in_a_sentence(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=sentence) as raised:
        read_vectors(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_format_that_is_named_is_insisted_on(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_bytes(_w2v("a 1 2 3", header=""))
    for format in ("word2vec", "word2vec-binary"):
        with pytest.raises(DataError, match=r"no header of word2vec.*'400000 300'.*format glove"):
            read_vectors(path, format)
    with pytest.raises(DataError, match="not a safetensors file"):
        read_vectors(path, "safetensors")
    with pytest.raises(DataError, match="no folder of TensorBoard's projector"):
        read_vectors(path, "projector")
    with pytest.raises(SettingsError, match="no format of word vectors is called 'fasttext'; there are: word2vec"):
        read_vectors(path, "fasttext")


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none: No such file"):
        read_vectors(tmp_path / "none")
    with pytest.raises(DataError, match="a folder without word vectors"):
        read_vectors(tmp_path)


@pytest.mark.parametrize("header", ["3 2\n", ""])
def test_marks_blanks_and_line_ends_of_other_programs_are_no_matter(header: str, tmp_path: Path) -> None:
    # The C program ends its lines with a space; others come from Windows, or from an editor that puts a mark first.
    path = tmp_path / "v.txt"
    path.write_bytes(b"\xef\xbb\xbf" + f"{header}a 1 2 \r\nb 3 4 \r\nc 5 6 \r\n\r\n".encode())
    found = read_vectors(path)
    assert found.words == ("a", "b", "c")
    assert found.vectors_VD.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_words_with_spaces_of_a_foreign_text_are_read(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_bytes(_w2v(". . . 1 2 3", "at name@domain.com 4 5 6", "the 7 8 9", "a 1 1 1", "b 1 1 1", header=""))
    found = read_vectors(path)
    assert found.words[:3] == (". . .", "at name@domain.com", "the")
    assert found.vector("at name@domain.com").tolist() == [4, 5, 6]


def test_the_width_is_that_of_the_numbers_though_most_words_have_spaces(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_bytes(_w2v("x 1 2 9", "a b 1 2 3", "new york 3 4 5", ". . . 3 3 3", header=""))
    found = read_vectors(path)
    assert found.words == ("x", "a b", "new york", ". . .")
    assert found.vectors_VD.tolist() == [[1, 2, 9], [1, 2, 3], [3, 4, 5], [3, 3, 3]]


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
def test_a_first_word_that_looks_like_something_else_is_a_word(
    lines: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "v").write_bytes(_w2v(*lines, header=""))
    assert read_vectors(tmp_path / "v").words == words


def test_the_first_lines_that_tell_the_width_tell_a_header_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v").write_bytes(_w2v("a 3", "new york 4", header="3 2"))
    with pytest.raises(DataError, match="line 2: 1 number after the word where 2"):
        read_vectors(tmp_path / "v")
    monkeypatch.setattr(text_files, "_SEEN", 1)
    assert read_vectors(tmp_path / "v").words == ("3", "a", "new york")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_what_is_written_is_recognised_though_words_and_numbers_look_like_a_header(
    format: str, dim: int, tmp_path: Path
) -> None:
    for words in (("1984", "a"), ("2", "a", "b"), ("1",), ("BZh", "b")):
        vectors = WordVectors(words, np.ones((len(words), dim), np.float32))
        write_vectors(vectors, tmp_path / "out", format)
        assert _same(read_vectors(tmp_path / "out"), vectors)


def test_what_would_be_taken_for_something_else_is_not_written(tmp_path: Path) -> None:
    vectors = _vectors(("PK\x03\x04", "b"))
    with pytest.raises(DataError, match=r"out is not written: .* the format glove .*PK.* something else; use safetens"):
        write_vectors(vectors, tmp_path / "out", "glove")
    assert not list(tmp_path.iterdir())
    write_vectors(vectors, tmp_path / "out", "safetensors")
    assert _same(read_vectors(tmp_path / "out"), vectors)


@pytest.mark.parametrize("newline", [b"", b"\n"])
@pytest.mark.parametrize(("size", "dim"), [(1, 1), (1, 2), (2, 5)])
def test_a_binary_file_is_none_of_text_however_small(size: int, dim: int, newline: bytes, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        rows = draw.standard_normal((size, dim)).astype("<f4")
        pairs = [b"w%d " % number + row.tobytes() + newline for number, row in enumerate(rows)]
        (tmp_path / "v.bin").write_bytes(b"%d %d\n" % (size, dim) + b"".join(pairs))
        assert np.array_equal(read_vectors(tmp_path / "v.bin").vectors_VD, rows)


@pytest.mark.parametrize(
    "numbers", [(b"printed?", b"letters>"), (b"7\n]H\xabQ4^", b"1 2 3 4?"), (b"0\n\x1a\xbd....", b"1\n2\n3\n4?")]
)
def test_a_binary_file_may_look_like_text(numbers: tuple[bytes, bytes], tmp_path: Path) -> None:
    (tmp_path / "v.bin").write_bytes(b"2 2\na %bb %b" % numbers)
    found = read_vectors(tmp_path / "v.bin")
    assert found.words == ("a", "b")
    assert found.vectors_VD.tobytes() == b"".join(numbers)


def test_the_first_of_doubles_counts_and_they_are_told(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_bytes(_w2v("a 1 2 3", "b 4 5 6", "a 7 8 9", header="3 3"))
    said: list[str] = []
    found = read_vectors(path, say=said.append)
    assert found.words == ("a", "b")
    assert found.vector("a").tolist() == [1, 2, 3]
    assert said == [
        f"{path}: 1 word is there already; the first vector of a word is the one that counts (the first is 'a')"
    ]


@pytest.mark.parametrize("binary", [False, True])
def test_bytes_that_are_no_text_are_shown_and_told(binary: bool, tmp_path: Path) -> None:
    path = tmp_path / "v"
    one = np.ones(2, "<f4").tobytes()
    path.write_bytes(b"2 2\ncaf\xe9 " + one + b"\nb " + one + b"\n" if binary else b"2 2\ncaf\xe9 1 1\nb 1 1\n")
    said: list[str] = []
    found = read_vectors(path, say=said.append)
    assert found.words == ("caf\\xe9", "b")
    assert said == [f"{path}: 1 word is no UTF-8; such bytes are shown as \\xNN (the first is 'caf\\\\xe9')"]
    # What is shown is text like any other, in every format.
    for format in FORMATS:
        write_vectors(found, tmp_path / format, format)


def test_a_newline_after_a_binary_vector_is_not_part_of_the_next_word(tmp_path: Path) -> None:
    path = tmp_path / "v.bin"
    path.write_bytes(b"2 2\n" + b"".join(w + b" " + np.full(2, 0.5, "<f4").tobytes() + b"\n" for w in (b"a", b"b")))
    assert read_vectors(path).words == ("a", "b")


def test_an_empty_word_of_a_foreign_file_is_a_word(tmp_path: Path) -> None:
    one = np.ones(2, "<f4").tobytes()
    for content in (b"2 2\n 1 1\nb 1 1\n", b" 1 1\nb 1 1\n", b"2 2\n " + one + b"b " + one):
        (tmp_path / "v").write_bytes(content)
        assert read_vectors(tmp_path / "v").words == ("", "b")


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_refused_in_a_sentence_or_read_as_word_vectors(format: str, tmp_path: Path) -> None:
    write_vectors(_vectors(PLAIN), tmp_path / "out", format)
    path = tmp_path / "out" / "vectors.tsv" if format == "projector" else tmp_path / "out"
    sound, draw, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(300):
        place, length = draw.randrange(len(sound)), draw.choice((0, 1, 4, 50))
        path.write_bytes(sound[:place] + draw.randbytes(draw.choice((0, 1, 4))) + sound[place + length :])
        try:
            found = read_vectors(tmp_path / "out", draw.choice((format, None)))
        except DataError:
            refused += 1
        else:
            assert np.isfinite(found.vectors_VD).all()
    assert refused > 100


def test_only_some_words_are_kept(tmp_path: Path) -> None:
    vectors = _vectors(PLAIN)
    for format in FORMATS:
        write_vectors(vectors, tmp_path / format, format)
        assert _same(read_vectors(tmp_path / format, only={"日本", "the", "none"}), vectors.select(["the", "日本"]))


def test_a_projector_of_others_may_have_columns_and_must_have_all_words(tmp_path: Path) -> None:
    (tmp_path / "vectors.tsv").write_text("1\t2\n3\t4\n")
    (tmp_path / "metadata.tsv").write_text("word\tcount\nb c\t7\na\t5\n")
    assert read_vectors(tmp_path).words == ("b c", "a")
    for metadata, sentence in (("a\n", "fewer words"), ("a\nb\nc\n", "more words")):
        (tmp_path / "metadata.tsv").write_text(metadata)
        with pytest.raises(DataError, match=sentence):
            read_vectors(tmp_path)
    (tmp_path / "metadata.tsv").write_text("a\nb\n")
    for rows in ("1\t2\n3\n", "1\t2\n3\tx\n", "1\t2\n3\t\t4\n"):
        (tmp_path / "vectors.tsv").write_text(rows)
        with pytest.raises(DataError, match=r"vectors.tsv, line 2: must be 2 numbers"):
            read_vectors(tmp_path)
    (tmp_path / "metadata.tsv").unlink()
    with pytest.raises(DataError, match=r"has no metadata.tsv"):
        read_vectors(tmp_path)


def test_tensorboard_finds_the_files_by_the_configuration(tmp_path: Path) -> None:
    write_vectors(_vectors(("a", "b")), tmp_path / "out", "projector")
    config = (tmp_path / "out" / "projector_config.pbtxt").read_text()
    named = re.findall(r'_path: "(.*)"', config)
    assert sorted(named) == ["metadata.tsv", "vectors.tsv"]
    assert all((tmp_path / "out" / name).is_file() for name in named)


def test_safetensors_of_something_else_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    def words(value: object) -> np.ndarray:
        return np.frombuffer(json.dumps(value).encode(), np.uint8)

    x = np.ones((2, 3), np.float64)
    path = tmp_path / "v.safetensors"
    for tensors, sentence in (
        ({"weight": x}, "needs the tensors vectors and words"),
        ({"vectors": x[0].copy(), "words": words(["a", "b", "c"])}, "must be a matrix"),
        ({"vectors": x.astype(int), "words": words(["a", "b"])}, "must be a matrix of floating-point"),
        ({"vectors": x * 1e300, "words": words(["a", "b"])}, r"the vector of 'a' \(word 1\) holds NaN or a number too"),
        ({"vectors": x, "words": words(["a"])}, "a JSON list of 2 words"),
        ({"vectors": x, "words": words(["a", 2])}, "a JSON list of 2 words"),
        ({"vectors": x, "words": words({"a": 1})}, "a JSON list of 2 words"),
        ({"vectors": x, "words": words("\ud800")[:-1]}, "truncated or not valid JSON"),
        ({"vectors": x, "words": words(["a", "\ud800"])}, "half a character"),
        ({"vectors": x, "words": x}, "truncated or not valid JSON"),
        ({"vectors": x, "words": words(["a", "b"]), "counts": np.array([1])}, "counts must be"),
    ):
        save_file(tensors, path)
        with pytest.raises(DataError, match=sentence):
            read_vectors(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="truncated or not a safetensors"):
        read_vectors(path)


@pytest.mark.parametrize("format", FORMATS)
def test_a_place_that_is_taken_by_something_else_is_left_alone(format: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("keep")
    (tmp_path / "file").write_text("keep")
    taken = "file" if format == "projector" else "folder"
    with pytest.raises(SettingsError, match=r"name a (file|folder) to write"):
        write_vectors(_vectors(("a",)), tmp_path / taken, format)
    if format == "projector":
        with pytest.raises(SettingsError, match="holds 'mine', which is not ours"):
            write_vectors(_vectors(("a",)), tmp_path / "folder", format)
    assert (tmp_path / "folder" / "mine").read_text() == (tmp_path / "file").read_text() == "keep"


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_written_again_replaces_the_old(format: str, tmp_path: Path) -> None:
    write_vectors(_vectors(("a", "b", "c")), tmp_path / "out", format)
    write_vectors(_vectors(("d",)), tmp_path / "out", format)
    assert read_vectors(tmp_path / "out").words == ("d",)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_failure_leaves_the_old_file_and_no_other(
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
        patched.setattr(files, "_read", lambda *_, **__: _vectors(("e",)))
        with pytest.raises(DataError, match="is not written: what was written does not read back the same at 'd'"):
            write_vectors(_vectors(("d",)), tmp_path / "out", format)
    assert _same(read_vectors(tmp_path / "out"), old)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_an_interrupt_between_two_renames_loses_no_folder(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = _vectors(("a", "b", "c")), _vectors(("d",))
    write_vectors(old, tmp_path / "out", "projector")
    commit, done = durable.commit, 0

    def interrupted(prepared: Path, path: Path) -> None:
        nonlocal done
        if done == renames:
            done += 1
            raise KeyboardInterrupt
        commit(prepared, path)
        done += 1
        if done == renames == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(durable, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_vectors(new, tmp_path / "out", "projector")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert _same(read_vectors(tmp_path / "out"), new if renames == 2 else old)


def test_a_folder_that_a_killed_process_was_replacing_is_not_removed_before_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_vectors(_vectors(("a",)), tmp_path / "out", "projector")
    seen: list[list[tuple[str, ...]]] = []
    commit = durable.commit

    def watched(prepared: Path, path: Path) -> None:
        commit(prepared, path)
        seen.append(sorted(read_vectors(each).words for each in tmp_path.iterdir()))

    monkeypatch.setattr(durable, "commit", watched)
    write_vectors(_vectors(("b",)), tmp_path / "out", "projector")
    assert seen == [[("a",), ("b",)], [("a",), ("b",)]]


def test_nothing_is_no_export(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no words to write"):
        write_vectors(WordVectors((), np.zeros((0, 3), np.float32)), tmp_path / "out", "glove")
    with pytest.raises(ResourceError, match=r"cannot write .*: No such file or directory"):
        write_vectors(_vectors(("a",)), tmp_path / "no" / "out", "glove")


def test_a_fingerprint_follows_the_content(tmp_path: Path) -> None:
    for format in ("glove", "projector"):
        for name, words in (("one", ("a",)), ("two", ("a",)), ("three", ("b",))):
            write_vectors(_vectors(words), tmp_path / f"{format}{name}", format)
        one, two, three = (fingerprint(tmp_path / f"{format}{name}") for name in ("one", "two", "three"))
        assert one == two != three
    with pytest.raises(DataError, match="cannot be read"):
        fingerprint(tmp_path / "none")
