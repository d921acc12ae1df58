"""The decoder-only transformer of Baevski & Auli (2019): causal self-attention in pre-norm blocks.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(W2 dropout_relu(relu(W1 norm(x))))

after the input was given its positions: sines in one half of the width and cosines in the other, computed for as many
positions as there are. Nothing is carried between windows: positions begin anew with each of them. Where a text is read
piece by piece, a memory holds the keys and values of what was read, and positions go on. It grows with every step; or
it has room for a number of them from the beginning, and `known` counts those of each stream, (1, B): then all steps
have the same shapes, as a CUDA graph needs them.

`Halves`, `Room` and `Positions` are those of `encoder_decoder.py` as well, whose blocks may have their norms behind the
sums.

Shapes: B streams, T steps, S steps in memory, U = S + T, or the steps that a memory has room for, D width, H heads,
K = D / H width of a head, F feed-forward units; 2 are keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, TypeVar, TypeVarTuple, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reefknot.errors import ArgumentError, SettingsError
from reefknot.lab.config.settings import Dim, Layers, Probability, check_rates
from reefknot.nn.encoders.contract import Encoded, Encoder, State, check_sizes

FIRST_POSITION = 2
"""The authors' program counts positions from the first id behind its padding symbol."""
SLOWEST = 10_000.0
"""Positions in which the slowest sine turns by one."""

Norm = Literal["pre", "post"]
Given = TypeVarTuple("Given")
Made = TypeVar("Made")


class Transformer(Encoder):
    """Blocks of causal self-attention with sinusoidal positions (Baevski & Auli 2019)."""

    carries = False

    def __init__(
        self,
        input_dim: int,
        layers: Annotated[Layers, Field(description="number of blocks")] = 16,
        heads: Annotated[Dim, Field(description="attention heads of every block; they divide the width")] = 16,
        ffn_dim: Annotated[Dim, Field(description="units between the two matrices of a block's feed-forward part")] = (
            4096
        ),
        dropout: Annotated[
            Probability, Field(description="drop rate on what goes in and on what each half of a block adds")
        ] = 0.0,
        dropout_attention: Annotated[Probability, Field(description="drop rate on the attention weights")] = 0.0,
        dropout_relu: Annotated[Probability, Field(description="drop rate on the feed-forward units")] = 0.0,
        final_norm: Annotated[
            bool, Field(description="a layer norm after the last block; the published models have none")
        ] = False,
        recompute: Annotated[
            bool, Field(description="keep of a block its input alone and compute it again on the way back")
        ] = False,
    ) -> None:
        super().__init__()
        check_sizes("Transformer", input_dim=input_dim, layers=layers, heads=heads, ffn_dim=ffn_dim)
        check_rates("Transformer", dropout=dropout, dropout_attention=dropout_attention, dropout_relu=dropout_relu)
        check_heads("Transformer", heads, input_dim)
        self.input_dim = self.dim = input_dim
        self.heads = heads
        self.dropout = dropout
        self.waits = recompute  # a block's masks are drawn again from where the generator stood, which is asked for
        self.blocks = nn.ModuleList(
            Block(input_dim, heads, ffn_dim, dropout, dropout_attention, dropout_relu, recompute) for _ in range(layers)
        )
        self.final_norm = nn.LayerNorm(input_dim) if final_norm else None
        self._positions = Positions(input_dim)

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        return {}

    def memory(self, streams: int, device: torch.device | None = None, steps: int | None = None) -> State:
        return empty_memory(len(self.blocks), streams, self.heads, self.dim, device, steps)

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        """Without a state, a window by itself; with a memory, what follows it, and the longer memory."""
        room = Room.after(state, x_BTD)
        # In the type of the parameters: under autocast, what the blocks add up and the norms stay in float32.
        x_BTD = x_BTD.to(next(self.parameters()).dtype)
        x_BTD = F.dropout(x_BTD + self._positions(state, room, x_BTD), self.dropout, self.training)
        memory: State = {} if room is None else {"known": room.known}
        for number, block in enumerate(self.blocks):
            name = f"block.{number}"
            x_BTD, longer = block(x_BTD, state.get(name), room)
            if longer is not None:
                memory[name] = longer
        if self.final_norm is not None:
            x_BTD = self.final_norm(x_BTD)
        return Encoded(x_BTD, x_BTD, memory)


