"""`reefknot rank`: compute the numerical rank of a language model's log-probabilities.

The log-probabilities of all next words after every context form a matrix. Its rank shows how expressive the output end
(classifier and loss) is: one softmax over D dimensions reaches at most D + 2 (Yang et al. 2018).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import AsJson, Data, Device, Run, open_language_model, open_split, print_result

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
        int | None, typer.Option(min=1, help="Number of contexts to use, from the start of the text. [default: all]")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Also compute the rank with this tolerance: the number of larger singular values.",
            show_default=False,
        ),
    ] = None,
    data: Data = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compute the rank of the log-probability matrix of a language model.

    The matrix has one row per context and one column per word. With one softmax over D dimensions, its rank is at most
    D + 2.
    """
    from reefknot.lab.evaluation.rank import AUTHORS_TOLERANCE, compute_spectrum, rank_bound, required_memory

    trained = open_language_model(run, device)
    _check_data(data, trained)
    text = open_split(trained, split, data)
    output = trained.model.output
    singular = compute_spectrum(
        trained.model, text, contexts, windows=trained.experiment.windows, eos=trained.vocabulary.eos
    )
    bound = rank_bound(output)
    tolerances = {"numpy's": singular.numpy_tolerance, "the paper's": AUTHORS_TOLERANCE}
    if tolerance is not None:
        tolerances["your own"] = tolerance
    ranks = [{"whose": whose, "tolerance": limit, "rank": singular.rank(limit)} for whose, limit in tolerances.items()]
    memory_bytes = required_memory(singular.contexts, singular.classes)
    largest, smallest = float(singular.values[0]), float(singular.values[-1])
    record = {
        "run": str(run),
        "split": split,
        "contexts": singular.contexts,
        "classes": singular.classes,
        "width": output.context_dim,
        "bound": bound,
        "ranks": ranks,
        "largest": largest,
        "smallest": smallest,
        "memory_bytes": memory_bytes,
    }
    context_bound = ""
    if singular.contexts < bound:
        context_bound = f", and {singular.contexts:,} with this few contexts"
    lines = [
        _format_title(singular, split, contexts),
        *(_format_rank(whose, limit, singular) for whose, limit in tolerances.items()),
        f"dimension of the hidden state {output.context_dim:,}; the rank of this end is at most {bound:,}"
        f"{context_bound}",
        f"singular values {largest:.4g} to {smallest:.3g}, in float64, in at most {_format_memory(memory_bytes)}",
    ]
    print_result(record, "\n".join(lines), as_json)


def _check_data(data: Path | None, trained: TrainedLanguageModel) -> None:
    """Raise an error if --data is set but the run reads a published corpus that is not in the data folder.

    A run on the user's own folder of text may need --data, because the folder may have moved.
    """
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.text.corpora import known_corpus

    corpus = trained.experiment.corpus.name
    if known_corpus(corpus) is not None:
        check_data(data, [corpus], str(trained.run.path))


def _format_rank(whose: str, tolerance: float, singular: Spectrum) -> str:
    note = " (numpy's matrix_rank(tol=True); not informative for a small model)" if whose == "the paper's" else ""
    return f"rank {singular.rank(tolerance):,} with {whose} tolerance, {tolerance:.3g}{note}"


def _format_title(singular: Spectrum, split: str, requested: int | None) -> str:
    quantifier = "the first" if requested == singular.contexts else "all"
    shortage = ""
    if requested is not None and requested > singular.contexts:
        shortage = f"; {requested:,} were requested"
    return (
        f"log-probabilities of {singular.classes:,} words after {quantifier} {singular.contexts:,} contexts of the "
        f"{split} text (every token but the last ends a context){shortage}"
    )


def _format_memory(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
