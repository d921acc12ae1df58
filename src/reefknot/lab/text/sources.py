"""Read text from any file: plain text, JSON lines or Parquet, compressed or not, folders of them, or standard input.

    source = open_text("articles/")              # a file, a folder, a pattern such as "*.txt", "-", or a list
    for line in source.read_lines():
        print(line)
    for document in source.read_documents():     # a row of JSON lines or Parquet, or a file of plain text
        print(document.name, sum(1 for _ in document.lines))

Nothing is held in memory as a whole except one row of JSON lines, or one batch of Parquet rows. These rules apply:

* Gzip, bzip2, xz and Zstandard are recognised by their first bytes, whatever the name of the file.
* `.jsonl` and `.ndjson` hold one JSON object per line, and `.parquet` a table. The text is in one field, by default
  `text`. Another file whose first line is a JSON object is read as JSON lines, too. Every other file is plain text.
* Plain text is UTF-8, or UTF-16 or UTF-32 if its first bytes show this. Other encodings are never guessed: the error
  message asks for the name of the encoding. Of several files, those that are valid UTF-8 are read as UTF-8 whatever
  encoding is given.
* A line ends at \\n, \\r\\n or \\r. Lines without words are skipped. In plain text, a line of more than a million
  characters is cut at a space.
* In a folder, files with the endings of `TEXT_ENDINGS` are read in the order of their names, subfolders included.
  Hidden files and files with other endings are skipped, and `TextSource.skipped` lists the latter.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from reefknot.errors import DataError, SettingsError, shorten
from reefknot.extras import import_extra
from reefknot.lab.text.recognition import Kind, check_utf8, detect_encoding, recognise_json, suggest_encoding

STANDARD_INPUT = "-"
"""The path that stands for standard input."""
TEXT_ENDINGS = (".txt", ".text", ".md", ".markdown", ".rst", ".tokens", ".jsonl", ".ndjson", ".parquet")
"""Endings of the files that are read in a folder. One of `COMPRESSED_ENDINGS` may follow."""
COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz", ".zst")
DEFAULT_FIELD = "text"

OnRead = Callable[[int], None]
"""A callback that receives the number of bytes that were read from a file since the last call."""

_KIND_BY_ENDING: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_BLOCK_BYTES = 1 << 16  # small, because a compressed block may unpack to a thousand times its size
_LONGEST_LINE = 1 << 20  # characters; a file without line ends must not be held in memory
_PARQUET_ROWS = 256  # per batch
_MAX_LISTED_NAMES = 8  # in an error message
_MAX_CHECKED_FILES = 1000  # for the number of files in another encoding


class _EncodingError(DataError):
    """A text is not valid UTF-8, and no encoding was given."""


class Document(NamedTuple):
    """A unit of text that belongs together: a row of JSON lines or Parquet, or a file of plain text."""

    name: str
    """Where the document is, such as "articles.jsonl, line 3", for error messages."""
    key: str
    """What identifies the document: the text of a row, or the name of a file. Equal rows have equal keys."""
    lines: Iterator[str]
    """The lines that have words, without line ends. Read them before the next document is read."""


@dataclass(frozen=True)
class TextFile:
    """One file of a text source. Creating the object does not open the file."""

    path: Path
    name: str
    """The name in messages: relative to the folder that the user gave, if there is one."""
    kind: Kind
    field: str = DEFAULT_FIELD
    """The field of JSON lines, or the column of Parquet, that holds the text."""
    encoding: str | None = None
    """Encoding of plain text and JSON lines, or None to recognise UTF-8, UTF-16 and UTF-32."""
    prefer_utf8: bool = False
    """Whether a file that is valid UTF-8, with characters beyond ASCII, is read as UTF-8 whatever `encoding` says."""

    @property
    def size(self) -> int:
        """Size on disk in bytes; 0 for standard input."""
        return 0 if str(self.path) == STANDARD_INPUT else self.path.stat().st_size

    def read_documents(self, on_read: OnRead = lambda _count: None) -> Iterator[Document]:
        """Yield the documents of the file in order."""
        if self.kind == "parquet":
            yield from self._read_parquet(on_read)
        elif self.kind == "jsonl":
            yield from self._read_json_lines(on_read)
        elif self.kind == "json":
            raise DataError(
                f"{self.name}: JSON is read as one object per line, and this file has an array, or an object over "
                f"several lines; convert it, for example an array with: jq -c '.[]' {self.path.name} > text.jsonl"
            )
        else:
            lines = (line for _number, line in self._decode_lines(on_read, _LONGEST_LINE) if line.strip())
            yield Document(self.name, self.name, lines)

    def _read_json_lines(self, on_read: OnRead) -> Iterator[Document]:
        for number, line in self._decode_lines(on_read, sys.maxsize):
            if line.strip():
                name = f"{self.name}, line {number:,}"
                text = _parse_row(line, self.field, name)
                yield Document(name, text, _split_lines(text))

    def _read_parquet(self, on_read: OnRead) -> Iterator[Document]:
        pyarrow = import_extra("pyarrow", self.name)
        parquet = import_extra("pyarrow.parquet", self.name)
        try:
            with parquet.ParquetFile(self.path) as table:
                columns = table.schema_arrow.names
                if self.field not in columns:
                    raise DataError(_missing_field(self.name, self.field, columns, "columns"))
                num_rows = max(table.metadata.num_rows, 1)
                number = 0
                for batch in table.iter_batches(_PARQUET_ROWS, columns=[self.field]):
                    for text in batch.column(0).to_pylist():
                        number += 1
                        name = f"{self.name}, row {number:,}"
                        if text is None:
                            continue
                        if not isinstance(text, str):
                            raise DataError(f"{name}: {self.field} holds {type(text).__name__}, not text; use --field")
                        yield Document(name, text, _split_lines(text))
                    on_read(self.size * batch.num_rows // num_rows)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.name}: cannot be read as Parquet: {shorten(str(error), 200)}") from error

    def _decode_lines(self, on_read: OnRead, max_length: int) -> Iterator[tuple[int, str]]:
        """Yield the number and the text of every line, without its line end."""
        with _data_errors(self.name), _open_stream(self.path) as stream:
            blocks = _unpack(_read_blocks(stream, on_read), self.name)
            head = _read_head(blocks)
            encoding = self.encoding or detect_encoding(head)
            if self.prefer_utf8 and self._is_utf8():
                encoding = detect_encoding(head)  # UTF-8, with or without a byte order mark
            texts = _decode(_chain(head, blocks), encoding, self.name, is_guess=self.encoding is None)
            yield from enumerate(_cut_lines(texts, max_length), start=1)

    def _is_utf8(self) -> bool:
        """Return whether the whole file is valid UTF-8 with characters beyond ASCII."""
        return str(self.path) != STANDARD_INPUT and check_utf8(self._read_bytes()) == "utf-8"

    def _read_bytes(self) -> Iterator[bytes]:
        """Yield the unpacked bytes of the file."""
        with _data_errors(self.name), _open_stream(self.path) as stream:
            yield from _unpack(_read_blocks(stream, lambda _count: None), self.name)


@dataclass(frozen=True)
class TextSource:
    """The files of a text, in the order in which they are read."""

    name: str
    """A short name of the text: that of the file or folder."""
    files: tuple[TextFile, ...]
    skipped: tuple[str, ...] = ()
    """Files in the folder that are not read because of their endings."""

    @property
    def has_documents(self) -> bool:
        """Whether the text consists of documents: rows, or several files."""
        return len(self.files) > 1 or any(file.kind != "plain" for file in self.files)

    @property
    def size(self) -> int:
        """Size of all files on disk in bytes."""
        return sum(file.size for file in self.files)

    def read_documents(self, on_read: OnRead = lambda _count: None) -> Iterator[Document]:
        """Yield the documents of all files."""
        for file in self.files:
            with self._count_other_encodings():
                for document in file.read_documents(on_read):
                    yield document._replace(lines=self._read_document(document))

    def _read_document(self, document: Document) -> Iterator[str]:
        with self._count_other_encodings():
            yield from document.lines

    @contextmanager
    def _count_other_encodings(self) -> Iterator[None]:
        """Add to an error about the encoding of a file how many of the other files are not valid UTF-8 either."""
        try:
            yield
        except _EncodingError as error:
            if len(self.files) == 1:
                raise
            num_files = sum(
                file.kind != "parquet" and check_utf8(file._read_bytes()) == "other"
                for file in self.files[:_MAX_CHECKED_FILES]
            )
            num_checked = min(len(self.files), _MAX_CHECKED_FILES)
            first = "" if num_checked == len(self.files) else "first "
            verb = "is" if num_files == 1 else "are"
            raise DataError(
                f"{error}. Of the {first}{num_checked:,} files, {num_files:,} {verb} not valid UTF-8; the others are "
                "read as UTF-8 even with --encoding"
            ) from None

    def read_lines(self, on_read: OnRead = lambda _count: None) -> Iterator[str]:
        """Yield the lines of all documents. Raise a DataError if there are none."""
        is_empty = True
        for document in self.read_documents(on_read):
            for line in document.lines:
                is_empty = False
                yield line
        if is_empty:
            raise DataError(f"{self.name}: the text has no words")


def open_text(
    paths: str | Path | Sequence[str | Path], *, encoding: str | None = None, field: str = DEFAULT_FIELD
) -> TextSource:
    """Find the files of a text. Only their first bytes are read, to recognise JSON lines.

    Args:
        paths: A file, a folder, a pattern such as `*.txt`, or `-` for standard input; or a list of them.
        encoding: Encoding of plain text and JSON lines. By default, UTF-8, UTF-16 and UTF-32 are recognised. Of
            several files, those that are valid UTF-8 are read as UTF-8.
        field: The field of JSON lines, or the column of Parquet, that holds the text.
    """
    if encoding is not None:
        _check_encoding(encoding)
    given_paths = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given_paths:
        raise SettingsError("there is no text: give a file, a folder or -")
    files: list[TextFile] = []
    skipped: list[str] = []
    for given_path in given_paths:
        for path, name in _find_files(str(given_path), skipped):
            files.append(TextFile(path, name, _find_kind(path, encoding), field, encoding))
    if encoding is not None and len(files) > 1:
        files = [replace(file, prefer_utf8=True) for file in files]
    if field != DEFAULT_FIELD and all(file.kind == "plain" for file in files):
        raise SettingsError(
            f"--field {shorten(field)} has no effect on {shorten(files[0].name, 200)}, which is plain text, not JSON "
            "lines or Parquet; leave --field out"
        )
    return TextSource(_name_source(str(given_paths[0])), tuple(files), tuple(skipped))


# -- find files ----------------------------------------------------------------------------------------------------


def _find_files(given_path: str, skipped: list[str]) -> list[tuple[Path, str]]:
    """Return the files of a path and their names. Files of a folder that are not read are added to `skipped`."""
    if given_path == STANDARD_INPUT:
        return [(Path(STANDARD_INPUT), "standard input")]
    try:
        path = Path(given_path).expanduser()
        if path.is_dir():
            return _find_files_in(path, skipped)
        if path.exists():
            return [(path, str(path))]
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob needs a folder
    except (OSError, ValueError, RuntimeError):  # not a possible path, or no such user
        matches = []
    files = [(Path(match), match) for match in matches if Path(match).is_file()]
    if not files:
        raise DataError(f"{shorten(given_path, 200)} does not exist; give a file, a folder, a pattern or -")
    return files


def _find_files_in(folder: Path, skipped: list[str]) -> list[tuple[Path, str]]:
    files = []
    for path in sorted(folder.rglob("*")):
        relative_path = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative_path.parts)
        if is_hidden or not path.is_file():
            continue
        if _ending(path) in TEXT_ENDINGS:
            files.append((path, str(relative_path)))
        else:
            skipped.append(str(relative_path))
    if not files:
        contents = f"; it holds {_format_names(skipped)}" if skipped else ""
        raise DataError(
            f"{folder} holds no files that end in {', '.join(TEXT_ENDINGS)} (or these with"
            f" {', '.join(COMPRESSED_ENDINGS)}){contents}; to read other files, give a pattern such as '{folder}/*.log'"
        )
    return files


def _ending(path: Path) -> str:
    """Return the ending of a file name in lower case, without the ending of its compression."""
    name = path.name.lower()
    for ending in COMPRESSED_ENDINGS:
        name = name.removesuffix(ending)
    return Path(name).suffix


def _find_kind(path: Path, encoding: str | None) -> Kind:
    """Return the kind of a file by its ending, or by its first bytes. A file that cannot be read counts as plain."""
    ending = _ending(path)
    if ending in _KIND_BY_ENDING:
        return _KIND_BY_ENDING[ending]
    try:
        if str(path) == STANDARD_INPUT:
            blocks = iter([sys.stdin.buffer.peek()])  # type: ignore[union-attr]
            head = next(_unpack(blocks, str(path)), b"")
        else:
            with path.open("rb") as stream:
                head = _read_head(_unpack(_read_blocks(stream, lambda _count: None), str(path)))
        return recognise_json(head, encoding, is_named_json=ending == ".json")
    except (OSError, EOFError, AttributeError, UnicodeError, zlib.error, lzma.LZMAError, SettingsError):
        return "plain"  # the error is raised when the file is read


def _name_source(given_path: str) -> str:
    if given_path == STANDARD_INPUT:
        return "standard input"
    path = Path(given_path).expanduser()
    return f"{path.resolve().name}/" if path.is_dir() else path.name


# -- bytes to lines ------------------------------------------------------------------------------------------------


@contextmanager
def _open_stream(path: Path) -> Iterator[BinaryIO]:
    if str(path) != STANDARD_INPUT:
        with path.open("rb") as stream:
            yield stream
        return
    if sys.stdin is None:
        raise DataError("standard input is closed; give a file, or pipe a text into the command")
    yield sys.stdin.buffer


@contextmanager
def _data_errors(name: str) -> Iterator[None]:
    """Turn errors of reading and unpacking into a DataError with the name of the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{name}: cannot be unpacked: {error}; the file is damaged or incomplete") from error


