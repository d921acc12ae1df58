"""Score every token of a text with a language model, and compute the perplexity of the text.

Start with `score`:

    result = score(model, split, vocabulary)
    result.nll                       # the loss of every token, in the order of the text
    result.summary().perplexity

A `Score` also records how the losses were measured, so that two perplexities are compared only where that makes sense.
Every token is scored exactly once, however the text is split.

A model that carries its state (an RNN) reads the text from start to end, in one or several streams (contiguous parts of
the text that are read in parallel). A model that carries no state (a transformer) reads the text in evaluation windows,
which are computed independently of each other (`windows.py`). A model that carries its state can be scored in
evaluation windows, too.

Shapes: B streams, T tokens of a stream or of the text, N tokens computed at once, M of them scored at once, D hidden
dimension.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reefknot.errors import DataError, NonFiniteError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.evaluation.contexts import check_carries_state, iterate_contexts
from reefknot.lab.runs.definition import BITS_PER_UNPREDICTED_BYTE, perplexity
from reefknot.lab.runs.scores import Mode, ScoredText, TextScore
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.constants import END_OF_WORD
from reefknot.nn.models.language_model import LanguageModel, evaluating

if TYPE_CHECKING:
    from reefknot.lab.evaluation.windows import Spans, Windows
    from reefknot.lab.text.pair_dataset import PairSplit

ROWS_AT_ONCE = 8192
"""Number of hidden states (rows) that the output end scores at once. It bounds the memory and does not change the
result."""
_AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Score:
    """Losses of the tokens of a text, in the order of the text, and how the losses were measured."""

    nll: NDArray[np.float32]
    """Negative log-likelihood of each scored token, in nats."""
    words: int
    """Number of words and line ends that the scored tokens make up. Without sub-words, it is the number of tokens."""
    bytes: int
    """Size of the text in bytes."""
    text: ScoredText
    """Description of the text that was scored."""
    precision: str
    """`float32`, or `bfloat16` or `float16` for autocast."""
    unpredicted_bytes: int = field(default=0, kw_only=True)
    """Number of bytes that no token predicts: those of unknown words and of additional white space."""
    streams: int = field(default=1, kw_only=True)
    """Number of contiguous parts of the text that were read in parallel."""
    windows: Windows | None = field(default=None, kw_only=True)
    """Evaluation windows, which are independent of each other; None if the state was carried along each stream."""
    pairs: int | None = field(default=None, kw_only=True)
    """Number of sentence pairs, each scored independently; None if the text is not parallel."""
    mode: Mode | None = field(default=None, kw_only=True)
    """Mode of evaluation, such as dynamic evaluation or a cache; None for plain evaluation."""

    @property
    def mean(self) -> float:
        """Mean negative log-likelihood per token, in nats."""
        return float(self.nll.mean(dtype=np.float64))

    @property
    def definition(self) -> str:
        """Definition of the perplexity, in words."""
        return self.summary().definition

    def summary(self) -> TextScore:
        """Return the scores that are saved in result.json."""
        total_nll = float(self.nll.sum(dtype=np.float64))
        total_bits = total_nll / math.log(2) + BITS_PER_UNPREDICTED_BYTE * self.unpredicted_bytes
        return TextScore(
            perplexity=perplexity(self.mean),
            word_perplexity=perplexity(total_nll / self.words),
            bits_per_byte=total_bits / self.bytes,
            unpredicted_bytes=self.unpredicted_bytes,
            nll=self.mean,
            tokens=len(self.nll),
            words=self.words,
            bytes=self.bytes,
            streams=self.streams,
            windows=self.windows.name if self.windows else None,
            pairs=self.pairs,
            precision=self.precision,
            text=self.text,
            mode=self.mode,
        )


@torch.no_grad()
def score(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    *,
    streams: int = 1,
    window: int | None = None,
    windows: Windows | None = None,
    precision: str = "float32",
) -> Score:
    """Score every token of a text.

    Args:
        model: The language model.
        split: The text.
        vocabulary: The vocabulary of the text.
        streams: Number of contiguous parts that are scored in parallel, each from an empty state. More streams are
            faster and give the model less context.
        window: Number of tokens of a stream that are computed at once. It changes time and memory only.
        windows: Evaluation windows that are computed independently, instead of streams that carry a state.
        precision: `float32`, or `bfloat16` or `float16` for autocast.
    """
    inputs_1T, targets_1T = build_stream(split, vocabulary)
    inputs_T = inputs_1T[0]
    targets_T = targets_1T[0]
    streams = min(streams, len(targets_T))

    # Compute the loss of every token, in evaluation windows or in streams.
    if windows is not None:
        if streams > 1:
            raise SettingsError(
                f"streams = {streams}: evaluation windows are independent, so streams have no effect; use streams = 1"
            )
        spans = windows.spans(targets_T, vocabulary.eos)
        nll = window_losses(model, inputs_T, targets_T, spans, precision=precision)
    else:
        inputs_BT = _split_into_streams(inputs_T, streams, padding=0)
        targets_BT = _split_into_streams(targets_T, streams, padding=IGNORE)
        nll_BT = stream_losses(model, inputs_BT, targets_BT, window=window, precision=precision)
        nll = nll_BT[(targets_BT != IGNORE).numpy()]
    if not np.isfinite(nll).all():
        raise NonFiniteError(f"the loss of the model on the {split.name} text is NaN or infinite")

    # Describe what was scored.
    ends_word = word_end_mask(vocabulary)[targets_T.numpy()]
    text = describe_text(split, split.ids, vocabulary)
    return Score(
        nll,
        int(ends_word.sum()),
        split.bytes,
        text,
        precision,
        unpredicted_bytes=count_unpredicted_bytes(split.bytes, targets_T.numpy(), vocabulary),
        streams=streams,
        windows=windows,
    )


def count_unpredicted_bytes(text_bytes: int, ids: NDArray[Any], vocabulary: Vocabulary) -> int:
    """Return the number of bytes of a text that its tokens do not predict.

    A word predicts its bytes and the space after it, and `<eos>` predicts the line end. There is no space between the
    last word of a line and `<eos>`. `<unk>` does not predict any bytes.

    Args:
        text_bytes: Size of the text in bytes.
        ids: The tokens of the text.
        vocabulary: The vocabulary of the tokens.
    """
    ends_word = word_end_mask(vocabulary)
    suffix = "" if vocabulary.bpe is None else END_OF_WORD
    sizes = [len(token.removesuffix(suffix).encode()) for token in vocabulary.words]
    bytes_of_token = np.array(sizes, dtype=np.int64) + ends_word
    for special_id, size in ((vocabulary.unk, 0), (vocabulary.eos, 1)):
        if special_id is not None:
            bytes_of_token[special_id] = size
    num_bytes = int(bytes_of_token[ids].sum())
    if vocabulary.eos is not None:
        precedes_eos = ids[:-1][ids[1:] == vocabulary.eos]
        has_space = (precedes_eos != vocabulary.eos) & ends_word[precedes_eos]
        if vocabulary.unk is not None:
            has_space &= precedes_eos != vocabulary.unk
        num_bytes -= int(has_space.sum())
    return max(text_bytes - num_bytes, 0)


def describe_text(split: Split | PairSplit, ids: NDArray[np.int32], vocabulary: Vocabulary) -> ScoredText:
    """Describe the text that was scored, and how its words were turned into the tokens `ids`."""
    # The positions of the unknown words, counted in words, so that texts in words and in sub-words can be compared.
    is_unknown_word = np.logical_or.reduceat(ids == vocabulary.unk, _word_starts(ids, vocabulary))
    unknown_positions = np.flatnonzero(is_unknown_word).astype("<i8")
    return ScoredText(
        split=split.name,
        tokens=split.tokens,
        sha256=split.sha256,
        line_ends=vocabulary.eos is not None,
        unknown=split.unknown,
        unknown_sha256=hashlib.sha256(unknown_positions.tobytes()).hexdigest(),
        tokenisation="words" if vocabulary.bpe is None else "pieces",
        vocabulary_sha256=vocabulary.tokens_sha256,
    )


def compute_unknown_share(split: Split | PairSplit, vocabulary: Vocabulary) -> float:
    """Return the share of unknown words among the words and line ends of a text, before it is scored."""
    num_words = split.words
    if vocabulary.eos is not None:
        num_words += split.lines
    return min(split.unknown / max(num_words, 1), 1.0)


def build_stream(split: Split, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the inputs inputs_1T and the targets targets_1T of a text that is read as one stream.

    <eos> is the input before the first token: the text "a b c" has the inputs <eos> a b and the targets a b c. Without
    <eos> in the vocabulary, the first token is not a target.
    """
    inputs = np.asarray(split.inputs[:-1], dtype=np.int64)
    targets = np.asarray(split.ids, dtype=np.int64)
    if vocabulary.eos is None:
        targets = targets[1:]
    else:
        inputs = np.concatenate([[vocabulary.eos], inputs])
    if not len(targets):
        raise DataError(
            f"the {split.name} text has one token and no <eos> before it, so there is nothing to score: use a longer "
            "text or a vocabulary with <eos>"
        )
    return torch.from_numpy(inputs)[None], torch.from_numpy(targets)[None]


