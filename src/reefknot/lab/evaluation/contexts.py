"""Compute the hidden state before each token of a text, from which the output end (classifier) predicts the token.

Start with `iterate_contexts`. Perplexity, the continuous cache, the rank of a model and its predictions are all
computed from these hidden states. A context is the text before a token.

Shapes: T tokens of the text, N tokens computed at once, D hidden dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.text.dataset import Split
from reefknot.nn.models.language_model import LanguageModel

if TYPE_CHECKING:
    from reefknot.lab.evaluation.windows import Spans

TOKENS_AT_ONCE = 2**14
"""Number of tokens in a batch of evaluation windows. It bounds the memory and does not change the result."""
STEPS_AT_ONCE = 1024
"""Number of tokens of a stream that are read at once. It bounds the memory and does not change the result."""


class Contexts(NamedTuple):
    """Hidden states of some tokens of a text, on the model's device."""

    output: Tensor
    """Hidden states hidden_ND that the output end reads."""
    raw: Tensor
    """The same hidden states before the last dropout of the encoder, hidden_ND."""
    positions: Tensor
    """Positions positions_N in the text of the tokens to predict."""


def iterate_contexts(model: LanguageModel, inputs_T: Tensor, spans: Spans | None = None) -> Iterator[Contexts]:
    """Yield the hidden state before each token of a text exactly once.

    With `spans`, the text is read in evaluation windows that are independent of each other, in any order. Otherwise it
    is read as one stream, from start to end: the state starts empty and is carried along. Call this without gradients,
    and inside `evaluating(model)` unless dropout is wanted.
    """
    device = next(model.parameters()).device
    if spans is None:
        check_carries_state(model)
        yield from _iterate_stream(model, inputs_T.to(device))
        return
    from reefknot.lab.evaluation.windows import batch_windows

    for batch in batch_windows(inputs_T, spans, TOKENS_AT_ONCE):
        encoded = model(batch.x.to(device))
        scored_N = batch.scored_indices.to(device)
        output_ND = encoded.output.flatten(0, 1)[scored_N]
        raw_ND = output_ND if encoded.raw is encoded.output else encoded.raw.flatten(0, 1)[scored_N]
        yield Contexts(output_ND, raw_ND, batch.positions.to(device))


def inputs_and_targets(split: Split) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets (next tokens) of a text, each (T,). The first token is not a target."""
    inputs_T, targets_T = (np.asarray(ids, dtype=np.int64) for ids in (split.inputs[:-1], split.ids[1:]))
    return torch.from_numpy(inputs_T), torch.from_numpy(targets_T)


def check_carries_state(model: LanguageModel) -> None:
    """Raise an error if the encoder carries no state, because a stream would forget its past after every chunk."""
    if not model.encoder.carries_state:
        raise SettingsError(
            f"{type(model.encoder).__name__} carries no state, so it cannot read a text as one stream: pass the "
            "windows to score it in, such as Sliding(context=0, stride=512)"
        )


def _iterate_stream(model: LanguageModel, inputs_T: Tensor) -> Iterator[Contexts]:
    """Read a text in chunks of one stream, with the state carried from chunk to chunk."""
    state = model.initial_state(1)
    positions_T = torch.arange(len(inputs_T), device=inputs_T.device)
    chunks = zip(torch.split(inputs_T, STEPS_AT_ONCE), torch.split(positions_T, STEPS_AT_ONCE), strict=True)
    for inputs_N, positions_N in chunks:
        encoded = model(inputs_N[None], state)
        state = encoded.state
        yield Contexts(encoded.output[0], encoded.raw[0], positions_N)
