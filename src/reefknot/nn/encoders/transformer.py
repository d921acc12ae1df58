"""The decoder-only transformer of Baevski & Auli (2019): causal self-attention in pre-norm blocks.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(W2 dropout_relu(relu(W1 norm(x))))

Position encodings are added to the input first: sines in the first half of the dimensions and cosines in the second,
for any number of positions. Nothing is carried between windows, and positions start again in each window. In
step-by-step decoding, a KV cache has the keys and values of the steps so far, and positions continue. The cache grows
with every step, or it has a fixed capacity from the start. With a fixed capacity, `known` counts the steps of each
stream, (1, B), and all steps have the same shapes, which a CUDA graph needs.

`encoder_decoder.py` uses `ResidualBlock`, `CacheSlots` and `Positions` too. Its blocks may be post-norm.

Shapes: B streams, T steps, S cached steps, U = S + T or the capacity of the cache, D dimensions, H heads, K = D / H
dimensions of a head, F feed-forward units; 2 stands for keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar, TypeVarTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reefknot.errors import ArgumentError, SettingsError
from reefknot.nn.bounds import Dim, Layers, Probability, check_rates, check_sizes
from reefknot.nn.encoders.contract import Encoded, Encoder, State
from reefknot.nn.part import PER_WEIGHT, matrix_weights

FIRST_POSITION = 2
"""The number of the first position. The authors' program counts positions from the id after its padding symbol."""
SLOWEST = 10_000.0
"""The number of positions over which the slowest sine advances by one radian."""

