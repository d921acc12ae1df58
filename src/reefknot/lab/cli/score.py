"""`reefknot score`: print the log-probability of sentences, token by token."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from reefknot.lab.cli.options import AsJson, Device, Run, open_language_model, open_standard_input, print_result

EXAMPLES = """\b
Examples:
  reefknot score runs/demo/tied/seed0 "return a list of strings"
  reefknot score runs/demo/tied/seed0 --json < sentences.txt
"""


def score(
    run: Run,
    sentences: Annotated[
        list[str] | None, typer.Argument(help="Sentences to score. [default: the lines of standard input]")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the log-probability of sentences, in total and token by token.

    A trained language model scores every sentence on its own, with the best weights of its run. Words are separated by
    spaces.
    """
    from dataclasses import asdict

    from reefknot.lab.evaluation.sentences import score_sentence
    from reefknot.storage.lines import read_stream, words_in

    trained = open_language_model(run, device)
    lines = sentences or [" ".join(line.words) for line in read_stream(open_standard_input(), "standard input")]
    split_lines = [words_in(line, "the sentence") for line in lines]
    trained = trained.with_spellings(chain.from_iterable(split_lines))
    records, output_lines = [], []
    for line, words in zip(lines, split_lines, strict=True):
        word_scores = score_sentence(trained.model, words, trained.vocabulary)
        total = sum(score.log_prob for score in word_scores)
        records.append({"sentence": line, "log_prob": total, "words": [asdict(score) for score in word_scores]})
        output_lines.append(f"{total:10.3f}  {line}")
        for score in word_scores:
            note = "  (unknown)" if score.unknown else ""
            output_lines.append(f"{score.log_prob:10.3f}    {score.word}{note}")
    print_result(records, "\n".join(output_lines), as_json)
