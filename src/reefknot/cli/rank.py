"""`reefknot rank`: the numerical rank of a run's log-probabilities."""

from __future__ import annotations

from typing import Annotated

import typer

from reefknot.cli.options import AsJson, Data, Device, Run, emit, open_trained

EXAMPLES = """\b
Examples:
  reefknot rank runs/demo/tied/seed0
  reefknot rank runs/demo/tied/seed0 --contexts 20000 --tolerance 0.01 --json
"""


def rank(
    run: Run,
    split: Annotated[str, typer.Option(help="The text of the contexts: train, valid or test.")] = "test",
    contexts: Annotated[
        int | None, typer.Option(min=1, help="Rows of the matrix, from the text's start; all unless given.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Count singular values above this too.", show_default=False)
    ] = None,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Rank of the matrix of log-probabilities, a row per context: at most D + 2 for one softmax over D dimensions."""
    from reefknot.errors import SettingsError
    from reefknot.evaluation.rank import AUTHORS, memory, spectrum

    trained = open_trained(run, device)
    texts = trained.dataset(data).splits
    if split not in texts:
        raise SettingsError(f"--split {split}: must be one of {', '.join(texts)}")
    found = spectrum(trained.model, texts[split], contexts)
    tolerances = {"numpy's": found.numpy_tolerance, "the paper's": AUTHORS}
    if tolerance is not None:
        tolerances["yours"] = tolerance
    ranks = [{"whose": whose, "tolerance": each, "rank": found.rank(each)} for whose, each in tolerances.items()]
    needed = memory(found.contexts, found.classes)
    lines = [f"log-probabilities of {found.classes:,} words after {found.contexts:,} contexts of the {split} text"]
    lines += [f"rank {found.rank(each):,} with {whose} tolerance, {each:.3g}" for whose, each in tolerances.items()]
    lines.append(
        f"width of the hidden state {trained.model.output.context_dim:,}; singular values "
        f"{found.values[0]:.4g} to {found.values[-1]:.3g}, in float64, in at most {needed / 2**30:,.2f} GiB"
    )
    if found.contexts < found.classes:
        lines.append(f"only {found.contexts:,} contexts: the rank cannot be larger")
    told = {
        "run": str(run),
        "split": split,
        "contexts": found.contexts,
        "classes": found.classes,
        "width": trained.model.output.context_dim,
        "ranks": ranks,
        "largest": float(found.values[0]),
        "smallest": float(found.values[-1]),
        "memory_bytes": needed,
    }
    emit(told, "\n".join(lines), as_json)
