"""Score every token of a text with a language model, and compute the perplexity of the text.

Start with `score`, which returns a `Score`: the loss of every token, and a record of how it was measured, so that two
perplexities are compared only where that makes sense. Every token is scored exactly once, however the text is split.

A model that carries its state (an RNN) reads the text from start to end, in one or several streams (contiguous parts of
the text that are read in parallel). A model that carries no state (a transformer) reads the text in evaluation windows,
which are computed independently of each other (`windows.py`). A model that carries its state can be scored in
evaluation windows, too.

Shapes: B streams, T tokens of a stream or of the text, N tokens computed at once.
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
from reefknot.lab.runs.definition import perplexity
from reefknot.lab.runs.scores import Mode, ScoredText, TextScore
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
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
    text: ScoredText
    precision: str
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
        total = float(self.nll.sum(dtype=np.float64))
        return TextScore(
            perplexity=perplexity(self.mean),
            word_perplexity=perplexity(total / self.words),
            bits_per_byte=total / math.log(2) / self.bytes,
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
    streams = min(streams, targets_1T.shape[1])
    if windows is not None:
        if streams > 1:
            raise SettingsError(
                f"streams = {streams}: evaluation windows are independent, so streams have no effect; use streams = 1"
            )
        nll = window_losses(
            model, inputs_1T[0], targets_1T[0], windows.spans(targets_1T[0], vocabulary.eos), precision=precision
        )
    else:
        targets_BT = _split_into_streams(targets_1T[0], streams, IGNORE)
        nll_BT = stream_losses(
            model, _split_into_streams(inputs_1T[0], streams, 0), targets_BT, window=window, precision=precision
        )
        nll = nll_BT[(targets_BT != IGNORE).numpy()]
    if not np.isfinite(nll).all():
        raise NonFiniteError(f"the loss of the model on the {split.name} text is NaN or infinite")
    word_count = int(word_end_mask(vocabulary)[targets_1T[0].numpy()].sum())
    text = describe_text(split, split.ids, vocabulary)
    return Score(nll, word_count, split.bytes, text, precision, streams=streams, windows=windows)


def describe_text(split: Split | PairSplit, ids: NDArray[np.int32], vocabulary: Vocabulary) -> ScoredText:
    """Describe the text that was scored, and how its words were turned into the tokens `ids`."""
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


def build_stream(split: Split, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the inputs inputs_1T and the targets targets_1T of a text that is read as one stream.

    <eos> is the input before the first token: the text "a b c" has the inputs <eos> a b and the targets a b c. Without
    <eos> in the vocabulary, the first token is not a target.
    """
    inputs, targets = (np.asarray(ids, dtype=np.int64) for ids in (split.inputs[:-1], split.ids))
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
    """Return the losses nll_BT of the targets of parallel streams, computed without dropout."""
    device = next(model.parameters()).device
    window = window or max(1, min(1024, ROWS_AT_ONCE // (model.output.rows_per_token * len(inputs_BT))))
    with evaluating(model), autocast(device, precision):
        chunks = [
            -log_probs_BT.float().cpu() for log_probs_BT in stream_log_probs(model, inputs_BT, targets_BT, window)
        ]
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
        window_x, window_y = (ids_BT[:, start : start + window].to(device) for ids_BT in (inputs_BT, targets_BT))
        log_probs_BT, state = model.target_log_probs(window_x, window_y, state)
        yield log_probs_BT


@torch.no_grad()
def window_losses(
    model: LanguageModel, inputs_T: Tensor, targets_T: Tensor, spans: Spans, *, precision: str = "float32"
) -> NDArray[np.float32]:
    """Return the losses nll_T of the targets of evaluation windows, in the order of the text, without dropout."""
    with evaluating(model), autocast(next(model.parameters()).device, precision):
        nll_T: NDArray[np.float32] = -window_log_probs(model, inputs_T, targets_T, spans).float().cpu().numpy()
    return nll_T


def window_log_probs(model: LanguageModel, inputs_T: Tensor, targets_T: Tensor, spans: Spans) -> Tensor:
    """Return the log-probabilities log_probs_T of the targets of evaluation windows, on the device of the model.

    The model stays in its mode, training or evaluation.
    """
    targets_T = targets_T.to(next(model.parameters()).device)
    chunks, positions = [], []
    for hidden_ND, _, positions_N in iterate_contexts(model, inputs_T, spans):
        chunks.append(chunked_log_probs(model, hidden_ND, targets_T[positions_N]))
        positions.append(positions_N)
    log_probs_T = torch.cat(chunks)
    return torch.empty_like(log_probs_T).index_copy_(0, torch.cat(positions), log_probs_T)


def chunked_log_probs(model: LanguageModel, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Return the log-probabilities of targets given hidden states, (N,), scored in chunks that bound the memory."""
    chunk_size = max(1, ROWS_AT_ONCE // model.output.rows_per_token)
    chunks = zip(torch.split(hidden_ND, chunk_size), torch.split(targets_N, chunk_size), strict=True)
    return torch.cat([model.output.target_log_probs(hidden_MD, targets_M) for hidden_MD, targets_M in chunks])


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context for a precision; it does nothing for `float32`.

    Exit and re-enter it after weights have changed, because autocast caches half-precision copies until it exits.
    """
    return torch.autocast(device.type, dtype=_AUTOCAST_DTYPES.get(precision), enabled=precision in _AUTOCAST_DTYPES)


def word_losses(nll: NDArray[Any], split: Split, vocabulary: Vocabulary) -> NDArray[np.float64]:
    """Return the loss of every word and line end of a text, which is the sum of the losses of its sub-words.

    If the first token was not scored, the loss of the first word includes only its other sub-words.
    """
    targets = np.asarray(split.ids[split.tokens - len(nll) :])
    nll_of_words: NDArray[np.float64] = np.add.reduceat(nll.astype(np.float64), _word_starts(targets, vocabulary))
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