@torch.no_grad()
def stream_losses(
    model: LanguageModel,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    *,
    window: int | None = None,
    precision: str = "float32",
) -> NDArray[np.float32]:
    """Return the losses nll_BT of the targets of parallel streams, computed without dropout.

    `window` is the number of tokens of a stream that are computed at once; by default, as many as fit into memory.
    """
    device = next(model.parameters()).device
    if not window:
        rows_per_step = model.output.rows_per_token * len(inputs_BT)
        window = max(1, min(1024, ROWS_AT_ONCE // rows_per_step))
    chunks = []
    with evaluating(model), autocast(device, precision):
        for log_probs_BT in stream_log_probs(model, inputs_BT, targets_BT, window):
            chunks.append(-log_probs_BT.float().cpu())
    nll_BT: NDArray[np.float32] = torch.cat(chunks, dim=1).numpy()
    return nll_BT


def stream_log_probs(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor, window: int) -> Iterator[Tensor]:
    """Yield the log-probabilities log_probs_BT of the targets, for `window` tokens of every stream at a time.

    Each stream starts from an empty state, which is carried from window to window. The model stays in its mode,
    training or evaluation.
    """
    check_carries_state(model)
    device = next(model.parameters()).device
    state = model.initial_state(len(inputs_BT))
    for start in range(0, inputs_BT.shape[1], window):
        window_inputs_BT = inputs_BT[:, start : start + window].to(device)
        window_targets_BT = targets_BT[:, start : start + window].to(device)
        log_probs_BT, state = model.target_log_probs(window_inputs_BT, window_targets_BT, state)
        yield log_probs_BT


@torch.no_grad()
def window_losses(
    model: LanguageModel, inputs_T: Tensor, targets_T: Tensor, spans: Spans, *, precision: str = "float32"
) -> NDArray[np.float32]:
    """Return the losses nll_T of the targets of evaluation windows, in the order of the text, without dropout."""
    device = next(model.parameters()).device
    with evaluating(model), autocast(device, precision):
        log_probs_T = window_log_probs(model, inputs_T, targets_T, spans)
    nll_T: NDArray[np.float32] = -log_probs_T.float().cpu().numpy()
    return nll_T


def window_log_probs(model: LanguageModel, inputs_T: Tensor, targets_T: Tensor, spans: Spans) -> Tensor:
    """Return the log-probabilities log_probs_T of the targets of evaluation windows, on the device of the model.

    The model stays in its mode, training or evaluation.
    """
    targets_T = targets_T.to(next(model.parameters()).device)
    log_prob_chunks = []
    position_chunks = []
    for hidden_ND, _, positions_N in iterate_contexts(model, inputs_T, spans):
        log_prob_chunks.append(chunked_log_probs(model, hidden_ND, targets_T[positions_N]))
        position_chunks.append(positions_N)

    # Windows come in any order, so put each log-probability at its position in the text.
    positions_T = torch.cat(position_chunks)
    unordered_T = torch.cat(log_prob_chunks)
    return torch.empty_like(unordered_T).index_copy_(0, positions_T, unordered_T)


def chunked_log_probs(model: LanguageModel, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Return the log-probabilities of targets given hidden states, log_probs_N, in chunks that bound the memory."""
    chunk_size = max(1, ROWS_AT_ONCE // model.output.rows_per_token)
    hidden_chunks = torch.split(hidden_ND, chunk_size)
    target_chunks = torch.split(targets_N, chunk_size)
    log_prob_chunks = []
    for hidden_MD, targets_M in zip(hidden_chunks, target_chunks, strict=True):
        log_prob_chunks.append(model.output.target_log_probs(hidden_MD, targets_M))
    return torch.cat(log_prob_chunks)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context for a precision; it does nothing for `float32`.

    Exit and re-enter it after weights have changed, because autocast caches half-precision copies until it exits.
    """
    dtype = _AUTOCAST_DTYPES.get(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def word_losses(nll: NDArray[Any], split: Split, vocabulary: Vocabulary) -> NDArray[np.float64]:
    """Return the loss of every word and line end of a text, which is the sum of the losses of its sub-words.

    If the first token was not scored, the loss of the first word includes only its other sub-words.
    """
    first_scored = split.tokens - len(nll)
    scored_ids = np.asarray(split.ids[first_scored:])
    word_starts = _word_starts(scored_ids, vocabulary)
    nll_of_words: NDArray[np.float64] = np.add.reduceat(nll.astype(np.float64), word_starts)
    return nll_of_words


def _word_starts(ids: NDArray[Any], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return the positions of the tokens that begin a word or are a line end."""
    ends_word = word_end_mask(vocabulary)[ids]
    starts_word = np.concatenate([[True], ends_word[:-1]])
    return np.flatnonzero(starts_word)


def word_end_mask(vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Return, for each token of the vocabulary, whether it is the last token of a word."""
    if vocabulary.bpe is None:
        return np.ones(len(vocabulary), dtype=np.bool_)
    return np.fromiter(map(vocabulary.ends_word, vocabulary.words), dtype=np.bool_, count=len(vocabulary))


def _split_into_streams(ids_T: Tensor, streams: int, padding: int) -> Tensor:
    """Split a text into contiguous streams, one per row, whose lengths differ by at most one. Pad the shorter rows."""
    return pad_sequence(list(ids_T.tensor_split(streams)), batch_first=True, padding_value=padding)
