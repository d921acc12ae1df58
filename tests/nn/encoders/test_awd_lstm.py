"""The weight-dropped LSTM equals torch without dropout, and drops weights and activations in the right places."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.encoders import awd_lstm
from reefknot.nn.encoders.awd_lstm import AWDLSTM
from reefknot.nn.encoders.stacked import run_layer

from .reference import HIDDEN, IN, STREAMS, assert_same_as_torch, vectors


def output(encoder: AWDLSTM) -> Tensor:
    output_BTD: Tensor = encoder(vectors(), encoder.initial_state(STREAMS)).output
    return output_BTD


def test_values_and_gradients_equal_torch() -> None:
    torch.manual_seed(0)
    assert_same_as_torch(AWDLSTM(IN, HIDDEN).double())
    rates = {"dropout_input": 0.4, "dropout_hidden": 0.25, "dropout_output": 0.4, "weight_drop": 0.5}
    assert_same_as_torch(AWDLSTM(IN, HIDDEN, **rates).double().eval())


@pytest.mark.parametrize(
    ("layers", "output_dim", "dims"), [(3, None, [7, 7, 5]), (1, None, [5]), (2, 4, [7, 4]), (3, 7, [7, 7, 7])]
)
def test_last_layer_has_input_dim_or_output_dim(layers: int, output_dim: int | None, dims: list[int]) -> None:
    encoder = AWDLSTM(IN, HIDDEN, layers=layers, output_dim=output_dim).double()
    assert [layer.hidden_size for layer in encoder.layers] == dims
    assert encoder.dim == output(encoder).shape[-1] == dims[-1]


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """Record the weights that every layer is run with."""
    recorded = []

    def record(layer: nn.Module, inputs_BTD: Tensor, start: Any, weights: list[Tensor]) -> Any:
        recorded.append(weights)
        return run_layer(layer, inputs_BTD, start, weights)

    monkeypatch.setattr(awd_lstm, "run_layer", record)
    return recorded


def test_weight_drop_acts_on_the_recurrent_matrix_only(weights: list[list[Tensor]]) -> None:
    torch.manual_seed(0)
    encoder = AWDLSTM(IN, 50, weight_drop=0.3).double()
    output(encoder)
    for layer, (input_weight, recurrent, *biases) in zip(encoder.layers, weights, strict=True):
        dropped = recurrent == 0
        assert dropped.double().mean().item() == pytest.approx(0.3, abs=0.05 if layer.hidden_size > IN else 0.15)
        torch.testing.assert_close(recurrent[~dropped], layer.weight_hh_l0[~dropped] / 0.7)
        assert torch.equal(input_weight, layer.weight_ih_l0)
        assert torch.equal(torch.stack(biases), torch.stack([layer.bias_ih_l0, layer.bias_hh_l0]))


def test_weights_are_contiguous_in_one_buffer_for_cudnn(weights: list[list[Tensor]]) -> None:
    encoder = AWDLSTM(IN, HIDDEN, weight_drop=0.5).double()
    output(encoder)
    for layer_weights in weights:
        storages = {weight.untyped_storage().data_ptr() for weight in layer_weights}
        assert len(storages) == 1
        sizes = [weight.numel() for weight in layer_weights]
        assert [weight.storage_offset() for weight in layer_weights] == [sum(sizes[:n]) for n in range(4)]


def test_every_window_has_a_new_mask_and_evaluation_has_none(weights: list[list[Tensor]]) -> None:
    torch.manual_seed(0)
    encoder = AWDLSTM(IN, HIDDEN, weight_drop=0.5).double()
    assert not torch.equal(output(encoder), output(encoder))
    first, second = weights[0][1], weights[len(encoder.layers)][1]
    assert not torch.equal(first == 0, second == 0)
    weights.clear()
    encoder.eval()
    assert torch.equal(output(encoder), output(encoder))
    assert all(used[1] is layer.weight_hh_l0 for used, layer in zip(weights, encoder.layers, strict=False))


def test_gradients_reach_the_weights_that_were_not_dropped(weights: list[list[Tensor]]) -> None:
    torch.manual_seed(0)
    encoder = AWDLSTM(IN, HIDDEN, layers=1, output_dim=HIDDEN, weight_drop=0.5).double()
    output(encoder).square().sum().backward()
    ((_, dropped, *_),) = weights
    grad = encoder.layers[0].weight_hh_l0.grad
    assert torch.equal(grad != 0, dropped != 0)
    before = output(encoder.eval())
    torch.optim.SGD(encoder.parameters(), lr=0.1).step()
    assert not torch.equal(output(encoder), before)


def test_every_rate_drops_the_same_units_at_every_step() -> None:
    """Only output dropout leaves zeros in the output, at the same units in every step."""
    torch.manual_seed(0)
    inputs_BTD = vectors(dim=60).float()
    for rate in ("dropout_input", "dropout_hidden", "dropout_output"):
        encoder = AWDLSTM(60, 60, layers=2, **{rate: 0.5})
        first = encoder(inputs_BTD, encoder.initial_state(STREAMS))
        second = encoder(inputs_BTD, encoder.initial_state(STREAMS))
        assert not torch.equal(first.output, second.output)
        dropped = first.output == 0
        assert dropped.any().item() == (rate == "dropout_output")
        assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
        # The penalties on activations read the last layer's output before dropout as well.
        assert torch.equal(first.raw, second.raw) == (rate == "dropout_output")
        assert not (first.raw == 0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_cudnn_does_not_warn(autocast: bool) -> None:
    encoder = AWDLSTM(IN, HIDDEN, weight_drop=0.5).cuda()
    inputs_BTD, state = vectors().float().cuda(), encoder.initial_state(STREAMS, torch.device("cuda"))
    with warnings.catch_warnings(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        warnings.simplefilter("error")
        for _ in range(2):
            encoder(inputs_BTD, state).output.float().square().sum().backward()
        encoder.eval()(inputs_BTD, state).output.float().square().sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_drop": 1.0}, "AWDLSTM: weight_drop = 1.0: must be at least 0 and less than 1"),
        ({"output_dim": 0}, "AWDLSTM: output_dim = 0: must be at least 1"),
        ({"layers": 0}, "AWDLSTM: layers = 0: must be at least 1"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        AWDLSTM(IN, HIDDEN, **arguments)
