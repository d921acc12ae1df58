"""Signal handling: the first signal requests an orderly stop, the second signal ends the process at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from reefknot.errors import Stopped

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def listen(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Install a handler for the watched signals and return the previous handlers.

    Ignored signals stay ignored, such as SIGHUP under `nohup`.
    """
    handled = [number for number in WATCHED if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in handled}


def restore(previous: dict[signal.Signals, Any]) -> None:
    """Restore the handlers that `listen` returned."""
    for number, handler in previous.items():
        signal.signal(number, handler)


class StopRequest:
    """A flag that becomes true when a signal arrives, so that the training loop can finish its step, save and exit.

    A second signal is not caught and ends the process.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        self._previous = listen(self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore(self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        # The default action also ends a process that is blocked inside a library, waiting for other processes.
        for watched in self._previous:
            signal.signal(watched, signal.SIG_DFL)


@contextmanager
def stopping_at_once(message: str) -> Iterator[None]:
    """Raise `Stopped` with this message at the first signal, for code that has nothing to save."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(message)

    previous = listen(stop)
    try:
        yield
    finally:
        restore(previous)