class Room(NamedTuple):
    """Where the steps of a window stand in a memory that keeps its size."""

    known: Tensor
    """Steps that the memory holds with them, (1, B)."""
    step: Tensor
    """Which step of its stream each is, (B, T)."""
    here: Tensor
    """The place of each, (B, T, U)."""
    seen: Tensor
    """Those that it attends to, its own and all before, (B, T, U)."""

    @classmethod
    def after(cls, state: State, x_BTD: Tensor) -> Room | None:
        """That of the window x; None where the state holds no memory, or one that grows."""
        known_1B = state.get("known")
        if known_1B is None:
            return None
        new, room, device = x_BTD.shape[1], state["block.0"].shape[-2], x_BTD.device
        # A GPU is not asked; whoever reads there counts the steps.
        asked = device.type == "cpu" and not torch.compiler.is_compiling()
        known = max(known_1B[0].tolist(), default=0) if asked else 0
        if known + new > room:
            raise ArgumentError(
                f"{new} more steps after {known} do not fit into a memory of {room}; begin with one of more steps"
            )
        step_BT = known_1B[0, :, None] + torch.arange(new, device=device)
        at_U = torch.arange(room, device=device)
        return cls(known_1B + new, step_BT, step_BT[..., None] == at_U, step_BT[..., None] >= at_U)

    def filled(self, past_2BHUK: Tensor, new_2BHTK: Tensor) -> Tensor:
        """The memory with keys and values of the new steps in their places."""
        for here_BU, new_2BHK in zip(self.here.unbind(1), new_2BHTK.unbind(3), strict=True):
            past_2BHUK = torch.where(here_BU[:, None, :, None], new_2BHK[:, :, :, None], past_2BHUK)
        return past_2BHUK


