"""Signals that ask for an orderly stop; a second one ends the process at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from reefknot.errors import Stopped

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def listen(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Handle the watched signals but those that are ignored, as `nohup` ignores SIGHUP; returns the old handlers."""
    heard = [number for number in WATCHED if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def restore(previous: dict[signal.Signals, Any]) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler)


class StopRequest:
    """True once a signal has come: the loop finishes its step, saves and leaves. A second signal is not caught."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        self._previous = listen(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore(self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        # From now on the kernel answers: it ends even a process that waits for others inside a library.
        for heard in self._previous:
            signal.signal(heard, signal.SIG_DFL)


@contextmanager
def stopping_at_once(message: str) -> Iterator[None]:
    """Where there is nothing to save: the first signal raises `Stopped` with this message."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Stopped(message)

    previous = listen(leave)
    try:
        yield
    finally:
        restore(previous)
