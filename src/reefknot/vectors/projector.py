"""TensorBoard's embedding projector: a folder with vectors.tsv, metadata.tsv and a configuration that names both.

    tensorboard --logdir FOLDER

Metadata of one column is the words, a line each, without a heading; where it has several, the first line names them,
and the words are the first column.

Shapes: V words, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from reefknot.errors import DataError
from reefknot.vectors.contract import BLOCK, Block, slices
from reefknot.vectors.text_files import NUMBER, is_number, parse, skip_bom
from reefknot.vectors.word_vectors import WordVectors

VECTORS, METADATA, CONFIG = "vectors.tsv", "metadata.tsv", "projector_config.pbtxt"
FILES = (VECTORS, METADATA, CONFIG)
_CONFIG = f"""embeddings {{
  tensor_name: "words"
  tensor_path: "{VECTORS}"
  metadata_path: "{METADATA}"
}}
"""


def read_projector(folder: Path) -> Iterator[Block]:
    """The words of a folder."""
    missing = [name for name in (VECTORS, METADATA) if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} is no folder of TensorBoard's projector: it has no {' and no '.join(missing)}")
    with ExitStack() as stack:
        rows, words = (stack.enter_context((folder / name).open("rb")) for name in (VECTORS, METADATA))
        skip_bom(words)
        start = words.tell()
        columns = words.readline().count(b"\t") + 1
        if columns == 1:
            words.seek(start)
        number, dim = 0, 0
        while lines := rows.readlines(BLOCK):
            numbers = [line.rstrip(b"\r\n") for line in lines]
            dim = dim or numbers[0].count(b"\t") + 1
            vectors_BD = parse(numbers, dim, "\t")
            if vectors_BD is None:
                raise _fault(numbers, dim, folder / VECTORS, number + 1)
            found = [line.rstrip(b"\r\n").partition(b"\t")[0] for line in islice(words, len(lines))]
            if len(found) < len(lines):
                raise DataError(f"{folder}: {METADATA} has fewer words than {VECTORS} has lines; export it anew")
            yield Block(found, vectors_BD)
            number += len(lines)
        if words.readline():
            raise DataError(f"{folder}: {METADATA} has more words than {VECTORS} has lines; export it anew")


def _fault(lines: list[bytes], dim: int, path: Path, first_line: int) -> DataError:
    for number, line in enumerate(lines, start=first_line):
        pieces = line.split(b"\t")
        if len(pieces) != dim or not all(map(is_number, pieces)):
            return DataError(f"{path}, line {number:,}: must be {dim:,} numbers with tabs between them; export it anew")
    return DataError(f"{path}: cannot be parsed from line {first_line:,} on; export it anew")


def write_projector(vectors: WordVectors, folder: Path) -> Iterator[int]:
    """Make the folder; yields how many words are written so far."""
    line = "\t".join([NUMBER] * vectors.dim)
    folder.mkdir()
    (folder / CONFIG).write_text(_CONFIG, encoding="utf-8")
    with (folder / VECTORS).open("wb") as rows_file, (folder / METADATA).open("wb") as words_file:
        for rows in slices(len(vectors), vectors.dim, bytes_per_number=16):
            rows_file.write("".join(f"{line % tuple(row)}\n" for row in vectors.vectors_VD[rows].tolist()).encode())
            words_file.write("".join(f"{word}\n" for word in vectors.words[rows]).encode())
            yield rows.stop
