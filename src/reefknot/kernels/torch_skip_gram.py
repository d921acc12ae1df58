"""Skip-gram in plain torch: the gradients of a batch of pairs are computed at the same weights and added up.

`train_in_batches` is the function to start from, and `update_batch` is one gradient step. `skip_gram` explains the
algorithm and the names u, v, g and e.

A row that occurs n times in a batch gets n gradients that were computed independently, as if its learning rate were n
times higher. A batch is therefore no larger than `PairSampler.max_parallel_pairs` allows. The vectors become as good as
those that are trained pair by pair (tests/kernels/test_skip_gram.py).

Shapes: V words, D dimensions, N pairs of a batch, K negatives, T = 1 + K targets of a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.kernels.skip_gram import CLIP, TrainingRange
from reefknot.kernels.skip_gram_draws import build_pairs, find_kept_words

MAX_BATCH_SIZE = {"cpu": 512, "cuda": 65_536}
"""The maximum number of pairs in a batch. Larger batches are not faster."""
POSITIONS_PER_CHUNK = 65_536
"""Number of words whose pairs are in memory at a time."""


def train_in_batches(training_range: TrainingRange) -> None:
    """Train on a range of the text in batches of pairs, on the device of the tables."""
    inputs, outputs = training_range.inputs, training_range.outputs
    sampler, key, rates = training_range.sampler, training_range.key, training_range.rates
    max_batch_size = MAX_BATCH_SIZE.get(inputs.device.type, MAX_BATCH_SIZE["cuda"])
    batch_size = min(max_batch_size, sampler.max_parallel_pairs(rates.initial))
    start_rate, decrease = rates.start_and_decrease
    for start in range(training_range.start, training_range.stop, POSITIONS_PER_CHUNK):
        stop = min(start + POSITIONS_PER_CHUNK, training_range.stop)
        pairs = build_pairs(sampler, key, find_kept_words(sampler, key, training_range.ids, start, stop))
        targets_NT = torch.cat([pairs.centres[:, None], pairs.negatives], 1)
        rates_N = (start_rate - decrease * pairs.positions.double()).clamp(min=rates.lowest).to(inputs.dtype)
        # A negative that equals its centre is not a target and has a rate of zero.
        rates_NT = rates_N[:, None] * (targets_NT != pairs.centres[:, None])
        rates_NT[:, 0] = rates_N
        for batch in range(0, len(pairs.contexts), batch_size):
            rows = slice(batch, batch + batch_size)
            update_batch(inputs, outputs, pairs.contexts[rows], targets_NT[rows], rates_NT[rows])


def update_batch(input_VD: Tensor, output_VD: Tensor, contexts_N: Tensor, targets_NT: Tensor, rates_NT: Tensor) -> None:
    """Train on one batch of pairs, in place.

    Args:
        input_VD: The input table.
        output_VD: The output table.
        contexts_N: The context of each pair.
        targets_NT: The targets of each pair: first the centre, then the negatives.
        rates_NT: The learning rate of each target, or 0 to skip it.
    """
    context_vectors_ND, target_vectors_NTD = input_VD[contexts_N], output_VD[targets_NT]
    scores_NT = torch.bmm(target_vectors_NTD, context_vectors_ND[:, :, None])[:, :, 0]
    probs_NT = scores_NT.sigmoid()
    probs_NT = torch.where(scores_NT.abs() > CLIP, (scores_NT > 0).to(probs_NT.dtype), probs_NT)
    grad_NT = -probs_NT
    grad_NT[:, 0] += 1.0
    grad_NT *= rates_NT
    grad_context_ND = torch.bmm(grad_NT[:, None], target_vectors_NTD)[:, 0]
    output_VD.index_add_(0, targets_NT.flatten(), (grad_NT[:, :, None] * context_vectors_ND[:, None]).flatten(0, 1))
    input_VD.index_add_(0, contexts_N, grad_context_ND)
