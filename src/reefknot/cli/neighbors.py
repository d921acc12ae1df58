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
    words: Annotated[list[str], typer.Argument(help="Words of the vocabulary, or any where spellings are kept.")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Neighbours per word.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Nearest words by cosine: in the input table, and among the label vectors of the output."""
    from reefknot.errors import DataError
    from reefknot.evaluation.neighbors import nearest
    from reefknot.findings import word_vectors
    from reefknot.text.lines import words_in

    words = words_in(" ".join(words), "the words")
    trained = open_trained(run).knowing(words)
    vocabulary = trained.vocabulary
    unknown = [word for word in words if not vocabulary.reads(word)]
    if unknown:
        raise DataError(f"not in the vocabulary of {run}: {', '.join(unknown)}")
    spelled = [word for word in words if word not in vocabulary]
    if spelled:
        typer.echo(f"not in the vocabulary, so with neighbours at the input only: {', '.join(spelled)}", err=True)
    cuts = {word: vocabulary.cut(word) for word in words}
    for word, tokens in cuts.items():
        if len(tokens) > 1:
            raise DataError(f"{word} has no vector of its own in {run}: it is cut into {' '.join(tokens)}")
    words = [token for (token,) in cuts.values()]
    classes = [word for word in words if word not in spelled]
    ends = word_vectors(trained.model)
    found = {
        "input": nearest(ends["input"], vocabulary, words, k),
        "labels": nearest(ends["labels"], vocabulary, classes, k),
    }
    lines = [
        f"{word} ({end}): " + ", ".join(f"{near} {cosine:.2f}" for near, cosine in found[end][word])
        for word in words
        for end in found
        if word in found[end]
    ]
    emit(found, "\n".join(lines), as_json)
