"""`reefknot score`: print the log-probability of sentences under a trained language model, token by token."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from reefknot.lab.cli.options import (
    DeviceOption,
    JsonOption,
    OtherEncodingOption,
    OtherFieldOption,
    OtherTextOption,
    RunArgument,
    open_language_model,
    open_standard_input,
    print_result,
)

EXAMPLES = """\b
Examples:
  reefknot score runs/demo/tied/seed0 "return a list of strings"
  reefknot score runs/demo/tied/seed0 --json < sentences.txt
  reefknot score runs/demo/tied/seed0 --text articles.jsonl.gz --field body
"""


def score(
    run: RunArgument,
    sentences: Annotated[
        list[str] | None, typer.Argument(help="Sentences to score. [default: the lines of standard input]")
    ] = None,
    text: OtherTextOption = None,
    field: OtherFieldOption = None,
    encoding: OtherEncodingOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Print the log-probability of sentences, in total and token by token.

    A trained language model scores every sentence on its own, with the best weights of its run. Words are separated by
    spaces. With --text, every line of the text is a sentence, and the last line of the output sums up the text.
    """
    from dataclasses import asdict

    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.sentences import score_sentence
    from reefknot.lab.text.sources import DEFAULT_FIELD, open_text
    from reefknot.storage.lines import read_stream, words_in

    if text is None and (field is not None or encoding is not None):
        raise SettingsError("--field and --encoding have no effect without --text; add --text or leave them out")
    if text is not None and sentences:
        raise SettingsError("sentences and --text were given; leave one of them out")
    trained = open_language_model(run, device)
    if text is not None:
        sentences = list(open_text(text, encoding=encoding, field=field or DEFAULT_FIELD).read_lines())
    elif sentences:
        _warn_of_file_names(sentences)
    else:
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
    if text is not None:
        output_lines.append(_summarise(records))
    print_result(records, "\n".join(output_lines), as_json)


def _warn_of_file_names(sentences: list[str]) -> None:
    """Print a hint on stderr for every sentence that is the name of a file."""
    for sentence in sentences:
        with suppress(OSError):  # the sentence is too long for a file name
            if Path(sentence).is_file():
                typer.echo(f"{sentence} is scored as a sentence; --text {sentence} scores the file", err=True)


def _summarise(records: list[dict[str, Any]]) -> str:
    """Return the perplexity of all sentences, with the share of unknown words."""
    from reefknot.lab.runs.definition import describe_unknown_share, format_perplexity, perplexity

    total = sum(record["log_prob"] for record in records)
    tokens = [token for record in records for token in record["words"]]
    num_unknown = sum(token["unknown"] for token in tokens)
    num_words = sum(len(record["sentence"].split()) + 1 for record in records)  # with line ends
    return (
        f"{total:10.3f}  in total: {len(records):,} sentences, {len(tokens):,} tokens, perplexity per token "
        f"{format_perplexity(perplexity(-total / len(tokens)))}, {describe_unknown_share(num_unknown / num_words)}; "
        "each sentence is scored without the sentences before it"
    )
