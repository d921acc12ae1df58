"""Measure how much of an adaptive softmax has to be computed to find the best next words.

Start with `measure_opened_tails`. An adaptive softmax has a head for frequent words, and tails: bands (clusters of
words of similar frequency) that are computed ("opened") only if they may contain one of the best words. A context is
the text before a token.

Shapes: T tokens of the text, N contexts, D hidden dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from reefknot.lab.evaluation.contexts import inputs_and_targets, iterate_contexts
from reefknot.lab.evaluation.windows import Windows
from reefknot.lab.runs.result import TailsOpened
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel, evaluating

if TYPE_CHECKING:
    from reefknot.nn.outputs.adaptive import AdaptiveSoftmax


@torch.no_grad()
def measure_opened_tails(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    windows: Windows | None = None,
    *,
    k: int = 10,
    tokens: int = 1000,
) -> TailsOpened | None:
    """Return the share of tails that are opened to find the k best words after each of the first `tokens` tokens.

    Returns None for an output end without tails, or for a text of a single token. The text is read as one stream or in
    evaluation windows.
    """
    output = model.output
    if output.bands == 1:
        return None
    inputs_T, targets_T = inputs_and_targets(split)
    inputs_T = inputs_T[:tokens]
    targets_T = targets_T[:tokens]
    if not len(inputs_T):
        return None

    spans = windows.spans(targets_T, vocabulary.eos) if windows else None
    with evaluating(model):
        hidden_ND = torch.cat([contexts.output for contexts in iterate_contexts(model, inputs_T, spans)])
        best_words = cast("AdaptiveSoftmax", output).search(hidden_ND, min(k, output.vocab_size))
    return TailsOpened(k=best_words.ids.shape[1], tokens=len(inputs_T), share=best_words.computed_share)
