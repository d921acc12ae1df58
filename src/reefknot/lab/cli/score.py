"""`reefknot score`: print the log-probability of sentences, token by token."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from reefknot.lab.cli.options import AsJson, Device, Run, emit, open_language_model, standard_input

EXAMPLES = """\b
Examples:
  reefknot score runs/demo/tied/seed0 "return a list of strings"
  reefknot score runs/demo/tied/seed0 --json < sentences.txt
"""


def score(
    run: Run,
    sentences: Annotated[
        list[str] | None, typer.Argument(help="Sentences to score. By default, lines are read from standard input.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the log-probability of sentences under the best weights of a run, token by token.

    Every sentence is scored on its own. Words are separated by spaces.
    """
    from dataclasses import asdict

    from reefknot.lab.evaluation.sentences import score_sentence
    from reefknot.storage.lines import read_stream, words_in

    trained = open_language_model(run, device)
    lines = sentences or [" ".join(line.words) for line in read_stream(standard_input(), "standard input")]
    words_of_lines = [words_in(line, "the sentence") for line in lines]
    trained = trained.with_spellings(chain.from_iterable(words_of_lines))
    records, text = [], []
    for line, words in zip(lines, words_of_lines, strict=True):
        scores = score_sentence(trained.model, words, trained.vocabulary)
        total = sum(score.log_prob for score in scores)
        records.append({"sentence": line, "log_prob": total, "words": [asdict(score) for score in scores]})
        text.append(f"{total:10.3f}  {line}")
        text += [f"{score.log_prob:10.3f}    {score.word}{'  (unknown)' if score.unknown else ''}" for score in scores]
    emit(records, "\n".join(text), as_json)
