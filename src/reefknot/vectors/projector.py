"""Read and write word vectors as a folder for TensorBoard's embedding projector. `files.py` calls these functions.

    FOLDER/vectors.tsv            the numbers of one vector per line, separated by tabs
    FOLDER/metadata.tsv           the words, one per line
    FOLDER/projector_config.pbtxt the names of the two files

`tensorboard --logdir FOLDER` shows the folder. If metadata.tsv has several columns, its first line names them and the
words are in the first column. With one column there is no heading.

Shapes: B words of a block (a part of the file that is read at once), D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from reefknot.errors import DataError
from reefknot.vectors.text_files import NUMBER_FORMAT, is_number, parse_numbers, read_line_blocks, skip_bom
from reefknot.vectors.word_vectors import Block, WordVectors, block_slices

VECTORS = "vectors.tsv"
METADATA = "metadata.tsv"
CONFIG = "projector_config.pbtxt"
FILES = (VECTORS, METADATA, CONFIG)
_CONFIG_TEXT = f"""embeddings {{
  tensor_name: "words"
  tensor_path: "{VECTORS}"
  metadata_path: "{METADATA}"
}}
"""


def read_projector(folder: Path) -> Iterator[Block]:
    """Yield the words and vectors of a projector folder in blocks."""
    missing = [name for name in (VECTORS, METADATA) if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} is not a folder of TensorBoard's projector: it has no {' and no '.join(missing)}")

    with (folder / VECTORS).open("rb") as vectors_file, (folder / METADATA).open("rb") as words_file:
        _skip_heading(words_file)
        dim = 0  # until the first line is read
        lines_read = 0
        for lines in read_line_blocks(vectors_file):
            number_lines = [line.rstrip(b"\r\n") for line in lines]
            if dim == 0:
                dim = number_lines[0].count(b"\t") + 1
            vectors_BD = parse_numbers(number_lines, dim, "\t")
            if vectors_BD is None:
                raise _parse_error(number_lines, dim, folder / VECTORS, first_line_number=lines_read + 1)

            words = [line.rstrip(b"\r\n").partition(b"\t")[0] for line in islice(words_file, len(lines))]
            if len(words) < len(lines):
                raise DataError(f"{folder}: {METADATA} has fewer words than {VECTORS} has lines; export it again")
            yield Block(words, vectors_BD)
            lines_read += len(lines)
        if words_file.readline():
            raise DataError(f"{folder}: {METADATA} has more words than {VECTORS} has lines; export it again")


def write_projector(vectors: WordVectors, folder: Path) -> Iterator[int]:
    """Create the folder, and yield the number of words written so far."""
    line_format = "\t".join([NUMBER_FORMAT] * vectors.dim)
    folder.mkdir()
    (folder / CONFIG).write_text(_CONFIG_TEXT, encoding="utf-8")
    with (folder / VECTORS).open("wb") as vectors_file, (folder / METADATA).open("wb") as words_file:
        for block in block_slices(len(vectors), vectors.dim, bytes_per_number=16):
            vector_lines = [f"{line_format % tuple(vector)}\n" for vector in vectors.vectors_VD[block].tolist()]
            word_lines = [f"{word}\n" for word in vectors.words[block]]
            vectors_file.write("".join(vector_lines).encode())
            words_file.write("".join(word_lines).encode())
            yield block.stop


def _skip_heading(words_file: BinaryIO) -> None:
    """Skip the first line if it names several columns. With one column, the first line is a word."""
    skip_bom(words_file)
    first_line_start = words_file.tell()
    first_line = words_file.readline()
    if b"\t" not in first_line:
        words_file.seek(first_line_start)


def _parse_error(lines: list[bytes], dim: int, path: Path, first_line_number: int) -> DataError:
    """Return the error for the first line that does not have `dim` numbers. numpy does not say which line it is."""
    for line_number, line in enumerate(lines, start=first_line_number):
        fields = line.split(b"\t")
        if len(fields) != dim or not all(map(is_number, fields)):
            return DataError(
                f"{path}, line {line_number:,}: expected {dim:,} numbers separated by tabs; export the folder again"
            )
    return DataError(f"{path}: cannot be parsed from line {first_line_number:,} on; export the folder again")
