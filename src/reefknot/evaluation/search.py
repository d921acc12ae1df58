"""How much of an adaptive softmax has to be looked at to find the best next words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reefknot.models.language_model import LanguageModel, evaluating
from reefknot.outputs.adaptive import AdaptiveSoftmax
from reefknot.text.dataset import Split


@dataclass(frozen=True)
class TailsOpened:
    """The share of the tails that an exact search for the k best words opened, over the first tokens of a text."""

    k: int
    tokens: int
    share: float

    def __str__(self) -> str:
        return f"the {self.k} best next words: {self.share:.1%} of the tails opened (first {self.tokens:,} tokens)"


@torch.no_grad()
def tails_opened(model: LanguageModel, split: Split, k: int = 10, tokens: int = 1000) -> TailsOpened | None:
    """Search for the k best words after each of the first tokens; None for an output end without tails."""
    output = model.output
    if not isinstance(output, AdaptiveSoftmax) or len(output.labels) == 1:
        return None
    ids_1T = torch.from_numpy(split.inputs[:tokens].astype("int64"))[None].to(next(model.parameters()).device)
    with evaluating(model):
        found = output.search(model(ids_1T).output[0], min(k, output.vocab_size))
    return TailsOpened(found.ids.shape[1], ids_1T.shape[1], found.opened)