Norm = Literal["pre", "post"]
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class Transformer(Encoder):
    """Blocks of causal self-attention with sinusoidal positions (Baevski & Auli 2019).

    Args:
        input_dim: Dimension of the input vectors and of the hidden states, D.
        layers: Number of blocks.
        heads: Number of attention heads of every block. It must divide `input_dim`.
        ffn_dim: Number of units of the feed-forward network of every block, F.
        dropout: Dropout rate of the input and of the outputs of attention and feed-forward network.
        dropout_attention: Dropout rate of the attention weights.
        dropout_relu: Dropout rate of the feed-forward units.
        final_norm: Add a layer norm after the last block. The published models do not have it.
        recompute: Save memory by storing only the input of each block and computing the block again in the backward
            pass (activation checkpointing).
    """

    carries_state = False

    def __init__(
        self,
        input_dim: int,
        layers: Layers = 16,
        heads: Dim = 16,
        ffn_dim: Dim = 4096,
        dropout: Probability = 0.0,
        dropout_attention: Probability = 0.0,
        dropout_relu: Probability = 0.0,
        final_norm: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        check_sizes("Transformer", input_dim=input_dim, layers=layers, heads=heads, ffn_dim=ffn_dim)
        check_rates("Transformer", dropout=dropout, dropout_attention=dropout_attention, dropout_relu=dropout_relu)
        check_heads("Transformer", heads, input_dim)
        self.input_dim = self.dim = input_dim
        self.heads = heads
        self.dropout = dropout
        # Recomputing a block draws its dropout masks again, for which the generator's state is read from the GPU.
        self.synchronizes = recompute
        self.blocks = nn.ModuleList(
            Block(input_dim, heads, ffn_dim, dropout, dropout_attention, dropout_relu, recompute) for _ in range(layers)
        )
        self.final_norm = nn.LayerNorm(input_dim) if final_norm else None
        self._positions = Positions(input_dim)

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """Return an empty state, because nothing is carried between windows."""
        return {}

    def decoding_state(self, streams: int, device: torch.device | None = None, steps: int | None = None) -> State:
        """Return an empty KV cache.

        Args:
            streams: Number of streams, B.
            device: Device of the cache.
            steps: Capacity of the cache. If it is given, the cache keeps its shape, which a CUDA graph needs. By
                default the cache grows with every step.
        """
        return empty_cache(len(self.blocks), streams, self.heads, self.dim, device, steps)

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        """Return the hidden states of a window, and the state after it.

        If the state is a KV cache, the window follows the cached steps, and the returned state is the extended cache.
        If the state is empty, the window is computed independently of other windows.

        Args:
            x_BTD: Input vectors, with shape (B, T, D).
            state: An empty state or a KV cache.
        """
        slots = CacheSlots.after(state, x_BTD)
        # In the type of the parameters: under autocast, the residual stream and the norms stay in float32.
        x_BTD = x_BTD.to(next(self.parameters()).dtype)
        x_BTD = F.dropout(x_BTD + self._positions(state, slots, x_BTD), self.dropout, self.training)
        cache: State = {} if slots is None else {"known": slots.known}
        for number, block in enumerate(self.blocks):
            name = f"block.{number}"
            x_BTD, extended = block(x_BTD, state.get(name), slots)
            if extended is not None:
                cache[name] = extended
        if self.final_norm is not None:
            x_BTD = self.final_norm(x_BTD)
        return Encoded(x_BTD, x_BTD, cache)

    def flops(self, lengths_B: Tensor) -> int:
        # Scores and weighted values: two products of T x T by D in each block, half of each masked.
        attention = len(self.blocks) * self.dim * int(lengths_B.square().sum())
        return PER_WEIGHT * (int(lengths_B.sum()) * matrix_weights(self) + attention)


class CacheSlots(NamedTuple):
    """The slots of a window's steps in a KV cache of fixed capacity."""

    known: Tensor
    """The number of steps in the cache after the window, (1, B)."""
    step: Tensor
    """The position of each step in its stream, (B, T)."""
    here: Tensor
    """Whether the step is stored in the slot, (B, T, U)."""
    seen: Tensor
    """Whether the step attends to the slot, which is true for its own slot and all earlier slots, (B, T, U)."""

    @classmethod
    def after(cls, state: State, x_BTD: Tensor) -> CacheSlots | None:
        """Return the slots of the window x, or None if the state does not have a cache of fixed capacity."""
        known_1B = state.get("known")
        if known_1B is None:
            return None
        new, capacity, device = x_BTD.shape[1], state["block.0"].shape[-2], x_BTD.device
        # On a GPU this check would wait for the device, so the caller must count the steps there.
        checked = device.type == "cpu" and not torch.compiler.is_compiling()
        known = max(known_1B[0].tolist(), default=0) if checked else 0
        if known + new > capacity:
            raise ArgumentError(
                f"{new} more steps after {known} do not fit into a KV cache of {capacity} steps; use a larger one"
            )
        step_BT = known_1B[0, :, None] + torch.arange(new, device=device)
        at_U = torch.arange(capacity, device=device)
        return cls(known_1B + new, step_BT, step_BT[..., None] == at_U, step_BT[..., None] >= at_U)

    def write(self, past_2BHUK: Tensor, new_2BHTK: Tensor) -> Tensor:
        """Return the cache with the keys and values of the new steps in their slots."""
        for here_BU, new_2BHK in zip(self.here.unbind(1), new_2BHTK.unbind(3), strict=True):
            past_2BHUK = torch.where(here_BU[:, None, :, None], new_2BHK[:, :, :, None], past_2BHUK)
        return past_2BHUK


class ResidualBlock(nn.Module):
    """Base class of blocks: self-attention and a feed-forward network, each with a residual connection.

    Args:
        dim: Dimension of the residual stream, D.
        heads: Number of attention heads.
        ffn_dim: Number of units of the feed-forward network.
        dropout: Dropout rate of the outputs of attention and feed-forward network.
        dropout_attention: Dropout rate of the attention weights.
        dropout_relu: Dropout rate of the feed-forward units.
        recompute: Store only the input of the block and compute the block again in the backward pass.
        norm: `pre` puts a layer norm before attention and feed-forward network. `post` puts it after each residual sum.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        ffn_dim: int,
        dropout: float = 0.0,
        dropout_attention: float = 0.0,
        dropout_relu: float = 0.0,
        recompute: bool = False,
        norm: Norm = "pre",
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.dropout_attention = dropout_attention
        self.dropout_relu = dropout_relu
        self.recompute = recompute
        self.norm = norm
        self.attention_norm = nn.LayerNorm(dim)
        self.attention_in = nn.Linear(dim, 3 * dim)  # queries, keys, values
        self.attention_out = nn.Linear(dim, dim)
        self.ffn_norm = nn.LayerNorm(dim)
        self.ffn_in = nn.Linear(dim, ffn_dim)
        self.ffn_out = nn.Linear(ffn_dim, dim)
        init_attention(self.attention_in, 3)
        for layer in (self.attention_out, self.ffn_in, self.ffn_out):
            init_linear(layer)

    def _run(self, compute: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Compute the block now or, with `recompute`, now and again in the backward pass."""
        if self.recompute and torch.is_grad_enabled():
            # The checkpoint is inside the block instead of around it, so that sharded parameters are gathered once for
            # the backward pass.
            return cast(Result, checkpoint(compute, *arguments, use_reentrant=False))
        return compute(*arguments)

    def _read(self, x_BTD: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Return the input of attention or feed-forward network: the residual stream, normalised if pre-norm."""
        return cast(Tensor, norm(x_BTD)) if self.norm == "pre" else x_BTD

    def _add(self, x_BTD: Tensor, added_BTD: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Return the residual stream with the output of attention or feed-forward network added."""
        x_BTD = x_BTD + F.dropout(added_BTD, self.dropout, self.training)
        return cast(Tensor, norm(x_BTD)) if self.norm == "post" else x_BTD

    def _feed_forward(self, x_BTD: Tensor) -> Tensor:
        units_BTF = F.relu(self.ffn_in(self._read(x_BTD, self.ffn_norm)))
        units_BTF = F.dropout(units_BTF, self.dropout_relu, self.training)
        return self._add(x_BTD, self.ffn_out(units_BTF), self.ffn_norm)

    def _attend(
        self, x_BTD: Tensor, past_2BHSK: Tensor | None, slots: CacheSlots | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Add attention over the steps so far. Also return the cache `past`, if given, extended by these steps."""
        parts_3BHTK = split_heads(self.attention_in(self._read(x_BTD, self.attention_norm)), 3, self.heads)
        # Unbound together: the gradient of each part alone would be written into zeros of the full size.
        q_BHTK, k_BHUK, v_BHUK = parts_3BHTK.unbind()
        extended = None
        if past_2BHSK is not None:
            past_2BHSK, new_2BHTK = past_2BHSK.to(q_BHTK.dtype), parts_3BHTK[1:]
            extended = (
                torch.cat([past_2BHSK, new_2BHTK], dim=3) if slots is None else slots.write(past_2BHSK, new_2BHTK)
            )
            k_BHUK, v_BHUK = extended.unbind()
        new, known = q_BHTK.shape[2], k_BHUK.shape[2]
        # `is_causal` counts from the first key, so steps that follow a cache need a mask. A single step sees all keys.
        mask = None
        if slots is not None:
            mask = slots.seen[:, None]
        elif 1 < new < known:
            mask = torch.ones(new, known, dtype=torch.bool, device=x_BTD.device).tril(known - new)
        h_BTD = self._attention(q_BHTK, k_BHUK, v_BHUK, mask, is_causal=mask is None and new == known)
        return self._add(x_BTD, self.attention_out(h_BTD), self.attention_norm), extended

    def _attention(
        self, q_BHTK: Tensor, k_BHUK: Tensor, v_BHUK: Tensor, mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        """Return the attended values with all heads concatenated, (B, T, D)."""
        rate = self.dropout_attention if self.training else 0.0
        h_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHUK, v_BHUK, mask, dropout_p=rate, is_causal=is_causal)
        return h_BHTK.transpose(1, 2).flatten(2)


class Block(ResidualBlock):
    """A block of causal self-attention and a feed-forward network. Its arguments are those of `ResidualBlock`."""

    def forward(
        self, x_BTD: Tensor, past_2BHSK: Tensor | None = None, slots: CacheSlots | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the block and, if there is a cache, `past`, the cache extended by these steps."""
        return self._run(self._compute, x_BTD, past_2BHSK, slots)

    def _compute(
        self, x_BTD: Tensor, past_2BHSK: Tensor | None, slots: CacheSlots | None
    ) -> tuple[Tensor, Tensor | None]:
        x_BTD, extended = self._attend(x_BTD, past_2BHSK, slots)
        return self._feed_forward(x_BTD), extended


def init_linear(layer: nn.Linear) -> None:
    """Initialise a linear layer as the authors' program does: Xavier weights and zero biases."""
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)


def init_attention(layer: nn.Linear, parts: int) -> None:
    """Initialise concatenated projections to queries, keys or values.

    Each projection is initialised as a separate matrix, with smaller weights than `init_linear` gives.
    """
    for weight in layer.weight.detach().chunk(parts):
        nn.init.xavier_uniform_(weight, gain=2**-0.5)
    nn.init.zeros_(layer.bias)


def split_heads(joined_BTD: Tensor, parts: int, heads: int) -> Tensor:
    """Split concatenated queries, keys or values by part and head: (parts, B, H, T, K)."""
    return torch.unflatten(joined_BTD, -1, (parts, heads, -1)).permute(2, 0, 3, 1, 4)


def empty_cache(
    blocks: int, streams: int, heads: int, dim: int, device: torch.device | None, steps: int | None
) -> State:
    """Return an empty KV cache: for each block (2, B, H, 0, K), or with a capacity of `steps` (2, B, H, U, K)."""
    shape = (2, streams, heads, steps or 0, dim // heads)
    cache = {f"block.{number}": torch.zeros(shape, device=device) for number in range(blocks)}
    if steps is None:
        return cache
    check_sizes("KV cache", steps=steps)
    return {"known": torch.zeros(1, streams, dtype=torch.int64, device=device)} | cache


def check_heads(module: str, heads: int, dim: int) -> None:
    """Raise an error unless the number of heads divides the dimension."""
    if dim % heads:
        raise SettingsError(
            f"{module}: heads = {heads} does not divide the dimension of the input vectors, {dim}; "
            "use a number that does, or vectors of another dimension"
        )


class Positions:
    """Sinusoidal positions, computed once and cached for lengths that are powers of two.

    They are not buffers, because they follow from the dimension and must not move or change type with the parameters.
    The cache is never emptied, because a CUDA graph reads the tensor with which it was captured. A compiled call does
    not use the cache. While a CUDA graph is captured, new positions are not cached, because they have no values yet.

    Args:
        dim: Dimension of the positions.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._cache: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, state: State, slots: CacheSlots | None, x_BTD: Tensor) -> Tensor:
        """Return the positions of the steps x that follow a state, (T, D), or in a fixed KV cache (B, T, D)."""
        cached = state["block.0"].shape[-2] if "block.0" in state else 0
        if slots is not None:
            return F.embedding(slots.step, self._between(0, cached, x_BTD))
        return self._between(cached, cached + x_BTD.shape[1], x_BTD)

    def _between(self, start: int, stop: int, x_BTD: Tensor) -> Tensor:
        device = x_BTD.device
        if torch.compiler.is_compiling():
            return sinusoids(start, stop, self.dim, device).to(x_BTD.dtype)
        length = 1 << max(stop - 1, 0).bit_length()
        key = length, x_BTD.dtype, device
        positions = self._cache.get(key)
        if positions is None:
            positions = sinusoids(0, length, self.dim, device).to(x_BTD.dtype)
            if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self._cache[key] = positions
        return positions[start:stop]


def sinusoids(start: int, stop: int, dim: int, device: torch.device) -> Tensor:
    """Return the encodings of positions `start` to `stop`, (T, D): sines in the first half, cosines in the second."""
    half = dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=device) / max(half - 1, 1)
    at = torch.arange(start, stop, dtype=torch.float64, device=device) + FIRST_POSITION
    angles = at[:, None] * torch.exp(-math.log(SLOWEST) * exponents)
    # An odd dimension has one more number than the two halves; it stays zero.
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, dim % 2))
