"""`reefknot predict`: the most probable next words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import AsJson, Data, Device, Run, emit, given, open_language_model, tell_unknown

if TYPE_CHECKING:
    from reefknot.lab.evaluation.predictions import Tendency

EXAMPLES = """\b
Examples:
  reefknot predict runs/demo/tied/seed0 "returns a list of" "this function"
  reefknot predict runs/demo/tied/seed0 --split test --neighbors 20 --json
"""


OF_A_TEXT = ("neighbors", "data")
"""Options that say something of a text, and nothing of phrases."""


def predict(
    invocation: typer.Context,
    run: Run,
    phrases: Annotated[list[str] | None, typer.Argument(help="Beginnings of lines, each on its own.")] = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Words to name after each phrase.")] = 10,
    split: Annotated[str | None, typer.Option(help="Means over a text too: train, valid or test.")] = None,
    neighbors: Annotated[int, typer.Option(min=1, help="Nearest words whose probability is added up.")] = 10,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Name the most probable next words, and the probability of <unk>, a, an and the."""
    from itertools import chain

    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.predictions import predict as guess
    from reefknot.lab.evaluation.predictions import tendency
    from reefknot.storage.lines import words_in

    _check(invocation, phrases or [], split)
    trained = open_language_model(run, device)
    cut = [words_in(phrase, "the phrase") for phrase in phrases or []]
    found: dict[str, Any] = {"run": str(run), "phrases": []}
    told: list[str] = []
    if split is not None:
        texts = trained.dataset(data).splits
        if split not in texts:
            raise SettingsError(f"--split {split}: must be one of {', '.join(texts)}")
        windows = trained.experiment.windows
        means = tendency(trained.model, texts[split], trained.vocabulary, neighbors, windows)
        found["text"] = {"split": split, **asdict(means)}
        told.append(_told(split, means))
    trained = trained.knowing(chain.from_iterable(cut))
    tell_unknown(chain.from_iterable(cut), trained.vocabulary)
    for words in cut:
        prediction = guess(trained.model, words, trained.vocabulary, top)
        phrase = " ".join(words)
        found["phrases"].append({"phrase": phrase, **asdict(prediction)})
        told += [phrase or "(start of line)", *(f"  {value:.4f}  {word}" for word, value in prediction.words)]
        told.append(f"  safe guesses, whatever comes: {_listed(prediction.watched)}")
    emit(found, "\n".join(told), as_json)


def _check(invocation: typer.Context, phrases: Sequence[str], split: str | None) -> None:
    """Refuse what would be ignored in silence, before anything is opened."""
    from reefknot.errors import SettingsError

    if not phrases and split is None:
        raise SettingsError("nothing to predict: give phrases, or a text with --split")
    for name, written in given(invocation):
        if name in OF_A_TEXT and split is None:
            raise SettingsError(f"{written} goes with --split; add that or leave {written} out")
        if name == "top" and not phrases:
            raise SettingsError(f"{written} goes with phrases; add some or leave {written} out")


def _told(split: str, means: Tendency) -> str:
    return (
        f"{split} text, mean probability over {means.contexts:,} contexts, one before every token but the first\n"
        f"  the word that comes {means.target:.4f}, its {means.k} nearest by the input end {means.neighbors:.4f}\n"
        f"  safe guesses, whatever comes: {_listed(means.watched)}"
    )


def _listed(watched: dict[str, float]) -> str:
    return ", ".join(f"{word} {value:.4f}" for word, value in watched.items()) or "none of them is in the vocabulary"
