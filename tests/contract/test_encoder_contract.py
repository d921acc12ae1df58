"""What every encoder promises.

Shapes: B streams, T steps, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.encoders.contract import Encoder, State, detach, join_streams, select_streams

STREAMS, STEPS = 3, 7


def vectors(encoder: Encoder) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(STREAMS, STEPS, 6, dtype=next(encoder.parameters()).dtype)


def some_state(encoder: Encoder) -> State:
    """A state that is not the initial one."""
    state: State = encoder(vectors(encoder), encoder.initial_state(STREAMS)).state
    return state


def test_shapes(encoder: Encoder) -> None:
    found = encoder(vectors(encoder), encoder.initial_state(STREAMS))
    assert encoder.input_dim == 6
    assert found.output.shape == found.raw.shape == (STREAMS, STEPS, encoder.dim)
    for name, tensor in encoder.initial_state(STREAMS).items():
        assert found.state[name].shape == tensor.shape
        assert tensor.shape[1] == STREAMS
    assert found.state.keys() == encoder.initial_state(STREAMS).keys()


def test_a_carried_state_joins_windows(encoder: Encoder) -> None:
    x_BTD = vectors(encoder)
    long = encoder(x_BTD, encoder.initial_state(STREAMS))
    first = encoder(x_BTD[:, :4], encoder.initial_state(STREAMS))
    second = encoder(x_BTD[:, 4:], first.state)
    torch.testing.assert_close(torch.cat([first.output, second.output], dim=1), long.output)
    for name, tensor in long.state.items():
        torch.testing.assert_close(second.state[name], tensor)


def test_streams_do_not_see_each_other(encoder: Encoder) -> None:
    x_BTD, state = vectors(encoder), some_state(encoder)
    whole = encoder(x_BTD, state)
    alone = encoder(x_BTD[1:2], select_streams(state, slice(1, 2)))
    torch.testing.assert_close(alone.output, whole.output[1:2])
    disturbed = x_BTD.clone()
    disturbed[0] += 1.0
    torch.testing.assert_close(encoder(disturbed, state).output[1:], whole.output[1:])


def test_nothing_comes_from_the_future(encoder: Encoder) -> None:
    x_BTD = vectors(encoder)
    changed = x_BTD.clone()
    changed[:, 5:] += 1.0
    before, after = (encoder(x, encoder.initial_state(STREAMS)).output for x in (x_BTD, changed))
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_streams_are_selected_and_joined(encoder: Encoder) -> None:
    state = some_state(encoder)
    parts = [select_streams(state, part) for part in (slice(0, 1), slice(1, 3))]
    joined = join_streams(parts)
    assert joined.keys() == state.keys()
    assert all(torch.equal(joined[name], state[name]) for name in state)
    assert join_streams([state]) is state


def test_detach_cuts_the_graph(encoder: Encoder) -> None:
    state = some_state(encoder)
    assert all(tensor.requires_grad for tensor in state.values())
    assert not any(tensor.requires_grad for tensor in detach(state).values())


def test_evaluation_repeats_itself_and_drops_nothing(encoder: Encoder) -> None:
    first, second = (encoder(vectors(encoder), encoder.initial_state(STREAMS)) for _ in range(2))
    assert torch.equal(first.output, second.output)
    assert torch.equal(first.output, first.raw)


def test_bf16_autocast_carries_float32(encoder: Encoder) -> None:
    encoder = encoder.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoder(vectors(encoder), encoder.initial_state(STREAMS))
        again = encoder(vectors(encoder), found.state)
    assert all(tensor.dtype == torch.float32 for tensor in found.state.values())
    assert again.output.isfinite().all()
