"""What every encoder promises, so that the model, training and resuming need to know none of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError

State = dict[str, Tensor]
"""What an encoder carries from one window to the next. Streams are dimension 1, as in torch's recurrent layers."""


class Encoded(NamedTuple):
    output: Tensor
    """h_BTD after the encoder's last dropout: what the output end reads."""
    raw: Tensor
    """h_BTD before it: penalties on activations need both."""
    state: State


class Encoder(nn.Module):
    """Vectors to hidden states, with a state that can be carried, saved and cut by stream."""

    input_dim: int
    """Width of the vectors it reads."""
    dim: int
    """Width of the hidden states."""
    carries: bool = True
    """Whether the state of one window is part of what the next one computes; False: every window is computed afresh."""
    waits: bool = False
    """Whether its forward asks a GPU or its generator for a number, which a step that is captured must not."""
    reads_source: bool = False
    """Whether it reads a source before the first step, as a translator's does: then it is a `SourceEncoder`."""

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """What the first window of a text begins with; what is carried from there on has the same names and shapes."""
        raise NotImplementedError

    def memory(self, streams: int, device: torch.device | None = None, steps: int | None = None) -> State:
        """The state to begin with where a text is read piece by piece, as in generation: whatever the pieces, all of
        the text counts. Where it would grow with the text, it has room for so many `steps` and keeps its size."""
        return self.initial_state(streams, device)

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        raise NotImplementedError


class SourceEncoder(Encoder):
    """The encoder of a translator: it reads a source as a whole, then hidden states of a target follow from that.

    `read` gives the state that the first target step begins with. A window of target steps after it is computed at
    once where that can be. `memory(streams) | read(...)` begins a target that comes piece by piece, as in a search;
    each call then returns the state of the next one. Everything of the source is in the state, so that its streams can
    be selected, repeated and put into another order like those of any other state.
    """

    reads_source = True
    carries = False
    source_dim: int
    """Width of the source's vectors."""

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """Nothing: a target begins with what `read` gives."""
        return {}

    def read(self, source_BSD: Tensor, there_BS: Tensor) -> State:
        """All that target steps need of the source. `there_BS` is False on padding, which may hold anything finite and
        is at the right; every source has at least one word."""
        raise NotImplementedError

    def attention(self, x_BTD: Tensor, state: State) -> Tensor:
        """a_BTS: for each target step that follows `state` the weights of the source's positions, as they are looked at
        by the last layer (the mean over its heads). They sum to 1 and are 0 on padding."""
        raise NotImplementedError


def select_streams(state: State, streams: slice) -> State:
    """The state of some of the streams."""
    return {name: tensor[:, streams] for name, tensor in state.items()}


def join_streams(states: list[State]) -> State:
    """The states of several groups of streams, as one."""
    if len(states) == 1:
        return states[0]
    return {name: torch.cat([state[name] for state in states], dim=1) for name in states[0]}


def detach(state: State) -> State:
    """Cut the state from the graph: backpropagation through time ends at the window's edge."""
    return {name: tensor.detach() for name, tensor in state.items()}


def overwrite(into: State, state: State) -> None:
    """Leave a state where the next replay of a captured step finds it."""
    for name, tensor in state.items():
        into[name].copy_(tensor)


def check_sizes(who: str, **sizes: int) -> None:
    """Refuse an impossible size: a recipe is checked against the annotations, a call from Python is not."""
    for name, size in sizes.items():
        if size < 1:
            raise SettingsError(f"{who}: {name} = {size}: must be at least 1")


def at_rest(tensor: Tensor) -> Tensor:
    """A part of the state as it is carried: in float32 at least, whatever the precision inside, because a window's
    rounding must not depend on its neighbours."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
