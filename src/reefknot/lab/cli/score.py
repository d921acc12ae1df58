"""`reefknot score`: print the log-probability of sentences under a trained language model, token by token."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from reefknot.lab.cli.options import (
    DeviceOption,
    JsonOption,
    RunArgument,
    open_language_model,
    open_standard_input,
    print_result,
)

EXAMPLES = """\b
Examples:
  reefknot score runs/demo/tied/seed0 "return a list of strings"
  reefknot score runs/demo/tied/seed0 --json < sentences.txt
"""


def score(
    run: RunArgument,
    sentences: Annotated[
        list[str] | None, typer.Argument(help="Sentences to score. [default: the lines of standard input]")
    ] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Print the log-probability of sentences, in total and token by token.

    A trained language model scores every sentence on its own, with the best weights of its run. Words are separated by
    spaces.
    """
    from dataclasses import asdict

    from reefknot.lab.evaluation.sentences import score_sentence
    from reefknot.storage.lines import read_stream, words_in

    trained = open_language_model(run, device)
    if not sentences:
        lines = read_stream(open_standard_input(), "standard input")
        sentences = [" ".join(line.words) for line in lines]
    split_sentences = [words_in(sentence, "the sentence") for sentence in sentences]
    # A model that reads spellings needs the spellings of all words.
    trained = trained.with_spellings(chain.from_iterable(split_sentences))

    records = []
    output_lines = []
    for sentence, words in zip(sentences, split_sentences, strict=True):
        word_scores = score_sentence(trained.model, words, trained.vocabulary)
        total = sum(word_score.log_prob for word_score in word_scores)
        word_records = [asdict(word_score) for word_score in word_scores]
        records.append({"sentence": sentence, "log_prob": total, "words": word_records})
        output_lines.append(f"{total:10.3f}  {sentence}")
        for word_score in word_scores:
            note = "  (unknown)" if word_score.unknown else ""
            output_lines.append(f"{word_score.log_prob:10.3f}    {word_score.word}{note}")
    print_result(records, "\n".join(output_lines), as_json)
