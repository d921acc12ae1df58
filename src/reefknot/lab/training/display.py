"""Progress display of training: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text


def duration(seconds: float) -> str:
    """Format a duration for people, such as 1m35s for 95 seconds."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{remainder:02d}s" if minutes else f"{remainder}s"


class Display(Protocol):
    """The interface through which training reports to the user."""

    def print(self, text: str) -> None:
        """Print a line that stays."""

    def update(self, line: str) -> None:
        """Show a line of progress. A terminal replaces the previous line; otherwise, a line is printed now and then."""

    def close(self) -> None:
        """Release the terminal."""


class Silent:
    """A display that shows nothing, for library calls and for all processes but the first."""

    def print(self, text: str) -> None: ...

    def update(self, line: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A display that prints plain lines, and at most one line of progress every `seconds` seconds."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def print(self, text: str) -> None:
        print(text, flush=True)

    def update(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last >= self._seconds:
            self._last = now
            print(line, flush=True)

    def close(self) -> None: ...


class LiveLine:
    """A display on a terminal, whose last line changes in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text(""), console=console, refresh_per_second=8, transient=True)
        self._live.start()

    def print(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def update(self, line: str) -> None:
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))

    def close(self) -> None:
        self._live.stop()


class Logged:
    """A display that also passes every printed line to a log."""

    def __init__(self, display: Display, log: Callable[[str], None]) -> None:
        self._display = display
        self._log = log

    def print(self, text: str) -> None:
        self._display.print(text)
        self._log(text)

    def update(self, line: str) -> None:
        self._display.update(line)

    def close(self) -> None:
        self._display.close()


def open_display() -> Display:
    """Return a display for the standard output: a live line on a terminal, plain lines otherwise."""
    return LiveLine(Console()) if sys.stdout.isatty() else Lines()


def progress_line(name: str, facts: Iterable[str], done: float, seconds_left: float) -> str:
    """Format a line of progress.

    The bar and the time left come first, because a narrow terminal cuts off the end of the line.

    Args:
        name: Name of the run.
        facts: Short texts that end the line, such as the perplexity.
        done: Fraction of the work that is done.
        seconds_left: Estimated time left.
    """
    filled = round(10 * done)
    bar = "━" * filled + "╌" * (10 - filled)
    return "  ".join([name, f"{bar} {done:.0%}, {duration(seconds_left)} left", *facts])
