"""Skip-gram in plain torch: the gradients of a batch of pairs are computed at the same weights and added up.

A row that occurs n times in a batch gets n gradients that were computed independently, as if its learning rate were n
times higher. A batch is therefore no larger than `Draws.at_once` allows. The vectors become as good as those that are
trained pair by pair (tests/kernels/test_skip_gram.py).

Shapes: V words, D dimensions, N pairs of a batch, K negatives, T = 1 + K targets of a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.kernels.skip_gram import CLIP, Stretch
from reefknot.kernels.skip_gram_draws import kept_words, pairs_of

BATCH = {"cpu": 512, "cuda": 65_536}
"""The most pairs in a batch. Larger batches are not faster."""
POSITIONS = 65_536
"""Number of words whose pairs are in memory at a time."""


def train_batches(stretch: Stretch) -> None:
    """Train on a stretch in batches of pairs, on the device of the tables."""
    inputs, outputs = stretch.inputs, stretch.outputs
    draws, key, rates = stretch.draws, stretch.key, stretch.rates
    batch = min(BATCH.get(inputs.device.type, BATCH["cuda"]), draws.at_once(rates.first))
    begin, fall = rates.line
    for first in range(stretch.start, stretch.stop, POSITIONS):
        last = min(first + POSITIONS, stretch.stop)
        pairs = pairs_of(draws, key, kept_words(draws, key, stretch.ids, first, last))
        targets_NT = torch.cat([pairs.centres[:, None], pairs.negatives], 1)
        rates_N = (begin - fall * pairs.positions.double()).clamp(min=rates.lowest).to(inputs.dtype)
        # A negative that equals its centre is not a target and has a step of zero.
        steps_NT = rates_N[:, None] * (targets_NT != pairs.centres[:, None])
        steps_NT[:, 0] = rates_N
        batches = (torch.split(part, batch) for part in (pairs.contexts, targets_NT, steps_NT))
        for contexts_N, targets, steps in zip(*batches, strict=True):
            update(inputs, outputs, contexts_N, targets, steps)


def update(input_VD: Tensor, output_VD: Tensor, contexts_N: Tensor, targets_NT: Tensor, steps_NT: Tensor) -> None:
    """Train on one batch of pairs, in place.

    Args:
        input_VD: The input table.
        output_VD: The output table.
        contexts_N: The context of each pair.
        targets_NT: The targets of each pair: first the centre, then the negatives.
        steps_NT: The learning rate of each target, or 0 to skip it.
    """
    v_ND, u_NTD = input_VD[contexts_N], output_VD[targets_NT]
    scores_NT = torch.bmm(u_NTD, v_ND[:, :, None])[:, :, 0]
    p_NT = scores_NT.sigmoid()
    p_NT = torch.where(scores_NT.abs() > CLIP, (scores_NT > 0).to(p_NT.dtype), p_NT)
    g_NT = -p_NT
    g_NT[:, 0] += 1.0
    g_NT *= steps_NT
    e_ND = torch.bmm(g_NT[:, None], u_NTD)[:, 0]
    output_VD.index_add_(0, targets_NT.flatten(), (g_NT[:, :, None] * v_ND[:, None]).flatten(0, 1))
    input_VD.index_add_(0, contexts_N, e_ND)
