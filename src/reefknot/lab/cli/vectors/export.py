"""`reefknot vectors export`: convert the word vectors of a run or a file to a format that other programs read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from reefknot.lab.cli.options import JsonOption, VectorSourceArgument, print_result

EXAMPLES = """\b
Examples:
  reefknot vectors export runs/demo/tied/seed0 --format word2vec -o demo.vec
  reefknot vectors export runs/demo/untied/seed0 --table output --format projector -o projector
  reefknot vectors export glove.6B.300d.txt --format safetensors -o glove.safetensors
"""


def export(
    source: VectorSourceArgument,
    format: Annotated[
        str,
        typer.Option(
            help="Format to write: word2vec, word2vec-binary, glove, projector or safetensors.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="File to write, or the folder for --format projector.", show_default=False),
    ],
    table: Annotated[
        str | None,
        typer.Option(
            help="Table of the run: input, output, or tied if both ends share it. Required if the run has two tables.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write word vectors in a format that gensim, TensorBoard and other programs read.

    All words of the run's vocabulary are written, including symbols such as <eos>. (Skip-gram vocabularies have no
    symbols.) It is an error if the format cannot store a word; safetensors can store any word. The file is read back to
    check it.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.tasks.word_vectors import open_vectors
    from reefknot.vectors.files import write_vectors

    notify = partial(typer.echo, err=True)
    tables = open_vectors(source, notify=notify)
    if table is None and len(tables) > 1:
        raise SettingsError(f"{source} has several tables; choose one with --table: {' or '.join(tables)}")
    table = table or next(iter(tables))
    if table not in tables:
        raise SettingsError(f"--table {table}: {source} does not have this table; it has: {', '.join(tables)}")

    vectors = tables[table]
    write_vectors(vectors, output, format, notify=notify)
    record = {"output": str(output), "format": format, "table": table, "words": len(vectors), "dim": vectors.dim}
    print_result(record, f"{output}: {len(vectors):,} words, dimension {vectors.dim} ({table}), read back", as_json)
