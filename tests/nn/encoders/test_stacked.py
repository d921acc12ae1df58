"""Stacked recurrent layers equal torch's, and add an option for a single bias and three places of dropout."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch

from reefknot.errors import ArgumentError, SettingsError
from reefknot.nn.encoders import stacked
from reefknot.nn.encoders.stacked import GRU, LSTM, RNN, LayerDropoutEncoder

from .reference import HIDDEN, IN, STREAMS, assert_same_as_torch, vectors

LAYERS = 2


@pytest.mark.parametrize("biases", [1, 2])
@pytest.mark.parametrize("encoder", [LSTM, GRU, RNN])
def test_values_and_gradients_equal_torch(encoder: type[LayerDropoutEncoder], biases: Literal[1, 2]) -> None:
    torch.manual_seed(0)
    assert_same_as_torch(encoder(IN, HIDDEN, layers=LAYERS, biases=biases).double())


@pytest.mark.parametrize("encoder", [LSTM, GRU, RNN])
def test_final_state_equals_torch_stack(encoder: type[LayerDropoutEncoder]) -> None:
    torch.manual_seed(0)
    stack = encoder(IN, HIDDEN, layers=LAYERS, biases=2).double()
    reference = encoder.layer_class(IN, HIDDEN, LAYERS, batch_first=True).double()
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            _, layer, weight = name.split(".")
            getattr(reference, weight.removesuffix("0") + layer).copy_(parameter)
    _, states = reference(vectors())
    state = stack(vectors(), stack.initial_state(STREAMS)).state
    assert list(state) == (["h", "c"] if encoder is LSTM else ["h"])
    for tensor, expected in zip(state.values(), states if encoder is LSTM else [states], strict=True):
        torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize("biases", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
def test_parameter_count_equals_the_formula(biases: Literal[1, 2], layers: int) -> None:
    encoder = LSTM(IN, HIDDEN, layers=layers, biases=biases)
    gates = 4 * HIDDEN
    matrices = gates * (IN + HIDDEN) + (layers - 1) * gates * 2 * HIDDEN
    assert sum(parameter.numel() for parameter in encoder.parameters()) == matrices + layers * biases * gates


@pytest.mark.parametrize("streams", [STREAMS - 1, STREAMS + 1])
@pytest.mark.parametrize("encoder", [LSTM, GRU, RNN])
def test_state_of_other_streams_is_rejected(encoder: type[LayerDropoutEncoder], streams: int) -> None:
    stack = encoder(IN, HIDDEN)
    with pytest.raises(ArgumentError, match=f"is \\({streams}, {HIDDEN}\\), but {STREAMS} streams"):
        stack(vectors().float(), stack.initial_state(streams))


@pytest.mark.parametrize("shape", [(STREAMS, 4, IN + 1), (STREAMS, IN)])
@pytest.mark.parametrize("encoder", [LSTM, GRU, RNN])
def test_inputs_of_another_shape_are_rejected(encoder: type[LayerDropoutEncoder], shape: tuple[int, ...]) -> None:
    stack = encoder(IN, HIDDEN)
    with pytest.raises(ArgumentError, match=f"reads vectors of dimension {IN}"):
        stack(torch.zeros(shape), stack.initial_state(STREAMS))


def test_zero_bias_is_not_saved_or_trained() -> None:
    encoder = LSTM(IN, HIDDEN, layers=LAYERS, biases=1)
    assert not any("bias_hh" in name for name in encoder.state_dict())
    assert not any("bias_hh" in name for name, _ in encoder.named_parameters())
    optimiser = torch.optim.SGD(encoder.parameters(), lr=1.0)
    encoder(vectors().float(), encoder.initial_state(3)).output.square().sum().backward()
    optimiser.step()
    buffers = dict(encoder.named_buffers())
    assert len(buffers) == LAYERS
    assert not any(buffer.any() for buffer in buffers.values())


@pytest.mark.parametrize("biases", [1, 2])
def test_copy_and_float32_conversion_give_equal_outputs(biases: Literal[1, 2]) -> None:
    torch.manual_seed(0)
    encoder = LSTM(IN, HIDDEN, layers=LAYERS, biases=biases).double()
    inputs_BTD = vectors()
    expected = encoder(inputs_BTD, encoder.initial_state(3)).output
    copied = copy.deepcopy(encoder)
    assert torch.equal(copied(inputs_BTD, copied.initial_state(3)).output, expected)
    rounded = copy.deepcopy(encoder).float()
    output = rounded(inputs_BTD.float(), rounded.initial_state(3)).output
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
    # The copy can be trained separately, because its kernel reads its own weights.
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(inputs_BTD, copied.initial_state(3)).output.any()
    assert torch.equal(encoder(inputs_BTD, encoder.initial_state(3)).output, expected)


def test_loaded_weights_are_used_by_the_kernel() -> None:
    source, target = LSTM(IN, HIDDEN), LSTM(IN, HIDDEN)
    inputs_BTD = vectors().float()
    target.load_state_dict(source.state_dict())
    outputs = [encoder(inputs_BTD, encoder.initial_state(3)).output for encoder in (source, target)]
    assert torch.equal(*outputs)


def test_output_dropout_is_applied_to_output_and_not_to_raw() -> None:
    torch.manual_seed(0)
    encoder = LSTM(IN, 50, layers=1, dropout=0.4)
    encoded = encoder(torch.randn(20, 30, IN), encoder.initial_state(20))
    dropped = encoded.output == 0
    assert dropped.float().mean().item() == pytest.approx(0.4, abs=0.01)
    torch.testing.assert_close(encoded.output[~dropped], encoded.raw[~dropped] / 0.6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_evaluation_mode_gradients_on_gpu_equal_those_without_cudnn(kind: type[LayerDropoutEncoder]) -> None:
    """cuDNN computes gradients in its training mode only."""
    torch.manual_seed(0)
    encoder = kind(IN, HIDDEN).double().cuda().eval()
    gradients = []
    for enabled in (True, False):
        with torch.backends.cudnn.flags(enabled=enabled):
            state = encoder.initial_state(3, torch.device("cuda"))
            loss = encoder(vectors().cuda(), state).output.square().sum()
            gradients.append(torch.autograd.grad(loss, list(encoder.parameters())))
    torch.testing.assert_close(*gradients)


def zero_lstm(dim: int, layers: int) -> tuple[LSTM, dict[str, torch.nn.Parameter]]:
    """Build an LSTM with all parameters 0, so its outputs are 0 until a weight is set."""
    torch.manual_seed(0)
    encoder = LSTM(dim, dim, layers=layers, dropout=0.3)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
    return encoder, dict(encoder.named_parameters())


def test_dropout_acts_on_the_input() -> None:
    """A layer whose cell candidate copies the input has output 0 where the input is dropped."""
    dim = 40
    encoder, weights = zero_lstm(dim, layers=1)
    with torch.no_grad():
        # Gates are in the order input, forget, cell, output, so the candidate of each unit is one input.
        weights["layers.0.weight_ih_l0"][2 * dim : 3 * dim] = torch.eye(dim)
    encoded = encoder(torch.ones(50, 1, dim), encoder.initial_state(50))
    assert (encoded.raw == 0).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert (encoder.eval()(torch.ones(50, 1, dim), encoder.initial_state(50)).raw != 0).all()


def test_dropout_acts_between_layers() -> None:
    dim = 40
    encoder, weights = zero_lstm(dim, layers=2)
    with torch.no_grad():
        # The first layer ignores its input, and the second layer copies the output of the first.
        weights["layers.0.bias_ih_l0"][2 * dim : 3 * dim] = 1.0
        weights["layers.1.weight_ih_l0"][2 * dim : 3 * dim] = torch.eye(dim)
    encoded = encoder(torch.ones(50, 1, dim), encoder.initial_state(50))
    assert (encoded.raw == 0).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert (encoded.state["h"][0] != 0).all()


def test_dropout_does_not_act_on_the_carried_state() -> None:
    """A unit that is dropped at the output keeps its value in the carried state."""
    torch.manual_seed(0)
    encoder = LSTM(IN, HIDDEN, layers=1, dropout=0.5)
    encoded = encoder(vectors().float(), encoder.initial_state(3))
    assert torch.equal(encoded.state["h"][0], encoded.raw[:, -1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"biases": 3}, "biases = 3: must be 1 or 2"),
        ({"dropout": 1.5}, "dropout = 1.5: must be at least 0 and less than 1"),
        ({"dropout": float("nan")}, "dropout = nan"),
        ({"layers": 0}, "layers = 0: must be at least 1"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        LSTM(IN, HIDDEN, **arguments)


@pytest.mark.parametrize("biases", [1, 2])
def test_builds_on_the_meta_device(biases: Literal[1, 2]) -> None:
    with torch.device("meta"):
        encoder = LSTM(20_000, 20_000, layers=4, biases=biases)
    assert all(parameter.is_meta for parameter in encoder.parameters())
    assert sum(parameter.numel() for parameter in encoder.parameters()) > 10**10


@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_bfloat16_runs_on_a_cpu_without_onednn_support(
    kind: type[LayerDropoutEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises an error if oneDNN has no kernel for a layer, so the layer must run without oneDNN."""
    enabled_inside = []
    function = torch.lstm if kind is LSTM else torch.gru if kind is GRU else torch.rnn_tanh

    def run(*arguments: Any, **options: Any) -> Any:
        enabled_inside.append(torch._C._get_mkldnn_enabled())
        return function(*arguments, **options)

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setitem(stacked._TORCH_FUNCTIONS, kind.layer_class(1, 1).mode, run)
    enabled = torch._C._get_mkldnn_enabled()
    encoder = kind(4, 6, layers=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = encoder(torch.randn(2, 3, 4), encoder.initial_state(2)).output
    output.float().sum().backward()
    assert output.isfinite().all()
    assert enabled_inside == [False]
    assert torch._C._get_mkldnn_enabled() == enabled, "the switch is restored"
