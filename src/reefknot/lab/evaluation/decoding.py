"""Steps of decoding: each hypothesis of a batch is given one more token, and the best words after it are found.

A step puts the state's rows into the order of what goes on, reads a token of each, and asks the output end. It has many
small kernels, which take a GPU longer to launch than to run. So it is captured there as a CUDA graph, once for each
shape, and replayed. Few shapes come up, because

    the memory has room for all steps of a translation from the first one on (`Encoder.memory`),
    sources are filled up to a multiple of 8 tokens, and sentences to a sixteenth of a power of two,
    every sentence has a row for each hypothesis that it may have, and keeps them when it is done: nobody reads them.

To capture a step for fewer rows would take as long as several steps, so there is one shape to the end of a batch. On a
CPU, and where a part of the model `waits` for a number from the device, steps run as they are: there the memory grows
with them, and rows leave.

Shapes: B sentences, W rows of each, R rows, K words of each, S source tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.capture import GraphCache, send, side_stream
from reefknot.lab.evaluation.generation import candidates
from reefknot.lab.text.pair_batches import MULTIPLE
from reefknot.nn.encoders.contract import Encoded, State, overwrite
from reefknot.nn.models.language_model import evaluating
from reefknot.nn.models.translator import PAD, Translator

GRAPHS = 2
"""Shapes whose graphs are kept, those used last. Each holds a state, and batches in the order of their lengths do not
come back to an earlier shape. One alone would leave the pool that graphs share empty while the next is captured."""
ROOM = 1024
"""Steps of the largest memory that keeps its size. Most translations end long before the limit of a longer one."""

Ints = NDArray[np.int64]
Best = tuple[Tensor, Tensor]
"""logp_RK and ids_RK of the best words after each row, best first."""
Graphs = GraphCache[tuple[Best, State]]
"""Captured steps: the best words that a step leaves, and the state, from which the next replay goes on."""


@contextmanager
def decoding(model: Translator | Decoder, fixed: bool | None = None) -> Iterator[Decoder]:
    """The model ready to decode one batch after the other; a decoder that is ready stays as it is.

    Meanwhile no weight may change. Enter it inside of autocast: graphs read the narrow copies of weights that autocast
    keeps until it is left, and the class vectors that are held here.

    Arguments:
        fixed: whether rows and memory keep their size. Left out, they do where that lets steps be replayed.
    """
    if isinstance(model, Decoder):
        yield model
        return
    with torch.no_grad(), evaluating(model), side_stream(next(model.parameters()).device):
        decoder = Decoder(model, fixed)
        try:
            yield decoder
        finally:
            decoder.close()


class Decoder:
    """A translator that batches are decoded with, one at a time; `decoding` makes it."""

    def __init__(self, model: Translator, fixed: bool | None) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        replays = self.device.type == "cuda" and not model.waits
        self.fixed = replays if fixed is None else fixed
        self.graphs: Graphs | None = GraphCache(self.device, GRAPHS) if self.fixed and replays else None
        """None: steps run as they are."""
        self._autocast = self._under_autocast()
        self._closed = False

    def close(self) -> None:
        """Let go of what is only true while `decoding` lasts."""
        self.graphs = None
        self._closed = True

    def begin(
        self, source_BS: Tensor, limit: Callable[[int], int], width: int, k: int | None, never: Collection[int]
    ) -> Rows:
        """The rows of a batch before the first step, one of each sentence.

        Arguments:
            limit: most steps that a source of so many tokens is given.
            width: most rows of a sentence.
            k: how many words are found after each row; None: all.
            never: ids that are not among them.
        """
        if self._closed:
            raise ArgumentError("this decoder was left; what is decoded belongs inside of `with decoding(model)`")
        if self._under_autocast() != self._autocast:
            raise ArgumentError("autocast was entered or left since decoding began; begin to decode inside of autocast")
        step = Step(self.model, k, frozenset(never))
        batch, tokens = source_BS.shape
        source_BS = F.pad(source_BS.to(self.device), (0, self.width(tokens) - tokens), value=PAD)
        steps = limit(self.width(tokens))
        if self.fixed and batch and steps <= ROOM:
            return FixedRows(step, source_BS, steps, width, self.graphs)
        return Rows(step, self.model.begin(source_BS) if batch else {}, np.arange(batch))

    def width(self, tokens: int) -> int:
        """What a source of so many tokens is filled up to."""
        return -(-tokens // MULTIPLE) * MULTIPLE if self.fixed else tokens

    def _under_autocast(self) -> bool:
        return torch.is_autocast_enabled(self.device.type)


@dataclass(frozen=True)
class Step:
    """One more token of every row, and the best words after it."""

    model: Translator
    k: int | None
    never: frozenset[int]

    def __call__(
        self, state: State, parents_R: Tensor, tokens_R: Tensor, same: set[str]
    ) -> tuple[Best, State, set[str]]:
        """The best words, the state that follows, and the names in it that the step has not changed.

        Arguments:
            parents_R: the rows of the state that go on, some of them perhaps several times.
            same: what need not be put into their order.
        """
        state = {name: each if name in same else each.index_select(1, parents_R) for name, each in state.items()}
        encoded: Encoded = self.model(tokens_R[:, None], state)
        untouched = {name for name, each in encoded.state.items() if each is state.get(name)}
        return candidates(self.model, encoded.output[:, -1], self.k, self.never), encoded.state, untouched


class Rows:
    """The model after what each of some hypotheses has read; those of a sentence stand side by side. What nobody goes
    on with leaves."""

    def __init__(self, step: Step, state: State, sentence_R: Ints) -> None:
        self._step = step
        self._state = state
        self._sentence_R = sentence_R
        self._untouched = set(state)

    def read(self, parents_R: Ints, tokens_R: Ints) -> Best:
        """Go on with these rows, some of them perhaps several times, by a token each. What is found is on the device,
        and to be used before the next step."""
        sentence_R = self._sentence_R[parents_R]
        # What no step has changed is the source's, and all rows of a sentence have the same of it.
        same = self._untouched if np.array_equal(sentence_R, self._sentence_R) else set()
        self._sentence_R = sentence_R
        return self._go_on(np.stack([parents_R, tokens_R]), same)

    def _go_on(self, given_2R: Ints, same: set[str]) -> Best:
        parents_R, tokens_R = send(torch.from_numpy(given_2R), next(iter(self._state.values())).device)
        best, self._state, self._untouched = self._step(self._state, parents_R, tokens_R, same)
        return best


class FixedRows(Rows):
    """The same with as many rows from the first step to the last, and a memory that keeps its size. Those of a sentence
    that is done, and those that fill up, are computed and not read."""

    def __init__(self, step: Step, source_BS: Tensor, steps: int, width: int, graphs: Graphs | None) -> None:
        batch, tokens = source_BS.shape
        sentence_R = np.minimum(np.arange(_filled(batch)), batch - 1).repeat(width)
        order_R = send(torch.from_numpy(sentence_R), source_BS.device)
        source = {name: each.index_select(1, order_R) for name, each in step.model.read(source_BS).items()}
        super().__init__(step, source | step.model.memory(len(sentence_R), steps), sentence_R)
        self._width = width
        self._at_R: Ints = width * np.arange(batch)
        """Where those that are read stand."""
        self._graphs = graphs
        self._key = step, len(sentence_R), tokens, steps
        self._graph = None if graphs is None else graphs.find(self._key)
        if self._graph is not None:
            _, state = self._graph.outputs
            overwrite(state, self._state)
            self._state = {}

    def read(self, parents_R: Ints, tokens_R: Ints) -> Best:
        before_R = self._at_R[parents_R]
        sentence_R = before_R // self._width
        self._at_R = sentence_R * self._width + np.arange(len(sentence_R)) - np.searchsorted(sentence_R, sentence_R)
        rows = len(self._sentence_R)
        given_2R = np.stack([np.arange(rows), np.zeros(rows, dtype=np.int64)])
        given_2R[:, self._at_R] = before_R, tokens_R
        logp_RK, ids_RK = self._go_on(given_2R, self._untouched)
        if len(self._at_R) == rows:
            return logp_RK, ids_RK
        at_R = send(torch.from_numpy(self._at_R), ids_RK.device)
        return logp_RK.index_select(0, at_R), ids_RK.index_select(0, at_R)

    def _go_on(self, given_2R: Ints, same: set[str]) -> Best:
        inputs = [torch.from_numpy(given_2R)]
        if self._graph is not None:
            best, _ = self._graph.replay(inputs)
            return best
        best = super()._go_on(given_2R, same)
        if self._graphs is not None:
            # The first step has warmed up what must not be captured, and has given the state its types.
            self._graph = self._graphs.capture(self._key, self._replayed_step, inputs)
        return best

    def _replayed_step(self, given_2R: Tensor) -> tuple[Best, State]:
        """A step that leaves its state where the next replay finds it. The state is the graph's from now on."""
        best, after, _ = self._step(self._state, given_2R[0], given_2R[1], self._untouched)
        overwrite(self._state, {name: tensor for name, tensor in after.items() if name not in self._untouched})
        return best, self._state


def _filled(number: int) -> int:
    """Rounded up to a sixteenth of a power of two: so there are few numbers, and at most an eighth too much."""
    part = max(1, (1 << (number - 1).bit_length()) // 16)
    return -(-number // part) * part
