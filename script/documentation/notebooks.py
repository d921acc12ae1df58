"""Notebooks as pages of the site: execute them, and convert their cells and outputs to Markdown.

The files in docs/notebooks have no outputs. `execute` adds the outputs, and `convert` shows them below their cells.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

CELL_SECONDS = 600
"""A cell that takes longer is stopped with an error, so that a cell that hangs is noticed."""


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Return a notebook with its outputs. Raise `nbclient.exceptions.CellExecutionError` if a cell fails.

    The cells run in a new process with this interpreter, its commands and its import path.

    Args:
        path: The notebook, which is not changed.
        folder: The current folder of the cells, where they write their files.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    client = NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return notebook


def convert(notebook: nbformat.NotebookNode, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its plots by file name.

    Args:
        notebook: The notebook, with or without outputs.
        name: The name of its file, without `.ipynb`. The names of the plots start with it.
    """
    blocks: list[str] = []
    plots: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            blocks.append(cell.source)
            continue
        blocks.append(convert_code(cell.source))
        for output in join_streams(cell.outputs):
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}-{len(plots) + 1}.png"
                plots[file] = base64.b64decode(data["image/png"])
                blocks.append(f"![{cell.metadata.get('alt', 'Plot')}]({file})")
            elif "text/html" in data:
                blocks.append(convert_table(data["text/html"]))
            else:
                text = output.get("text") or data.get("text/plain", "")
                blocks.append(f"```{{code-block}} text\n:class: output\n\n{text.rstrip()}\n```")
    blocks.append(f"{{download}}`Download this notebook <{name}.ipynb>`")
    return "\n\n".join(blocks) + "\n", plots


def convert_code(source: str) -> str:
    """Return a code cell as a code block. The first line of some cells is a magic of IPython."""
    magic, _, code = source.partition("\n")
    if magic == "%%sh":
        return f"```sh\n{code}\n```"
    if magic.startswith("%%writefile "):
        file = magic.removeprefix("%%writefile ")
        return f"```{{code-block}} {Path(file).suffix[1:]}\n:caption: {file}\n\n{code}\n```"
    return f"```python\n{source}\n```"


def join_streams(outputs: list[Any]) -> Iterator[Any]:
    """Yield the outputs of a cell. Consecutive texts that were printed are joined; the standard error is left out."""
    printed = ""
    for output in outputs:
        if output.output_type == "stream":
            printed += output.text if output.name == "stdout" else ""
            continue
        if printed:
            yield {"text": printed}
            printed = ""
        yield output
    if printed:
        yield {"text": printed}


def convert_table(html: str) -> str:
    """Return a data frame as a table in the style of the site, which scrolls if it is wide."""
    html = re.sub(r"<style.*?</style>\s*", "", html, flags=re.DOTALL)
    html = html.replace("<div>", '<div class="table-wrapper docutils container">')
    html = html.replace('class="dataframe"', 'class="docutils"')
    return f"```{{raw}} html\n{html}\n```"
