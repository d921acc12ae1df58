"""`reefknot export`: write a trained model in a format that other programs load."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from reefknot.lab.cli.options import JsonOption, RunArgument, open_trained, print_result

EXAMPLES = """\b
Examples:
  reefknot export runs/demo/tied/seed0 --format hf -o tied-hf
  reefknot export runs/demo/tied/seed0 --format onnx -o tied-onnx
  reefknot export runs/demo/tied/seed0 --format pt2 --kind topk --k 5 -o tied-pt2
"""


def export(
    run: RunArgument,
    format: Annotated[
        str,
        typer.Option(
            help="Format to write: hf (Hugging Face transformers), onnx (ONNX), or pt2 (torch.export).",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to create. It must not exist.", show_default=False)
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            help="For onnx and pt2, what the model computes: log_probs (of all words), targets (log-probabilities of "
            "given words), topk (the best words) or step (one token, with an explicit state). [default: step for "
            "recurrent models, log_probs for transformers]",
            show_default=False,
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option(min=1, help="For --kind topk, the number of best words. [default: 10]", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the best weights of a run as a model for other programs.

    The folder also has the vocabulary, and a model card with the scores and their definition. Word vectors alone are
    exported by `reefknot vectors export`.
    """
    from reefknot.lab.interop.export import ExportRequest, check_request, export_run

    request = ExportRequest(format=format, output=output, kind=kind, k=k)
    check_request(request)
    exported = export_run(open_trained(run), request, notify=partial(typer.echo, err=True))
    print_result(exported.record(), exported.text(), as_json)
