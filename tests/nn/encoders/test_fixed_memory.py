"""A memory with room for a number of steps against one that grows, in both transformers.

Shapes: B streams, T steps, D width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.errors import ArgumentError, SettingsError
from reefknot.nn.encoders.contract import Encoder, State
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.encoders.transformer import Transformer

from .stacks import HEADS, LAYERS, STEPS, STREAMS, WIDTH, build, close, gradients, source, vectors

ROOM = 11


def decoder_only(**options: Any) -> Transformer:
    torch.manual_seed(0)
    encoder = Transformer(WIDTH, layers=3, heads=HEADS, ffn_dim=20, **options).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return encoder


ALL = {
    "transformer": decoder_only,
    "transformer with a norm": lambda: decoder_only(final_norm=True),
    "pre": build,
    "post": lambda: build(norm="post"),
}


@pytest.fixture(params=list(ALL))
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return ALL[request.param]().eval()


def begun(encoder: Encoder, steps: int | None) -> State:
    source_BSD, there_BS = source()
    source_BSD = source_BSD.to(next(encoder.parameters()).dtype)
    read = encoder.read(source_BSD, there_BS) if isinstance(encoder, EncoderDecoder) else {}
    return encoder.decoding_state(STREAMS, steps=steps) | read


def blocks(state: State) -> list[Tensor]:
    return [each for name, each in state.items() if name.startswith("block.")]


@pytest.mark.parametrize("cuts", [[7], [1] * 7, [3, 4], [4, 1, 2], [0, 2, 5]])
@pytest.mark.parametrize("steps", [STEPS, ROOM])
def test_it_is_the_memory_that_grows(encoder: Encoder, cuts: list[int], steps: int) -> None:
    grown, fixed = begun(encoder, None), begun(encoder, steps)
    shapes, read = {name: each.shape for name, each in fixed.items()}, 0
    for piece in vectors().split(cuts, dim=1):
        if isinstance(encoder, EncoderDecoder):
            close(encoder.attention(piece, fixed), encoder.attention(piece, grown))
        before = {name: each.clone() for name, each in fixed.items()}
        one, other = encoder(piece, grown), encoder(piece, fixed)
        close(other.output, one.output)
        assert all(torch.equal(fixed[name], each) for name, each in before.items()), "what was given is left alone"
        grown, fixed, read = one.state, other.state, read + piece.shape[1]
        assert {name: each.shape for name, each in fixed.items()} == shapes
        assert fixed["known"].tolist() == [[read] * STREAMS]
        for large, small in zip(blocks(fixed), blocks(grown), strict=True):
            close(large[:, :, :, :read].to(small.dtype), small)
            assert not large[:, :, :, read:].any()


def test_streams_may_be_reordered_repeated_and_of_different_lengths(encoder: Encoder) -> None:
    x_BTD = vectors()
    grown, fixed = begun(encoder, None), begun(encoder, ROOM)
    for step, kept in enumerate(([2, 0, 0, 1], [3, 3, 1], [0, 2, 1, 1, 0], [4, 1])):
        new = x_BTD[torch.arange(grown["block.0"].shape[1]) % STREAMS, step, None]
        one, other = encoder(new, grown), encoder(new, fixed)
        close(other.output, one.output)
        order = torch.tensor(kept)
        grown, fixed = ({name: each.index_select(1, order) for name, each in at.state.items()} for at in (one, other))
    begin = begun(encoder, ROOM)
    after = encoder(x_BTD[:, :3], begin).state
    mixed = {name: torch.cat([after[name][:, :1], begin[name][:, 1:]], dim=1) for name in begin}
    found = encoder(x_BTD[:, 3:5], mixed)
    close(found.output[:1], encoder(x_BTD[:, 3:5], after).output[:1])
    close(found.output[1:], encoder(x_BTD[:, 3:5], begin).output[1:])
    assert found.state["known"].tolist() == [[5, 2, 2]]


def test_what_is_not_known_yet_may_hold_anything(encoder: Encoder) -> None:
    state = encoder(vectors()[:, :3], begun(encoder, ROOM)).state
    noisy = {
        name: torch.cat([each[..., :3, :], torch.full_like(each[..., 3:, :], 1e3)], dim=-2) if "block" in name else each
        for name, each in state.items()
    }
    assert torch.equal(encoder(vectors()[:, 3:], noisy).output, encoder(vectors()[:, 3:], state).output)


def test_half_precision(encoder: Encoder) -> None:
    encoder, x_BTD = encoder.float(), vectors().float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        grown, fixed = begun(encoder, None), begun(encoder, ROOM)
        for step in range(STEPS):
            one, other = (encoder(x_BTD[:, step, None], state) for state in (grown, fixed))
            torch.testing.assert_close(other.output, one.output, rtol=0.02, atol=0.02)
            grown, fixed = one.state, other.state
            assert {each.dtype for each in blocks(fixed)} == {torch.bfloat16}
    assert fixed["known"].dtype == torch.int64


def test_it_has_gradients(encoder: Encoder) -> None:
    x_BTD = vectors().requires_grad_()
    inputs = [x_BTD, *encoder.parameters()]
    found = []
    for steps in (None, ROOM):
        first = encoder(x_BTD[:, :4], begun(encoder, steps))
        second = encoder(x_BTD[:, 4:], first.state)
        found.append(gradients(torch.cat([first.output, second.output], dim=1), inputs))
    close(found[1], found[0])


def test_more_steps_than_there_is_room_for_are_refused(encoder: Encoder) -> None:
    state = encoder(vectors()[:, :5], begun(encoder, 6)).state
    state = encoder(vectors()[:, :1], state).state
    with pytest.raises(ArgumentError, match="1 more steps after 6 do not fit into a KV cache of 6 steps; use a larger"):
        encoder(vectors()[:, :1], state)
    with pytest.raises(ArgumentError, match="7 more steps after 0 do not fit into a KV cache of 6 steps"):
        encoder(vectors(), begun(encoder, 6))
    # Of another device, what its shapes alone tell.
    meta = {name: each.to("meta") for name, each in state.items()}
    encoder.to("meta")
    assert encoder(vectors()[:, :1].to("meta"), meta).output.is_meta
    with pytest.raises(ArgumentError, match="7 more steps"):
        encoder(vectors().to("meta"), meta)
    with pytest.raises(SettingsError, match="KV cache: steps = 0: must be at least 1"):
        encoder.decoding_state(STREAMS, steps=0)


def test_it_compiles_whole() -> None:
    encoder = build(layers=1).eval()
    state = encoder(vectors()[:, :3], begun(encoder, ROOM)).state
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    close(compiled(vectors(1), state).output, encoder(vectors(1), state).output)


def test_its_entries_have_streams_in_dimension_1() -> None:
    memory = build().decoding_state(STREAMS, steps=ROOM)
    assert list(memory) == ["known", *(f"block.{number}" for number in range(LAYERS))]
    assert memory["known"].shape == (1, STREAMS)
    assert memory["block.0"].shape == (2, STREAMS, HEADS, ROOM, WIDTH // HEADS)
