"""Compute the hidden state before each token of a text, from which the output end (classifier) predicts the token.

Start with `iterate_contexts`. A context is the text before a token. Perplexity, the continuous cache, the rank of a
model and its predictions are all computed from these hidden states. A text is read in one of two ways:

- as one stream, from start to end, if the encoder carries its state (an RNN);
- in evaluation windows, which are computed independently of each other (`windows.py`).

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
    """Hidden states that the output end reads, output_ND."""
    raw: Tensor
    """The same hidden states before the last dropout of the encoder, raw_ND."""
    positions: Tensor
    """Positions in the text of the tokens to predict, positions_N."""


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
    else:
        yield from _iterate_windows(model, inputs_T, spans)


def inputs_and_targets(split: Split) -> tuple[Tensor, Tensor]:
    """Return the inputs inputs_T and the targets (next tokens) targets_T of a text. The first token is not a target."""
    inputs_T = np.asarray(split.inputs[:-1], dtype=np.int64)
    targets_T = np.asarray(split.ids[1:], dtype=np.int64)
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
    for positions_N in torch.split(positions_T, STEPS_AT_ONCE):
        inputs_N = inputs_T[positions_N]
        encoded = model(inputs_N[None], state)
        state = encoded.state
        yield Contexts(encoded.output[0], encoded.raw[0], positions_N)


def _iterate_windows(model: LanguageModel, inputs_T: Tensor, spans: Spans) -> Iterator[Contexts]:
    """Read a text in batches of evaluation windows, and yield the hidden states of the scored tokens."""
    from reefknot.lab.evaluation.windows import batch_windows

    device = next(model.parameters()).device
    for batch in batch_windows(inputs_T, spans, TOKENS_AT_ONCE):
        encoded = model(batch.inputs.to(device))
        scored_N = batch.scored_indices.to(device)
        output_ND = encoded.output.flatten(0, 1)[scored_N]
        raw_ND = output_ND
        if encoded.raw is not encoded.output:
            raw_ND = encoded.raw.flatten(0, 1)[scored_N]
        yield Contexts(output_ND, raw_ND, batch.positions.to(device))
