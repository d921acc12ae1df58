"""`reefknot neighbors`: the words nearest to a word, at either end of a run or in a file of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from reefknot.lab.cli.options import AsJson, VectorSource, emit, is_run, open_tables, open_trained

if TYPE_CHECKING:
    from reefknot.lab.runs.result import NearestWords
    from reefknot.vectors.word_vectors import WordVectors

    Found: TypeAlias = tuple[dict[str, WordVectors], dict[str, NearestWords]]

Near = Sequence[tuple[str, float]]
EXAMPLES = """\b
Examples:
  reefknot neighbors runs/demo/untied/seed0 file string
  reefknot neighbors runs/demo/tied/seed0 file -k 20 --json
  reefknot neighbors vectors.txt file
"""


def neighbors(
    source: VectorSource,
    words: Annotated[list[str], typer.Argument(help="Words of the vocabulary, or any where spellings are kept.")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Neighbours per word.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Nearest words by cosine: in the input table, and among the label vectors of the output."""
    tables, all_near = _of_model(source, words, k) if _has_model(source) else _of_vectors(source, words, k)
    found = {
        end: {word: meaningful(near, tables[end], [word], f"{word} ({end})") for word, near in each.items()}
        for end, each in all_near.items()
    }
    asked = dict.fromkeys(word for near in found.values() for word in near)
    lines = [f"{word} ({end}): {listed(found[end][word])}" for word in asked for end in found if word in found[end]]
    emit(found, "\n".join(lines), as_json)


def meaningful(near: Near, vectors: WordVectors, words: Sequence[str], what: str) -> Near:
    """Words near to what is made of `words`; none, and a remark on `what`, where a zero vector gives no direction."""
    zero = [word for word in dict.fromkeys(words) if not vectors.vector(word).any()]
    if zero:
        typer.echo(f"{what}: the vector of {' and '.join(zero)} is zero, which has no direction", err=True)
        return []
    if not near:
        typer.echo(f"{what}: there is no other word", err=True)
    return near


def listed(near: Near) -> str:
    """Words with their cosines, for a person."""
    return ", ".join(f"{word} {cosine:.2f}" for word, cosine in near) or "none"


def _has_model(source: Path) -> bool:
    """Whether a model reads the words, which it may cut into sub-words or spell, rather than look their vectors up."""
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks import load_task

    return is_run(source) and load_task(RunFolder.open(source).task).scores_text


def _of_vectors(source: Path, words: list[str], k: int) -> Found:
    from reefknot.lab.evaluation.neighbors import nearest_words
    from reefknot.vectors.lookup import Lookup

    tables, found = open_tables(source), {}
    for name, vectors in tables.items():
        rows = Lookup(vectors).require(words, str(source))
        found[name] = nearest_words(vectors, [vectors.words[row] for row in rows], k)
    return tables, found


def _of_model(run: Path, words: list[str], k: int) -> Found:
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
    cuts = {word: vocabulary.cut(word) for word in words}
    for word, tokens in cuts.items():
        if len(tokens) > 1:
            raise DataError(f"{word} has no vector of its own in {run}: it is cut into {' '.join(tokens)}")
    words = [token for (token,) in cuts.values()]
    tables = trained.vectors()
    return tables, {
        end: nearest(torch.from_numpy(vectors.vectors_VD), vocabulary, [word for word in words if word in vectors], k)
        for end, vectors in tables.items()
    }
