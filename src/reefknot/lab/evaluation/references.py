"""Perplexity of a translator: the loss of every token of the reference translations, given the source.

Start with `score_references`. It uses teacher forcing: the input before each target token is the reference, not the
model's own output. Every target token is scored once, and sentence pairs are independent. BLEU is in `bleu.py`.

Shapes: N pairs, B pairs computed at once, S source tokens, T target tokens, U = S + T.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from reefknot.errors import DataError, NonFiniteError
from reefknot.lab.evaluation.perplexity import ROWS_AT_ONCE, Score, autocast, count_unpredicted_bytes, describe_text
from reefknot.lab.text.pair_batches import join_sides, pad_lines
from reefknot.lab.text.pair_dataset import PairSplit
from reefknot.lab.text.samples import pack_windows, row_offsets
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import evaluating
from reefknot.nn.models.translator import Translator


@torch.no_grad()
def score_references(
    model: Translator, split: PairSplit, vocabulary: Vocabulary, *, precision: str = "float32"
) -> Score:
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
    source_lengths_N = split.source.lengths
    target_lengths_N = split.target.lengths
    nll = np.empty(split.tokens, dtype=np.float32)
    with evaluating(model), autocast(device, precision):
        for indices_B in _batches(split, model.output.rows_per_token):
            source_lengths_B = source_lengths_N[indices_B]
            target_lengths_B = target_lengths_N[indices_B]
            target_steps = int(target_lengths_B.max())
            source_BS = pad_lines(split.source, indices_B, source_lengths_B, int(source_lengths_B.max()))
            targets_BT = pad_lines(split.target, indices_B, target_lengths_B, target_steps)
            pairs_BU = join_sides(source_BS, targets_BT, vocabulary.eos)
            log_probs_BT, _ = model.target_log_probs(
                torch.from_numpy(pairs_BU).to(device), torch.from_numpy(targets_BT).to(device)
            )
            nll_BT = -log_probs_BT.float().cpu().numpy()
            starts_B = split.target.bounds[indices_B]
            positions_BT, is_token_BT = row_offsets(starts_B, target_lengths_B, target_steps, padding=0)
            nll[positions_BT[is_token_BT]] = nll_BT[is_token_BT]

    if not np.isfinite(nll).all():
        raise NonFiniteError(f"the loss of the model on the {split.name} text is NaN or infinite")
    word_count = split.words + split.pairs  # each line ends with <eos>
    text = describe_text(split, split.target.ids, vocabulary)
    unpredicted_bytes = count_unpredicted_bytes(split.bytes, split.target.ids, vocabulary)
    return Score(nll, word_count, split.bytes, text, precision, unpredicted_bytes=unpredicted_bytes, pairs=split.pairs)


def _batches(split: PairSplit, rows_per_token: int) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of pairs in batches of similar length.

    The longest pairs come first, so that running out of memory happens at once. The size of a batch bounds the memory
    and does not change the result.
    """
    source_lengths_N = split.source.lengths
    target_lengths_N = split.target.lengths
    longer_side_N = np.maximum(source_lengths_N, target_lengths_N)
    # Sort by the longer side, then by the target, then by the source.
    shortest_first_N = np.lexsort((source_lengths_N, target_lengths_N, longer_side_N))
    longest_first_N = shortest_first_N[::-1]
    max_tokens = max(ROWS_AT_ONCE // rows_per_token, int(longer_side_N.max()))
    for start, stop in pack_windows(longer_side_N[longest_first_N], max_tokens):
        yield longest_first_N[start:stop]
