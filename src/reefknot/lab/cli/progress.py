"""The progress of long work, printed on stderr because stdout is for the result."""

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
    """Yield a function that updates a line in place on a terminal. stdout cannot be used meanwhile."""
    from reefknot.lab.training.display import open_display, progress_line

    started: dict[str, float] = {}
    with redirect_stdout(sys.stderr):
        display = open_display()

        def update(what: str, done: float) -> None:
            now = time.monotonic()
            seconds = now - started.setdefault(what, now)
            if done > 0:
                display.update(progress_line(what, {}, done, seconds * (1 - done) / done))

        try:
            yield update
        finally:
            display.close()


class LineCount:
    """The number of lines done, printed every few seconds, for work that prints its results meanwhile."""

    def __init__(self, what: str, total: int | None) -> None:
        """`what` names the work. `total` is the number of lines, or None if it is not known."""
        from reefknot.lab.training.display import Lines

        self._what, self._total = what, total
        self._display, self._started = Lines(), time.monotonic()

    def tell(self, lines: float) -> None:
        """Report how many lines are done; a fraction counts a line in part."""
        from reefknot.lab.training.display import progress_line

        line = f"{self._what}  {lines:,.0f} lines"
        if self._total and lines > 0:
            done = min(lines / self._total, 1.0)
            left = (time.monotonic() - self._started) * (1 - done) / done
            line = progress_line(self._what, [f"{lines:,.0f} of {self._total:,} lines"], done, left)
        with redirect_stdout(sys.stderr):
            self._display.update(line)
