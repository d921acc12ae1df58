"""Run a translator step by step: each hypothesis of a batch reads one more token, and the best next words are computed.

A hypothesis is the beginning of a translation. It is one row of the batch. `beam.py` decides which hypotheses go on:

    with decoding(model) as decoder:
        batch = decoder.start_batch(source_BS, limit, rows_per_sentence, k, banned)    # encodes the sources
        log_probs_RK, ids_RK = batch.step(parents_R, tokens_R)                         # one call per target token

A step reorders the rows of the state (`parents_R`), reads one token per row (`tokens_R`), and scores the next words
with the output end (classifier and softmax). On a GPU, a step is captured as a CUDA graph and replayed
(`FixedSizeBatch`). On a CPU, and if a part of the model `synchronizes` (reads a value from the device), steps run
without a graph (`DecodingBatch`).

Shapes: B sentences, R rows (hypotheses), K words per row, S source tokens. `inputs_2R` has two rows: the parent row of
each hypothesis, and the token that it reads.
"""

from __future__ import annotations

import math
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
from reefknot.lab.evaluation.generation import top_candidates
from reefknot.lab.text.pair_batches import WIDTH_MULTIPLE
from reefknot.nn.encoders.contract import Encoded, State, overwrite
from reefknot.nn.models.language_model import evaluating
from reefknot.nn.models.translator import PAD, Translator

MAX_GRAPHS = 2
"""Number of graphs in memory, one per shape; the most recently used graphs stay. Each graph holds a state, and batches
that are sorted by length do not return to an earlier shape. With a single graph, the memory pool that graphs share
would be empty while the next graph is captured."""
MAX_STEPS = 1024
"""Maximum capacity of a KV cache of fixed size, in steps. Most translations end long before a larger limit."""

Ints = NDArray[np.int64]
BestWords = tuple[Tensor, Tensor]
"""Log-probabilities log_probs_RK and ids ids_RK of the best next words of each row, best first."""
Graphs = GraphCache[tuple[BestWords, State]]
"""Captured steps, with their outputs: the best next words, and the state that the next replay reads."""


