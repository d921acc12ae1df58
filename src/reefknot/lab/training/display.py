"""What a person sees while training: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text


def duration(seconds: float) -> str:
    """95 -> 1m35s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


class Display(Protocol):
    """Where the loop reports to."""

    def say(self, text: str) -> None: ...

    def update(self, line: str) -> None:
        """The state of things now: replaces the line before it on a terminal, or comes every few seconds."""

    def close(self) -> None: ...


class Silent:
    """Nothing: for the processes that are not the first, and for library calls."""

    def say(self, text: str) -> None: ...

    def update(self, line: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """Plain lines, at most one update every few seconds."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def update(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last >= self._seconds:
            self._last = now
            print(line, flush=True)

    def close(self) -> None: ...


class LiveLine:
    """One line that changes in place, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text(""), console=console, refresh_per_second=8, transient=True)
        self._live.start()

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def update(self, line: str) -> None:
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))

    def close(self) -> None:
        self._live.stop()


class Logged:
    """What is said is also written down."""

    def __init__(self, display: Display, log: Callable[[str], None]) -> None:
        self._display = display
        self._log = log

    def say(self, text: str) -> None:
        self._display.say(text)
        self._log(text)

    def update(self, line: str) -> None:
        self._display.update(line)

    def close(self) -> None:
        self._display.close()


def open_display() -> Display:
    """A live line where there is a terminal to draw it on."""
    return LiveLine(Console()) if sys.stdout.isatty() else Lines()


def progress_line(name: str, facts: Iterable[str], done: float, seconds_left: float) -> str:
    """One line: how far, the time left, then what may be cut off where the terminal is narrow."""
    filled = round(10 * done)
    bar = "━" * filled + "╌" * (10 - filled)
    return "  ".join([name, f"{bar} {done:.0%}, {duration(seconds_left)} left", *facts])
