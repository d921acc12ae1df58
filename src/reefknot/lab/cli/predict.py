"""`reefknot predict`: print the most probable next words after a phrase.

With `--split`, it also prints mean probabilities over a text, as Inan et al. (2017) analyse their models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import (
    DataOption,
    DeviceOption,
    JsonOption,
    RunArgument,
    open_language_model,
    open_split,
    print_result,
    reject_options,
    warn_about_unknown_words,
)

if TYPE_CHECKING:
    from reefknot.lab.evaluation.predictions import Tendency

EXAMPLES = """\b
Examples:
  reefknot predict runs/demo/tied/seed0 "returns a list of" "this function"
  reefknot predict runs/demo/tied/seed0 --split test --neighbors 20 --json
"""

TEXT_OPTIONS = ("neighbors", "data")
"""Options that only affect the mean probabilities over a text."""


def predict(
    ctx: typer.Context,
    run: RunArgument,
    phrases: Annotated[
        list[str] | None, typer.Argument(help="Phrases to continue. Every phrase is read as the start of a line.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Number of words to print after each phrase.")] = 10,
    split: Annotated[
        str | None,
        typer.Option(help="Also print mean probabilities over this text of the corpus: train, valid or test."),
    ] = None,
    neighbors: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --split: also print the total probability of this many nearest neighbours of the next word.",
        ),
    ] = 10,
    data: DataOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Print the most probable next words after a phrase, with their probabilities.

    For comparison, the probabilities of `<unk>`, `a`, `an` and `the` are also printed, if they are in the vocabulary. A
    model that gives these frequent words a high probability after every phrase has learned little about the phrase.
    """
    from itertools import chain

    from reefknot.lab.evaluation.predictions import measure_tendency
    from reefknot.lab.evaluation.predictions import predict as predict_next
    from reefknot.storage.lines import words_in

    _check_options(ctx, phrases or [], split)
    trained = open_language_model(run, device)
    split_phrases = [words_in(phrase, "the phrase") for phrase in phrases or []]
    record: dict[str, Any] = {"run": str(run), "phrases": []}
    lines: list[str] = []

    # The mean probabilities over a text.
    if split is not None:
        text = open_split(trained, split, data)
        means = measure_tendency(trained.model, text, trained.vocabulary, neighbors, trained.experiment.windows)
        record["text"] = {"split": split, **asdict(means)}
        lines += _format_means(split, means)

    # The words after each phrase.
    all_words = list(chain.from_iterable(split_phrases))
    trained = trained.with_spellings(all_words)
    warn_about_unknown_words(all_words, trained.vocabulary)
    for words in split_phrases:
        prediction = predict_next(trained.model, words, trained.vocabulary, top)
        phrase = " ".join(words)
        record["phrases"].append({"phrase": phrase, **asdict(prediction)})
        lines.append(phrase or "(start of line)")
        lines += [f"  {probability:.4f}  {word}" for word, probability in prediction.words]
        lines += _format_frequent_words(prediction.watched)
    print_result(record, "\n".join(lines), as_json)


def _check_options(ctx: typer.Context, phrases: Sequence[str], split: str | None) -> None:
    """Raise an error if there is nothing to predict or an option has no effect. Called before anything is opened."""
    from reefknot.errors import SettingsError

    if not phrases and split is None:
        raise SettingsError("nothing to predict; pass phrases, or a text with --split")
    if split is None:
        reject_options(ctx, TEXT_OPTIONS, "without --split; add --split or leave {option} out")
    if not phrases:
        reject_options(ctx, ["top"], "without phrases; add phrases or leave {option} out")


def _format_means(split: str, means: Tendency) -> list[str]:
    """Return lines with the mean probabilities over a text."""
    return [
        f"{split} text: mean probabilities over {means.contexts:,} contexts (one for each token except the first)",
        f"  next word {means.target:.4f}, its {means.k} nearest neighbours at the input end {means.neighbors:.4f}",
        *_format_frequent_words(means.watched),
    ]


def _format_frequent_words(probabilities: dict[str, float]) -> list[str]:
    """Return a line with the probabilities of frequent words, or nothing if none is in the vocabulary."""
    words = ", ".join(f"{word} {probability:.4f}" for word, probability in probabilities.items())
    return [f"  for comparison, words that are common after any phrase: {words}"] if words else []
