"""Base classes of encoders, the networks between the embeddings and the output layer of a language model.

`Encoder` turns word vectors into hidden states. `SourceEncoder` is its extension for translation. Two words come up
everywhere:

    stream    a contiguous part of the training text: one row of a batch
    window    the T steps of every stream that are computed at once

Each stream is read window by window. The `State`, such as the hidden and cell state of an LSTM, is carried from one
window to the next.

Shapes: B streams, S source tokens, T steps, D dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from reefknot.nn.part import FLOPS_PER_WEIGHT, InheritsDocstrings, count_matrix_weights

State = dict[str, Tensor]
"""The state that an encoder carries from one window to the next, as named tensors. Dimension 1 of every tensor is the
stream, as in torch's recurrent layers."""


class Encoded(NamedTuple):
    """The hidden states of a window, and the state after it."""

    output: Tensor
    """Hidden states after the last dropout, with shape (B, T, D). The output end reads them."""
    raw: Tensor
    """Hidden states before the last dropout, with shape (B, T, D). Penalties on activations need both."""
    state: State
    """The state for the next window."""


class Encoder(nn.Module, InheritsDocstrings):
    """Base class of encoders, which turn vectors into hidden states.

        state = encoder.initial_state(num_streams)
        for vectors in windows:                     # (B, T, input_dim)
            encoded = encoder(vectors, state)
            encoded.output                          # the hidden states, (B, T, dim)
            state = encoded.state                   # the state for the next window

    A state is a dictionary of tensors. It can be carried to the next window, saved, and split by stream.
    """

    input_dim: int
    """Dimension of the input vectors."""
    dim: int
    """Dimension of the hidden states."""
    carries_state: bool = True
    """Whether the state after a window affects the next window. If not, windows are independent."""
    synchronizes: bool = False
    """Whether `forward` reads a value from the GPU or its generator. Such a call cannot be captured in a CUDA graph."""
    reads_source: bool = False
    """Whether this is a `SourceEncoder`, which reads a source before the first target step."""

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """Return the state before the first window of a text. Later states have the same names and shapes.

        Args:
            streams: Number of streams, B.
            device: Device of the state.
        """
        raise NotImplementedError

    def decoding_state(self, streams: int, device: torch.device | None = None, steps: int | None = None) -> State:
        """Return the state before a text that is decoded step by step, as in generation.

        Every step then depends on the whole text before it. A transformer returns an empty KV cache, and a recurrent
        encoder its initial state.

        Args:
            streams: Number of streams, B.
            device: Device of the state.
            steps: Capacity of the KV cache. If it is given, the state keeps its shape, which a CUDA graph needs. By
                default the cache grows with every step.
        """
        return self.initial_state(streams, device)

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        """Return the hidden states of a window that follows `state`, and the state after the window.

        Args:
            inputs_BTD: Input vectors, with shape (B, T, input_dim).
            state: The state before the window.
        """
        raise NotImplementedError

    def flops(self, lengths_B: Tensor) -> int:
        """Return the number of floating-point operations of a training step (see `nn/part.py`).

        Args:
            lengths_B: Number of steps of each stream's window, with shape (B,).
        """
        return FLOPS_PER_WEIGHT * int(lengths_B.sum()) * count_matrix_weights(self)


class SourceEncoder(Encoder):
    """Base class of the encoders of translators, which read a source and then compute the hidden states of a target.

        state = encoder.encode_source(source, mask)
        encoded = encoder(target, state)                            # all target steps at once, as in training

        state = encoder.decoding_state(num_streams) | state         # or step by step, as in a beam search
        encoded = encoder(first_step, state)
        encoded = encoder(second_step, encoded.state)

    Everything about the source is in the state, so its streams can be selected, repeated and reordered.
    """

    reads_source = True
    carries_state = False
    source_dim: int
    """Dimension of the source vectors."""

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """Return an empty state, because a target starts from the state that `encode_source` returns."""
        return {}

    def encode_source(self, source_BSD: Tensor, mask_BS: Tensor) -> State:
        """Return the state before the first target step. It has everything that target steps need from the source.

        Args:
            source_BSD: Vectors of the source tokens, with shape (B, S, source_dim).
            mask_BS: Mask with shape (B, S): True for tokens and False for padding, which must be on the right. The
                vectors of padding may have any finite value. Every source has at least one token.
        """
        raise NotImplementedError

    def attention(self, inputs_BTD: Tensor, state: State) -> Tensor:
        """Return the attention weights of the last layer over the source, with shape (B, T, S).

        The weights are averaged over the heads. They sum to 1 over the source and are 0 for padding.

        Args:
            inputs_BTD: Vectors of the target steps, with shape (B, T, input_dim).
            state: The state before these steps.
        """
        raise NotImplementedError

    def translation_flops(self, source_lengths_B: Tensor, target_lengths_B: Tensor) -> int:
        """Return the number of floating-point operations of a training step (see `nn/part.py`).

        Args:
            source_lengths_B: Number of tokens of each source, with shape (B,).
            target_lengths_B: Number of tokens of each target, with shape (B,).
        """
        tokens = int(source_lengths_B.sum() + target_lengths_B.sum())
        return FLOPS_PER_WEIGHT * tokens * count_matrix_weights(self)


def select_streams(state: State, streams: slice) -> State:
    """Return the state of some of the streams."""
    return {name: tensor[:, streams] for name, tensor in state.items()}


def join_streams(states: list[State]) -> State:
    """Return the states of several groups of streams as one state."""
    if len(states) == 1:
        return states[0]
    joined = {}
    for name in states[0]:
        joined[name] = torch.cat([state[name] for state in states], dim=1)
    return joined


def detach(state: State) -> State:
    """Detach the state from the autograd graph, so that backpropagation through time stays within one window."""
    return {name: tensor.detach() for name, tensor in state.items()}


def overwrite(destination: State, state: State) -> None:
    """Copy `state` into the tensors of `destination`, which the next replay of a CUDA graph reads."""
    for name, tensor in state.items():
        destination[name].copy_(tensor)


def to_state_dtype(tensor: Tensor) -> Tensor:
    """Convert a tensor of the state to the type in which it is carried: float32 or wider.

    Rounding to half precision here would make the result of a window depend on where the window begins.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
