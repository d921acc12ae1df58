"""What every encoder promises.

Shapes: B streams, T steps, D width.
"""

from __future__ import annotations

import copy

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save
from torch import Tensor

from reefknot.lab.config.parts import ENCODERS
from reefknot.nn.encoders.contract import Encoder, State, detach, join_streams, select_streams

from .combinations import part_settings

STREAMS, STEPS = 3, 7


@pytest.fixture
def dropping(encoder_kind: str) -> Encoder:
    """The same in training, with every rate it has at one half."""
    rates = [each.name for each in ENCODERS.arguments(encoder_kind) if "drop" in each.name]
    settings = part_settings(ENCODERS, encoder_kind, {}) | dict.fromkeys(rates, 0.5)
    torch.manual_seed(0)
    built: Encoder = ENCODERS.build(TypeAdapter(ENCODERS.settings()).validate_python(settings), {"input_dim": 6})
    return built.double().train()


def vectors(encoder: Encoder) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(STREAMS, STEPS, 6, dtype=next(encoder.parameters()).dtype)


def some_state(encoder: Encoder) -> State:
    """A state that something was read into."""
    state: State = encoder(vectors(encoder), encoder.memory(STREAMS)).state
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
    long = encoder(x_BTD, encoder.memory(STREAMS))
    first = encoder(x_BTD[:, :4], encoder.memory(STREAMS))
    second = encoder(x_BTD[:, 4:], first.state)
    torch.testing.assert_close(torch.cat([first.output, second.output], dim=1), long.output)
    for name, tensor in long.state.items():
        torch.testing.assert_close(second.state[name], tensor)


def test_a_memory_may_keep_its_size(encoder: Encoder) -> None:
    """From the first step to the last, and changes nothing; a state that never grows is as it is."""
    grown, fixed = encoder.memory(STREAMS), encoder.memory(STREAMS, steps=STEPS + 2)
    shapes = {name: each.shape for name, each in fixed.items()}
    for x_B1D in vectors(encoder).split(1, dim=1):
        one, other = encoder(x_B1D, grown), encoder(x_B1D, fixed)
        torch.testing.assert_close(other.output, one.output)
        grown, fixed = one.state, other.state
        assert {name: each.shape for name, each in fixed.items()} == shapes
        assert {each.shape[1] for each in fixed.values()} == {STREAMS}


def test_a_window_carries_on_or_is_computed_afresh(encoder: Encoder) -> None:
    x_BTD = vectors(encoder)
    afresh = encoder(x_BTD, encoder.initial_state(STREAMS))
    after = encoder(x_BTD, afresh.state)
    assert torch.equal(after.output, afresh.output) is not encoder.carries
    torch.testing.assert_close(encoder(x_BTD, encoder.memory(STREAMS)).output, afresh.output)
    assert bool(encoder.initial_state(STREAMS)) is encoder.carries


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


def test_a_state_is_saved_exactly(encoder: Encoder) -> None:
    """In float32 as in training, and cut by stream as a process of several would."""
    encoder = encoder.float()
    state = detach(select_streams(some_state(encoder), slice(1, 3)))
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    stored = load(save({name: tensor.contiguous() for name, tensor in state.items()}))
    assert all(torch.equal(stored[name], tensor) for name, tensor in state.items())
    # As training does, for some products are rounded by where in memory their numbers begin.
    stored, state = ({name: tensor.clone() for name, tensor in each.items()} for each in (stored, state))
    x_BTD = vectors(encoder)[1:]
    assert torch.equal(encoder(x_BTD, stored).output, encoder(x_BTD, state).output)


def test_evaluation_mode_has_gradients(encoder: Encoder) -> None:
    """Dynamic evaluation adapts a model that drops nothing."""
    encoder(vectors(encoder), encoder.initial_state(STREAMS)).output.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in encoder.parameters())


def test_training_drops_as_the_generator_says(dropping: Encoder) -> None:
    x_BTD, state = vectors(dropping), dropping.initial_state(STREAMS)
    torch.manual_seed(3)
    first, second = (dropping(x_BTD, state).output for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(dropping(x_BTD, state).output, first)
    assert not torch.equal(first, second)


def test_training_reaches_every_parameter_and_the_carried_state(dropping: Encoder) -> None:
    state = {name: tensor.requires_grad_() for name, tensor in detach(some_state(dropping)).items()}
    found = dropping(vectors(dropping), state)
    found.output.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in dropping.parameters())
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in state.values())


def test_the_carried_state_is_not_dropped(dropping: Encoder) -> None:
    assert all((tensor != 0).all() for tensor in some_state(dropping).values())


def test_what_is_dropped_returns_in_evaluation(dropping: Encoder, encoder: Encoder) -> None:
    """Rates are no part of the weights: the same seed gives the encoder without them."""
    dropping.eval()
    x_BTD, state = vectors(encoder), some_state(encoder)
    assert torch.equal(dropping(x_BTD, state).output, encoder(x_BTD, state).output)


def test_copies_and_narrow_numbers_train(dropping: Encoder) -> None:
    copied = copy.deepcopy(dropping).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = copied(vectors(copied), copied.initial_state(STREAMS))
    found.output.float().square().sum().backward()
    assert all(tensor.dtype == torch.float32 for tensor in found.state.values())
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in dropping.parameters())
    whole = copy.deepcopy(dropping).bfloat16()
    assert whole(vectors(whole), whole.initial_state(STREAMS)).output.isfinite().all()
