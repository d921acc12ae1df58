"""`reefknot rank`: the numerical rank of a run's log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import AsJson, Data, Device, Run, emit, open_language_model

if TYPE_CHECKING:
    from reefknot.lab.evaluation.rank import Spectrum

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
    from reefknot.lab.evaluation.rank import AUTHORS, bound, memory, spectrum

    trained = open_language_model(run, device)
    texts = trained.dataset(data).splits
    if split not in texts:
        raise SettingsError(f"--split {split}: must be one of {', '.join(texts)}")
    output = trained.model.output
    windows, eos = trained.experiment.windows, trained.vocabulary.eos
    found, most = spectrum(trained.model, texts[split], contexts, windows=windows, eos=eos), bound(output)
    tolerances = {"numpy's": found.numpy_tolerance, "the paper's": AUTHORS}
    if tolerance is not None:
        tolerances["your own"] = tolerance
    ranks = [{"whose": whose, "tolerance": each, "rank": found.rank(each)} for whose, each in tolerances.items()]
    needed = memory(found.contexts, found.classes)
    size = f"{needed / 2**30:,.1f} GiB" if needed >= 2**30 else f"{needed / 2**20:,.1f} MiB"
    lines = [_title(found, split, contexts)]
    for whose, each in tolerances.items():
        remark = " (numpy's matrix_rank(tol=True); says little of a small model)" if whose == "the paper's" else ""
        lines.append(f"rank {found.rank(each):,} with {whose} tolerance, {each:.3g}{remark}")
    by_contexts = f", and {found.contexts:,} with so few contexts" if found.contexts < most else ""
    lines += [
        f"width of the hidden state {output.context_dim:,}; the rank of this end is at most {most:,}{by_contexts}",
        f"singular values {found.values[0]:.4g} to {found.values[-1]:.3g}, in float64, in at most {size}",
    ]
    told = {
        "run": str(run),
        "split": split,
        "contexts": found.contexts,
        "classes": found.classes,
        "width": output.context_dim,
        "bound": most,
        "ranks": ranks,
        "largest": float(found.values[0]),
        "smallest": float(found.values[-1]),
        "memory_bytes": needed,
    }
    emit(told, "\n".join(lines), as_json)


def _title(found: Spectrum, split: str, asked: int | None) -> str:
    which = "the first" if asked == found.contexts else "all"
    fewer = f"; {asked:,} were asked for" if asked is not None and asked > found.contexts else ""
    return (
        f"log-probabilities of {found.classes:,} words after {which} {found.contexts:,} contexts of the {split} text "
        f"(every token but the last is the end of one){fewer}"
    )
