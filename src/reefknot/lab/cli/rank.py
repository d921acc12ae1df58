"""`reefknot rank`: compute the numerical rank of a run's log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import AsJson, Data, Device, Run, emit, open_language_model

if TYPE_CHECKING:
    from reefknot.lab.evaluation.rank import Spectrum
    from reefknot.lab.tasks.language_model import TrainedLanguageModel

EXAMPLES = """\b
Examples:
  reefknot rank runs/demo/tied/seed0
  reefknot rank runs/demo/tied/seed0 --contexts 20000 --tolerance 0.01 --json
"""


def rank(
    run: Run,
    split: Annotated[str, typer.Option(help="Text to take the contexts from: train, valid or test.")] = "test",
    contexts: Annotated[
        int | None, typer.Option(min=1, help="Number of contexts, from the start of the text. [default: all]")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Also count the singular values above this tolerance.", show_default=False),
    ] = None,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compute the rank of the matrix of log-probabilities, which has one row per context.

    The rank is at most D + 2 for one softmax over D dimensions.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.rank import AUTHORS_TOLERANCE, compute_spectrum, rank_bound, required_memory

    trained = open_language_model(run, device)
    _check_data(data, trained)
    texts = trained.dataset(data).splits
    if split not in texts:
        raise SettingsError(f"--split {split}: must be one of {', '.join(texts)}")
    output = trained.model.output
    windows, eos = trained.experiment.windows, trained.vocabulary.eos
    values, most = compute_spectrum(trained.model, texts[split], contexts, windows=windows, eos=eos), rank_bound(output)
    tolerances = {"numpy's": values.numpy_tolerance, "the paper's": AUTHORS_TOLERANCE}
    if tolerance is not None:
        tolerances["your own"] = tolerance
    ranks = [{"whose": whose, "tolerance": limit, "rank": values.rank(limit)} for whose, limit in tolerances.items()]
    needed = required_memory(values.contexts, values.classes)
    record = {
        "run": str(run),
        "split": split,
        "contexts": values.contexts,
        "classes": values.classes,
        "width": output.context_dim,
        "bound": most,
        "ranks": ranks,
        "largest": float(values.values[0]),
        "smallest": float(values.values[-1]),
        "memory_bytes": needed,
    }
    few = f", and {values.contexts:,} with this few contexts" if values.contexts < most else ""
    size = f"{needed / 2**30:,.1f} GiB" if needed >= 2**30 else f"{needed / 2**20:,.1f} MiB"
    lines = [
        _title(values, split, contexts),
        *(_rank_line(whose, limit, values) for whose, limit in tolerances.items()),
        f"dimension of the hidden state {output.context_dim:,}; the rank of this end is at most {most:,}{few}",
        f"singular values {values.values[0]:.4g} to {values.values[-1]:.3g}, in float64, in at most {size}",
    ]
    emit(record, "\n".join(lines), as_json)


def _check_data(data: Path | None, trained: TrainedLanguageModel) -> None:
    """Raise an error if --data is set but the run's text is part of Python.

    A run on a folder of text can need --data, because the folder may have moved.
    """
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.text.corpora import known_corpus

    corpus = trained.experiment.corpus.name
    if known_corpus(corpus) is not None:
        check_data(data, [corpus], str(trained.run.path))


def _rank_line(whose: str, tolerance: float, values: Spectrum) -> str:
    note = " (numpy's matrix_rank(tol=True); not informative for a small model)" if whose == "the paper's" else ""
    return f"rank {values.rank(tolerance):,} with {whose} tolerance, {tolerance:.3g}{note}"


def _title(values: Spectrum, split: str, requested: int | None) -> str:
    which = "the first" if requested == values.contexts else "all"
    fewer = f"; {requested:,} were requested" if requested is not None and requested > values.contexts else ""
    return (
        f"log-probabilities of {values.classes:,} words after {which} {values.contexts:,} contexts of the {split} text "
        f"(every token but the last ends a context){fewer}"
    )
