"""How much of an adaptive softmax has to be looked at to find the best next words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from reefknot.lab.evaluation.contexts import contexts, inside
from reefknot.lab.evaluation.windows import Windows
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel, evaluating

if TYPE_CHECKING:
    from reefknot.nn.outputs.adaptive import AdaptiveSoftmax


@dataclass(frozen=True)
class TailsOpened:
    """The share of the tails that an exact search for the k best words opened, over the first tokens of a text."""

    k: int
    tokens: int
    share: float

    def __str__(self) -> str:
        return f"the {self.k} best next words: {self.share:.1%} of the tails opened (first {self.tokens:,} tokens)"


@torch.no_grad()
def tails_opened(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    windows: Windows | None = None,
    *,
    k: int = 10,
    tokens: int = 1000,
) -> TailsOpened | None:
    """Search for the k best words after each of the first tokens; None for an output end without tails, or a single
    token."""
    output = model.output
    if output.bands == 1:
        return None
    x_T, y_T = (each[:tokens] for each in inside(split))
    if not len(x_T):
        return None
    spans = None if windows is None else windows.cut(y_T, vocabulary.eos)
    with evaluating(model):
        read = contexts(model, x_T, spans)
        found = cast("AdaptiveSoftmax", output).search(
            torch.cat([each.output for each in read]), min(k, output.vocab_size)
        )
    return TailsOpened(found.ids.shape[1], len(x_T), found.opened)
