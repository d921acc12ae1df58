"""Progress displays of training: a line that changes in place on a terminal, plain lines elsewhere.

`Display` is the interface that training uses, and `open_display` chooses an implementation for the standard output:

    display = open_display()
    display.print("tied  epoch 1/2  valid perplexity 130.50")    # stays
    display.update("tied  ━━━━╌╌╌╌╌╌ 40%, 1m35s left")            # the next update replaces it
    display.close()
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from reefknot.storage.terminal import escape_control_characters, escape_terminal_output, unescaped

BAR_WIDTH = 10
"""Number of characters of the progress bar."""
_UPDATE_SECONDS = 10.0  # between two lines of progress, if a display only prints lines


class Display(Protocol):
    """The interface through which training reports to the user."""

    def print(self, text: str) -> None:
        """Print a line that stays."""

    def update(self, line: str) -> None:
        """Show a line of progress. A terminal replaces the previous line; otherwise, a line is printed now and then."""

    def close(self) -> None:
        """Release the terminal."""


def open_display() -> Display:
    """Return a display for the standard output: a live line on a terminal, plain lines otherwise."""
    if sys.stdout.isatty():
        return LiveDisplay(open_console())
    return LineDisplay()


def open_console(width: int | None = None) -> Console:
    """Return a rich console for the standard output. On a terminal, it escapes the control characters of texts.

    Args:
        width: Width in characters; that of the terminal if None.
    """
    return _EscapingConsole(file=unescaped(sys.stdout), width=width)


class _EscapingConsole(Console):
    """A console that escapes control characters in texts, but not its own sequences for cursor and colours."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if self.is_terminal and not segment.control:
                yield Segment(escape_control_characters(segment.text), segment.style)
            else:
                yield segment


class SilentDisplay:
    """A display that shows nothing, for library calls and for all processes but the first."""

    def print(self, text: str) -> None: ...

    def update(self, line: str) -> None: ...

    def close(self) -> None: ...


class LineDisplay:
    """A display that prints plain lines, and at most one line of progress every ten seconds."""

    def __init__(self) -> None:
        self._last_update_time = time.monotonic()

    def print(self, text: str) -> None:
        print(text, flush=True)

    def update(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last_update_time >= _UPDATE_SECONDS:
            self._last_update_time = now
            print(line, flush=True)

    def close(self) -> None: ...


class LiveDisplay:
    """A display on a terminal, whose last line changes in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text(""), console=console, refresh_per_second=8, transient=True)
        self._live.start()
        escape_terminal_output()  # while the display is live, rich replaces the standard streams by its own

    def print(self, text: str) -> None:
        # Rich drops some control characters, so they are escaped before rich sees them.
        self._live.console.print(escape_control_characters(text), markup=False, highlight=False)

    def update(self, line: str) -> None:
        self._live.update(Text(escape_control_characters(line), no_wrap=True, overflow="ellipsis"))

    def close(self) -> None:
        self._live.stop()


class LoggedDisplay:
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


def format_progress(name: str, details: Iterable[str], fraction_done: float, seconds_left: float) -> str:
    """Format a line of progress, such as `tied  ━━╌╌╌╌╌╌╌╌ 25%, 1m35s left  epoch 1/2`.

    The bar and the time left come first, because a narrow terminal cuts off the end of the line.

    Args:
        name: Name of the run.
        details: Short texts that end the line, such as the perplexity.
        fraction_done: Fraction of the work that is done.
        seconds_left: Estimated time left.
    """
    filled_width = round(BAR_WIDTH * fraction_done)
    bar = "━" * filled_width + "╌" * (BAR_WIDTH - filled_width)
    time_left = format_duration(seconds_left)
    return "  ".join([name, f"{bar} {fraction_done:.0%}, {time_left} left", *details])


def format_duration(seconds: float) -> str:
    """Return a readable form of a duration, such as 1m35s for 95 seconds."""
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{remaining_seconds:02d}s"
    return f"{remaining_seconds}s"
