"""The contract of every encoder.

Shapes: B streams, T steps, D dimensions.
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

from .combinations import DIM, part_settings

STREAMS, STEPS = 3, 7


@pytest.fixture
def with_dropout(encoder_kind: str) -> Encoder:
    """Return an encoder in training mode with all dropout rates at one half."""
    rates = [argument.name for argument in ENCODERS.arguments(encoder_kind) if "drop" in argument.name]
    settings = part_settings(ENCODERS, encoder_kind, {}) | dict.fromkeys(rates, 0.5)
    torch.manual_seed(0)
    built: Encoder = ENCODERS.build(TypeAdapter(ENCODERS.entry_type()).validate_python(settings), {"input_dim": DIM})
    return built.double().train()


def vectors(encoder: Encoder) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(STREAMS, STEPS, DIM, dtype=next(encoder.parameters()).dtype)


def some_state(encoder: Encoder) -> State:
    """Return the state after some steps."""
    state: State = encoder(vectors(encoder), encoder.decoding_state(STREAMS)).state
    return state


def test_outputs_and_states_have_the_right_shapes(encoder: Encoder) -> None:
    encoded = encoder(vectors(encoder), encoder.initial_state(STREAMS))
    assert encoder.input_dim == DIM
    assert encoded.output.shape == encoded.raw.shape == (STREAMS, STEPS, encoder.dim)
    for name, tensor in encoder.initial_state(STREAMS).items():
        assert encoded.state[name].shape == tensor.shape
        assert tensor.shape[1] == STREAMS
    assert encoded.state.keys() == encoder.initial_state(STREAMS).keys()


def test_two_windows_with_carried_state_equal_one_window(encoder: Encoder) -> None:
    inputs_BTD = vectors(encoder)
    long = encoder(inputs_BTD, encoder.decoding_state(STREAMS))
    first = encoder(inputs_BTD[:, :4], encoder.decoding_state(STREAMS))
    second = encoder(inputs_BTD[:, 4:], first.state)
    torch.testing.assert_close(torch.cat([first.output, second.output], dim=1), long.output)
    for name, tensor in long.state.items():
        torch.testing.assert_close(second.state[name], tensor)


def test_state_of_fixed_size_gives_the_same_outputs(encoder: Encoder) -> None:
    """A state of fixed size gives the same outputs as a state that grows."""
    growing, fixed = encoder.decoding_state(STREAMS), encoder.decoding_state(STREAMS, steps=STEPS + 2)
    shapes = {name: tensor.shape for name, tensor in fixed.items()}
    for inputs_B1D in vectors(encoder).split(1, dim=1):
        grown, fixed_step = encoder(inputs_B1D, growing), encoder(inputs_B1D, fixed)
        torch.testing.assert_close(fixed_step.output, grown.output)
        growing, fixed = grown.state, fixed_step.state
        assert {name: tensor.shape for name, tensor in fixed.items()} == shapes
        assert {tensor.shape[1] for tensor in fixed.values()} == {STREAMS}


def test_only_carrying_encoders_depend_on_the_last_window(encoder: Encoder) -> None:
    inputs_BTD = vectors(encoder)
    first = encoder(inputs_BTD, encoder.initial_state(STREAMS))
    after = encoder(inputs_BTD, first.state)
    assert torch.equal(after.output, first.output) is not encoder.carries_state
    torch.testing.assert_close(encoder(inputs_BTD, encoder.decoding_state(STREAMS)).output, first.output)
    assert bool(encoder.initial_state(STREAMS)) is encoder.carries_state


def test_streams_do_not_see_each_other(encoder: Encoder) -> None:
    inputs_BTD, state = vectors(encoder), some_state(encoder)
    whole = encoder(inputs_BTD, state)
    alone = encoder(inputs_BTD[1:2], select_streams(state, slice(1, 2)))
    torch.testing.assert_close(alone.output, whole.output[1:2])
    disturbed = inputs_BTD.clone()
    disturbed[0] += 1.0
    torch.testing.assert_close(encoder(disturbed, state).output[1:], whole.output[1:])


def test_outputs_do_not_depend_on_later_inputs(encoder: Encoder) -> None:
    inputs_BTD = vectors(encoder)
    changed = inputs_BTD.clone()
    changed[:, 5:] += 1.0
    before = encoder(inputs_BTD, encoder.initial_state(STREAMS)).output
    after = encoder(changed, encoder.initial_state(STREAMS)).output
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_selected_streams_can_be_joined_again(encoder: Encoder) -> None:
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


def test_evaluation_is_deterministic_without_dropout(encoder: Encoder) -> None:
    first, second = (encoder(vectors(encoder), encoder.initial_state(STREAMS)) for _ in range(2))
    assert torch.equal(first.output, second.output)
    assert torch.equal(first.output, first.raw)


def test_carried_state_is_float32_under_autocast(encoder: Encoder) -> None:
    encoder = encoder.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encoded = encoder(vectors(encoder), encoder.initial_state(STREAMS))
        again = encoder(vectors(encoder), encoded.state)
    assert all(tensor.dtype == torch.float32 for tensor in encoded.state.values())
    assert again.output.isfinite().all()


def test_saved_state_gives_the_same_outputs(encoder: Encoder) -> None:
    """In float32 as in training, and for some of the streams as with several processes."""
    encoder = encoder.float()
    state = detach(select_streams(some_state(encoder), slice(1, 3)))
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    stored = load(save({name: tensor.contiguous() for name, tensor in state.items()}))
    assert all(torch.equal(stored[name], tensor) for name, tensor in state.items())
    # Cloned as in training, because the rounding of some products depends on memory alignment.
    stored, state = ({name: tensor.clone() for name, tensor in tensors.items()} for tensors in (stored, state))
    inputs_BTD = vectors(encoder)[1:]
    assert torch.equal(encoder(inputs_BTD, stored).output, encoder(inputs_BTD, state).output)


def test_parameters_get_gradients_in_evaluation_mode(encoder: Encoder) -> None:
    """Dynamic evaluation trains in evaluation mode."""
    encoder(vectors(encoder), encoder.initial_state(STREAMS)).output.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in encoder.parameters())


def test_dropout_depends_on_the_seed(with_dropout: Encoder) -> None:
    inputs_BTD, state = vectors(with_dropout), with_dropout.initial_state(STREAMS)
    torch.manual_seed(3)
    first, second = (with_dropout(inputs_BTD, state).output for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(with_dropout(inputs_BTD, state).output, first)
    assert not torch.equal(first, second)


def test_training_gives_gradients_to_parameters_and_carried_state(with_dropout: Encoder) -> None:
    state = {name: tensor.requires_grad_() for name, tensor in detach(some_state(with_dropout)).items()}
    encoded = with_dropout(vectors(with_dropout), state)
    encoded.output.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in with_dropout.parameters())
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in state.values())


def test_dropout_does_not_zero_the_carried_state(with_dropout: Encoder) -> None:
    assert all((tensor != 0).all() for tensor in some_state(with_dropout).values())


def test_dropout_is_off_in_evaluation(with_dropout: Encoder, encoder: Encoder) -> None:
    """Dropout has no weights, so the same seed gives the same encoder with and without dropout."""
    with_dropout.eval()
    inputs_BTD, state = vectors(encoder), some_state(encoder)
    assert torch.equal(with_dropout(inputs_BTD, state).output, encoder(inputs_BTD, state).output)


def test_copies_train_in_bfloat16_and_under_autocast(with_dropout: Encoder) -> None:
    copied = copy.deepcopy(with_dropout).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encoded = copied(vectors(copied), copied.initial_state(STREAMS))
    encoded.output.float().square().sum().backward()
    assert all(tensor.dtype == torch.float32 for tensor in encoded.state.values())
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in with_dropout.parameters())
    whole = copy.deepcopy(with_dropout).bfloat16()
    assert whole(vectors(whole), whole.initial_state(STREAMS)).output.isfinite().all()
