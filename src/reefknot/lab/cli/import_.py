"""`reefknot import`: create a run folder from a language model that was trained with fairseq."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reefknot.lab.cli.options import DataOption, JsonOption, monolingual_corpus

EXAMPLES = """\b
Examples:
  reefknot import adaptive_lm_wiki103.v2/model.pt --dictionary adaptive_lm_wiki103.v2/dict.txt --out runs/wiki103
  reefknot import model.pt --dictionary dict.txt --out RUN --corpus wikitext-103 --data DIR
"""


def import_(
    checkpoint: Annotated[Path, typer.Argument(help="A fairseq checkpoint with adaptive inputs (model.pt).")],
    dictionary: Annotated[Path, typer.Option(help="Dictionary of the checkpoint (dict.txt).", show_default=False)],
    out: Annotated[Path, typer.Option(help="Run folder to create.", show_default=False)],
    corpus: Annotated[
        str | None,
        typer.Option(help="Text to evaluate the model on: a corpus (see `reefknot ls corpora`) or a folder of text."),
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a run folder from a fairseq checkpoint, for `evaluate`, `score`, `generate` and other commands.

    Only tensors, numbers and options are read from the checkpoint. Code in it is never run.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.cli.options import JsonOutput, check_data
    from reefknot.lab.interop.fairseq import import_checkpoint

    output = JsonOutput(as_json)
    if data is not None and corpus is None:
        raise SettingsError("--data has no effect without --corpus; add --corpus or leave --data out")
    if corpus == "":
        raise SettingsError("--corpus: is empty; pass a corpus (see `reefknot ls corpora`) or a folder of text")
    corpus_settings = None
    if corpus is not None:
        corpus_settings = monolingual_corpus(corpus)
        check_data(data, [corpus_settings], "this command")
    run = import_checkpoint(checkpoint, dictionary, out, corpus=corpus_settings, data=data, notify=typer.echo)
    output.print(lambda: {"run": str(run.path)})
