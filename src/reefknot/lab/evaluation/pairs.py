"""Perplexity of translations under teacher forcing. Every target token is scored once, and pairs are independent.

Shapes: N pairs, B pairs computed at once, S source tokens, T target tokens, U = S + T, M target tokens without padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from reefknot.errors import DataError, NonFiniteError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.evaluation.perplexity import ROWS_AT_ONCE, Score, autocast, scored_text
from reefknot.lab.text.pair_dataset import Lines, PairSplit
from reefknot.lab.text.samples import pack_windows, row_offsets
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import evaluating
from reefknot.nn.models.translator import Translator


@torch.no_grad()
def score_pairs(model: Translator, split: PairSplit, vocabulary: Vocabulary, *, precision: str = "float32") -> Score:
    """Score the target side of a parallel text.

    Args:
        model: The translator.
        split: The parallel text.
        vocabulary: The vocabulary of the target side.
        precision: `float32`, or `bfloat16` or `float16` for autocast.
    """
    if not split.pairs:
        raise DataError(f"the {split.name} text has no pairs, so there is nothing to score")
    if vocabulary.eos is None:
        raise DataError("the vocabulary of the target side has no <eos>, which begins and ends every target sentence")
    device = next(model.parameters()).device
    nll = np.empty(split.tokens, dtype=np.float32)
    with evaluating(model), autocast(device, precision):
        for pairs_B in _batches(split, model.output.rows_per_token):
            source_BS, _ = _rows(split.source, pairs_B)
            y_BT, position_M = _rows(split.target, pairs_B)
            before_BT = np.pad(y_BT[:, :-1], ((0, 0), (1, 0)), constant_values=vocabulary.eos)
            x_BU = np.concatenate([source_BS, np.where(y_BT == IGNORE, 0, before_BT)], axis=1)
            logp_BT, _ = model.target_log_probs(torch.from_numpy(x_BU).to(device), torch.from_numpy(y_BT).to(device))
            nll[position_M] = -logp_BT.float().cpu().numpy()[y_BT != IGNORE]
    if not np.isfinite(nll).all():
        raise NonFiniteError(f"the loss of the model on the {split.name} text is NaN or infinite")
    words = split.words + split.pairs  # each line ends with <eos>
    text = scored_text(split, split.target.ids, vocabulary)
    return Score(nll, words, split.bytes, text, precision, pairs=split.pairs)


def _batches(split: PairSplit, rows_per_token: int) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of pairs in batches of similar length.

    The longest pairs come first, so that running out of memory happens at once. The size of a batch bounds the memory
    and does not change the result.
    """
    source_N, target_N = split.source.lengths, split.target.lengths
    longer_N = np.maximum(source_N, target_N)
    order_N = np.lexsort((source_N, target_N, longer_N))[::-1]
    capacity = max(ROWS_AT_ONCE // rows_per_token, int(longer_N.max()))
    for first, stop in pack_windows(longer_N[order_N], capacity):
        yield order_N[first:stop]


def _rows(lines: Lines, numbers_B: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of lines, ids_BT, padded with `IGNORE`, and the positions of the ids in the text, position_M."""
    starts_B = lines.bounds[numbers_B]
    lengths_B = lines.bounds[numbers_B + 1] - starts_B
    position_BT, inside_BT = row_offsets(starts_B, lengths_B, int(lengths_B.max()), padding=0)
    return np.where(inside_BT, lines.ids[position_BT], IGNORE).astype(np.int64), position_BT[inside_BT]
