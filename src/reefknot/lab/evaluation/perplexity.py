"""Perplexity that says what it is: every token scored once, however the text is cut into windows and streams.

A model that carries its state reads a text through, in one stream or several. One that does not, or one that is to be
scored like it, reads it in windows that are each computed afresh (`windows.py`).

Shapes: B streams, T steps of each or tokens of the text, N tokens at once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reefknot.errors import DataError, NonFiniteError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.evaluation.contexts import check_carries, contexts
from reefknot.lab.evaluation.windows import Spans, Windows
from reefknot.lab.runs.scores import Mode, ScoredText, TextScore
from reefknot.lab.runs.units import perplexity
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.pair_dataset import PairSplit
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel, evaluating

ROWS_AT_ONCE = 8192
"""Rows that the output end scores in one window, all streams together: bounds the memory, never the result."""
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Score:
    """Losses of a text's tokens, in the text's order, and what they were measured over."""

    nll: NDArray[np.float32]
    """One per scored token."""
    words: int
    """Words and line ends that the scored tokens make; without sub-words, as many as there are of those."""
    bytes: int
    text: ScoredText
    precision: str
    streams: int = field(default=1, kw_only=True)
    """Parts that the text was read in, side by side."""
    windows: Windows | None = field(default=None, kw_only=True)
    """What was computed afresh; None: nothing but the streams."""
    pairs: int | None = field(default=None, kw_only=True)
    """Pairs that were each computed afresh, if the text is one of pairs."""
    mode: Mode | None = field(default=None, kw_only=True)
    """What the model did while it read; None: nothing else."""

    @property
    def mean(self) -> float:
        return float(self.nll.mean(dtype=np.float64))

    @property
    def definition(self) -> str:
        """What the perplexity means, for people."""
        return self.summary().definition

    def summary(self) -> TextScore:
        """Return what result.json keeps."""
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
    """Score a text.

    Arguments:
        streams: contiguous parts scored side by side, each from an empty state; more are faster, with less context.
        window: tokens per stream computed at once. Changes time and memory only.
        windows: pieces of the text that are computed afresh, in place of streams that carry a state.
        precision: `float32`, or `bfloat16` or `float16` for autocast.
    """
    x_1T, y_1T = one_stream(split, vocabulary)
    streams = min(streams, y_1T.shape[1])
    if windows is not None:
        if streams > 1:
            raise SettingsError(f"streams = {streams}: windows are computed afresh, whatever stream they are in")
        nll = window_losses(model, x_1T[0], y_1T[0], windows.cut(y_1T[0], vocabulary.eos), precision=precision)
    else:
        y_BT = _fold(y_1T[0], streams, IGNORE)
        nll_BT = losses(model, _fold(x_1T[0], streams, 0), y_BT, window=window, precision=precision)
        nll = nll_BT[(y_BT != IGNORE).numpy()]
    if not np.isfinite(nll).all():
        raise NonFiniteError(f"the model gives the {split.name} text a probability that is not a number")
    words = int(ends_of_words(vocabulary)[y_1T[0].numpy()].sum())
    text = scored_text(split, split.ids, vocabulary)
    return Score(nll, words, split.bytes, text, precision, streams=streams, windows=windows)


def scored_text(split: Split | PairSplit, ids: NDArray[np.int32], vocabulary: Vocabulary) -> ScoredText:
    """Return which text was scored, and how its words became tokens, which are `ids`."""
    unknown_words = np.logical_or.reduceat(ids == vocabulary.unk, _starts_of_words(ids, vocabulary))
    positions = np.flatnonzero(unknown_words).astype("<i8")
    return ScoredText(
        split=split.name,
        tokens=split.tokens,
        sha256=split.sha256,
        line_ends=vocabulary.eos is not None,
        unknown=split.unknown,
        unknown_sha256=hashlib.sha256(positions.tobytes()).hexdigest(),
        tokenisation="words" if vocabulary.bpe is None else "pieces",
        vocabulary_sha256=vocabulary.tokens_sha256,
    )


def one_stream(split: Split, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """A text's inputs x_1T and targets y_1T: <eos> stands before the first token, which else is no target."""
    inputs, targets = (np.asarray(each, dtype=np.int64) for each in (split.inputs[:-1], split.ids))
    if vocabulary.eos is None:
        targets = targets[1:]
    else:
        inputs = np.concatenate([[vocabulary.eos], inputs])
    if not len(targets):
        raise DataError(f"the {split.name} text has one token and no <eos> to stand before it: nothing can be scored")
    return torch.from_numpy(inputs)[None], torch.from_numpy(targets)[None]


