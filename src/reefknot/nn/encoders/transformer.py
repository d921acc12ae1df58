"""A decoder-only transformer (Baevski & Auli 2019): a stack of blocks of causal self-attention.

Start reading at `Transformer`. It adds sinusoidal positions to its input x and runs the blocks. A block is pre-norm:

    x = x + dropout(attention(norm(x)))
    x = x + dropout(W2 dropout_relu(relu(W1 norm(x))))

In training, every window (T steps of text that are computed at once) is independent of other windows. In step-by-step
decoding, the state is a KV cache (see `create_cache`). `encoder_decoder.py` shares the classes of this file.

Shapes: B streams (rows of a batch), T steps, S cached steps, U = S + T or the capacity of the cache, D dimensions, H
heads, K = D / H dimensions of a head, F feed-forward units, E concatenated queries, keys or values. 2 stands for keys
and values, 3 for queries, keys and values.
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
from reefknot.nn.part import FLOPS_PER_WEIGHT, count_matrix_weights

FIRST_POSITION = 2
"""Positions are counted from 2, as in the authors' program, which starts after the id of its padding symbol."""
MAX_TIMESCALE = 10_000.0
"""The number of positions over which the slowest sine advances by one radian."""
ATTENTION_GAIN = 2**-0.5
"""Queries, keys and values start with this factor of Xavier's range, as in the authors' program."""

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
        self._positions = SinusoidalPositions(input_dim)

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
        return create_cache(len(self.blocks), streams, self.heads, self.dim, device, steps)

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        """Return the hidden states of a window, and the state after it.

        If the state is a KV cache, the window follows the cached steps, and the returned state is the extended cache.
        If the state is empty, the window is computed independently of other windows.

        Args:
            inputs_BTD: Input vectors, with shape (B, T, D).
            state: An empty state or a KV cache.
        """
        slots = CacheSlots.for_window(state, inputs_BTD)
        # Convert the input to the type of the parameters, so that under autocast the residual stream and the norms stay
        # in float32.
        hidden_BTD = inputs_BTD.to(next(self.parameters()).dtype)
        hidden_BTD = hidden_BTD + self._positions(state, slots, hidden_BTD)
        hidden_BTD = F.dropout(hidden_BTD, self.dropout, self.training)

        next_cache: State = {}
        if slots is not None:
            next_cache["cached_steps"] = slots.cached_steps
        for index, block in enumerate(self.blocks):
            name = f"block.{index}"
            hidden_BTD, block_cache = block(hidden_BTD, state.get(name), slots)
            if block_cache is not None:
                next_cache[name] = block_cache

        if self.final_norm is not None:
            hidden_BTD = self.final_norm(hidden_BTD)
        # There is no dropout after the last block, so `output` and `raw` are the same.
        return Encoded(output=hidden_BTD, raw=hidden_BTD, state=next_cache)

    def flops(self, lengths_B: Tensor) -> int:
        weight_products = int(lengths_B.sum()) * count_matrix_weights(self)
        # Each block computes two products of T x T by D (scores and weighted values). The mask leaves half of each.
        attention_products = len(self.blocks) * self.dim * int(lengths_B.square().sum())
        return FLOPS_PER_WEIGHT * (weight_products + attention_products)


class CacheSlots(NamedTuple):
    """The slots that the steps of a window fill in a KV cache of fixed capacity.

    A slot is the place of one step in the cache. For a window of two steps after one cached step, in a cache with
    capacity 4:

        cached_steps   3
        positions      1, 2
        is_own         [0 1 0 0]   is_visible   [1 1 0 0]
                       [0 0 1 0]                [1 1 1 0]
    """

    cached_steps: Tensor
    """The number of steps in the cache after the window, (1, B)."""
    positions: Tensor
    """The position of each step in its stream, (B, T), counted from 0."""
    is_own: Tensor
    """Whether the step is stored in the slot, (B, T, U)."""
    is_visible: Tensor
    """Whether the step attends to the slot, which is true for its own slot and all earlier slots, (B, T, U)."""

    @classmethod
    def for_window(cls, state: State, hidden_BTD: Tensor) -> CacheSlots | None:
        """Return the slots of a window, or None if the state does not have a cache of fixed capacity."""
        cached_steps_1B = state.get("cached_steps")
        if cached_steps_1B is None:
            return None
        new_steps = hidden_BTD.shape[1]
        capacity = state["block.0"].shape[-2]
        device = hidden_BTD.device

        # The capacity is checked only on a CPU. On a GPU, reading the counts would make the host wait, so the caller
        # must make sure that the steps fit.
        max_cached_steps = 0
        if device.type == "cpu" and not torch.compiler.is_compiling():
            max_cached_steps = max(cached_steps_1B[0].tolist(), default=0)
        if max_cached_steps + new_steps > capacity:
            raise ArgumentError(
                f"{new_steps} more steps after {max_cached_steps} do not fit into a KV cache of {capacity} steps; "
                "use a larger capacity"
            )

        positions_BT = cached_steps_1B[0, :, None] + torch.arange(new_steps, device=device)
        slots_U = torch.arange(capacity, device=device)
        return cls(
            cached_steps=cached_steps_1B + new_steps,
            positions=positions_BT,
            is_own=positions_BT[..., None] == slots_U,
            is_visible=positions_BT[..., None] >= slots_U,
        )

    def write(self, past_2BHUK: Tensor, new_2BHTK: Tensor) -> Tensor:
        """Return the cache with the keys and values of the new steps in their slots."""
        for is_own_BU, step_2BHK in zip(self.is_own.unbind(1), new_2BHTK.unbind(3), strict=True):
            past_2BHUK = torch.where(is_own_BU[:, None, :, None], step_2BHK[:, :, :, None], past_2BHUK)
        return past_2BHUK


