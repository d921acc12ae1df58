"""text8: the first 100 million characters of Wikipedia's plain text (Mahoney 2006), lower-case letters and spaces.

The split follows the script of Mikolov et al. (2014), which Press & Wolf (2017) cite: the last million characters are
held out, and a line has 1,000 words. There is only one held-out text, so it is both the validation text and the
test text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from reefknot.errors import DataError
from reefknot.lab.text.prepared import NamedLines, PreparedCorpus
from reefknot.lab.text.published import find_all_files

NUM_CHARACTERS = 100_000_000
NUM_HELD_OUT = 1_000_000  # characters at the end
WORDS_PER_LINE = 1_000
_BLOCK_SIZE = 1 << 20


def _read_lines(files: list[Path]) -> NamedLines:
    (path,) = files
    size = path.stat().st_size
    if size != NUM_CHARACTERS:
        raise DataError(f"{path}: {size:,} bytes, but text8 has {NUM_CHARACTERS:,}; download it again")
    with path.open("rb") as file:
        for line in _cut_lines(file, NUM_CHARACTERS - NUM_HELD_OUT):
            yield "train", line
        for line in _cut_lines(file, NUM_HELD_OUT):
            yield "valid", line
            yield "test", line


def _cut_lines(file: BinaryIO, num_characters: int) -> Iterator[str]:
    """Yield the next `num_characters` characters in lines of `WORDS_PER_LINE` words.

    A word at the end may be incomplete.
    """
    words: list[bytes] = []
    partial_word = b""
    remaining = num_characters
    while remaining:
        block = file.read(min(remaining, _BLOCK_SIZE))
        remaining -= len(block)
        *complete_words, partial_word = (partial_word + block).split(b" ")
        words += [word for word in complete_words if word]
        while len(words) >= WORDS_PER_LINE:
            yield b" ".join(words[:WORDS_PER_LINE]).decode("ascii")
            del words[:WORDS_PER_LINE]
    if partial_word:
        words.append(partial_word)
    if words:
        yield b" ".join(words).decode("ascii")


TEXT8 = PreparedCorpus(
    name="text8",
    description="text8, lines of 1,000 words; the last 1,000,000 characters are both validation and test text",
    how_to_get="It is published at http://mattmahoney.net/dc/text8.zip.",
    expected="text8",
    files=lambda folder: find_all_files(folder, "text8"),
    lines=_read_lines,
)