@torch.no_grad()
def losses(
    model: LanguageModel, x_BT: Tensor, y_BT: Tensor, *, window: int | None = None, precision: str = "float32"
) -> NDArray[np.float32]:
    """nll_BT of the targets of streams that are read side by side, without dropout."""
    device = next(model.parameters()).device
    window = window or max(1, min(1024, ROWS_AT_ONCE // (model.output.rows_per_token * len(x_BT))))
    with evaluating(model), autocast(device, precision):
        pieces = [-logp_BT.float().cpu() for logp_BT in log_probs(model, x_BT, y_BT, window)]
    nll_BT: NDArray[np.float32] = torch.cat(pieces, dim=1).numpy()
    return nll_BT


def log_probs(model: LanguageModel, x_BT: Tensor, y_BT: Tensor, window: int) -> Iterator[Tensor]:
    """logp_BT of the targets, window by window, in the mode that the model is in. Streams begin with an empty state,
    which is carried."""
    check_carries(model)
    device = next(model.parameters()).device
    state = model.initial_state(len(x_BT))
    for start in range(0, x_BT.shape[1], window):
        x, y = (each[:, start : start + window].to(device) for each in (x_BT, y_BT))
        logp_BT, state = model.target_log_probs(x, y, state)
        yield logp_BT


@torch.no_grad()
def window_losses(
    model: LanguageModel, x_T: Tensor, y_T: Tensor, spans: Spans, *, precision: str = "float32"
) -> NDArray[np.float32]:
    """nll_T of the targets of windows that are each computed afresh, in the text's order, without dropout."""
    with evaluating(model), autocast(next(model.parameters()).device, precision):
        nll_T: NDArray[np.float32] = -window_log_probs(model, x_T, y_T, spans).float().cpu().numpy()
    return nll_T


def window_log_probs(model: LanguageModel, x_T: Tensor, y_T: Tensor, spans: Spans) -> Tensor:
    """logp_T of the same in the mode that the model is in, on its device."""
    y_T = y_T.to(next(model.parameters()).device)
    pieces, places = [], []
    for h_ND, _, place_N in contexts(model, x_T, spans):
        pieces.append(scored_rows(model, h_ND, y_T[place_N]))
        places.append(place_N)
    logp_T = torch.cat(pieces)
    return torch.empty_like(logp_T).index_copy_(0, torch.cat(places), logp_T)


def scored_rows(model: LanguageModel, h_ND: Tensor, y_N: Tensor) -> Tensor:
    """logp_N of targets after hidden states, as many at a time as the output end may score at once."""
    rows = max(1, ROWS_AT_ONCE // model.output.rows_per_token)
    parts = zip(torch.split(h_ND, rows), torch.split(y_N, rows), strict=True)
    return torch.cat([model.output.target_log_probs(h_MD, y_M) for h_MD, y_M in parts])


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """What a model trained in this precision computes in. Where weights change it is to be entered anew: it keeps its
    half-precision copies of them until it is left."""
    return torch.autocast(device.type, dtype=_AUTOCAST.get(precision), enabled=precision in _AUTOCAST)


def word_losses(nll: NDArray[Any], split: Split, vocabulary: Vocabulary) -> NDArray[np.float64]:
    """The loss of every word and line end of a text, from those of its tokens: the sum over the pieces of each.

    Where the first token was not scored, the first word has the loss of its other pieces, if it has any.
    """
    targets = np.asarray(split.ids[split.tokens - len(nll) :])
    losses: NDArray[np.float64] = np.add.reduceat(nll.astype(np.float64), _starts_of_words(targets, vocabulary))
    return losses


def _starts_of_words(ids: NDArray[Any], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return the places of the tokens that begin a word or are a line end."""
    ends = ends_of_words(vocabulary)[ids]
    return np.flatnonzero(np.concatenate([[True], ends[:-1]]))


def ends_of_words(vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """For each token of the vocabulary, whether a word ends with it."""
    if vocabulary.bpe is None:
        return np.ones(len(vocabulary), dtype=np.bool_)
    return np.fromiter(map(vocabulary.ends_word, vocabulary.words), dtype=np.bool_, count=len(vocabulary))


def _fold(ids_T: Tensor, streams: int, filler: int) -> Tensor:
    """Contiguous parts as rows, in order; lengths differ by one at most and the short ones are filled up."""
    return pad_sequence(list(ids_T.tensor_split(streams)), batch_first=True, padding_value=filler)