@contextmanager
def decoding(model: Translator | Decoder, fixed: bool | None = None) -> Iterator[Decoder]:
    """Prepare a model for decoding batches. A decoder is yielded unchanged.

    No weight may change inside this context. Enter it inside autocast, because graphs read the half-precision weights
    that autocast caches until it exits, and the class vectors that are cached here.

    Args:
        model: A translator, or a decoder.
        fixed: Whether the number of rows and the KV cache keep their size. By default, they do if steps can be replayed
            as CUDA graphs.
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
    """A translator that decodes batches, one at a time. Use `decoding` to create it."""

    def __init__(self, model: Translator, fixed: bool | None) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        can_replay = self.device.type == "cuda" and not model.synchronizes
        self.fixed = can_replay if fixed is None else fixed
        """Whether the number of rows and the KV cache keep their size."""
        self.graphs: Graphs | None = None
        """Captured steps; None if steps run without graphs."""
        if self.fixed and can_replay:
            self.graphs = GraphCache(self.device, MAX_GRAPHS)
        self._created_in_autocast = self._autocast_enabled()
        self._closed = False

    def close(self) -> None:
        """Release the graphs. The decoder cannot be used afterwards."""
        self.graphs = None
        self._closed = True

    def start_batch(
        self,
        source_BS: Tensor,
        limit: Callable[[int], int],
        rows_per_sentence: int,
        k: int | None,
        banned: Collection[int],
    ) -> DecodingBatch:
        """Encode the sources of a batch, and return the batch before its first step, with one row per sentence.

        Args:
            source_BS: Source ids, padded with `PAD`.
            limit: Function that returns the maximum number of steps for a source with this number of tokens.
            rows_per_sentence: Maximum number of rows per sentence, which is the beam.
            k: Number of best words to compute for each row; None for all words.
            banned: Ids that are never among the best words.
        """
        if self._closed:
            raise ArgumentError("this decoder is closed; use it only inside `with decoding(model)`")
        if self._autocast_enabled() != self._created_in_autocast:
            raise ArgumentError("autocast was turned on or off inside `decoding`; enter autocast before `decoding`")

        batch_size, source_length = source_BS.shape
        padded_length = self.padded_length(source_length)
        source_BS = F.pad(source_BS.to(self.device), (0, padded_length - source_length), value=PAD)

        step = DecodingStep(self.model, k, frozenset(banned))
        max_steps = limit(padded_length)
        if self.fixed and batch_size and max_steps <= MAX_STEPS:
            return FixedSizeBatch(step, source_BS, max_steps, rows_per_sentence, self.graphs)
        state: State = {}
        if batch_size:
            state = self.model.start_decoding(source_BS)
        return DecodingBatch(step, state, np.arange(batch_size))

    def padded_length(self, tokens: int) -> int:
        """Return the length that a source of `tokens` tokens is padded to."""
        if not self.fixed:
            return tokens
        return _round_up_to_multiple(tokens, WIDTH_MULTIPLE)

    def _autocast_enabled(self) -> bool:
        return torch.is_autocast_enabled(self.device.type)


@dataclass(frozen=True)
class DecodingStep:
    """One decoding step: every row reads one token, and the best next words are computed."""

    model: Translator
    k: int | None
    """Number of best words to compute for each row; None for all words."""
    banned: frozenset[int]
    """Ids that are never among the best words."""

    def __call__(
        self, state: State, parents_R: Tensor, tokens_R: Tensor, unchanged: set[str]
    ) -> tuple[BestWords, State, set[str]]:
        """Return the best words, the next state, and the names of its tensors that the step has not changed.

        Args:
            state: The state of all rows.
            parents_R: The rows of the state to continue. A row may occur several times.
            tokens_R: The token that each row reads.
            unchanged: Names of the tensors in the state that need no reordering.
        """
        reordered: State = {}
        for name, tensor in state.items():
            if name in unchanged:
                reordered[name] = tensor
            else:
                reordered[name] = tensor.index_select(1, parents_R)

        encoded: Encoded = self.model(tokens_R[:, None], reordered)
        still_unchanged = {name for name, tensor in encoded.state.items() if tensor is reordered.get(name)}
        best_words = top_candidates(self.model, encoded.output[:, -1], self.k, self.banned)
        return best_words, encoded.state, still_unchanged


class DecodingBatch:
    """The hypotheses of a batch and their states, with the rows of a sentence next to each other.

    Rows that are not continued are removed, and the KV cache grows with the steps.
    """

    def __init__(self, step: DecodingStep, state: State, sentence_R: Ints) -> None:
        self._decoding_step = step
        self._state = state
        self._sentence_R = sentence_R
        """The sentence that each row belongs to."""
        self._unchanged = set(state)
        """Names of the tensors in the state that no step has changed."""

    def step(self, parents_R: Ints, tokens_R: Ints) -> BestWords:
        """Continue rows by one token each, and return the best next words.

        For example, parents [0, 0] and tokens [5, 7] continue row 0 twice, and the batch has two rows afterwards.
        The result is on the device. Use it before the next step, because that step may overwrite it.
        """
        sentence_R = self._sentence_R[parents_R]
        # Tensors that no step has changed depend on the source only, so all rows of a sentence hold the same values.
        # They need no reordering if every row still belongs to the same sentence.
        unchanged: set[str] = set()
        if np.array_equal(sentence_R, self._sentence_R):
            unchanged = self._unchanged
        self._sentence_R = sentence_R
        return self._run_step(np.stack([parents_R, tokens_R]), unchanged)

    def _run_step(self, inputs_2R: Ints, unchanged: set[str]) -> BestWords:
        device = next(iter(self._state.values())).device
        parents_R, tokens_R = send(torch.from_numpy(inputs_2R), device)
        best_words, self._state, self._unchanged = self._decoding_step(self._state, parents_R, tokens_R, unchanged)
        return best_words


class FixedSizeBatch(DecodingBatch):
    """The hypotheses of a batch, with a fixed number of rows and a KV cache of fixed size, as CUDA graphs need.

    A step consists of many small kernels, which take longer to launch on a GPU than to run. So it is captured as a CUDA
    graph, once for each shape, and replayed. There are few shapes, because

    - the KV cache has the capacity for all steps of a translation from the start (`Encoder.memory`),
    - sources are padded to a multiple of 8 tokens, and the number of sentences to a sixteenth of a power of two,
    - every sentence has a row for each hypothesis of the beam, and keeps its rows, unused, when it is finished.

    Capturing a step for fewer rows would take as long as several steps, so the shape stays the same to the end of a
    batch.

    Every sentence has a block of `rows_per_sentence` rows. For example, with 3 rows per sentence, sentence 0 has rows 0
    to 2, and sentence 1 rows 3 to 5. If sentence 0 has two hypotheses and sentence 1 has one, rows 0, 1 and 3 are in
    use. The other rows are computed but never read.
    """

    def __init__(
        self, step: DecodingStep, source_BS: Tensor, max_steps: int, rows_per_sentence: int, graphs: Graphs | None
    ) -> None:
        # The last sentence fills the rows that pad the batch.
        batch_size, source_length = source_BS.shape
        padded_sentences = np.minimum(np.arange(_round_up(batch_size)), batch_size - 1)
        sentence_R = padded_sentences.repeat(rows_per_sentence)
        num_rows = len(sentence_R)

        # The state of the decoder, and the encoded source of the sentence of each row.
        encoded_source = step.model.encode_source(source_BS)
        order_R = send(torch.from_numpy(sentence_R), source_BS.device)
        source_state = {name: tensor.index_select(1, order_R) for name, tensor in encoded_source.items()}
        super().__init__(step, source_state | step.model.decoding_state(num_rows, max_steps), sentence_R)
        self._rows_per_sentence = rows_per_sentence
        self._used_R: Ints = rows_per_sentence * np.arange(batch_size)
        """Indices of the rows that are in use."""

        # A graph of an earlier batch of this shape reads its own state, so copy the new state into it.
        self._graphs = graphs
        self._graph_key = step, num_rows, source_length, max_steps
        self._graph = None if graphs is None else graphs.find(self._graph_key)
        if self._graph is not None:
            _, graph_state = self._graph.outputs
            overwrite(graph_state, self._state)
            self._state = {}

    def step(self, parents_R: Ints, tokens_R: Ints) -> BestWords:
        # `parents_R` counts the rows in use; `parent_rows_R` counts all rows.
        parent_rows_R = self._used_R[parents_R]
        sentence_R = parent_rows_R // self._rows_per_sentence

        # A sentence uses the first rows of its block of `rows_per_sentence` rows.
        first_of_sentence_R = np.searchsorted(sentence_R, sentence_R)
        index_in_sentence_R = np.arange(len(sentence_R)) - first_of_sentence_R
        self._used_R = sentence_R * self._rows_per_sentence + index_in_sentence_R

        # Rows that are not in use continue themselves with token 0.
        num_rows = len(self._sentence_R)
        inputs_2R = np.stack([np.arange(num_rows), np.zeros(num_rows, dtype=np.int64)])
        inputs_2R[0, self._used_R] = parent_rows_R
        inputs_2R[1, self._used_R] = tokens_R

        log_probs_RK, ids_RK = self._run_step(inputs_2R, self._unchanged)
        if len(self._used_R) == num_rows:
            return log_probs_RK, ids_RK
        used_R = send(torch.from_numpy(self._used_R), ids_RK.device)
        return log_probs_RK.index_select(0, used_R), ids_RK.index_select(0, used_R)

    def _run_step(self, inputs_2R: Ints, unchanged: set[str]) -> BestWords:
        inputs = [torch.from_numpy(inputs_2R)]
        if self._graph is not None:
            best_words, _ = self._graph.replay(inputs)
            return best_words
        best_words = super()._run_step(inputs_2R, unchanged)
        if self._graphs is not None:
            # The first step, without a graph, makes initialisations that must not be captured and sets the dtypes.
            self._graph = self._graphs.capture(self._graph_key, self._step_in_place, inputs)
        return best_words

    def _step_in_place(self, inputs_2R: Tensor) -> tuple[BestWords, State]:
        """Run a step that writes the new state over the old one, for the next replay. The graph owns the state."""
        parents_R = inputs_2R[0]
        tokens_R = inputs_2R[1]
        best_words, next_state, _ = self._decoding_step(self._state, parents_R, tokens_R, self._unchanged)
        changed = {name: tensor for name, tensor in next_state.items() if name not in self._unchanged}
        overwrite(self._state, changed)
        return best_words, self._state


def _round_up(count: int) -> int:
    """Round up to a sixteenth of a power of two, so that there are few sizes and at most an eighth is padding."""
    next_power_of_two = 1 << (count - 1).bit_length()
    return _round_up_to_multiple(count, max(1, next_power_of_two // 16))


def _round_up_to_multiple(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple
