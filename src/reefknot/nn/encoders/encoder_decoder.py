"""The encoder-decoder Transformer (Vaswani et al. 2017): one stack reads a source, the other writes a target.

Start reading at `EncoderDecoder`. `encode_source` runs the source stack once per sentence, and `forward` runs the
target stack over one or more target steps. The state, which `encode_source` creates and `forward` reads, has these
tensors:

    source_mask      (1, B, S)          True for source tokens, False for padding
    source.N         (2, B, H, S, K)    keys and values of the source for target block N
    block.N          (2, B, H, P, K)    in step-by-step decoding: KV cache of target block N
    cached_steps     (1, B)             if the KV cache has a fixed capacity: number of cached steps

The sublayers that the blocks share with other transformers (`_self_attention`, `_feed_forward`) and their helpers
(`_attend`, `_normalise_input`, `_add_residual`) are methods of `ResidualBlock` in `transformer.py`.

Shapes: B streams (rows of a batch), S source tokens, T target steps, P cached target steps, U cached target steps with
the new ones, D dimensions, H heads, K = D / H dimensions of a head, E concatenated queries, keys or values. A leading 2
stands for keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Dim, Layers, Probability, check_rates, check_sizes
from reefknot.nn.encoders.contract import Encoded, SourceEncoder, State, to_state_dtype
from reefknot.nn.encoders.transformer import (
    ATTENTION_GAIN,
    CacheSlots,
    JoinedLinear,
    Norm,
    ResidualBlock,
    SinusoidalPositions,
    check_heads,
    create_cache,
    init_linear,
    split_heads,
)
from reefknot.nn.part import FLOPS_PER_WEIGHT, count_matrix_weights


class EncoderDecoder(SourceEncoder):
    """The encoder-decoder Transformer with sinusoidal positions (Vaswani et al. 2017).

    A source block has two sublayers: attention over the whole source and a feed-forward network. A target block has
    three: causal attention over the target, attention over the encoded source, and a feed-forward network. A sublayer
    maps x to

        norm = "pre"     x + dropout(sublayer(norm(x))), with another norm after the last block of each stack
        norm = "post"    norm(x + dropout(sublayer(x))), as in the paper

    The paper's base model has 6 + 6 blocks, 512 dimensions, 8 heads and 2048 feed-forward units. Its big model has 1024
    dimensions, 16 heads and 4096 feed-forward units. The scale of the embeddings is a setting of the input ends (the
    modules that turn token ids into vectors).

    Args:
        source_dim: Dimension of the source vectors. It must equal `input_dim`.
        input_dim: Dimension of the target vectors and of the hidden states, D.
        layers: Number of blocks in each of the two stacks.
        heads: Number of attention heads of every block. It must divide `input_dim`.
        ffn_dim: Number of units of the feed-forward network of every block.
        dropout: Dropout rate of the embeddings that enter a stack, and of the output of every sublayer.
        dropout_attention: Dropout rate of the attention weights.
        dropout_relu: Dropout rate of the feed-forward units.
        norm: `pre` puts a layer norm before each sublayer and after each stack. `post` puts it after each residual sum
            (Vaswani et al.).
        recompute: Save memory by storing only the input of each block and computing the block again in the backward
            pass (activation checkpointing).
    """

    def __init__(
        self,
        source_dim: int,
        input_dim: int,
        layers: Layers = 6,
        heads: Dim = 8,
        ffn_dim: Dim = 2048,
        dropout: Probability = 0.1,
        dropout_attention: Probability = 0.0,
        dropout_relu: Probability = 0.0,
        norm: Norm = "pre",
        recompute: bool = False,
    ) -> None:
        super().__init__()
        check_sizes("EncoderDecoder", source_dim=source_dim, input_dim=input_dim, layers=layers)
        check_sizes("EncoderDecoder", heads=heads, ffn_dim=ffn_dim)
        check_rates("EncoderDecoder", dropout=dropout, dropout_attention=dropout_attention, dropout_relu=dropout_relu)
        check_heads("EncoderDecoder", heads, input_dim)
        _check_dims_and_norm(source_dim, input_dim, norm)
        self.source_dim = source_dim
        self.input_dim = input_dim
        self.dim = input_dim
        self.heads = heads
        self.dropout = dropout
        # Recomputing a block draws its dropout masks again, for which the generator's state is read from the GPU.
        self.synchronizes = recompute

        def build_stack(block_class: type[ResidualBlock]) -> nn.ModuleList:
            return nn.ModuleList(
                block_class(
                    dim=input_dim,
                    heads=heads,
                    ffn_dim=ffn_dim,
                    dropout=dropout,
                    dropout_attention=dropout_attention,
                    dropout_relu=dropout_relu,
                    recompute=recompute,
                    norm=norm,
                )
                for _ in range(layers)
            )

        self.source_blocks = build_stack(SourceBlock)
        self.target_blocks = build_stack(TargetBlock)
        self.source_norm = nn.LayerNorm(input_dim) if norm == "pre" else nn.Identity()
        self.target_norm = nn.LayerNorm(input_dim) if norm == "pre" else nn.Identity()
        # One product computes the source keys and values of all target blocks. It is a module of its own because FSDP
        # gathers the parameters of a block only while that block runs.
        self.source_in = JoinedLinear(input_dim, 2 * layers)
        self.source_in.draw(ATTENTION_GAIN)
        self._positions = SinusoidalPositions(input_dim)

    @property
    def blocks(self) -> Iterator[nn.Module]:
        """The blocks of both stacks. Distributed training shards each block separately."""
        yield from self.source_blocks
        yield from self.target_blocks

    def decoding_state(self, streams: int, device: torch.device | None = None, steps: int | None = None) -> State:
        """Return an empty KV cache of the target. Merge it with the result of `encode_source` to decode.

        Args:
            streams: Number of streams, B.
            device: Device of the cache.
            steps: Capacity of the cache. If it is given, the cache keeps its shape, which a CUDA graph needs. By
                default the cache grows with every step.
        """
        return create_cache(len(self.target_blocks), streams, self.heads, self.dim, device, steps)

    def encode_source(self, source_BSD: Tensor, mask_BS: Tensor) -> State:
        """Run the source stack. Return the source mask, and the keys and values of the source for each target block.

        Args:
            source_BSD: Vectors of the source tokens, with shape (B, S, D).
            mask_BS: True for tokens and False for padding, which must be on the right.
        """
        source_BSD = self._add_positions(source_BSD, {}, None)
        for block in self.source_blocks:
            source_BSD = block(source_BSD, mask_BS)

        # Compute the source keys and values of all target blocks at once.
        num_blocks = len(self.target_blocks)
        joined_BSE = self.source_in(self.source_norm(source_BSD))
        keys_and_values = split_heads(joined_BSE, 2 * num_blocks, self.heads)
        state = {"source_mask": mask_BS[None]}
        for index, source_2BHSK in enumerate(keys_and_values.chunk(num_blocks)):
            state[f"source.{index}"] = source_2BHSK
        return state

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        """Return the hidden states of target steps that follow `state`, and the state after the steps.

        If the state has a KV cache, the steps follow the cached steps, and the returned state has the extended cache.

        Args:
            inputs_BTD: Vectors of the target tokens, with shape (B, T, D).
            state: The state that `encode_source` returned, merged with a KV cache to decode step by step.
        """
        slots = CacheSlots.for_window(state, inputs_BTD)
        hidden_BTD, next_cache = self._run_target_blocks(len(self.target_blocks), inputs_BTD, state, slots)
        hidden_BTD = self.target_norm(hidden_BTD)
        # There is no dropout after the last block, so `output` and `raw` are the same.
        return Encoded(output=hidden_BTD, raw=hidden_BTD, state=state | next_cache)

    def attention(self, inputs_BTD: Tensor, state: State) -> Tensor:
        """Return the attention weights of the last target block over the source, averaged over its heads, (B, T, S).

        Args:
            inputs_BTD: Vectors of the target tokens, with shape (B, T, D).
            state: The state before these tokens.
        """
        last_index = len(self.target_blocks) - 1
        slots = CacheSlots.for_window(state, inputs_BTD)
        hidden_BTD, _ = self._run_target_blocks(last_index, inputs_BTD, state, slots)
        last_block = self.target_blocks[last_index]
        assert isinstance(last_block, TargetBlock)
        past_2BHPK, source_2BHSK, mask_BS = _block_state(state, last_index)
        return last_block.source_attention_weights(hidden_BTD, past_2BHPK, source_2BHSK, mask_BS, slots)

    def translation_flops(self, source_lengths_B: Tensor, target_lengths_B: Tensor) -> int:
        """Return the number of floating-point operations of a training step (see `nn/part.py`).

        Args:
            source_lengths_B: Number of tokens of each source, with shape (B,).
            target_lengths_B: Number of tokens of each target, with shape (B,).
        """
        source_weights = count_matrix_weights(self.source_blocks) + count_matrix_weights(self.source_in)
        target_weights = count_matrix_weights(self.target_blocks)
        weight_products = int(source_lengths_B.sum()) * source_weights + int(target_lengths_B.sum()) * target_weights

        # Attention computes two products (scores and weighted values) of D dimensions per token pair. It covers all
        # pairs within a source, all source-target pairs, and half of the pairs within a target, because that attention
        # is causal.
        pairs_B = 2 * source_lengths_B.square() + 2 * source_lengths_B * target_lengths_B + target_lengths_B.square()
        attention_products = len(self.target_blocks) * self.dim * int(pairs_B.sum())
        return FLOPS_PER_WEIGHT * (weight_products + attention_products)

    def _run_target_blocks(
        self, num_blocks: int, inputs_BTD: Tensor, state: State, slots: CacheSlots | None
    ) -> tuple[Tensor, State]:
        """Run the first target blocks over steps that follow `state`.

        Return the hidden states and the KV cache extended by these steps, which is empty if the state has no cache.

        Args:
            num_blocks: Number of blocks to run.
            inputs_BTD: Vectors of the target tokens.
            state: The state before the steps.
            slots: The slots of the steps, if the KV cache has a fixed capacity.
        """
        hidden_BTD = self._add_positions(inputs_BTD, state, slots)
        next_cache: State = {}
        if slots is not None:
            next_cache["cached_steps"] = slots.cached_steps
        for index in range(num_blocks):
            past_2BHPK, source_2BHSK, mask_BS = _block_state(state, index)
            hidden_BTD, block_cache = self.target_blocks[index](hidden_BTD, past_2BHPK, source_2BHSK, mask_BS, slots)
            if block_cache is not None:
                next_cache[f"block.{index}"] = block_cache
        return hidden_BTD, next_cache

    def _add_positions(self, inputs_BTD: Tensor, state: State, slots: CacheSlots | None) -> Tensor:
        """Return the input of a stack: the vectors plus the encodings of their positions, with dropout."""
        # Convert the input to the type of the parameters, so that under autocast the residual stream and the norms stay
        # in float32.
        hidden_BTD = inputs_BTD.to(next(self.parameters()).dtype)
        hidden_BTD = hidden_BTD + self._positions(state, slots, hidden_BTD)
        return F.dropout(hidden_BTD, self.dropout, self.training)


def _check_dims_and_norm(source_dim: int, input_dim: int, norm: str) -> None:
    if source_dim != input_dim:
        raise SettingsError(
            f"EncoderDecoder: source vectors have {source_dim} dimensions and target vectors {input_dim}, but both "
            "stacks must have the same dimension; give both input ends the same dimension"
        )
    if norm not in get_args(Norm):
        raise SettingsError(f"EncoderDecoder: norm = {norm!r}: must be 'pre' or 'post'")


def _block_state(state: State, index: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the KV cache of a target block, if any, its keys and values of the source, and the padding mask."""
    return state.get(f"block.{index}"), state[f"source.{index}"], state["source_mask"][0]


class SourceBlock(ResidualBlock):
    """A block of attention over the source and a feed-forward network. Its arguments are those of `ResidualBlock`."""

    def forward(self, hidden_BSD: Tensor, mask_BS: Tensor) -> Tensor:
        """Return the output of the block. `mask_BS` is False where the source is padding."""
        return self._run(self._compute, hidden_BSD, mask_BS)

    def _compute(self, hidden_BSD: Tensor, mask_BS: Tensor) -> Tensor:
        joined_BSE = self.attention_in(self._normalise_input(hidden_BSD, self.attention_norm))
        queries_BHSK, keys_BHSK, values_BHSK = split_heads(joined_BSE, 3, self.heads).unbind()
        attended_BSD = self._attend(queries_BHSK, keys_BHSK, values_BHSK, mask_BS[:, None, None])
        hidden_BSD = self._add_residual(hidden_BSD, self.attention_out(attended_BSD), self.attention_norm)
        return self._feed_forward(hidden_BSD)


class TargetBlock(ResidualBlock):
    """A block of causal attention over the target, attention over the source and a feed-forward network.

    Its arguments are those of `ResidualBlock`.
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
        super().__init__(dim, heads, ffn_dim, dropout, dropout_attention, dropout_relu, recompute, norm)
        self.cross_norm = nn.LayerNorm(dim)
        self.cross_in = JoinedLinear(dim, 1)  # queries; keys and values are computed for all blocks at once
        self.cross_out = nn.Linear(dim, dim)
        self.cross_in.draw(ATTENTION_GAIN)
        init_linear(self.cross_out)

    def forward(
        self,
        hidden_BTD: Tensor,
        past_2BHPK: Tensor | None,
        source_2BHSK: Tensor,
        mask_BS: Tensor,
        slots: CacheSlots | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the block and its KV cache, extended by these steps (None without a cache).

        Args:
            hidden_BTD: The residual stream.
            past_2BHPK: The KV cache of this block, or None.
            source_2BHSK: The keys and values of the source for this block.
            mask_BS: False where the source is padding.
            slots: The slots of the steps, if the KV cache has a fixed capacity.
        """
        return self._run(self._compute, hidden_BTD, past_2BHPK, source_2BHSK, mask_BS, slots)

    def source_attention_weights(
        self,
        hidden_BTD: Tensor,
        past_2BHPK: Tensor | None,
        source_2BHSK: Tensor,
        mask_BS: Tensor,
        slots: CacheSlots | None,
    ) -> Tensor:
        """Return the attention weights of each step over the source, averaged over the heads, (B, T, S)."""
        hidden_BTD, _ = self._self_attention(hidden_BTD, past_2BHPK, slots)
        queries_BHTK = self._source_queries(hidden_BTD)
        keys_BHSK = source_2BHSK[0].to(queries_BHTK.dtype)
        head_dim = queries_BHTK.shape[-1]
        scores_BHTS = to_state_dtype(queries_BHTK @ keys_BHSK.mT) / math.sqrt(head_dim)
        weights_BHTS = scores_BHTS.masked_fill(~mask_BS[:, None, None], -math.inf).softmax(-1)
        return weights_BHTS.mean(1)

    def _compute(
        self,
        hidden_BTD: Tensor,
        past_2BHPK: Tensor | None,
        source_2BHSK: Tensor,
        mask_BS: Tensor,
        slots: CacheSlots | None,
    ) -> tuple[Tensor, Tensor | None]:
        hidden_BTD, extended_2BHUK = self._self_attention(hidden_BTD, past_2BHPK, slots)
        queries_BHTK = self._source_queries(hidden_BTD)
        keys_BHSK, values_BHSK = source_2BHSK.to(queries_BHTK.dtype).unbind()
        attended_BTD = self._attend(queries_BHTK, keys_BHSK, values_BHSK, mask_BS[:, None, None])
        hidden_BTD = self._add_residual(hidden_BTD, self.cross_out(attended_BTD), self.cross_norm)
        return self._feed_forward(hidden_BTD), extended_2BHUK

    def _source_queries(self, hidden_BTD: Tensor) -> Tensor:
        """Return the queries of the attention over the source, (B, H, T, K)."""
        joined_BTD = self.cross_in(self._normalise_input(hidden_BTD, self.cross_norm))
        return split_heads(joined_BTD, 1, self.heads)[0]
