"""Print tables of measurements: names on the left, numbers on the right, notes below the table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

FILE_WIDTH = 120
"""Width in characters of a table that is printed to a file or a pipe."""


def print_table(titles: Sequence[str], lines: Sequence[Sequence[str]], notes: Sequence[tuple[str, str]]) -> None:
    """Print a table, and below it the notes on its lines.

    Args:
        titles: One title per column. The first column has the names of the lines.
        lines: The cells of every line. Without lines, only the notes are printed.
        notes: Pairs (name, note), such as ("cce", "not installed"). Equal notes are printed once, with all their names.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from reefknot.lab.training.display import open_console

    console = open_console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    if lines:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column(titles[0], no_wrap=True)
        for title in titles[1:]:
            table.add_column(title, justify="right", no_wrap=True)
        for cells in lines:
            table.add_row(*cells)
        console.print(table)

    names_by_note: dict[str, list[str]] = {}
    for name, note in notes:
        if note:
            names_by_note.setdefault(note, []).append(name)
    for note, names in names_by_note.items():
        console.print(f"{', '.join(names)}: {note}", highlight=False, markup=False)


def filled_columns(lines: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the titles of the columns that have a value in at least one line. A line has its cells by title."""
    if not lines:
        return []
    return [title for title in lines[0] if any(cells[title] for cells in lines)]


def format_number(value: float | None) -> str:
    """Format a number with three significant digits, or without decimals from 100 on."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def format_integer(value: float | None) -> str:
    """Format a number without decimals."""
    return "" if value is None else f"{value:,.0f}"


def format_gib(num_bytes: int | None) -> str:
    """Format a number of bytes in GiB."""
    return "" if num_bytes is None else f"{num_bytes / 2**30:.1f}"


def format_percent(fraction: float | None) -> str:
    """Format a fraction in percent: `0.5` becomes `50%`."""
    return "" if fraction is None else f"{fraction:.0%}"


def format_error(value: float | None) -> str:
    """Format a relative error with two digits."""
    return "" if value is None else f"{value:.1e}"


def format_bool(value: bool | None) -> str:
    """Return "yes" or "no", or an empty text if the value is unknown."""
    if value is None:
        return ""
    return "yes" if value else "no"
