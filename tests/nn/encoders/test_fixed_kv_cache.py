"""A KV cache of fixed capacity equals one that grows, in both Transformers.

Shapes: B streams, T steps, D dimensions.
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

from .torch_stacks import DIM, HEADS, LAYERS, STEPS, STREAMS, assert_near, build, gradients, source, vectors

CAPACITY = 11


def decoder_only(**options: Any) -> Transformer:
    """Build a float64 Transformer with noise added to every parameter."""
    torch.manual_seed(0)
    encoder = Transformer(DIM, layers=3, heads=HEADS, ffn_dim=20, **options).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return encoder


ENCODERS = {
    "transformer": decoder_only,
    "transformer with final norm": lambda: decoder_only(final_norm=True),
    "encoder-decoder pre-norm": build,
    "encoder-decoder post-norm": lambda: build(norm="post"),
}


@pytest.fixture(params=list(ENCODERS))
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return ENCODERS[request.param]().eval()


def initial_state(encoder: Encoder, steps: int | None) -> State:
    """Return a KV cache for a number of steps, or one that grows, with the source if the encoder reads one."""
    source_BSD, mask_BS = source()
    source_BSD = source_BSD.to(next(encoder.parameters()).dtype)
    read = encoder.encode_source(source_BSD, mask_BS) if isinstance(encoder, EncoderDecoder) else {}
    return encoder.decoding_state(STREAMS, steps=steps) | read


def blocks(state: State) -> list[Tensor]:
    return [tensor for name, tensor in state.items() if name.startswith("block.")]


@pytest.mark.parametrize("lengths", [[7], [1] * 7, [3, 4], [4, 1, 2], [0, 2, 5]])
@pytest.mark.parametrize("steps", [STEPS, CAPACITY])
def test_fixed_cache_equals_growing_cache(encoder: Encoder, lengths: list[int], steps: int) -> None:
    grown, fixed = initial_state(encoder, None), initial_state(encoder, steps)
    shapes, read = {name: tensor.shape for name, tensor in fixed.items()}, 0
    for part in vectors().split(lengths, dim=1):
        if isinstance(encoder, EncoderDecoder):
            assert_near(encoder.attention(part, fixed), encoder.attention(part, grown))
        before = {name: tensor.clone() for name, tensor in fixed.items()}
        expected, actual = encoder(part, grown), encoder(part, fixed)
        assert_near(actual.output, expected.output)
        assert all(torch.equal(fixed[name], tensor) for name, tensor in before.items()), (
            "the input state is not changed"
        )
        grown, fixed, read = expected.state, actual.state, read + part.shape[1]
        assert {name: tensor.shape for name, tensor in fixed.items()} == shapes
        assert fixed["cached_steps"].tolist() == [[read] * STREAMS]
        for fixed_block, grown_block in zip(blocks(fixed), blocks(grown), strict=True):
            assert_near(fixed_block[:, :, :, :read].to(grown_block.dtype), grown_block)
            assert not fixed_block[:, :, :, read:].any()


def test_streams_can_be_reordered_and_have_different_lengths(encoder: Encoder) -> None:
    inputs_BTD = vectors()
    grown, fixed = initial_state(encoder, None), initial_state(encoder, CAPACITY)
    for step, survivors in enumerate(([2, 0, 0, 1], [3, 3, 1], [0, 2, 1, 1, 0], [4, 1])):
        new = inputs_BTD[torch.arange(grown["block.0"].shape[1]) % STREAMS, step, None]
        expected, actual = encoder(new, grown), encoder(new, fixed)
        assert_near(actual.output, expected.output)
        order = torch.tensor(survivors)
        grown, fixed = (
            {name: tensor.index_select(1, order) for name, tensor in out.state.items()} for out in (expected, actual)
        )
    empty = initial_state(encoder, CAPACITY)
    after = encoder(inputs_BTD[:, :3], empty).state
    mixed = {name: torch.cat([after[name][:, :1], empty[name][:, 1:]], dim=1) for name in empty}
    encoded = encoder(inputs_BTD[:, 3:5], mixed)
    assert_near(encoded.output[:1], encoder(inputs_BTD[:, 3:5], after).output[:1])
    assert_near(encoded.output[1:], encoder(inputs_BTD[:, 3:5], empty).output[1:])
    assert encoded.state["cached_steps"].tolist() == [[5, 2, 2]]


def test_values_beyond_the_known_steps_are_ignored(encoder: Encoder) -> None:
    state = encoder(vectors()[:, :3], initial_state(encoder, CAPACITY)).state
    noisy = {
        name: torch.cat([old[..., :3, :], torch.full_like(old[..., 3:, :], 1e3)], dim=-2) if "block" in name else old
        for name, old in state.items()
    }
    assert torch.equal(encoder(vectors()[:, 3:], noisy).output, encoder(vectors()[:, 3:], state).output)


def test_fixed_cache_equals_growing_cache_in_bfloat16(encoder: Encoder) -> None:
    encoder, inputs_BTD = encoder.float(), vectors().float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        grown, fixed = initial_state(encoder, None), initial_state(encoder, CAPACITY)
        for step in range(STEPS):
            expected, actual = (encoder(inputs_BTD[:, step, None], state) for state in (grown, fixed))
            torch.testing.assert_close(actual.output, expected.output, rtol=0.02, atol=0.05)
            grown, fixed = expected.state, actual.state
            assert {tensor.dtype for tensor in blocks(fixed)} == {torch.bfloat16}
    assert fixed["cached_steps"].dtype == torch.int64


def test_gradients_equal_those_of_a_growing_cache(encoder: Encoder) -> None:
    inputs_BTD = vectors().requires_grad_()
    inputs = [inputs_BTD, *encoder.parameters()]
    results = []
    for steps in (None, CAPACITY):
        first = encoder(inputs_BTD[:, :4], initial_state(encoder, steps))
        second = encoder(inputs_BTD[:, 4:], first.state)
        results.append(gradients(torch.cat([first.output, second.output], dim=1), inputs))
    assert_near(results[1], results[0])


def test_steps_beyond_the_capacity_are_rejected(encoder: Encoder) -> None:
    state = encoder(vectors()[:, :5], initial_state(encoder, 6)).state
    state = encoder(vectors()[:, :1], state).state
    with pytest.raises(ArgumentError, match="1 more steps after 6 do not fit into a KV cache of 6 steps; use a larger"):
        encoder(vectors()[:, :1], state)
    with pytest.raises(ArgumentError, match="7 more steps after 0 do not fit into a KV cache of 6 steps"):
        encoder(vectors(), initial_state(encoder, 6))
    # On another device only the shapes can be checked, because reading values would synchronise.
    meta = {name: tensor.to("meta") for name, tensor in state.items()}
    encoder.to("meta")
    assert encoder(vectors()[:, :1].to("meta"), meta).output.is_meta
    with pytest.raises(ArgumentError, match="7 more steps"):
        encoder(vectors().to("meta"), meta)
    with pytest.raises(SettingsError, match="KV cache: steps = 0: must be at least 1"):
        encoder.decoding_state(STREAMS, steps=0)


def test_compiles_without_graph_breaks() -> None:
    encoder = build(layers=1).eval()
    state = encoder(vectors()[:, :3], initial_state(encoder, CAPACITY)).state
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    assert_near(compiled(vectors(1), state).output, encoder(vectors(1), state).output)


def test_cache_entries_have_streams_in_dimension_1() -> None:
    cache = build().decoding_state(STREAMS, steps=CAPACITY)
    assert list(cache) == ["cached_steps", *(f"block.{number}" for number in range(LAYERS))]
    assert cache["cached_steps"].shape == (1, STREAMS)
    assert cache["block.0"].shape == (2, STREAMS, HEADS, CAPACITY, DIM // HEADS)
