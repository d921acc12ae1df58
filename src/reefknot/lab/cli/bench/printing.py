"""Tables of measurements: names on the left, numbers on the right, notes below."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

FILE_WIDTH = 120
"""Width in characters of a table that is printed to a file or a pipe."""


def print_numbers(titles: Sequence[str], lines: Sequence[Sequence[str]], notes: Sequence[tuple[str, str]]) -> None:
    """Print a table, and below it the notes on its rows.

    A note is a pair (name, note). It says, for example, why a competitor was not measured. Equal notes are printed
    once, with all their names.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(titles[0] if titles else "", no_wrap=True)
    for title in titles[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    if lines:
        console.print(table)
    for note in dict.fromkeys(note for _, note in notes if note):
        names = ", ".join(name for name, other in notes if other == note)
        console.print(f"{names}: {note}", highlight=False, markup=False)


def print_cells(cells: Sequence[Mapping[str, str]], notes: Sequence[tuple[str, str]]) -> None:
    """Print rows of cells by title, without the columns that are empty in every row."""
    titles = [title for title in cells[0] if any(row[title] for row in cells)] if cells else []
    print_numbers(titles, [[row[title] for title in titles] for row in cells], notes)


def number(value: float | None) -> str:
    """Return a number with three significant digits, or without decimals from 100 on."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def whole(value: float | None) -> str:
    """Return a number without decimals."""
    return "" if value is None else f"{value:,.0f}"


def gib(size: int | None) -> str:
    """Return a number of bytes in GiB."""
    return "" if size is None else f"{size / 2**30:.1f}"


def percent(share: float | None) -> str:
    """Return a share in percent."""
    return "" if share is None else f"{share:.0%}"


def error(value: float | None) -> str:
    """Return a relative error with two digits."""
    return "" if value is None else f"{value:.1e}"


def yes_or_no(value: bool | None) -> str:
    """Return yes or no, or nothing if the value is unknown."""
    return {True: "yes", False: "no", None: ""}[value]