def _read_blocks(stream: BinaryIO, on_read: OnRead) -> Iterator[bytes]:
    while block := stream.read(_BLOCK_BYTES):
        on_read(len(block))
        yield block


def _chain(head: bytes, blocks: Iterable[bytes]) -> Iterator[bytes]:
    yield head
    yield from blocks


def _read_head(blocks: Iterator[bytes], num_bytes: int = _BLOCK_BYTES) -> bytes:
    """Return at least `num_bytes` bytes from the beginning, or all bytes if there are fewer."""
    head = b""
    while len(head) < num_bytes:
        block = next(blocks, None)
        if block is None:
            break
        head += block
    return head


def _unpack(blocks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file, or its bytes if it is not compressed."""
    head = _read_head(blocks, 6)
    create_decompressor: Callable[[], Any]
    if head.startswith(b"\x1f\x8b"):
        create_decompressor = lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)  # noqa: E731 - 16 selects gzip
    elif head.startswith(b"BZh"):
        create_decompressor = bz2.BZ2Decompressor
    elif head.startswith(b"\xfd7zXZ\x00"):
        create_decompressor = lzma.LZMADecompressor
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        zstandard = import_extra("zstandard", name)
        create_decompressor = lambda: _ZstandardDecompressor(zstandard)  # noqa: E731
    else:
        yield from _chain(head, blocks)
        return

    decompressor = create_decompressor()
    for block in _chain(head, blocks):
        remaining = block
        while remaining:
            if decompressor.eof:  # a compressed file may consist of several parts, padded with zeros
                remaining = remaining.lstrip(b"\0")
                if not remaining:
                    break
                decompressor = create_decompressor()
            yield decompressor.decompress(remaining)
            remaining = decompressor.unused_data if decompressor.eof else b""
    if not decompressor.eof:
        raise EOFError("the end is missing")


class _ZstandardDecompressor:
    """A decompressor of zstandard whose errors are those of the standard library."""

    def __init__(self, zstandard: Any) -> None:
        self._error = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor().decompressobj()

    def decompress(self, data: bytes) -> bytes:
        try:
            unpacked: bytes = self._decompressor.decompress(data)
        except self._error as error:
            raise EOFError(str(error)) from error
        return unpacked

    @property
    def eof(self) -> bool:
        return bool(self._decompressor.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._decompressor.unused_data)


def _decode(blocks: Iterable[bytes], encoding: str, name: str, *, is_guess: bool) -> Iterator[str]:
    """Yield the decoded text, with the line end \\n only."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate=True)
    num_lines = 0
    for block in _chain_end(blocks):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeError as error:
            _raise_encoding_error(error, num_lines, encoding, name, is_guess=is_guess)
        if "\0" in text:
            line_number = num_lines + text[: text.index("\0")].count("\n") + 1
            raise DataError(
                f"{name}, line {line_number:,}: NUL byte; is this a text file? If it is UTF-16, pass --encoding utf-16"
            )
        num_lines += text.count("\n")
        yield text


def _chain_end(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks that are not empty, and then an empty block, which marks the end."""
    yield from filter(None, blocks)
    yield b""


def _raise_encoding_error(error: UnicodeError, num_lines: int, encoding: str, name: str, *, is_guess: bool) -> None:
    """Raise a DataError that names the line and the byte, and suggests an encoding."""
    line_number = num_lines + 1
    detail = str(error)
    sample = b""
    if isinstance(error, UnicodeDecodeError):
        sample = error.object
        line_number += sample[: error.start].count(b"\n")
        detail = f"byte 0x{sample[error.start]:02x}"
    problem = f"{name}, line {line_number:,}: {detail} is not valid {encoding.upper()}"
    if not is_guess:
        raise DataError(f"{problem}; pass another --encoding") from None
    if b"\0" in sample:  # most binary files have NUL bytes, and text has none
        raise DataError(f"{problem}; is this a text file?") from None
    suggestion = suggest_encoding(sample)
    if suggestion is None:
        raise _EncodingError(f"{problem}, but most of the text is; repair the line, or convert the text") from None
    raise _EncodingError(
        f"{problem}; pass the encoding of the text, perhaps --encoding {suggestion} (this is a guess: check the "
        "letters with accents), or convert the text to UTF-8"
    ) from None


def _cut_lines(texts: Iterable[str], max_length: int) -> Iterator[str]:
    """Yield the lines of a text. Longer lines are cut, at a space if there is one in their second half."""
    fragments: list[str] = []  # of a line whose end was not read yet
    length = 0
    for text in texts:
        first, *others = text.split("\n")
        fragments.append(first)
        length += len(first)
        if others:
            yield "".join(fragments)
            *complete_lines, last = others
            yield from complete_lines
            fragments, length = [last], len(last)
        while length > max_length:
            line, remainder = cut_line("".join(fragments), max_length)
            yield line
            fragments, length = [remainder], len(remainder)
    yield "".join(fragments)


def cut_line(line: str, max_length: int) -> tuple[str, str]:
    """Cut a line at the last space of its first `max_length` characters, or after them if there is no space."""
    end = line.rfind(" ", max_length // 2, max_length)
    if end < 0:
        end = max_length
    return line[:end], line[end:]


def _split_lines(text: str) -> Iterator[str]:
    """Yield the lines of a row that have words."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        text = text.replace("\0", " ")
    for line in text.split("\n"):
        if line.strip():
            yield line


# -- rows ----------------------------------------------------------------------------------------------------------


def _parse_row(line: str, field: str, name: str) -> str:
    """Return the text of a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: not valid JSON: {error}; expected one object per line") from None
    if not isinstance(row, dict):
        raise DataError(f"{name}: not a JSON object; expected one object per line, with the field {field}")
    if field not in row:
        raise DataError(_missing_field(name, field, list(row), "fields"))
    text = row[field]
    if not isinstance(text, str):
        raise DataError(f"{name}: {field} is not a text; use --field to name the field that holds the text")
    if "\\ud" in line or "\\uD" in line:  # JSON may contain half of a surrogate pair, which is not valid Unicode
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _missing_field(name: str, field: str, names: list[str], noun: str) -> str:
    return f"{name}: no field {field!r}; the {noun} are {_format_names(names)}; choose one with --field"


def _format_names(names: Sequence[str]) -> str:
    listed_names = ", ".join(shorten(name) for name in names[:_MAX_LISTED_NAMES])
    if len(names) > _MAX_LISTED_NAMES:
        listed_names += f" and {len(names) - _MAX_LISTED_NAMES:,} more"
    return listed_names or "none"


def _check_encoding(encoding: str) -> None:
    try:
        "".encode(encoding)  # rejects encodings that are not for text, such as base64
    except (LookupError, ValueError):
        raise SettingsError(
            f"--encoding {shorten(encoding)}: Python does not know this encoding; use one such as cp1252 or utf-16"
        ) from None
