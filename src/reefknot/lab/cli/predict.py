"""`reefknot predict`: print the most probable next words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import (
    AsJson,
    Data,
    Device,
    Run,
    emit,
    given_options,
    note_unknown_words,
    open_language_model,
)

if TYPE_CHECKING:
    from reefknot.lab.evaluation.predictions import Tendency

EXAMPLES = """\b
Examples:
  reefknot predict runs/demo/tied/seed0 "returns a list of" "this function"
  reefknot predict runs/demo/tied/seed0 --split test --neighbors 20 --json
"""

TEXT_OPTIONS = ("neighbors", "data")
"""Options that have an effect on the means over a text, but not on phrases."""


def predict(
    invocation: typer.Context,
    run: Run,
    phrases: Annotated[
        list[str] | None, typer.Argument(help="Phrases to continue. Each phrase is read as the start of a line.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Number of words to print after each phrase.")] = 10,
    split: Annotated[
        str | None, typer.Option(help="Also print mean probabilities over this text: train, valid or test.")
    ] = None,
    neighbors: Annotated[
        int,
        typer.Option(
            min=1, help="With --split: number of nearest neighbours of the next word whose probabilities are added up."
        ),
    ] = 10,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the most probable next words, and the probability of <unk>, a, an and the."""
    from itertools import chain

    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.predictions import measure_tendency
    from reefknot.lab.evaluation.predictions import predict as predict_next
    from reefknot.lab.tasks import check_data_option, create_task
    from reefknot.storage.lines import words_in

    _check(invocation, phrases or [], split)
    trained = open_language_model(run, device)
    words_of_phrases = [words_in(phrase, "the phrase") for phrase in phrases or []]
    record: dict[str, Any] = {"run": str(run), "phrases": []}
    lines: list[str] = []
    if split is not None:
        check_data_option(data, [create_task(trained.experiment)])
        texts = trained.dataset(data).splits
        if split not in texts:
            raise SettingsError(f"--split {split}: must be one of {', '.join(texts)}")
        means = measure_tendency(trained.model, texts[split], trained.vocabulary, neighbors, trained.experiment.windows)
        record["text"] = {"split": split, **asdict(means)}
        lines += _mean_lines(split, means)
    trained = trained.with_spellings(chain.from_iterable(words_of_phrases))
    note_unknown_words(chain.from_iterable(words_of_phrases), trained.vocabulary)
    for words in words_of_phrases:
        prediction = predict_next(trained.model, words, trained.vocabulary, top)
        phrase = " ".join(words)
        record["phrases"].append({"phrase": phrase, **asdict(prediction)})
        lines += [phrase or "(start of line)", *(f"  {value:.4f}  {word}" for word, value in prediction.words)]
        lines.append(_watched_line(prediction.watched))
    emit(record, "\n".join(lines), as_json)


def _check(invocation: typer.Context, phrases: Sequence[str], split: str | None) -> None:
    """Raise an error if an option has no effect, before anything is opened."""
    from reefknot.errors import SettingsError

    if not phrases and split is None:
        raise SettingsError("nothing to predict; pass phrases, or a text with --split")
    for name, option in given_options(invocation):
        if name in TEXT_OPTIONS and split is None:
            raise SettingsError(f"{option} has no effect without --split; add --split or leave {option} out")
        if name == "top" and not phrases:
            raise SettingsError(f"{option} has no effect without phrases; add phrases or leave {option} out")


def _mean_lines(split: str, means: Tendency) -> list[str]:
    return [
        f"{split} text, mean probability over {means.contexts:,} contexts, one before every token but the first",
        f"  next word {means.target:.4f}, its {means.k} nearest neighbours at the input end {means.neighbors:.4f}",
        _watched_line(means.watched),
    ]


def _watched_line(watched: dict[str, float]) -> str:
    """Return the probability of words that are a safe guess in any context."""
    listed = ", ".join(f"{word} {value:.4f}" for word, value in watched.items())
    return f"  safe guesses in any context: {listed or 'none of them is in the vocabulary'}"
