"""Show control characters as escapes on a terminal.

Words of a corpus, of a vector file or of a run may contain control characters. A terminal would obey them: the sequence
that begins with ESC ] 52 writes to the clipboard, for example. `escape_terminal_output` replaces the standard streams
that are terminals by streams that write ESC as `\\u001b`. Pipes and files receive all characters unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

# The C0 and C1 control characters except tab and line end, and surrogates, which a terminal cannot show.
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escape_control_characters(text: str) -> str:
    """Return a text in which control characters except tab and line end are escaped as in JSON: ESC is `\\u001b`."""
    return _CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def escape_terminal_output() -> None:
    """Replace the standard output and the standard error by streams that escape, if they are terminals."""
    sys.stdout = _protect(sys.stdout)
    sys.stderr = _protect(sys.stderr)


def unescaped(stream: TextIO) -> TextIO:
    """Return the terminal behind a stream that escapes, for code that moves the cursor. Other streams are returned."""
    if isinstance(stream, _EscapingStream):
        return stream.terminal
    return stream


class _EscapingStream:
    """A text stream on a terminal that escapes control characters. It has all other attributes of the terminal.

    Args:
        terminal: The stream of the terminal.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal

    def write(self, text: str) -> int:
        self.terminal.write(escape_control_characters(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError("bytes would reach the terminal without being escaped")
        return getattr(self.terminal, name)


def _protect(stream: TextIO) -> TextIO:
    # Python sets a standard stream to None if it is closed.
    if stream is None or isinstance(stream, _EscapingStream) or not stream.isatty():
        return stream
    return cast(TextIO, _EscapingStream(stream))
