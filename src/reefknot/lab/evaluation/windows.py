"""Split a text into evaluation windows, for models that carry no state from one window to the next.

A window is a part of the text that the model reads at once. Windows are computed independently of each other, and every
token is scored in exactly one window. A model that carries no state (a transformer) knows only as much of the past as
its window holds (Baevski & Auli 2019, Table 5). Choose one of three classes:

- `Sliding`: Each window scores the next `stride` tokens and reads up to `context` tokens before them.
- `Complete`: Each window scores a block of whole lines and reads up to `context` tokens before it, as in the paper.
- `Lines`: Every line is a window, as in the paper's experiments on Billion Word.

Their method `spans` returns the windows of a text, and `batch_windows` groups them into padded batches. The input
before the first token of a window is the token that precedes it in the text, which is <eos> at the start of a line.

Shapes: T tokens of the text, W windows, B windows of a batch, L tokens of the longest window of a batch, N scored
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.errors import SettingsError, shorten
from reefknot.lab.runs.modes import MAX_TOKENS, WINDOW_NAMES, parse_window_sizes
from reefknot.nn.bounds import Ge, Le

Ints = NDArray[np.int64]
Tokens = Annotated[int, Ge(1), Le(MAX_TOKENS)]
"""A number of tokens."""
Context = Annotated[int, Ge(0), Le(MAX_TOKENS)]
"""A number of tokens that may be 0."""

NO_LINES = "the text has no line ends to cut it at (vocabulary.end_of_line = false); use sliding windows"
"""Error message for windows by lines on a text without line ends."""


class Spans(NamedTuple):
    """Windows over a text, in order. A window reads tokens `start` to `stop` and scores those from `scored_start` on.

    For example, `Sliding(context=2, stride=3)` splits 6 tokens into two windows: start [0, 1], scored_start [0, 3],
    stop [3, 6].
    """

    start: Ints
    """Position of the first token of each window, start_W."""
    scored_start: Ints
    """Position of the first scored token of each window, scored_start_W."""
    stop: Ints
    """Position after the last token of each window, stop_W."""


class WindowBatch(NamedTuple):
    """Windows that are computed together. Shorter windows are padded on the right, and padding is not scored."""

    inputs: Tensor
    """Input ids, inputs_BL."""
    scored_indices: Tensor
    """Indices of the scored tokens in the flattened batch, scored_N."""
    positions: Tensor
    """Positions of the scored tokens in the text, positions_N."""


class Windows:
    """Base class for splitting a text into evaluation windows."""

    by_lines: ClassVar[bool] = True
    """Whether windows begin at the start of a line."""

    @property
    def name(self) -> str:
        """Name of the windows in a saved evaluation and in a recipe."""
        raise NotImplementedError

    def spans(self, targets_T: Tensor, eos: int | None) -> Spans:
        """Return the windows of a text. Every target is scored in exactly one window.

        Args:
            targets_T: The tokens to score.
            eos: Id of the token that ends a line; None if lines have no end token.
        """
        raise NotImplementedError


class Sliding(Windows):
    """Windows that score the next `stride` tokens and read up to `context` tokens before them.

    Args:
        context: Number of tokens that are read before the scored tokens.
        stride: Number of tokens that a window scores. A smaller stride gives more context on average and costs more.
    """

    by_lines = False

    def __init__(self, context: Context, stride: Tokens) -> None:
        if not (0 <= context <= MAX_TOKENS and 1 <= stride <= MAX_TOKENS):
            raise SettingsError(
                f"sliding windows: context = {context}, stride = {stride}: context must be at least 0, stride at "
                f"least 1, and both at most {MAX_TOKENS:,}"
            )
        self.context = context
        self.stride = stride

    @property
    def name(self) -> str:
        return f"context-{self.context}-stride-{self.stride}"

    def spans(self, targets_T: Tensor, eos: int | None) -> Spans:
        scored_start_W = np.arange(0, len(targets_T), self.stride)
        start_W = np.maximum(scored_start_W - self.context, 0)
        stop_W = np.minimum(scored_start_W + self.stride, len(targets_T))
        return Spans(start_W, scored_start_W, stop_W)


class Complete(Windows):
    """Blocks of as many whole lines as fit. A line that is too long for one block is split into several.

    For example, with length = 5, lines of 2, 2, 3 and 7 tokens become blocks of 4 (two lines), 3, 5 and 2 tokens.

    Args:
        length: Maximum number of tokens in a block.
        context: Number of tokens that are read before the block and not scored (fairseq's context window).
    """

    def __init__(self, length: Tokens, context: Context = 0) -> None:
        if not 1 <= length <= MAX_TOKENS:
            raise SettingsError(
                f"blocks of whole lines: length = {length}: must be at least 1 and at most {MAX_TOKENS:,}"
            )
        if not 0 <= context <= MAX_TOKENS:
            raise SettingsError(
                f"blocks of whole lines: context = {context}: must be at least 0 and at most {MAX_TOKENS:,}"
            )
        self.length = length
        self.context = context

    @property
    def name(self) -> str:
        if not self.context:
            return f"complete-{self.length}"
        return f"context-{self.context}-complete-{self.length}"

    def spans(self, targets_T: Tensor, eos: int | None) -> Spans:
        blocks = _adjacent_spans(self._block_edges(targets_T, eos))
        return blocks._replace(start=np.maximum(blocks.start - self.context, 0))

    def _block_edges(self, targets_T: Tensor, eos: int | None) -> list[int]:
        """Return the positions at which blocks begin, and the end of the text."""
        edges = [0]
        line_start = 0
        for line_end in _line_ends(targets_T, eos).tolist():
            # The line does not fit into the block any more, so the block ends before the line.
            if line_end - edges[-1] > self.length and line_start > edges[-1]:
                edges.append(line_start)
            # The line is too long for any block, so it is split.
            if line_end - line_start > self.length:
                edges.extend(range(line_start + self.length, line_end, self.length))
                edges.append(line_end)
            line_start = line_end
        if edges[-1] < len(targets_T):
            edges.append(len(targets_T))
        return edges


class Lines(Windows):
    """Windows of one line each, with only <eos> before the line."""

    @property
    def name(self) -> str:
        return "lines"

    def spans(self, targets_T: Tensor, eos: int | None) -> Spans:
        line_ends = _line_ends(targets_T, eos).tolist()
        return _adjacent_spans([0, *line_ends])


def parse_windows(name: str) -> Windows:
    """Return the windows with a name in the format of `Windows.name`."""
    sizes = parse_window_sizes(name)
    if sizes is None:
        raise SettingsError(f"unknown windows {shorten(name, 60)!r}: use {WINDOW_NAMES}")
    if sizes.stride:
        return Sliding(sizes.context, sizes.stride)
    if sizes.length:
        return Complete(sizes.length, sizes.context)
    return Lines()


def _line_ends(targets_T: Tensor, eos: int | None) -> Ints:
    """Return the position after the last token of each line. The last position is the end of the text."""
    if eos is None:
        raise SettingsError(f"windows by lines: {NO_LINES}")
    ends: Ints = np.flatnonzero(targets_T.numpy() == eos) + 1
    if len(ends) and ends[-1] == len(targets_T):
        return ends
    return np.append(ends, len(targets_T))


def _adjacent_spans(edges: list[int]) -> Spans:
    """Return adjacent windows between these edges, which score all tokens that they read."""
    all_edges = np.asarray(edges, dtype=np.int64)
    start_W = all_edges[:-1]
    stop_W = all_edges[1:]
    return Spans(start_W, scored_start=start_W, stop=stop_W)


def batch_windows(inputs_T: Tensor, spans: Spans, max_tokens: int) -> Iterator[WindowBatch]:
    """Yield the windows of a text in batches of similar length.

    The longest windows come first, so that running out of memory happens at once. A batch has at most `max_tokens`
    tokens, padding included, unless a single window is longer. This bound does not change the result.
    """
    lengths_W = spans.stop - spans.start
    longest_first_W = np.argsort(-lengths_W, kind="stable")
    num_batched = 0
    while num_batched < len(longest_first_W):
        # Select the windows of the batch.
        longest = int(lengths_W[longest_first_W[num_batched]])
        batch_size = max(1, max_tokens // longest)
        windows_B = longest_first_W[num_batched : num_batched + batch_size]
        num_batched += len(windows_B)

        # Read their tokens. Positions after the end of a window are padding.
        positions_BL = spans.start[windows_B, None] + np.arange(longest)
        is_inside_BL = positions_BL < spans.stop[windows_B, None]
        tokens_BL = inputs_T[np.minimum(positions_BL, len(inputs_T) - 1)]
        inputs_BL = torch.where(torch.from_numpy(is_inside_BL), tokens_BL, 0)

        is_scored_BL = is_inside_BL & (positions_BL >= spans.scored_start[windows_B, None])
        scored_N = torch.from_numpy(np.flatnonzero(is_scored_BL))
        yield WindowBatch(inputs_BL, scored_N, torch.from_numpy(positions_BL[is_scored_BL]))
