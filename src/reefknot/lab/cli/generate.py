"""`reefknot generate`: generate text with a language model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import (
    AsJson,
    Device,
    Run,
    emit,
    given_options,
    note_unknown_words,
    open_language_model,
)

if TYPE_CHECKING:
    from reefknot.lab.text.vocabulary import Vocabulary

EXAMPLES = """\b
Examples:
  reefknot generate runs/demo/tied/seed0
  reefknot generate runs/demo/tied/seed0 --prompt "this function" --temperature 0.7 --top-p 0.9 --seed 3
"""

SAMPLING_OPTIONS = ("top_k", "top_p", "seed")
"""Options that have no effect at temperature 0, where the most probable word is always chosen."""


def generate(
    invocation: typer.Context,
    run: Run,
    prompt: Annotated[str, typer.Option(help="Words to start from. By default, the text starts a new line.")] = "",
    length: Annotated[int, typer.Option(min=1, max=100_000, help="Number of tokens to generate.")] = 60,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Sampling temperature. Lower values make the text more predictable, and 0 always chooses the most "
            "probable word.",
        ),
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k most probable words.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1.0, help="Sample from the most probable words that together have probability p."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed.")] = 0,
    unknown: Annotated[bool, typer.Option("--unknown", help="Allow <unk> in the text.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Generate text with the best weights of a run."""
    from reefknot.lab.evaluation.generation import encode_prompt
    from reefknot.lab.evaluation.generation import generate as generate_ids
    from reefknot.storage.lines import words_in

    _check_sampling(invocation, temperature)
    words = words_in(prompt, "the prompt")
    trained = open_language_model(run, device).with_spellings(words)
    vocabulary = trained.vocabulary
    _check_unknown(unknown, vocabulary, run)
    ids = encode_prompt(words, vocabulary)
    banned = () if unknown or vocabulary.unk is None else (vocabulary.unk,)
    model, window = trained.model, trained.experiment.training.steps
    generator = generate_ids(
        model, ids, length, temperature=temperature, top_k=top_k, top_p=top_p, banned=banned, seed=seed, window=window
    )
    generated = list(generator)
    note_unknown_words(words, vocabulary)
    # The last token is generated but not read by the model.
    if not model.encoder.carries_state and len(ids) + length - 1 > window:
        typer.echo(
            f"the text is longer than the {window} tokens of a training window: whenever the window was full, "
            f"generation continued from the last {max(1, window // 2)} tokens",
            err=True,
        )
    text = " ".join([*words, vocabulary.text(generated)])
    emit({"prompt": prompt, "tokens": [vocabulary.words[index] for index in generated], "text": text}, text, as_json)


def _check_sampling(invocation: typer.Context, temperature: float) -> None:
    """Raise an error if options of sampling are set but nothing is sampled."""
    from reefknot.errors import SettingsError

    for name, option in given_options(invocation):
        if temperature == 0 and name in SAMPLING_OPTIONS:
            raise SettingsError(
                f"{option} has no effect at temperature 0, which always chooses the most probable word; leave it out"
            )


def _check_unknown(unknown: bool, vocabulary: Vocabulary, run: Path) -> None:
    from reefknot.errors import SettingsError

    if unknown and vocabulary.unk is None:
        raise SettingsError(f"--unknown has no effect, because the vocabulary of {run} has no <unk>; leave it out")
