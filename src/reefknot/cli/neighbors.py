"""`reefknot neighbors`: the words nearest to a word, at either end."""

from __future__ import annotations

from typing import Annotated

import typer

from reefknot.cli.options import AsJson, Run, emit, open_trained

EXAMPLES = """\b
Examples:
  reefknot neighbors runs/demo/untied/seed0 file string
  reefknot neighbors runs/demo/tied/seed0 file -k 20 --json
"""


def neighbors(
    run: Run,
    words: Annotated[list[str], typer.Argument(help="Words of the run's vocabulary.")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Neighbours per word.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Nearest words by cosine: in the input table, and among the label vectors of the output."""
    from reefknot.errors import DataError
    from reefknot.evaluation.neighbors import nearest

    trained = open_trained(run)
    unknown = [word for word in words if word not in trained.vocabulary]
    if unknown:
        raise DataError(f"not in the vocabulary of {run}: {', '.join(unknown)}")
    ends = {"input": trained.model.input.vectors(), "labels": trained.model.output.vectors()}
    found = {end: nearest(vectors, trained.vocabulary, words, k) for end, vectors in ends.items()}
    lines = [
        f"{word} ({end}): " + ", ".join(f"{near} {cosine:.2f}" for near, cosine in found[end][word])
        for word in words
        for end in found
    ]
    emit(found, "\n".join(lines), as_json)
