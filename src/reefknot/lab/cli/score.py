"""`reefknot score`: log-probability of sentences, token by token."""

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
        list[str] | None, typer.Argument(help="Sentences; without any, lines of standard input.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score sentences with a run's best weights, each on its own, words separated by spaces."""
    from dataclasses import asdict

    from reefknot.lab.evaluation.sentences import score_sentence
    from reefknot.storage.lines import read_stream, words_in

    trained = open_language_model(run, device)
    lines = sentences or [" ".join(line.words) for line in read_stream(standard_input(), "standard input")]
    cut = [words_in(line, "the sentence") for line in lines]
    trained = trained.knowing(chain.from_iterable(cut))
    scored = []
    told = []
    for line, given in zip(lines, cut, strict=True):
        words = score_sentence(trained.model, given, trained.vocabulary)
        total = sum(word.log_prob for word in words)
        scored.append({"sentence": line, "log_prob": total, "words": [asdict(word) for word in words]})
        told.append(f"{total:10.3f}  {line}")
        told += [f"{w.log_prob:10.3f}    {w.word}{'  (unknown)' if w.unknown else ''}" for w in words]
    emit(scored, "\n".join(told), as_json)
