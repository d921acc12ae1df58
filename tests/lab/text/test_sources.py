"""Text from any file: every kind of input gives the same lines, and damaged input gives a clear error."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
from pathlib import Path

import pytest

from reefknot.errors import DataError, SettingsError
from reefknot.lab.text import sources
from reefknot.lab.text.sources import TextSource, open_text

LINES = ["the first line", "naïve café 🙂", "שלום עולם", "the last line"]
TEXT = "\n".join(LINES) + "\n"


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor().compress(data)


def jsonl(rows: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, field: row}) + "\n" for row in rows).encode()


def parquet(path: Path, columns: dict[str, list[object]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def read(path: object, **options: str) -> list[str]:
    return list(open_text(path, **options).read_lines())  # type: ignore[arg-type]


def documents(source: TextSource) -> list[list[str]]:
    return [list(document.lines) for document in source.read_documents()]


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.txt", bytes),
        ("a.txt.gz", gzip.compress),
        ("a.txt", gzip.compress),  # recognised by its bytes, not by its name
        ("a.txt.xz", lzma.compress),
        ("a.txt.bz2", bz2.compress),
        ("a.txt.zst", zstd),
        ("no_ending", bytes),
        ("a.txt.gz", lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:]) + b"\0" * 7),
        ("a.txt.zst", lambda data: zstd(data[:20]) + zstd(data[20:])),
    ],
)
def test_plain_text_is_unpacked_by_its_first_bytes(tmp_path, name, pack):
    assert read(write(tmp_path / name, pack(TEXT.encode()))) == LINES


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_unicode_encodings_and_line_ends_are_recognised(tmp_path, encoding, line_end):
    text = "plain words\nof one text\n".replace("\n", line_end)
    assert read(write(tmp_path / "a.txt", text.encode(encoding))) == ["plain words", "of one text"]


def test_other_encodings_are_not_guessed_but_offered(tmp_path):
    path = write(tmp_path / "a.txt", "first\nÜbergrößenträger für café\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"line 2: byte 0xdc is not valid UTF-8; .*--encoding cp1252 \(this is a guess"):
        read(path)
    assert read(path, encoding="cp1252") == ["first", "Übergrößenträger für café"]
    with pytest.raises(SettingsError, match="--encoding base64"):
        read(path, encoding="base64")
    with pytest.raises(DataError, match="not valid ASCII; pass another --encoding"):
        read(path, encoding="ascii")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Les élèves français étaient à l’école. « Où est-ce ? »\n", "cp1252"),
        ("It costs £5.\n", "cp1252"),
        ("Все счастливые семьи похожи друг на друга.\n", "cp1251"),
        ("Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι.\n", "cp1253"),
        ("Żołnierz łaskawie kupił dużą książkę o wolności.\n", "cp1250"),
    ],
)
def test_the_suggested_encoding_is_the_right_one(tmp_path, text, encoding):
    pytest.importorskip("charset_normalizer")
    path = write(tmp_path / "a.txt", (text * 9).encode(encoding))
    with pytest.raises(DataError, match=f"perhaps --encoding {encoding} "):
        read(path)


def test_an_encoding_for_a_folder_leaves_files_in_utf8_alone(tmp_path):
    write(tmp_path / "a.txt", "größe\n".encode())
    write(tmp_path / "b.txt", "café\n".encode("cp1252"))
    write(tmp_path / "c.txt.gz", gzip.compress("naïve\n".encode("utf-8-sig")))
    write(tmp_path / "d.txt", b"plain\n")
    write(tmp_path / "e.jsonl", '{"text": "über"}\n'.encode("cp1252"))
    message = (
        r"b\.txt, line 1: .*--encoding cp1252 .* Of the 5 files, 2 are not valid UTF-8; the others are read as UTF-8"
    )
    with pytest.raises(DataError, match=message):
        read(tmp_path)
    assert read(tmp_path, encoding="cp1252") == ["größe", "café", "naïve", "plain", "über"]
    assert read(tmp_path / "a.txt", encoding="cp1252") == ["grÃ¶ÃŸe"]


@pytest.mark.parametrize(("name", "pack"), [("a.jsonl", bytes), ("a.ndjson.gz", gzip.compress), ("a.jsonl.zst", zstd)])
def test_rows_of_json_lines_are_documents(tmp_path, name, pack):
    path = write(tmp_path / name, pack(jsonl(["one\r\n\n two", "three \0 \n"]) + b"\n"))
    source = open_text(path)
    assert documents(source) == [["one", " two"], ["three   "]]
    assert source.has_documents


def test_another_field_and_half_a_surrogate_pair(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"body": "half \\ud83d, whole \\ud83d\\ude42"}\n')
    assert read(path, field="body") == ["half \ufffd, whole 🙂"]


@pytest.mark.parametrize("name", ["a.json", "a.txt", "no_ending", "a.json.gz"])
def test_json_lines_are_recognised_by_their_content(tmp_path, name):
    data = b"\n" + jsonl(["one", "two"], "body")
    path = write(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    assert documents(open_text(path, field="body")) == [["one"], ["two"]]
    assert open_text(path, field="body").has_documents
    with pytest.raises(DataError, match="no field 'text'; the fields are id, body"):
        read(path)


def test_a_long_first_row_is_recognised(tmp_path):
    row = "many words " * 20_000
    assert read(write(tmp_path / "a.json", jsonl([row, "two"]))) == [row, "two"]


def test_json_lines_from_standard_input(monkeypatch):
    for data in (jsonl(["one", "two"]), gzip.compress(jsonl(["one", "two"]))):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
        assert read("-") == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b'[{"text": "x"}]'),
        ("a.txt", b'[\n  {"text": "x"}\n]\n'),
        ("a.json", b'["x", "y"]'),
        ("a.json", b'{\n  "text": "x"\n}\n'),
    ],
)
def test_other_json_is_rejected(tmp_path, name, data):
    with pytest.raises(DataError, match="JSON is read as one object per line, and this file has an array"):
        read(write(tmp_path / name, data))


@pytest.mark.parametrize("text", ["[1] A footnote.", "{curly} words", "[link](https://example.org)", '["x"', "{"])
def test_text_that_begins_with_a_bracket_is_plain(tmp_path, text):
    path = write(tmp_path / "a.md", text.encode())
    assert read(path) == [text]
    with pytest.raises(SettingsError, match=r"--field body has no effect on .*a\.md, which is plain text"):
        open_text(path, field="body")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"title": "x"}\n', "line 1: no field 'text'; the fields are title; choose one with --field"),
        (b'{"text": "x"}\n{"text": 3}\n', "line 2: text is not a text"),
        (b"[1]\n", "line 1: not a JSON object"),
        (b'{"text": "x"}\n{"te', "line 2: not valid JSON"),
        (b"[" * 100_000, "line 1: not valid JSON"),
    ],
)
def test_bad_rows_name_their_line(tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "a.jsonl", data))


def test_parquet(tmp_path):
    parquet(tmp_path / "a.parquet", {"text": ["one\ntwo", None, "three"], "n": [1, 2, 3]})
    source = open_text(tmp_path / "a.parquet")
    assert documents(source) == [["one", "two"], ["three"]]
    with pytest.raises(DataError, match="no field 'body'; the columns are text, n"):
        read(tmp_path / "a.parquet", field="body")
    with pytest.raises(DataError, match=r"row 1: n holds int, not text"):
        read(tmp_path / "a.parquet", field="n")
    data = (tmp_path / "a.parquet").read_bytes()
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read(write(tmp_path / "cut.parquet", data[: len(data) // 2]))


def test_folder_reads_texts_in_order_and_lists_what_it_skips(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "b.md", b"second\n")
    write(tmp_path / "a.txt.gz", gzip.compress(b"first\n"))
    write(tmp_path / "sub" / "c.jsonl", jsonl(["third"]))
    write(tmp_path / "picture.png", b"\x89PNG\0")
    write(tmp_path / ".hidden.txt", b"hidden\n")
    source = open_text(tmp_path)
    assert documents(source) == [["first"], ["second"], ["third"]]
    assert source.skipped == ("picture.png",)
    assert source.name == f"{tmp_path.name}/"
    assert read([tmp_path / "b.md", str(tmp_path / "*.gz")]) == ["second", "first"]


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(TEXT.encode()))))
    assert read("-") == LINES


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(TEXT.encode() * 1000)[:-9], "cannot be unpacked: the end is missing"),
        (lzma.compress(TEXT.encode() * 1000)[:-9], "cannot be unpacked"),
        (gzip.compress(TEXT.encode())[:12] + b"\xff" * 30, "cannot be unpacked"),
        (zstd(TEXT.encode() * 1000)[:-3], "cannot be unpacked"),
        (b"\x28\xb5\x2f\xfd" + b"\xff" * 30, "cannot be unpacked"),
        (b"", "has no words"),
        (b" \n\n\t\n", "has no words"),
        (b"MZ\x90\0\x03\0\0\0\x04\0\0\0", "line 1: byte 0x90 .* is this a text file"),
        (b"words\nMZ\0\0\x03\0\0\0\x04\0\0\0", "line 2: NUL byte; is this a text file"),
        (b"some text\n\x89PNG\xff", "line 2: byte 0x89 is not valid UTF-8"),
        ("cut in the middle of é".encode()[:-1], "line 1: .* is not valid UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # compressed bytes have a time stamp
)
def test_damaged_and_empty_files_are_rejected(tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "a.txt", data))


def test_missing_files_are_named(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path / "*.txt", "a\0b"):
        with pytest.raises(DataError, match="does not exist"):
            open_text(path)
    (tmp_path / "x.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"holds no files that end in .*; it holds x\.png"):
        open_text(tmp_path)


def test_a_line_without_end_is_cut_at_spaces(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_LONGEST_LINE", 50)
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 16)
    words = [f"word{number}" for number in range(40)]
    lines = read(write(tmp_path / "a.txt", " ".join(words).encode()))
    assert max(map(len, lines)) <= 50
    assert [word for line in lines for word in line.split()] == words
    assert "".join(read(write(tmp_path / "b.txt", "字".encode() * 120))) == "字" * 120


@pytest.mark.parametrize(("module", "name"), [("zstandard", "a.txt.zst"), ("pyarrow", "a.parquet")])
def test_a_missing_extra_names_the_command(tmp_path, monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match=r"pip install 'reefknot\[data\]'"):
        read(write(tmp_path / name, b"\x28\xb5\x2f\xfd1234"))
