"""Progress of long work, reported as lines of text to whoever asked for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Say = Callable[[str], None]


T = TypeVar("T")


_SECONDS = 3.0  # between two lines of progress


def silent(_: str) -> None:
    """For whoever wants to hear of no progress."""


def reported(items: Iterable[T], sentence: Callable[[int], str], say: Say) -> Iterator[T]:
    """The items; every few seconds `say` hears the sentence on how many there have been."""
    told = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - told > _SECONDS:
            say(sentence(number))
            told = time.monotonic()
