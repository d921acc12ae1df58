"""The contract of encoders.

Shapes: B streams, S source tokens, T steps, D dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from reefknot.nn.part import PER_WEIGHT, Documented, matrix_weights

State = dict[str, Tensor]
"""What an encoder carries from one window to the next. Dimension 1 of every tensor is the stream, as in torch's
recurrent layers."""


class Encoded(NamedTuple):
    """The hidden states of a window, and the state after it."""

    output: Tensor
    """h_BTD after the encoder's last dropout: what the output end reads."""
    raw: Tensor
    """h_BTD before the last dropout. Penalties on activations need both."""
    state: State
    """The state for the next window."""


class Encoder(nn.Module, Documented):
    """Base class of encoders, which turn vectors into hidden states.

    The state of an encoder is a value that can be carried to the next window, saved, and split by stream.
    """

    input_dim: int
    """Dimension of the input vectors."""
    dim: int
    """Dimension of the hidden states."""
    carries: bool = True
    """Whether the state after a window affects the next window. If not, every window is computed by itself."""
    waits: bool = False
    """Whether `forward` reads a value from the GPU or its generator. Such a call cannot be captured in a CUDA graph."""
    reads_source: bool = False
    """Whether this is a `SourceEncoder`, which reads a source before the first step, as a translator does."""

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """Return the state before the first window of a text. Later states have the same names and shapes."""
        raise NotImplementedError

    def decoding_state(self, streams: int, device: torch.device | None = None, steps: int | None = None) -> State:
        """Return the state before a text that is read step by step, as in generation.

        Every step then depends on the whole text before it. A transformer's state is an empty KV cache.

        Args:
            streams: Number of streams, B.
            device: Device of the state.
            steps: Capacity of the KV cache. With it, the state keeps its shape, as a CUDA graph needs. Without it, the
                cache grows with every step.
        """
        return self.initial_state(streams, device)

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        """Return the hidden states of a window that follows `state`, and the state after it."""
        raise NotImplementedError

    def flops(self, lengths_B: Tensor) -> int:
        """Return the floating-point operations of a training step on windows of these lengths (see `nn/part.py`)."""
        return PER_WEIGHT * int(lengths_B.sum()) * matrix_weights(self)


class SourceEncoder(Encoder):
    """Base class of the encoders of translators, which read a source and then give the hidden states of a target.

    `read` returns the state before the first target step. A window of target steps that follows this state is computed
    in parallel if the encoder can do that. To decode step by step, as in a beam search, start from the state
    `decoding_state(streams) | read(...)`; each call of `forward` returns the state for the next call. Everything about
    the source is in the state, so its streams can be selected, repeated and reordered.
    """

    reads_source = True
    carries = False
    source_dim: int
    """Dimension of the source vectors."""

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """Return an empty state, because a target begins with the state that `read` returns."""
        return {}

    def read(self, source_BSD: Tensor, there_BS: Tensor) -> State:
        """Return everything that target steps need to know about the source.

        Args:
            source_BSD: Vectors of the source tokens.
            there_BS: False where the source is padding, which is on the right and may have any finite value. Every
                source has at least one token.
        """
        raise NotImplementedError

    def attention(self, x_BTD: Tensor, state: State) -> Tensor:
        """Return the attention weights a_BTS of the last layer over the source, for target steps that follow `state`.

        They are averaged over the heads, sum to 1 over the source, and are 0 on padding.
        """
        raise NotImplementedError

    def translation_flops(self, sources_B: Tensor, lengths_B: Tensor) -> int:
        """Return the operations of a training step on sources and targets of these lengths."""
        return PER_WEIGHT * int(sources_B.sum() + lengths_B.sum()) * matrix_weights(self)


def select_streams(state: State, streams: slice) -> State:
    """Return the state of some of the streams."""
    return {name: tensor[:, streams] for name, tensor in state.items()}


def join_streams(states: list[State]) -> State:
    """Return the states of several groups of streams as one state."""
    if len(states) == 1:
        return states[0]
    return {name: torch.cat([state[name] for state in states], dim=1) for name in states[0]}


def detach(state: State) -> State:
    """Detach the state from the graph, so that backpropagation through time ends at the start of the next window."""
    return {name: tensor.detach() for name, tensor in state.items()}


def overwrite(into: State, state: State) -> None:
    """Copy a state to the tensors from which the next replay of a captured step reads it."""
    for name, tensor in state.items():
        into[name].copy_(tensor)


def to_state_dtype(tensor: Tensor) -> Tensor:
    """Convert a part of the state to the type in which it is carried: float32 or wider.

    Rounding to half precision here would make the result of a window depend on where the window begins.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
