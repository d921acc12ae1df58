"""Windows: a text cut into pieces that are each computed afresh, so that every token is scored in exactly one of them.

How much a model that carries no state knows of the past is up to the window it reads (Baevski & Auli 2019, Table 5):

- `sliding`: each window scores the next `stride` tokens and reads up to `context` more before them;
- `complete`: blocks of whole lines, the paper's way without context;
- `lines`: every line by itself, the paper's way on Billion Word.

A window reads the text as it stands: before its first token comes the token before that one in the text, which is <eos>
where a line begins. Positions begin anew in every window.

Shapes: T tokens of the text, W windows, B of them in a batch, L tokens of the longest of these, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.errors import SettingsError, shortened
from reefknot.lab.runs.modes import LONGEST, window_sizes
from reefknot.nn.bounds import Ge, Le

Ints = NDArray[np.int64]
Tokens = Annotated[int, Ge(1), Le(LONGEST)]
Context = Annotated[int, Ge(0), Le(LONGEST)]

NO_LINES = "the text has no line ends to cut it at (vocabulary.end_of_line = false); use sliding windows"


class Spans(NamedTuple):
    """Windows over a text, in its order: tokens `start` to `stop`, of which those from `scored` on are scored."""

    start: Ints
    scored: Ints
    stop: Ints


class Batch(NamedTuple):
    """Windows that are computed together; shorter ones are filled up at the right, where nothing is scored."""

    x: Tensor
    """x_BL, what is read."""
    rows: Tensor
    """rows_N of the flattened batch that have a scored token."""
    place: Tensor
    """place_N of those tokens in the text."""


class Windows:
    """A way to cut a text."""

    by_lines: ClassVar[bool] = True
    """Whether windows begin where lines do."""

    @property
    def name(self) -> str:
        """As a saved evaluation and a row of a recipe call it."""
        raise NotImplementedError

    def cut(self, y_T: Tensor, eos: int | None) -> Spans:
        """The windows of a text of these targets, in which every token is scored once."""
        raise NotImplementedError


class Sliding(Windows):
    """Windows that score the next `stride` tokens and read up to `context` tokens before them.

    Args:
        context: Number of tokens that are read before the scored ones. With 0, there are none.
        stride: Number of tokens that a window scores. Smaller windows have more context on average and cost more.
    """

    by_lines = False

    def __init__(self, context: Context, stride: Tokens) -> None:
        if not (0 <= context <= LONGEST and 1 <= stride <= LONGEST):
            raise SettingsError(
                f"sliding windows: context = {context}, stride = {stride}: must be at least 0 and at least 1, "
                f"and at most {LONGEST:,}"
            )
        self.context = context
        self.stride = stride

    @property
    def name(self) -> str:
        return f"context-{self.context}-stride-{self.stride}"

    def cut(self, y_T: Tensor, eos: int | None) -> Spans:
        scored_W = np.arange(0, len(y_T), self.stride)
        return Spans(np.maximum(scored_W - self.context, 0), scored_W, np.minimum(scored_W + self.stride, len(y_T)))


class Complete(Windows):
    """Blocks of as many whole lines as fit. A longer line has blocks of its own.

    Args:
        length: Maximum number of tokens of a block.
    """

    def __init__(self, length: Tokens) -> None:
        if not 1 <= length <= LONGEST:
            raise SettingsError(f"blocks of whole lines: length = {length}: must be at least 1, at most {LONGEST:,}")
        self.length = length

    @property
    def name(self) -> str:
        return f"complete-{self.length}"

    def cut(self, y_T: Tensor, eos: int | None) -> Spans:
        edges, begin = [0], 0
        for end in _line_ends(y_T, eos).tolist():
            if end - edges[-1] > self.length and begin > edges[-1]:
                edges.append(begin)
            if end - begin > self.length:
                edges += [*range(begin + self.length, end, self.length), end]
            begin = end
        return _between([*edges, len(y_T)] if edges[-1] < len(y_T) else edges)


class Lines(Windows):
    """Every line by itself, with nothing but <eos> before it."""

    @property
    def name(self) -> str:
        return "lines"

    def cut(self, y_T: Tensor, eos: int | None) -> Spans:
        return _between([0, *_line_ends(y_T, eos).tolist()])


def named(name: str) -> Windows:
    """The windows of this name, as `Windows.name` gives it."""
    sizes = window_sizes(name)
    if sizes is None:
        raise SettingsError(f"no windows are called {shortened(name, 60)!r}: context-C-stride-S, complete-L or lines")
    if sizes.stride:
        return Sliding(sizes.context, sizes.stride)
    return Complete(sizes.length) if sizes.length else Lines()


def _line_ends(y_T: Tensor, eos: int | None) -> Ints:
    """Where the lines end, each the place after its last token; the text's end is the last."""
    if eos is None:
        raise SettingsError(f"windows by lines: {NO_LINES}")
    ends: Ints = np.flatnonzero(y_T.numpy() == eos) + 1
    return ends if len(ends) and ends[-1] == len(y_T) else np.append(ends, len(y_T))


def _between(edges: list[int]) -> Spans:
    """Windows side by side that score all they read."""
    edge_W = np.asarray(edges, dtype=np.int64)
    return Spans(edge_W[:-1], edge_W[:-1], edge_W[1:])


def batches(x_T: Tensor, spans: Spans, tokens: int) -> Iterator[Batch]:
    """The windows of a text, those of like length together, the longest first, so that a batch too large for the
    machine is the first one.

    `tokens` bounds a batch with what fills it up, never the result; a longer window is a batch of its own.
    """
    length_W = spans.stop - spans.start
    order_W = np.argsort(-length_W, kind="stable")
    done = 0
    while done < len(order_W):
        longest = int(length_W[order_W[done]])
        some_B = order_W[done : done + max(1, tokens // longest)]
        done += len(some_B)
        start_B1, scored_B1, stop_B1 = (each[some_B, None] for each in spans)
        place_BL = start_B1 + np.arange(longest)
        inside_BL = place_BL < stop_B1
        x_BL = torch.where(torch.from_numpy(inside_BL), x_T[np.minimum(place_BL, len(x_T) - 1)], 0)
        scores_BL = inside_BL & (place_BL >= scored_B1)
        yield Batch(x_BL, torch.from_numpy(np.flatnonzero(scores_BL)), torch.from_numpy(place_BL[scores_BL]))
