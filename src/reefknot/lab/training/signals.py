"""Signal handling: the first signal requests an orderly stop, the second signal ends the process at once.

Training loops use `StopRequest`, a flag that they check after every step:

    with StopRequest() as stop:
        while not stop:
            train_step()

Code that has nothing to save uses `raise_on_signal`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from reefknot.errors import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that stop training. Cluster schedulers send SIGTERM or one of the SIGUSR signals before they kill a job."""


def install_handlers(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Install a handler for the stop signals and return the previous handlers.

    Ignored signals stay ignored, such as SIGHUP under `nohup`.
    """
    previous_handlers: dict[signal.Signals, Any] = {}
    for stop_signal in STOP_SIGNALS:
        if signal.getsignal(stop_signal) is not signal.SIG_IGN:
            previous_handlers[stop_signal] = signal.signal(stop_signal, handler)
    return previous_handlers


def restore_handlers(previous_handlers: dict[signal.Signals, Any]) -> None:
    """Restore the handlers that `install_handlers` returned."""
    for stop_signal, handler in previous_handlers.items():
        signal.signal(stop_signal, handler)


class StopRequest:
    """A flag that becomes true when a signal arrives, so that the training loop can finish its step, save and exit.

    A second signal is not caught and ends the process.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that arrived, if any."""
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        self._previous_handlers = install_handlers(self._handle)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore_handlers(self._previous_handlers)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        # The default action also ends a process that is blocked inside a library, waiting for other processes.
        for handled_signal in self._previous_handlers:
            signal.signal(handled_signal, signal.SIG_DFL)


@contextmanager
def raise_on_signal(message: str) -> Iterator[None]:
    """Raise `Stopped` with this message at the first signal, for code that has nothing to save."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(message)

    previous_handlers = install_handlers(stop)
    try:
        yield
    finally:
        restore_handlers(previous_handlers)
