"""Progress messages of long-running functions.

A function that may run for minutes takes a callback `notify` and calls it with lines of text. `report_progress` wraps
a loop for this; `silent` is the callback that ignores the messages:

    for line in report_progress(lines, lambda count: f"{count:,} lines read", notify):
        ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

Notify = Callable[[str], None]
"""A callback that receives one line of progress."""
ProgressCallback = Callable[[str, float], None]
"""A callback that receives a description of the work and the fraction that is done."""

_PROGRESS_SECONDS = 3.0  # between two lines of progress


def silent(_message: str) -> None:
    """Ignore a line of progress."""


def ignore_progress(_description: str, _fraction: float) -> None:
    """Ignore the fraction of the work that is done."""


def report_progress(items: Iterable[T], message: Callable[[int], str], notify: Notify) -> Iterator[T]:
    """Yield the items, and report every few seconds how many items the loop has finished.

    Args:
        items: The items to loop over.
        message: Returns the line of progress for a number of finished items.
        notify: Called with the line of progress.
    """
    last_report_time = time.monotonic()
    for count, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last_report_time > _PROGRESS_SECONDS:
            notify(message(count))
            last_report_time = time.monotonic()
