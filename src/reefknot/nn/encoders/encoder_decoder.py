"""The encoder-decoder Transformer of Vaswani et al. (2017): one stack of blocks reads a source, one writes a target.

    pre                         x = x + dropout(half(norm(x)))            and a norm after the last block of each stack
    post (Vaswani et al.)       x = norm(x + dropout(half(x)))

A block of the source has two halves, attention over the whole source and a feed-forward network. A block of the target
has attention over the target so far, attention over the source as its stack left it, and the network. What the blocks
share with those of a language model, and the positions, are in `transformer.py`. To scale embeddings is a setting of
the input ends.

The base model has 6 + 6 blocks, 512 wide, with 8 heads and 2048 units, the big one 1024, 16 and 4096.

The state: `there`, which source steps are no padding, (1, B, S); for each block of the target `source.N`, keys and
values of the source, (2, B, H, S, K), and in step-by-step decoding `block.N`, those of the target so far,
(2, B, H, P, K), with `known`, how many they are, (1, B), where the memory keeps its size.

Shapes: B streams, S source steps, T target steps, P target steps in memory, D width, H heads, K = D / H width of a
head; 2 are keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Dim, Layers, Probability, check_rates
from reefknot.nn.encoders.contract import Encoded, SourceEncoder, State, at_rest, check_sizes
from reefknot.nn.encoders.transformer import Halves, Norm, Positions, Room, check_heads, draw, empty_memory, split_heads


class EncoderDecoder(SourceEncoder):
    """The encoder-decoder Transformer with sinusoidal positions (Vaswani et al. 2017)."""

    def __init__(
        self,
        source_dim: int,
        input_dim: int,
        layers: Annotated[Layers, Field(description="number of blocks in each of the two stacks")] = 6,
        heads: Annotated[Dim, Field(description="attention heads of every block; they divide the width")] = 8,
        ffn_dim: Annotated[Dim, Field(description="units between the two matrices of a block's feed-forward part")] = (
            2048
        ),
        dropout: Annotated[
            Probability, Field(description="drop rate on what goes in and on what each part of a block adds")
        ] = 0.1,
        dropout_attention: Annotated[Probability, Field(description="drop rate on the attention weights")] = 0.0,
        dropout_relu: Annotated[Probability, Field(description="drop rate on the feed-forward units")] = 0.0,
        norm: Annotated[
            Norm,
            Field(
                description="pre: layer norms stand before attention and feed-forward part, and after each stack; "
                "post: after each sum (Vaswani)"
            ),
        ] = "pre",
        recompute: Annotated[
            bool, Field(description="keep of a block its input alone and compute it again on the way back")
        ] = False,
    ) -> None:
        super().__init__()
        check_sizes("EncoderDecoder", source_dim=source_dim, input_dim=input_dim, layers=layers)
        check_sizes("EncoderDecoder", heads=heads, ffn_dim=ffn_dim)
        check_rates("EncoderDecoder", dropout=dropout, dropout_attention=dropout_attention, dropout_relu=dropout_relu)
        check_heads("EncoderDecoder", heads, input_dim)
        if source_dim != input_dim:
            raise SettingsError(
                f"EncoderDecoder: its source is {source_dim} wide and its target {input_dim}, but both stacks have one "
                "width; make the two input ends equally wide"
            )
        if norm not in get_args(Norm):
            raise SettingsError(f"EncoderDecoder: norm = {norm!r}: must be 'pre' or 'post'")
        self.source_dim = self.input_dim = self.dim = input_dim
        self.heads = heads
        self.dropout = dropout
        self.waits = recompute  # as in Transformer: masks are drawn again from where the generator stood
        shape = input_dim, heads, ffn_dim, dropout, dropout_attention, dropout_relu, recompute, norm
        self.source_blocks = nn.ModuleList(SourceBlock(*shape) for _ in range(layers))
        self.target_blocks = nn.ModuleList(TargetBlock(*shape) for _ in range(layers))
        self.source_norm, self.target_norm = (
            nn.LayerNorm(input_dim) if norm == "pre" else nn.Identity() for _ in range(2)
        )
        # Keys and values of the source for all blocks of the target: one product, and nothing of a block that is
        # sharded is used outside of it.
        self.source_in = nn.Linear(input_dim, 2 * layers * input_dim)
        draw(self.source_in, 2 * layers)
        self._positions = Positions(input_dim)

    @property
    def blocks(self) -> Iterator[nn.Module]:
        """Of both stacks: what is sharded by itself."""
        yield from self.source_blocks
        yield from self.target_blocks

    def memory(self, streams: int, device: torch.device | None = None, steps: int | None = None) -> State:
        return empty_memory(len(self.target_blocks), streams, self.heads, self.dim, device, steps)

    def read(self, source_BSD: Tensor, there_BS: Tensor) -> State:
        source_BSD = self._enter(source_BSD, {}, None)
        for block in self.source_blocks:
            source_BSD = block(source_BSD, there_BS)
        layers = len(self.target_blocks)
        parts = split_heads(self.source_in(self.source_norm(source_BSD)), 2 * layers, self.heads).chunk(layers)
        return {"there": there_BS[None]} | {f"source.{number}": part for number, part in enumerate(parts)}

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        """After `read` alone, a window by itself; with a memory, what follows it, and the longer memory."""
        x_BTD, memory = self._decode(x_BTD, state, Room.after(state, x_BTD), len(self.target_blocks))
        x_BTD = self.target_norm(x_BTD)
        return Encoded(x_BTD, x_BTD, state | memory)

    def attention(self, x_BTD: Tensor, state: State) -> Tensor:
        last = len(self.target_blocks) - 1
        room = Room.after(state, x_BTD)
        x_BTD, _ = self._decode(x_BTD, state, room, last)
        block = self.target_blocks[last]
        assert isinstance(block, TargetBlock)
        return block.weights(x_BTD, *_context(state, last), room)

    def _decode(self, x_BTD: Tensor, state: State, room: Room | None, blocks: int) -> tuple[Tensor, State]:
        """What the first blocks make of the target steps that follow `state`, and their longer memory, if any."""
        x_BTD = self._enter(x_BTD, state, room)
        memory: State = {} if room is None else {"known": room.known}
        for number in range(blocks):
            x_BTD, longer = self.target_blocks[number](x_BTD, *_context(state, number), room)
            if longer is not None:
                memory[f"block.{number}"] = longer
        return x_BTD, memory

    def _enter(self, x_BTD: Tensor, state: State, room: Room | None) -> Tensor:
        # In the type of the parameters: under autocast, what the blocks add up and the norms stay in float32.
        x_BTD = x_BTD.to(next(self.parameters()).dtype)
        return F.dropout(x_BTD + self._positions(state, room, x_BTD), self.dropout, self.training)


def _context(state: State, number: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """What a block of the target attends to besides its input."""
    return state.get(f"block.{number}"), state[f"source.{number}"], state["there"][0]


class SourceBlock(Halves):
    """Attention over all steps of the source that are there, then a feed-forward network at each step."""

    def forward(self, x_BSD: Tensor, there_BS: Tensor) -> Tensor:
        return self._run(self._compute, x_BSD, there_BS)

    def _compute(self, x_BSD: Tensor, there_BS: Tensor) -> Tensor:
        joined_BSE = self.attention_in(self._read(x_BSD, self.attention_norm))
        q_BHSK, k_BHSK, v_BHSK = split_heads(joined_BSE, 3, self.heads).unbind()
        h_BSD = self._weighted(q_BHSK, k_BHSK, v_BHSK, there_BS[:, None, None])
        return self._feed_forward(self._add(x_BSD, self.attention_out(h_BSD), self.attention_norm))


class TargetBlock(Halves):
    """Attention over the target so far, attention over the source, then a feed-forward network at each step."""

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
        self.cross_in = nn.Linear(dim, dim)  # queries; keys and values are made for all blocks at once
        self.cross_out = nn.Linear(dim, dim)
        draw(self.cross_in, 1)
        draw(self.cross_out)

    def forward(
        self,
        x_BTD: Tensor,
        past_2BHPK: Tensor | None,
        source_2BHSK: Tensor,
        there_BS: Tensor,
        room: Room | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What the block makes of a window, and after a `past` the keys and values of all steps, its own among them."""
        return self._run(self._compute, x_BTD, past_2BHPK, source_2BHSK, there_BS, room)

    def weights(
        self, x_BTD: Tensor, past_2BHPK: Tensor | None, source_2BHSK: Tensor, there_BS: Tensor, room: Room | None
    ) -> Tensor:
        """How much each step attends to each source step, as a mean over the heads, (B, T, S)."""
        x_BTD, _ = self._attend(x_BTD, past_2BHPK, room)
        q_BHTK = self._queries(x_BTD)
        scores_BHTS = at_rest(q_BHTK @ source_2BHSK[0].to(q_BHTK.dtype).mT) / math.sqrt(q_BHTK.shape[-1])
        return scores_BHTS.masked_fill(~there_BS[:, None, None], -math.inf).softmax(-1).mean(1)

    def _compute(
        self, x_BTD: Tensor, past_2BHPK: Tensor | None, source_2BHSK: Tensor, there_BS: Tensor, room: Room | None
    ) -> tuple[Tensor, Tensor | None]:
        x_BTD, longer = self._attend(x_BTD, past_2BHPK, room)
        q_BHTK = self._queries(x_BTD)
        k_BHSK, v_BHSK = source_2BHSK.to(q_BHTK.dtype).unbind()
        h_BTD = self._weighted(q_BHTK, k_BHSK, v_BHSK, there_BS[:, None, None])
        return self._feed_forward(self._add(x_BTD, self.cross_out(h_BTD), self.cross_norm)), longer

    def _queries(self, x_BTD: Tensor) -> Tensor:
        return split_heads(self.cross_in(self._read(x_BTD, self.cross_norm)), 1, self.heads)[0]
