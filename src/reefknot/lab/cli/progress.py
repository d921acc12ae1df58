"""How far long work is, on stderr: stdout is the result's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reefknot.lab.evaluation.grid import Progress


@contextmanager
def live_progress() -> Iterator[Progress]:
    """A line that changes in place on a terminal. Nothing can be printed to stdout meanwhile."""
    from reefknot.lab.training.display import open_display, progress_line

    began: dict[str, float] = {}
    with redirect_stdout(sys.stderr):
        display = open_display()

        def tell(what: str, done: float) -> None:
            now = time.monotonic()
            passed = now - began.setdefault(what, now)
            if done > 0:
                display.update(progress_line(what, {}, done, passed * (1 - done) / done))

        try:
            yield tell
        finally:
            display.close()


class LineCount:
    """Plain lines every few seconds, for work that prints its results meanwhile."""

    def __init__(self, what: str, total: int | None) -> None:
        """`total` is the number of lines that there are; None where only their end will tell."""
        from reefknot.lab.training.display import Lines

        self._what, self._total = what, total
        self._display, self._began = Lines(), time.monotonic()

    def tell(self, lines: float) -> None:
        """So many lines are done, or nearly so."""
        from reefknot.lab.training.display import progress_line

        line = f"{self._what}  {lines:,.0f} lines"
        if self._total and lines > 0:
            done = min(lines / self._total, 1.0)
            left = (time.monotonic() - self._began) * (1 - done) / done
            line = progress_line(self._what, [f"{lines:,.0f} of {self._total:,} lines"], done, left)
        with redirect_stdout(sys.stderr):
            self._display.update(line)