class Halves(nn.Module):
    """What every block has: self-attention and a feed-forward network at each step, both added to what they read."""

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
        draw(self.attention_in, 3)
        for layer in (self.attention_out, self.ffn_in, self.ffn_out):
            draw(layer)

    def _run(self, compute: Callable[[*Given], Made], *given: *Given) -> Made:
        """Compute a block, now or now and again on the way back."""
        if self.recompute and torch.is_grad_enabled():
            # Here and not around the block, so that whoever shards its parameters gathers them once for both.
            return cast(Made, checkpoint(compute, *given, use_reentrant=False))
        return compute(*given)

    def _read(self, x_BTD: Tensor, norm: nn.LayerNorm) -> Tensor:
        """What a part of the block reads of the sum so far."""
        return cast(Tensor, norm(x_BTD)) if self.norm == "pre" else x_BTD

    def _add(self, x_BTD: Tensor, added_BTD: Tensor, norm: nn.LayerNorm) -> Tensor:
        """The sum, when the part has read it and adds this."""
        x_BTD = x_BTD + F.dropout(added_BTD, self.dropout, self.training)
        return cast(Tensor, norm(x_BTD)) if self.norm == "post" else x_BTD

    def _feed_forward(self, x_BTD: Tensor) -> Tensor:
        units_BTF = F.relu(self.ffn_in(self._read(x_BTD, self.ffn_norm)))
        units_BTF = F.dropout(units_BTF, self.dropout_relu, self.training)
        return self._add(x_BTD, self.ffn_out(units_BTF), self.ffn_norm)

    def _attend(
        self, x_BTD: Tensor, past_2BHSK: Tensor | None, room: Room | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Add attention over the steps so far; after a `past`, also return the keys and values of all steps."""
        parts_3BHTK = split_heads(self.attention_in(self._read(x_BTD, self.attention_norm)), 3, self.heads)
        # All three at once: the gradient of each alone would be laid into zeros of their common size.
        q_BHTK, k_BHUK, v_BHUK = parts_3BHTK.unbind()
        longer = None
        if past_2BHSK is not None:
            past_2BHSK, new_2BHTK = past_2BHSK.to(q_BHTK.dtype), parts_3BHTK[1:]
            longer = torch.cat([past_2BHSK, new_2BHTK], dim=3) if room is None else room.filled(past_2BHSK, new_2BHTK)
            k_BHUK, v_BHUK = longer.unbind()
        new, known = q_BHTK.shape[2], k_BHUK.shape[2]
        # `is_causal` counts from the first key. A step that follows a memory sees all of it, and a step alone sees all.
        mask = None
        if room is not None:
            mask = room.seen[:, None]
        elif 1 < new < known:
            mask = torch.ones(new, known, dtype=torch.bool, device=x_BTD.device).tril(known - new)
        h_BTD = self._weighted(q_BHTK, k_BHUK, v_BHUK, mask, is_causal=mask is None and new == known)
        return self._add(x_BTD, self.attention_out(h_BTD), self.attention_norm), longer

    def _weighted(
        self, q_BHTK: Tensor, k_BHUK: Tensor, v_BHUK: Tensor, mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        """The values as the queries attend to them, those of all heads side by side, (B, T, D)."""
        rate = self.dropout_attention if self.training else 0.0
        h_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHUK, v_BHUK, mask, dropout_p=rate, is_causal=is_causal)
        return h_BHTK.transpose(1, 2).flatten(2)


class Block(Halves):
    """Attention over the steps so far, then a feed-forward network at each step."""

    def forward(
        self, x_BTD: Tensor, past_2BHSK: Tensor | None = None, room: Room | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What the block makes of a window, and after a `past` the keys and values of all steps, its own among them."""
        return self._run(self._compute, x_BTD, past_2BHSK, room)

    def _compute(self, x_BTD: Tensor, past_2BHSK: Tensor | None, room: Room | None) -> tuple[Tensor, Tensor | None]:
        x_BTD, longer = self._attend(x_BTD, past_2BHSK, room)
        return self._feed_forward(x_BTD), longer


def draw(layer: nn.Linear, beside: int | None = None) -> None:
    """Start as the authors' program does: queries, keys and values, so many beside each other, as matrices of their own
    and smaller than others."""
    for weight in layer.weight.detach().chunk(beside or 1):
        nn.init.xavier_uniform_(weight, gain=2**-0.5 if beside else 1.0)
    nn.init.zeros_(layer.bias)


def split_heads(joined_BTD: Tensor, parts: int, heads: int) -> Tensor:
    """Queries, keys or values that lie side by side, by part and head: (parts, B, H, T, K)."""
    return torch.unflatten(joined_BTD, -1, (parts, heads, -1)).permute(2, 0, 3, 1, 4)


def empty_memory(
    blocks: int, streams: int, heads: int, dim: int, device: torch.device | None, steps: int | None
) -> State:
    """For each block the keys and values of no step yet, (2, B, H, 0, K); or room for so many steps, none of which is
    known."""
    shape = (2, streams, heads, steps or 0, dim // heads)
    memory = {f"block.{number}": torch.zeros(shape, device=device) for number in range(blocks)}
    if steps is None:
        return memory
    check_sizes("a memory", steps=steps)
    return {"known": torch.zeros(1, streams, dtype=torch.int64, device=device)} | memory


def check_heads(who: str, heads: int, dim: int) -> None:
    """Refuse heads that would not be equally wide."""
    if dim % heads:
        raise SettingsError(
            f"{who}: heads = {heads} do not divide the width of the vectors it reads, {dim}; "
            "use a number that does, or vectors of another width"
        )


class Positions:
    """The sinusoids of a width, computed once and kept, in lengths of powers of two.

    No buffers: they follow from the width, and neither move nor change type with the parameters. None is ever let go: a
    CUDA graph reads the one that it was captured with. A call that is compiled computes its own, and so does one that
    is captured before any other computed them, since what it leaves is not there yet.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._kept: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, state: State, room: Room | None, x_BTD: Tensor) -> Tensor:
        """Those of the steps of x, which follow a state, (T, D); in the room of a memory, (B, T, D)."""
        held = state["block.0"].shape[-2] if "block.0" in state else 0
        if room is not None:
            return F.embedding(room.step, self._between(0, held, x_BTD))
        return self._between(held, held + x_BTD.shape[1], x_BTD)

    def _between(self, start: int, stop: int, x_BTD: Tensor) -> Tensor:
        device = x_BTD.device
        if torch.compiler.is_compiling():
            return sinusoids(start, stop, self.dim, device).to(x_BTD.dtype)
        length = 1 << max(stop - 1, 0).bit_length()
        key = length, x_BTD.dtype, device
        found = self._kept.get(key)
        if found is None:
            found = sinusoids(0, length, self.dim, device).to(x_BTD.dtype)
            if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self._kept[key] = found
        return found[start:stop]


def sinusoids(start: int, stop: int, dim: int, device: torch.device) -> Tensor:
    """What tells the positions from `start` to `stop` apart, (T, D): sines in the first half, cosines in the second."""
    half = dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=device) / max(half - 1, 1)
    at = torch.arange(start, stop, dtype=torch.float64, device=device) + FIRST_POSITION
    angles = at[:, None] * torch.exp(-math.log(SLOWEST) * exponents)
    # An odd width has one number more than the halves; it stays zero.
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, dim % 2))
