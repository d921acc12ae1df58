"""`reefknot vectors neighbors`: print the nearest words of a word, in the tables of a run or in a file of vectors.

A table holds one vector per word. A language model may read a word as sub-words or by its spelling, so its words are
looked up with the model's vocabulary (`_find_in_model`). In all other sources, a word is a line of the table
(`_find_in_tables`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from reefknot.lab.cli.options import (
    JsonOption,
    VectorSourceArgument,
    is_run_folder,
    open_tables,
    open_trained,
    print_result,
)

if TYPE_CHECKING:
    from reefknot.lab.runs.result import NearestWords
    from reefknot.vectors.word_vectors import WordVectors

Neighbors = Sequence[tuple[str, float]]
"""Words with their cosines, the nearest first."""


class TableNeighbors(NamedTuple):
    """The nearest words of each word in one table."""

    vectors: WordVectors
    """The table."""
    nearest: NearestWords
    """The neighbours by word."""


EXAMPLES = """\b
Examples:
  reefknot vectors neighbors runs/demo/untied/seed0 file string
  reefknot vectors neighbors runs/demo/tied/seed0 file -k 20 --json
  reefknot vectors neighbors vectors.txt file
"""


def neighbors(
    source: VectorSourceArgument,
    words: Annotated[
        list[str],
        typer.Argument(help="Words of the vocabulary. If the model reads spellings (char-CNN), any words."),
    ],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Number of neighbours to print per word.")] = 8,
    as_json: JsonOption = False,
) -> None:
    """Print the nearest words by cosine, in every table of a run or in a file.

    A run has an input table and an output table, which holds the class vectors, or one tied table for both.
    """
    if _has_language_model(source):
        neighbors_by_table = _find_in_model(source, words, k)
    else:
        neighbors_by_table = _find_in_tables(source, words, k)

    record: dict[str, dict[str, Neighbors]] = {}
    for table, table_neighbors in neighbors_by_table.items():
        record[table] = {}
        for word, nearest in table_neighbors.nearest.items():
            record[table][word] = check_neighbors(nearest, table_neighbors.vectors, [word], f"{word} ({table})")

    # Only the input table has the neighbours of a word that is outside the vocabulary and read by its spelling.
    all_words = dict.fromkeys(chain.from_iterable(record.values()))
    lines = []
    for word in all_words:
        for table, nearest_by_word in record.items():
            if word in nearest_by_word:
                lines.append(f"{word} ({table}): {format_neighbors(nearest_by_word[word])}")
    print_result(record, "\n".join(lines), as_json)


def check_neighbors(neighbors: Neighbors, vectors: WordVectors, words: Sequence[str], label: str) -> Neighbors:
    """Return the neighbours, or an empty list if they are undefined; print a warning if there are none.

    Args:
        neighbors: Words with their cosines.
        vectors: The vectors of all words.
        words: The words that the neighbours were computed from. If the vector of one of them is zero, it has no
            direction, and cosines to it mean nothing.
        label: Start of the warning.
    """
    zero_words = [word for word in dict.fromkeys(words) if not vectors.vector(word).any()]
    if zero_words:
        typer.echo(f"{label}: the vector of {' and '.join(zero_words)} is zero, which has no direction", err=True)
        return []
    if not neighbors:
        typer.echo(f"{label}: there is no other word", err=True)
    return neighbors


def format_neighbors(neighbors: Neighbors) -> str:
    """Format words with their cosines: `queen 0.79, apple 0.12`."""
    return ", ".join(f"{word} {cosine:.2f}" for word, cosine in neighbors) or "none"


def _has_language_model(source: Path) -> bool:
    """Return whether the source is a run of a model that reads words, possibly as sub-words or by their spelling."""
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks import load_task

    if not is_run_folder(source):
        return False
    task = load_task(RunFolder.open(source).task)
    return task.scores_text


def _find_in_tables(source: Path, words: list[str], k: int) -> dict[str, TableNeighbors]:
    """Look the words up in every table of a file or of a skip-gram run, and return their neighbours by table."""
    from reefknot.lab.evaluation.neighbors import nearest_words
    from reefknot.vectors.lookup import Lookup

    neighbors_by_table = {}
    for table, vectors in open_tables(source).items():
        table_rows = Lookup(vectors).require(words, str(source))
        table_words = [vectors.words[table_row] for table_row in table_rows]
        neighbors_by_table[table] = TableNeighbors(vectors, nearest_words(vectors, table_words, k))
    return neighbors_by_table


def _find_in_model(run: Path, words: list[str], k: int) -> dict[str, TableNeighbors]:
    """Look the words up with a model's vocabulary, and return their neighbours by table.

    A table that does not have a word has no neighbours of it.
    """
    import torch

    from reefknot.errors import DataError
    from reefknot.lab.evaluation.neighbors import nearest_neighbors
    from reefknot.storage.lines import words_in
    from reefknot.vectors.lookup import unknown_words_error

    words = words_in(" ".join(words), "the words")
    trained = open_trained(run).with_spellings(words)
    vocabulary = trained.vocabulary
    unknown_words = [word for word in words if not vocabulary.can_read(word)]
    if unknown_words:
        raise unknown_words_error(unknown_words, vocabulary.words, str(run))
    input_only_words = [word for word in words if word not in vocabulary]
    if input_only_words:
        typer.echo(
            f"not in the vocabulary, so these words have neighbours at the input only: {', '.join(input_only_words)}",
            err=True,
        )

    # Every word must be one token of the model, because sub-words have the vectors.
    tokens_by_word = {word: vocabulary.split_word(word) for word in words}
    for word, tokens in tokens_by_word.items():
        if len(tokens) > 1:
            raise DataError(
                f"{word} does not have its own vector in {run}: it is split into {' '.join(tokens)}; use another word"
            )
    word_tokens = [token for (token,) in tokens_by_word.values()]

    neighbors_by_table = {}
    for table, vectors in trained.vectors().items():
        table_words = [token for token in word_tokens if token in vectors]
        nearest = nearest_neighbors(torch.from_numpy(vectors.vectors_VD), vocabulary, table_words, k)
        neighbors_by_table[table] = TableNeighbors(vectors, nearest)
    return neighbors_by_table
