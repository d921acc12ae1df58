"""SIGTERM, SIGINT and SIGUSR1 ask for an orderly stop; a second one ends the process at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from reefknot.errors import Stopped

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """True once a signal has come: the loop finishes its step, saves and leaves. A second signal is not caught."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._note) for number in WATCHED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        # From now on the kernel answers: it ends even a process that waits for others inside a library.
        for watched in WATCHED:
            signal.signal(watched, signal.SIG_DFL)


@contextmanager
def stopping_at_once(message: str) -> Iterator[None]:
    """Where there is nothing to save: the first signal raises `Stopped` with this message."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Stopped(message)

    previous = {number: signal.signal(number, leave) for number in WATCHED}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
