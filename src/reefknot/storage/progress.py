"""Progress reports: lines of text that long-running functions pass to a callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

Notify = Callable[[str], None]
"""A callback that receives one line of progress."""

_SECONDS = 3.0  # time between two lines of progress


def silent(_: str) -> None:
    """Ignore the progress."""


def report_progress(items: Iterable[T], message: Callable[[int], str], notify: Notify) -> Iterator[T]:
    """Yield the items, and every few seconds call `notify` with the message for the number of items so far."""
    last = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last > _SECONDS:
            notify(message(number))
            last = time.monotonic()
