"""`reefknot export`: word vectors of a run, or of a file, in a format that other programs read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from reefknot.lab.cli.options import AsJson, emit

EXAMPLES = """\b
Examples:
  reefknot export runs/demo/tied/seed0 --format word2vec -o demo.vec
  reefknot export runs/demo/untied/seed0 --table output --format projector -o projector
  reefknot export glove.6B.300d.txt --format safetensors -o glove.safetensors
"""


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="A run folder, or a file of word vectors.")],
    format: Annotated[
        str, typer.Option(help="word2vec, word2vec-binary, glove, projector or safetensors.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write; for projector, a folder.", show_default=False)
    ],
    table: Annotated[
        str | None, typer.Option(help="Of a run: input, output, or tied where one table is both.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write word vectors for gensim, TensorBoard and others, and read them back before saying so.

    Words are those of the run's vocabulary, symbols such as <eos> included (skip-gram learns none). A word that the
    format cannot hold is refused; safetensors holds any.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.tasks.word_vectors import open_vectors
    from reefknot.vectors.files import write_vectors

    say = partial(typer.echo, err=True)
    tables = open_vectors(source, say=say)
    if table is None and len(tables) > 1:
        raise SettingsError(f"{source} has several tables; say which with --table: {' or '.join(tables)}")
    table = table or next(iter(tables))
    if table not in tables:
        raise SettingsError(f"--table {table}: {source} has no such table; there is: {', '.join(tables)}")
    vectors = tables[table]
    write_vectors(vectors, output, format, say=say)
    told = {"output": str(output), "format": format, "table": table, "words": len(vectors), "dim": vectors.dim}
    emit(told, f"{output}: {len(vectors):,} words, {vectors.dim} numbers each ({table}), read back", as_json)
