"""`reefknot rank`: compute the numerical rank of a language model's log-probabilities.

The log-probabilities of all next words after every context form a matrix. Its rank shows how expressive the output end
(classifier and loss) is: one softmax over D dimensions reaches at most D + 2 (Yang et al. 2018). The numerical rank is
the number of singular values above a tolerance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import (
    DataOption,
    DeviceOption,
    JsonOption,
    RunArgument,
    open_language_model,
    open_split,
    print_result,
)

if TYPE_CHECKING:
    from reefknot.lab.evaluation.rank import Spectrum

EXAMPLES = """\b
Examples:
  reefknot rank runs/demo/tied/seed0
  reefknot rank runs/demo/tied/seed0 --contexts 20000 --tolerance 0.01 --json
"""


def rank(
    run: RunArgument,
    split: Annotated[str, typer.Option(help="Text to take the contexts from: train, valid or test.")] = "test",
    contexts: Annotated[
        int | None, typer.Option(min=1, help="Number of contexts to use, from the start of the text. [default: all]")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Also compute the rank with this tolerance: the number of singular values above the tolerance.",
            show_default=False,
        ),
    ] = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compute the rank of the log-probability matrix of a language model.

    The matrix has one row per context and one column per word. With one softmax over D dimensions, its rank is at most
    D + 2.
    """
    from reefknot.lab.evaluation.rank import AUTHORS_TOLERANCE, compute_spectrum, rank_bound, required_memory

    trained = open_language_model(run, device)
    text = open_split(trained, split, data)
    output = trained.model.output
    spectrum = compute_spectrum(
        trained.model, text, contexts, windows=trained.experiment.windows, eos=trained.vocabulary.eos
    )
    bound = rank_bound(output)
    memory_bytes = required_memory(spectrum.contexts, spectrum.classes)
    largest = float(spectrum.values[0])
    smallest = float(spectrum.values[-1])

    tolerances = {"numpy's": spectrum.numpy_tolerance, "the paper's": AUTHORS_TOLERANCE}
    if tolerance is not None:
        tolerances["your own"] = tolerance
    ranks = []
    for whose, limit in tolerances.items():
        ranks.append({"whose": whose, "tolerance": limit, "rank": spectrum.rank(limit)})

    record = {
        "run": str(run),
        "split": split,
        "contexts": spectrum.contexts,
        "classes": spectrum.classes,
        "width": output.context_dim,
        "bound": bound,
        "ranks": ranks,
        "largest": largest,
        "smallest": smallest,
        "memory_bytes": memory_bytes,
    }
    context_bound = ""
    if spectrum.contexts < bound:
        context_bound = f", and {spectrum.contexts:,} with this few contexts"
    lines = [
        _format_title(spectrum, split, contexts),
        *(_format_rank(whose, limit, spectrum) for whose, limit in tolerances.items()),
        f"dimension of the hidden state {output.context_dim:,}; the rank of this end is at most {bound:,}"
        f"{context_bound}",
        f"singular values from {largest:.4g} down to {smallest:.3g}; computed in float64 with at most "
        f"{_format_memory(memory_bytes)} of memory",
    ]
    print_result(record, "\n".join(lines), as_json)


def _format_title(spectrum: Spectrum, split: str, requested_contexts: int | None) -> str:
    """Describe the matrix: its columns and its rows."""
    quantifier = "the first" if requested_contexts == spectrum.contexts else "all"
    shortage = ""
    if requested_contexts is not None and requested_contexts > spectrum.contexts:
        shortage = f"; {requested_contexts:,} were requested"
    return (
        f"log-probabilities of {spectrum.classes:,} words after {quantifier} {spectrum.contexts:,} contexts of the "
        f"{split} text (every token but the last ends a context){shortage}"
    )


def _format_rank(whose: str, tolerance: float, spectrum: Spectrum) -> str:
    """Format the rank with one tolerance. `whose` says where the tolerance comes from, such as "numpy's"."""
    note = ""
    if whose == "the paper's":
        note = " (numpy's matrix_rank(tol=True); not informative for a small model)"
    return f"rank {spectrum.rank(tolerance):,} with {whose} tolerance, {tolerance:.3g}{note}"


def _format_memory(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.1f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"
