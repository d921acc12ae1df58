"""Hidden states before the tokens of a text: what a score, and the measures that look at whole distributions, read.

Shapes: T tokens of the text, N of them at once, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.windows import Spans, batches
from reefknot.lab.text.dataset import Split
from reefknot.nn.models.language_model import LanguageModel

TOKENS_AT_ONCE = 2**14
"""Tokens that the encoder reads in one batch of windows: bounds the memory, never the result."""
STEPS_AT_ONCE = 1024
"""Tokens of a single stream read at once: the same."""


class Contexts(NamedTuple):
    """Some of the hidden states of a text, on the model's device."""

    output: Tensor
    """h_ND, what the output end reads."""
    raw: Tensor
    """h_ND before the encoder's last dropout."""
    place: Tensor
    """place_N in the text of the tokens to predict."""


def contexts(model: LanguageModel, x_T: Tensor, spans: Spans | None = None) -> Iterator[Contexts]:
    """The hidden state before each token of a text once: of windows in any order, or without them of one stream from
    an empty state that is carried to its end.

    To be read without gradients, and inside `evaluating(model)` unless something is to be dropped.
    """
    device = next(model.parameters()).device
    if spans is None:
        check_carries(model)
        yield from _stream(model, x_T.to(device))
        return
    for batch in batches(x_T, spans, TOKENS_AT_ONCE):
        encoded = model(batch.x.to(device))
        rows_N = batch.rows.to(device)
        output_ND = encoded.output.flatten(0, 1)[rows_N]
        raw_ND = output_ND if encoded.raw is encoded.output else encoded.raw.flatten(0, 1)[rows_N]
        yield Contexts(output_ND, raw_ND, batch.place.to(device))


def inside(split: Split) -> tuple[Tensor, Tensor]:
    """A text's inputs x_T and the tokens y_T after them, as it stands: its first token is read alone."""
    x_T, y_T = (np.asarray(each, dtype=np.int64) for each in (split.inputs[:-1], split.ids[1:]))
    return torch.from_numpy(x_T), torch.from_numpy(y_T)


def check_carries(model: LanguageModel) -> None:
    """Refuse to read a text through with an encoder that would forget at every window's edge."""
    if not model.encoder.carries:
        raise SettingsError(
            f"{type(model.encoder).__name__} carries no state, so it cannot read a text through: say which windows it "
            "is scored in, such as Sliding(context=0, stride=512)"
        )


def _stream(model: LanguageModel, x_T: Tensor) -> Iterator[Contexts]:
    state = model.initial_state(1)
    place_T = torch.arange(len(x_T), device=x_T.device)
    for x_N, place_N in zip(*(torch.split(each, STEPS_AT_ONCE) for each in (x_T, place_T)), strict=True):
        encoded = model(x_N[None], state)
        state = encoded.state
        yield Contexts(encoded.output[0], encoded.raw[0], place_N)
