"""Reads the learning curves that the authors of a paper published, from `curves.csv` in the folder of its recipes.

The file has one line per epoch and one column per training run. Lines that begin with # say where the numbers
come from. A column ends where its run ends.

    # Source: ...
    epoch,awd-lstm-ptb,mos-ptb
    1,338.5,280.33
    2,224.26,

A row of a recipe names its column: `paper_curve = "awd-lstm-ptb"`.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from reefknot.errors import SettingsError, shorten

CURVES_FILE = "curves.csv"
"""The name of the file, next to the recipes."""

Curve = tuple[float, ...]
"""Validation perplexity after each epoch, from the first epoch on."""


def read_curves(path: Path) -> dict[str, Curve]:
    """Read all curves of a file, by the name of their column."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error

    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    header, *rows = list(csv.reader(lines)) or [[]]
    if header[:1] != ["epoch"] or len(set(header)) != len(header):
        raise SettingsError(f"{path}: the first line must be `epoch` and the names of the curves, all different")

    values: dict[str, list[float]] = {name: [] for name in header[1:]}
    for epoch, row in enumerate(rows, 1):
        if len(row) != len(header) or row[0] != str(epoch):
            raise SettingsError(f"{path}, epoch {epoch}: expected the epoch and {len(header) - 1} values")
        for name, cell in zip(header[1:], row[1:], strict=True):
            if cell:
                values[name].append(_read_value(cell, path, epoch))
                if len(values[name]) != epoch:
                    raise SettingsError(f"{path}, epoch {epoch}: {name} has no value for an earlier epoch")
    return {name: tuple(curve) for name, curve in values.items()}


def _read_value(cell: str, path: Path, epoch: int) -> float:
    """Return a perplexity, or raise an error that names its epoch."""
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise SettingsError(f"{path}, epoch {epoch}: {shorten(cell)!r} is not a perplexity")
    return value
