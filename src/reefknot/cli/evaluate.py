"""`reefknot evaluate`: perplexity with its definition."""

from __future__ import annotations

from typing import Annotated

import typer

from reefknot.cli.options import AsJson, Data, Device, Run, emit, open_trained

EXAMPLES = """\b
Examples:
  reefknot evaluate runs/demo/tied/seed0
  reefknot evaluate runs/demo/tied/seed0 --split valid --streams 20 --json
"""


def evaluate(
    run: Run,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    streams: Annotated[int, typer.Option(min=1, help="Parts scored side by side, each from an empty state.")] = 1,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score a text with a run's best weights and say exactly what the figure means."""
    from dataclasses import asdict

    from reefknot.errors import SettingsError
    from reefknot.evaluation.perplexity import score
    from reefknot.evaluation.search import tails_opened

    trained = open_trained(run, device)
    dataset = trained.dataset(data)
    if split not in dataset.splits:
        raise SettingsError(f"--split {split}: must be one of {', '.join(dataset.splits)}")
    precision = trained.experiment.training.precision
    figures = score(
        trained.model, dataset.splits[split], trained.vocabulary, streams=streams, precision=precision
    ).summary()
    text = (
        f"{split} perplexity {figures['perplexity']:.2f}  word perplexity {figures['word_perplexity']:.2f}  "
        f"bits per byte {figures['bits_per_byte']:.4f}\n{figures['definition']}"
    )
    opened = tails_opened(trained.model, dataset.splits[split])
    if opened is not None:
        figures["tails_opened"] = asdict(opened)
        text += f"\n{opened}"
    emit({"run": str(run), "split": split, **figures}, text, as_json)
