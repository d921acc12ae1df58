"""Progress messages of long-running functions.

A function that may run for minutes takes a callback `notify` and calls it with lines of text. `report_progress` wraps
a loop for this; `silent` is the callback that ignores the messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

Notify = Callable[[str], None]
"""A callback that receives one line of progress."""

_PROGRESS_SECONDS = 3.0  # between two lines of progress


def silent(_: str) -> None:
    """Ignore the progress."""


def report_progress(items: Iterable[T], message: Callable[[int], str], notify: Notify) -> Iterator[T]:
    """Yield the items, and every few seconds call `notify` with the message for the number of items so far.

    for line in report_progress(lines, lambda count: f"{count:,} lines read", notify):
        ...
    """
    last_report = time.monotonic()
    for count, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last_report > _PROGRESS_SECONDS:
            notify(message(count))
            last_report = time.monotonic()
