"""`reefknot generate`: generate text with a language model, word by word."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import (
    TOP_K_HELP,
    TOP_P_HELP,
    DeviceOption,
    JsonOption,
    RunArgument,
    open_language_model,
    print_result,
    reject_options,
    warn_about_unknown_words,
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
    ctx: typer.Context,
    run: RunArgument,
    prompt: Annotated[
        str, typer.Option(help="Words to start from. [default: the start of a new line]", show_default=False)
    ] = "",
    length: Annotated[int, typer.Option(min=1, max=100_000, help="Number of tokens to generate.")] = 60,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Sampling temperature. Lower values make the text more predictable; 0 always chooses the most "
            "probable word.",
        ),
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help=TOP_K_HELP)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1.0, help=TOP_P_HELP),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed.")] = 0,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Allow <unk>, the symbol for unknown words, in the text.")
    ] = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Generate text with a trained language model, using the best weights of its run."""
    from reefknot.lab.evaluation.generation import banned_ids, encode_prompt
    from reefknot.lab.evaluation.generation import generate as generate_ids
    from reefknot.storage.lines import words_in

    if temperature == 0:
        reject_options(
            ctx, SAMPLING_OPTIONS, "at temperature 0, which always chooses the most probable word; leave {option} out"
        )
    prompt_words = words_in(prompt, "the prompt")
    trained = open_language_model(run, device).with_spellings(prompt_words)
    model = trained.model
    vocabulary = trained.vocabulary
    _check_unknown(unknown, vocabulary, run)

    # Generate.
    prompt_ids = encode_prompt(prompt_words, vocabulary)
    window = trained.experiment.training.steps  # the number of tokens that the model read at once in training
    generated_ids = list(
        generate_ids(
            model,
            prompt_ids,
            length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            banned=() if unknown else banned_ids(vocabulary),
            seed=seed,
            window=window,
        )
    )

    # Print warnings and the text.
    warn_about_unknown_words(prompt_words, vocabulary)
    num_tokens_read = len(prompt_ids) + length - 1  # the last token is generated but not read by the model
    if not model.encoder.carries_state and num_tokens_read > window:
        typer.echo(
            f"the text is longer than the {window} tokens of a training window: whenever the window was full, "
            f"generation continued from the last {max(1, window // 2)} tokens",
            err=True,
        )
    tokens = [vocabulary.words[token_id] for token_id in generated_ids]
    text = " ".join([*prompt_words, vocabulary.decode_text(generated_ids)])
    print_result({"prompt": prompt, "tokens": tokens, "text": text}, text, as_json)


def _check_unknown(unknown: bool, vocabulary: Vocabulary, run: Path) -> None:
    """Raise an error if --unknown is set, but the vocabulary has no symbol for unknown words."""
    from reefknot.errors import SettingsError

    if unknown and vocabulary.unk is None:
        raise SettingsError(
            f"--unknown has no effect, because the vocabulary of {run} has no <unk>; leave --unknown out"
        )