class ResidualBlock(nn.Module):
    """Base class of blocks: self-attention and a feed-forward network, each with a residual connection.

    Attention and feed-forward network are the sublayers of the block. The residual stream is the sum of the block's
    input and the outputs of the sublayers so far.

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
        self.attention_in = JoinedLinear(dim, 3)  # queries, keys, values
        self.attention_out = nn.Linear(dim, dim)
        self.ffn_norm = nn.LayerNorm(dim)
        self.ffn_in = nn.Linear(dim, ffn_dim)
        self.ffn_out = nn.Linear(ffn_dim, dim)
        self.attention_in.draw(ATTENTION_GAIN)
        for layer in (self.attention_out, self.ffn_in, self.ffn_out):
            init_linear(layer)

    def _run(self, compute: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Call `compute` with the arguments or, with `recompute`, call it now and again in the backward pass."""
        if self.recompute and torch.is_grad_enabled():
            # The checkpoint is inside the block instead of around it, so that sharded parameters are gathered once for
            # the backward pass.
            return cast(Result, checkpoint(compute, *arguments, use_reentrant=False))
        return compute(*arguments)

    def _self_attention(
        self, hidden_BTD: Tensor, past_2BHSK: Tensor | None, slots: CacheSlots | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream after causal self-attention, and the KV cache with the new steps, if there is one.

        Args:
            hidden_BTD: The residual stream.
            past_2BHSK: The KV cache of this block, or None without a cache.
            slots: The slots of the new steps, if the cache has a fixed capacity.
        """
        joined_BTE = self.attention_in(self._normalise_input(hidden_BTD, self.attention_norm))
        qkv_3BHTK = split_heads(joined_BTE, 3, self.heads)
        # Unbind all three at once: if they were indexed one by one, each backward pass would allocate a full-size
        # tensor of zeros.
        queries_BHTK, keys_BHUK, values_BHUK = qkv_3BHTK.unbind()

        extended_2BHUK = None
        if past_2BHSK is not None:
            extended_2BHUK = _extend_cache(past_2BHSK.to(queries_BHTK.dtype), qkv_3BHTK[1:], slots)
            keys_BHUK, values_BHUK = extended_2BHUK.unbind()

        # `is_causal` must be a plain bool, so it is not computed from sizes that `torch.export` keeps dynamic.
        mask = None
        is_causal = past_2BHSK is None
        if past_2BHSK is not None:
            num_queries = queries_BHTK.shape[2]
            mask = _mask_after_cache(num_queries, keys_BHUK.shape[2], slots, hidden_BTD.device)
            is_causal = mask is None and num_queries > 1  # the cache was empty
        attended_BTD = self._attend(queries_BHTK, keys_BHUK, values_BHUK, mask, is_causal)
        hidden_BTD = self._add_residual(hidden_BTD, self.attention_out(attended_BTD), self.attention_norm)
        return hidden_BTD, extended_2BHUK

    def _attend(
        self, queries_BHTK: Tensor, keys_BHUK: Tensor, values_BHUK: Tensor, mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        """Return the attended values with all heads concatenated, (B, T, D)."""
        dropout_rate = self.dropout_attention if self.training else 0.0
        attended_BHTK = F.scaled_dot_product_attention(
            queries_BHTK, keys_BHUK, values_BHUK, mask, dropout_p=dropout_rate, is_causal=is_causal
        )
        return attended_BHTK.transpose(1, 2).flatten(2)

    def _feed_forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the residual stream after the feed-forward network."""
        units_BTF = F.relu(self.ffn_in(self._normalise_input(hidden_BTD, self.ffn_norm)))
        units_BTF = F.dropout(units_BTF, self.dropout_relu, self.training)
        return self._add_residual(hidden_BTD, self.ffn_out(units_BTF), self.ffn_norm)

    def _normalise_input(self, hidden_BTD: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Return the input of a sublayer: the residual stream, normalised if the block is pre-norm."""
        if self.norm == "pre":
            return cast(Tensor, norm(hidden_BTD))
        return hidden_BTD

    def _add_residual(self, hidden_BTD: Tensor, output_BTD: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Add the output of a sublayer to the residual stream, and normalise the sum if the block is post-norm."""
        sum_BTD = hidden_BTD + F.dropout(output_BTD, self.dropout, self.training)
        if self.norm == "post":
            return cast(Tensor, norm(sum_BTD))
        return sum_BTD


class Block(ResidualBlock):
    """A block of causal self-attention and a feed-forward network. Its arguments are those of `ResidualBlock`."""

    def forward(
        self, hidden_BTD: Tensor, past_2BHSK: Tensor | None = None, slots: CacheSlots | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the block and its KV cache, extended by these steps (None without a cache)."""
        return self._run(self._compute, hidden_BTD, past_2BHSK, slots)

    def _compute(
        self, hidden_BTD: Tensor, past_2BHSK: Tensor | None, slots: CacheSlots | None
    ) -> tuple[Tensor, Tensor | None]:
        hidden_BTD, extended_2BHUK = self._self_attention(hidden_BTD, past_2BHSK, slots)
        return self._feed_forward(hidden_BTD), extended_2BHUK


def _extend_cache(past_2BHSK: Tensor, new_2BHTK: Tensor, slots: CacheSlots | None) -> Tensor:
    """Return a KV cache with the keys and values of new steps: at its end, or in the slots of a fixed cache."""
    if slots is None:
        return torch.cat([past_2BHSK, new_2BHTK], dim=3)
    return slots.write(past_2BHSK, new_2BHTK)


def _mask_after_cache(num_queries: int, num_keys: int, slots: CacheSlots | None, device: torch.device) -> Tensor | None:
    """Return the causal mask of steps that follow a KV cache, or None if they need no mask.

    For two steps after one cached step, the mask is [1 1 0] and [1 1 1]. A single step sees all keys. Without a cache,
    torch's `is_causal` does the same. With a cache, `is_causal` does not work, because it counts from the first key.
    """
    if slots is not None:
        return slots.is_visible[:, None]
    if 1 < num_queries < num_keys:
        ones_TU = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        return ones_TU.tril(num_keys - num_queries)
    return None


class JoinedLinear(nn.Linear):
    """A linear layer that holds several square matrices, one below the other, such as queries, keys and values.

    Args:
        dim: Dimension of the input vectors and of each matrix's output vectors.
        matrices: Number of matrices.
    """

    def __init__(self, dim: int, matrices: int) -> None:
        super().__init__(dim, matrices * dim)
        self.matrices = matrices

    def draw(self, gain: float = 1.0) -> None:
        """Initialise each matrix as a separate matrix, Xavier-uniform, and the biases as zeros.

        Args:
            gain: Factor of Xavier's range.
        """
        for matrix in self.weight.detach().chunk(self.matrices):
            nn.init.xavier_uniform_(matrix, gain)
        nn.init.zeros_(self.bias)


def init_linear(layer: nn.Linear) -> None:
    """Initialise a linear layer as the authors' program does: Xavier weights and zero biases."""
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)


def split_heads(joined_BTE: Tensor, projections: int, heads: int) -> Tensor:
    """Split concatenated queries, keys or values by projection and head: (projections, B, H, T, K).

    E = projections x D is the dimension of the concatenated vectors.
    """
    split = torch.unflatten(joined_BTE, -1, (projections, heads, -1))
    return split.permute(2, 0, 3, 1, 4)


def create_cache(
    blocks: int, streams: int, heads: int, dim: int, device: torch.device | None, steps: int | None
) -> State:
    """Return an empty KV cache for step-by-step decoding.

        block.N         keys and values of block N for the steps so far, (2, B, H, S, K)
        cached_steps    with a fixed capacity: the number of steps so far of each stream, (1, B)

    Without `steps`, the cache grows with every step. With `steps`, it has this capacity from the start, (2, B, H, U,
    K), so all steps have the same shapes, which a CUDA graph needs. `CacheSlots` then says where new steps are stored.
    """
    shape = (2, streams, heads, steps or 0, dim // heads)
    block_caches = {f"block.{index}": torch.zeros(shape, device=device) for index in range(blocks)}
    if steps is None:
        return block_caches
    check_sizes("KV cache", steps=steps)
    cached_steps = torch.zeros(1, streams, dtype=torch.int64, device=device)
    return {"cached_steps": cached_steps} | block_caches


def check_heads(module: str, heads: int, dim: int) -> None:
    """Raise an error unless the number of heads divides the dimension."""
    if dim % heads:
        raise SettingsError(
            f"{module}: heads = {heads} does not divide the dimension of the input vectors, {dim}; "
            "use a number that does, or vectors of another dimension"
        )


class SinusoidalPositions:
    """Encodings of positions by sines and cosines, computed once and cached for lengths that are powers of two.

    The encodings are not buffers, because they follow from the dimension and must not move or change type with the
    parameters. The cache is never emptied, because a CUDA graph reads the tensor with which it was captured. A compiled
    call does not use the cache. While a CUDA graph is captured, new encodings are not cached, because their values do
    not exist yet.

    Args:
        dim: Dimension of the encodings, D.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._cache: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, state: State, slots: CacheSlots | None, hidden_BTD: Tensor) -> Tensor:
        """Return the encodings of steps that follow a state: (T, D), or (B, T, D) with a KV cache of fixed capacity.

        Args:
            state: The state before the steps.
            slots: The slots of the steps, if the KV cache has a fixed capacity.
            hidden_BTD: The vectors of the steps, which give the number of steps, the type and the device.
        """
        cache_length = 0
        if "block.0" in state:
            cache_length = state["block.0"].shape[-2]
        if slots is not None:
            all_encodings_UD = self._encode_range(0, cache_length, hidden_BTD)
            return F.embedding(slots.positions, all_encodings_UD)
        new_steps = hidden_BTD.shape[1]
        return self._encode_range(cache_length, cache_length + new_steps, hidden_BTD)

    def _encode_range(self, start: int, stop: int, hidden_BTD: Tensor) -> Tensor:
        """Return the encodings of positions `start` to `stop`, (T, D), with the type and device of `hidden_BTD`."""
        device = hidden_BTD.device
        if torch.compiler.is_compiling():
            return sinusoids(start, stop, self.dim, device).to(hidden_BTD.dtype)
        length = 1 << max(stop - 1, 0).bit_length()  # the next power of two
        key = (length, hidden_BTD.dtype, device)
        encodings = self._cache.get(key)
        if encodings is None:
            encodings = sinusoids(0, length, self.dim, device).to(hidden_BTD.dtype)
            is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not is_capturing:
                self._cache[key] = encodings
        return encodings[start:stop]


def sinusoids(start: int, stop: int, dim: int, device: torch.device) -> Tensor:
    """Return the encodings of positions `start` to `stop`, (T, D): sines in the first half, cosines in the second."""
    half_dim = dim // 2
    exponents = torch.arange(half_dim, dtype=torch.float64, device=device) / max(half_dim - 1, 1)
    frequencies = torch.exp(-math.log(MAX_TIMESCALE) * exponents)
    positions = torch.arange(start, stop, dtype=torch.float64, device=device) + FIRST_POSITION
    angles = positions[:, None] * frequencies
    encodings = torch.cat([angles.sin(), angles.cos()], dim=-1)
    # An odd dimension has one more number than the two halves. This number stays zero.
    return F.pad(encodings, (0, dim % 2))
