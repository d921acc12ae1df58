"""`reefknot generate`: text from a run."""

from __future__ import annotations

from typing import Annotated

import typer

from reefknot.lab.cli.options import AsJson, Device, Run, emit, open_language_model, tell_unknown

EXAMPLES = """\b
Examples:
  reefknot generate runs/demo/tied/seed0
  reefknot generate runs/demo/tied/seed0 --prompt "this function" --temperature 0.7 --top-p 0.9 --seed 3
"""


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Words to begin with; none is the start of a line.")] = "",
    length: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens to write.")] = 60,
    temperature: Annotated[float, typer.Option(min=0.0, help="Below 1 safer, above 1 wilder; 0 takes the best.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among the k best words.")] = None,
    top_p: Annotated[float | None, typer.Option(min=1e-9, max=1.0, help="Among the best that reach p.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random choices.")] = 0,
    unknown: Annotated[bool, typer.Option("--unknown", help="Let <unk> be chosen.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Write text with a run's best weights."""
    from reefknot.lab.evaluation.generation import generate as write
    from reefknot.lab.evaluation.generation import prompt_ids
    from reefknot.storage.lines import words_in

    words = words_in(prompt, "the prompt")
    trained = open_language_model(run, device).knowing(words)
    vocabulary = trained.vocabulary
    ids = prompt_ids(words, vocabulary)
    never = () if unknown or vocabulary.unk is None else (vocabulary.unk,)
    model, window = trained.model, trained.experiment.training.steps
    writer = write(
        model, ids, length, temperature=temperature, top_k=top_k, top_p=top_p, never=never, seed=seed, window=window
    )
    written = list(writer)
    tell_unknown(words, vocabulary)
    # The last token is written but not read.
    if not model.encoder.carries and len(ids) + length - 1 > window:
        kept = max(1, window // 2)
        typer.echo(f"longer than the {window} tokens of training: each time, it went on from the last {kept}", err=True)
    text = " ".join([*words, vocabulary.text(written)])
    emit({"prompt": prompt, "tokens": [vocabulary.words[index] for index in written], "text": text}, text, as_json)
