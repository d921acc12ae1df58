"""Progress of long computations, printed on stderr because stdout is for the result."""

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
    """Yield a function that updates a progress line in place. In the meantime, stdout is redirected to stderr."""
    from reefknot.lab.training.display import format_progress, open_display

    started: dict[str, float] = {}
    with redirect_stdout(sys.stderr):
        display = open_display()

        def update(what: str, done: float) -> None:
            now = time.monotonic()
            seconds = now - started.setdefault(what, now)
            if done > 0:
                display.update(format_progress(what, {}, done, seconds * (1 - done) / done))

        try:
            yield update
        finally:
            display.close()


class LineCount:
    """Progress in lines of text, printed every few seconds, for verbs that print results in the meantime."""

    def __init__(self, what: str, total: int | None) -> None:
        """Start to count. `what` names the work, and `total` is the number of lines, or None if it is unknown."""
        from reefknot.lab.training.display import LineDisplay

        self._what, self._total = what, total
        self._display, self._started = LineDisplay(), time.monotonic()

    def report(self, lines: float) -> None:
        """Report how many lines are done. A fraction stands for a line that is partly done."""
        from reefknot.lab.training.display import format_progress

        line = f"{self._what}  {lines:,.0f} lines"
        if self._total and lines > 0:
            done = min(lines / self._total, 1.0)
            left = (time.monotonic() - self._started) * (1 - done) / done
            line = format_progress(self._what, [f"{lines:,.0f} of {self._total:,} lines"], done, left)
        with redirect_stdout(sys.stderr):
            self._display.update(line)
