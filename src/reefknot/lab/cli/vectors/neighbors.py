"""`reefknot vectors neighbors`: print the nearest words of a word, in the tables of a run or in a file of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from reefknot.lab.cli.options import AsJson, VectorSource, emit, is_run, open_tables, open_trained

if TYPE_CHECKING:
    from reefknot.lab.runs.result import NearestWords
    from reefknot.vectors.word_vectors import WordVectors

    TablesAndNeighbors: TypeAlias = tuple[dict[str, WordVectors], dict[str, NearestWords]]

Neighbors = Sequence[tuple[str, float]]
"""Words with their cosines, the nearest first."""

EXAMPLES = """\b
Examples:
  reefknot vectors neighbors runs/demo/untied/seed0 file string
  reefknot vectors neighbors runs/demo/tied/seed0 file -k 20 --json
  reefknot vectors neighbors vectors.txt file
"""


def neighbors(
    source: VectorSource,
    words: Annotated[
        list[str],
        typer.Argument(help="Words of the vocabulary, or any words if the input end of the run reads spellings."),
    ],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Number of neighbours to print per word.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Print the nearest words by cosine, in the input table and among the class vectors of the output."""
    tables, nearest = _from_model(source, words, k) if _has_model(source) else _from_vectors(source, words, k)
    neighbors = {
        end: {word: with_direction(near, tables[end], [word], f"{word} ({end})") for word, near in by_word.items()}
        for end, by_word in nearest.items()
    }
    # A word outside the vocabulary, whose spelling only the input reads, has neighbours at one end.
    every_word = dict.fromkeys(word for by_word in neighbors.values() for word in by_word)
    lines = [
        f"{word} ({end}): {listed(by_word[word])}"
        for word in every_word
        for end, by_word in neighbors.items()
        if word in by_word
    ]
    emit(neighbors, "\n".join(lines), as_json)


def with_direction(near: Neighbors, vectors: WordVectors, words: Sequence[str], what: str) -> Neighbors:
    """Return the neighbours, or an empty list if the vector of a word is zero, because zero has no direction.

    If there are no neighbours, a note is printed on stderr. `what` names the question in this note.
    """
    zero = [word for word in dict.fromkeys(words) if not vectors.vector(word).any()]
    if zero:
        typer.echo(f"{what}: the vector of {' and '.join(zero)} is zero, which has no direction", err=True)
        return []
    if not near:
        typer.echo(f"{what}: there is no other word", err=True)
    return near


def listed(near: Neighbors) -> str:
    """Return words with their cosines as text."""
    return ", ".join(f"{word} {cosine:.2f}" for word, cosine in near) or "none"


def _has_model(source: Path) -> bool:
    """Return whether the source has a model that reads words, possibly as sub-words or by their spelling."""
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks import load_task

    return is_run(source) and load_task(RunFolder.open(source).task).scores_text


def _from_vectors(source: Path, words: list[str], k: int) -> TablesAndNeighbors:
    """Return the tables of a source that has no model, and the neighbours of the words in every table."""
    from reefknot.lab.evaluation.neighbors import nearest_words
    from reefknot.vectors.lookup import Lookup

    tables, nearest = open_tables(source), {}
    for name, vectors in tables.items():
        rows = Lookup(vectors).require(words, str(source))
        nearest[name] = nearest_words(vectors, [vectors.words[row] for row in rows], k)
    return tables, nearest


def _from_model(run: Path, words: list[str], k: int) -> TablesAndNeighbors:
    """Return the tables of a model, and the neighbours of the words in the tables that have them."""
    import torch

    from reefknot.errors import DataError
    from reefknot.lab.evaluation.neighbors import nearest_neighbors
    from reefknot.storage.lines import words_in
    from reefknot.vectors.lookup import unknown_words_error

    words = words_in(" ".join(words), "the words")
    trained = open_trained(run).with_spellings(words)
    vocabulary = trained.vocabulary
    unknown = [word for word in words if not vocabulary.can_read(word)]
    if unknown:
        raise unknown_words_error(unknown, vocabulary.words, str(run))
    spelled = [word for word in words if word not in vocabulary]
    if spelled:
        typer.echo(
            f"not in the vocabulary, so these words have neighbours at the input only: {', '.join(spelled)}", err=True
        )
    tokens_of = {word: vocabulary.split_word(word) for word in words}
    for word, tokens in tokens_of.items():
        if len(tokens) > 1:
            raise DataError(
                f"{word} does not have its own vector in {run}: it is split into {' '.join(tokens)}; use another word"
            )
    words = [token for (token,) in tokens_of.values()]
    tables = trained.vectors()
    return tables, {
        end: nearest_neighbors(
            torch.from_numpy(vectors.vectors_VD), vocabulary, [word for word in words if word in vectors], k
        )
        for end, vectors in tables.items()
    }
