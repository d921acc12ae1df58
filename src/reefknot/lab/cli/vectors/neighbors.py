"""`reefknot vectors neighbors`: the words nearest to a word, in the tables of a run or in a file of vectors."""

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
        typer.Argument(help="Words of the vocabulary; any words if the run's input reads spellings."),
    ],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Print this many neighbours per word.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Print the nearest words by cosine, in the input table and among the class vectors of the output."""
    tables, nearest = _of_model(source, words, k) if _has_model(source) else _of_vectors(source, words, k)
    neighbors = {
        end: {word: with_direction(near, tables[end], [word], f"{word} ({end})") for word, near in by_word.items()}
        for end, by_word in nearest.items()
    }
    # A word that only the input can spell has neighbours at one end.
    every_word = dict.fromkeys(word for by_word in neighbors.values() for word in by_word)
    lines = [
        f"{word} ({end}): {listed(by_word[word])}"
        for word in every_word
        for end, by_word in neighbors.items()
        if word in by_word
    ]
    emit(neighbors, "\n".join(lines), as_json)


def with_direction(near: Neighbors, vectors: WordVectors, words: Sequence[str], what: str) -> Neighbors:
    """Return the neighbours, or none if a vector that they were computed from is zero, because zero has no direction.

    Prints a note on stderr if there are no neighbours; `what` names the question there.
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
    """Return whether the source has a model that reads words, and may cut them into sub-words or spell them."""
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks import load_task

    return is_run(source) and load_task(RunFolder.open(source).task).scores_text


def _of_vectors(source: Path, words: list[str], k: int) -> TablesAndNeighbors:
    """Return the tables of a source without a model, and the neighbours of the words in every table."""
    from reefknot.lab.evaluation.neighbors import nearest_words
    from reefknot.vectors.lookup import Lookup

    tables, nearest = open_tables(source), {}
    for name, vectors in tables.items():
        rows = Lookup(vectors).require(words, str(source))
        nearest[name] = nearest_words(vectors, [vectors.words[row] for row in rows], k)
    return tables, nearest


def _of_model(run: Path, words: list[str], k: int) -> TablesAndNeighbors:
    """Return the tables of a model, and the neighbours of the words in the tables that have them."""
    import torch

    from reefknot.errors import DataError
    from reefknot.lab.evaluation.neighbors import nearest
    from reefknot.storage.lines import words_in
    from reefknot.vectors.lookup import unknown_words_error

    words = words_in(" ".join(words), "the words")
    trained = open_trained(run).knowing(words)
    vocabulary = trained.vocabulary
    unknown = [word for word in words if not vocabulary.reads(word)]
    if unknown:
        raise unknown_words_error(unknown, vocabulary.words, str(run))
    spelled = [word for word in words if word not in vocabulary]
    if spelled:
        typer.echo(f"not in the vocabulary, so with neighbours at the input only: {', '.join(spelled)}", err=True)
    tokens_of = {word: vocabulary.cut(word) for word in words}
    for word, tokens in tokens_of.items():
        if len(tokens) > 1:
            raise DataError(f"{word} has no vector of its own in {run}: it is cut into {' '.join(tokens)}")
    words = [token for (token,) in tokens_of.values()]
    tables = trained.vectors()
    return tables, {
        end: nearest(torch.from_numpy(vectors.vectors_VD), vocabulary, [word for word in words if word in vectors], k)
        for end, vectors in tables.items()
    }
