"""Report the progress of long computations on stderr, because stdout is for the result.

`live_progress` updates one line in place. `LineProgress` is for subcommands that print results in the meantime.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reefknot.storage.progress import ProgressCallback


@contextmanager
def live_progress() -> Iterator[ProgressCallback]:
    """Yield a function that updates a progress line in place.

    The function is called with a description of the work and the fraction that is done: `update("scoring", 0.5)`.
    Inside the block, everything that is printed goes to stderr.
    """
    from reefknot.lab.training.display import format_progress, open_display

    start_times: dict[str, float] = {}
    with redirect_stdout(sys.stderr):
        display = open_display()

        def update(description: str, fraction: float) -> None:
            now = time.monotonic()
            elapsed = now - start_times.setdefault(description, now)
            if fraction > 0:
                remaining = elapsed * (1 - fraction) / fraction
                display.update(format_progress(description, {}, fraction, remaining))

        try:
            yield update
        finally:
            display.close()


class LineProgress:
    """Prints every few seconds how many lines of text are done.

    Args:
        description: Name of the work, such as "translating".
        total: Number of lines, or None if it is unknown. If it is known, the remaining time is printed as well.
    """

    def __init__(self, description: str, total: int | None) -> None:
        from reefknot.lab.training.display import LineDisplay

        self._description = description
        self._total = total
        self._display = LineDisplay()
        self._start_time = time.monotonic()

    def report(self, lines_done: float) -> None:
        """Report how many lines are done. The number has a fraction if a line is partly done."""
        from reefknot.lab.training.display import format_progress

        message = f"{self._description}  {lines_done:,.0f} lines"
        if self._total and lines_done > 0:
            fraction = min(lines_done / self._total, 1.0)
            elapsed = time.monotonic() - self._start_time
            remaining = elapsed * (1 - fraction) / fraction
            counts = [f"{lines_done:,.0f} of {self._total:,} lines"]
            message = format_progress(self._description, counts, fraction, remaining)
        with redirect_stdout(sys.stderr):
            self._display.update(message)
