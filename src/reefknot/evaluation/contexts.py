"""Hidden states of a text, window by window: what the measures that look at whole distributions read.

Shapes: B streams, T steps, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from reefknot.models.language_model import LanguageModel
from reefknot.text.streams import Streams


def contexts(model: LanguageModel, streams: Streams) -> Iterator[tuple[Tensor, Tensor]]:
    """h_BTD of each window and the tokens y_BT that follow. Streams begin with an empty state, which is carried.

    To be read inside `evaluating(model)` and without gradients.
    """
    device = next(model.parameters()).device
    state = model.initial_state(streams.batch)
    for index in range(streams.windows):
        x_BT, y_BT = (each.to(device) for each in streams.window(index))
        encoded = model(x_BT, state)
        state = encoded.state
        yield encoded.output, y_BT
