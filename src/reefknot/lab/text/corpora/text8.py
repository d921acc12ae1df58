"""text8: the first 100 million characters of Wikipedia's plain text (Mahoney 2006), lower-case letters and spaces.

The split follows the script of Mikolov et al. (2014), which Press & Wolf (2017) cite: the last million characters are
held out, and a line has 1,000 words. There is only one held-out text, so it is both valid and test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from reefknot.errors import DataError
from reefknot.lab.text.prepared import Lines, PreparedCorpus
from reefknot.lab.text.published import all_of

SIZE = 100_000_000
HELD_OUT = 1_000_000
WORDS = 1_000  # per line
_BLOCK = 1 << 20


def _lines(files: list[Path]) -> Lines:
    (path,) = files
    if path.stat().st_size != SIZE:
        raise DataError(f"{path}: {path.stat().st_size:,} bytes, but text8 has {SIZE:,}; download it again")
    with path.open("rb") as stream:
        yield from (("train", line) for line in _cut(stream, SIZE - HELD_OUT))
        for line in _cut(stream, HELD_OUT):
            yield "valid", line
            yield "test", line


def _cut(stream: BinaryIO, size: int) -> Iterator[str]:
    """Yield the next `size` characters in lines of `WORDS` words. A word at the end may be incomplete."""
    words: list[bytes] = []
    partial = b""
    while size:
        block = stream.read(min(size, _BLOCK))
        size -= len(block)
        *whole, partial = (partial + block).split(b" ")
        words += filter(None, whole)
        while len(words) >= WORDS:
            yield b" ".join(words[:WORDS]).decode("ascii")
            del words[:WORDS]
    words += filter(None, [partial])
    if words:
        yield b" ".join(words).decode("ascii")


TEXT8 = PreparedCorpus(
    name="text8",
    description="text8, lines of 1,000 words; the last 1,000,000 characters are both valid and test",
    how_to_get="It is published at http://mattmahoney.net/dc/text8.zip.",
    expected="text8",
    files=lambda folder: all_of(folder, "text8"),
    lines=_lines,
)
