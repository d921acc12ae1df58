"""The weight-dropped LSTM: torch's where nothing is dropped, and what is dropped where."""

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

from .authority import HIDDEN, IN, STREAMS, same_as_torch, vectors


def output(encoder: AWDLSTM) -> Tensor:
    found: Tensor = encoder(vectors(), encoder.initial_state(STREAMS)).output
    return found


def test_values_and_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    same_as_torch(AWDLSTM(IN, HIDDEN).double())
    rates = {"dropout_input": 0.4, "dropout_hidden": 0.25, "dropout_output": 0.4, "weight_drop": 0.5}
    same_as_torch(AWDLSTM(IN, HIDDEN, **rates).double().eval())


@pytest.mark.parametrize(
    ("layers", "output_dim", "widths"), [(3, None, [7, 7, 5]), (1, None, [5]), (2, 4, [7, 4]), (3, 7, [7, 7, 7])]
)
def test_the_last_layer_is_as_wide_as_the_input_or_as_told(
    layers: int, output_dim: int | None, widths: list[int]
) -> None:
    encoder = AWDLSTM(IN, HIDDEN, layers=layers, output_dim=output_dim).double()
    assert [layer.hidden_size for layer in encoder.layers] == widths
    assert encoder.dim == output(encoder).shape[-1] == widths[-1]


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The weights that every layer is run with."""
    seen = []

    def seeing(layer: nn.Module, x_BTD: Tensor, start: Any, weights: list[Tensor]) -> Any:
        seen.append(weights)
        return run_layer(layer, x_BTD, start, weights)

    monkeypatch.setattr(awd_lstm, "run_layer", seeing)
    return seen


def test_numbers_of_the_recurrent_matrix_alone_are_dropped(weights: list[list[Tensor]]) -> None:
    torch.manual_seed(0)
    encoder = AWDLSTM(IN, 50, weight_drop=0.3).double()
    output(encoder)
    for layer, (input_weight, recurrent, *biases) in zip(encoder.layers, weights, strict=True):
        gone = recurrent == 0
        assert gone.double().mean().item() == pytest.approx(0.3, abs=0.05 if layer.hidden_size > IN else 0.15)
        torch.testing.assert_close(recurrent[~gone], layer.weight_hh_l0[~gone] / 0.7)
        assert torch.equal(input_weight, layer.weight_ih_l0)
        assert torch.equal(torch.stack(biases), torch.stack([layer.bias_ih_l0, layer.bias_hh_l0]))


def test_weights_lie_as_cudnn_reads_them(weights: list[list[Tensor]]) -> None:
    encoder = AWDLSTM(IN, HIDDEN, weight_drop=0.5).double()
    output(encoder)
    for each in weights:
        storages = {weight.untyped_storage().data_ptr() for weight in each}
        assert len(storages) == 1
        sizes = [weight.numel() for weight in each]
        assert [weight.storage_offset() for weight in each] == [sum(sizes[:n]) for n in range(4)]


def test_two_windows_of_training_differ_and_evaluation_uses_the_raw_weights(weights: list[list[Tensor]]) -> None:
    torch.manual_seed(0)
    encoder = AWDLSTM(IN, HIDDEN, weight_drop=0.5).double()
    assert not torch.equal(output(encoder), output(encoder))
    first, second = weights[0][1], weights[len(encoder.layers)][1]
    assert not torch.equal(first == 0, second == 0)
    weights.clear()
    encoder.eval()
    assert torch.equal(output(encoder), output(encoder))
    assert all(used[1] is layer.weight_hh_l0 for used, layer in zip(weights, encoder.layers, strict=False))


def test_gradients_reach_the_raw_weight_where_it_was_kept(weights: list[list[Tensor]]) -> None:
    torch.manual_seed(0)
    encoder = AWDLSTM(IN, HIDDEN, layers=1, output_dim=HIDDEN, weight_drop=0.5).double()
    output(encoder).square().sum().backward()
    ((_, dropped, *_),) = weights
    grad = encoder.layers[0].weight_hh_l0.grad
    assert torch.equal(grad != 0, dropped != 0)
    before = output(encoder.eval())
    torch.optim.SGD(encoder.parameters(), lr=0.1).step()
    assert not torch.equal(output(encoder), before)


def test_each_place_has_its_locked_dropout() -> None:
    """With a constant input and no recurrence, what is dropped at a place is seen in the output."""
    torch.manual_seed(0)
    x_BTD = vectors(width=60).float()
    for place in ("dropout_input", "dropout_hidden", "dropout_output"):
        encoder = AWDLSTM(60, 60, layers=2, **{place: 0.5})
        drawn = encoder(x_BTD, encoder.initial_state(STREAMS))
        again = encoder(x_BTD, encoder.initial_state(STREAMS))
        assert not torch.equal(drawn.output, again.output)
        gone = drawn.output == 0
        assert gone.any().item() == (place == "dropout_output")
        assert torch.equal(gone, gone[:, :1].expand_as(gone))
        # The penalties on activations read the last layer's output before dropout as well.
        assert torch.equal(drawn.raw, again.raw) == (place == "dropout_output")
        assert not (drawn.raw == 0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_cudnn_has_nothing_to_warn_of(autocast: bool) -> None:
    encoder = AWDLSTM(IN, HIDDEN, weight_drop=0.5).cuda()
    x_BTD, state = vectors().float().cuda(), encoder.initial_state(STREAMS, torch.device("cuda"))
    with warnings.catch_warnings(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        warnings.simplefilter("error")
        for _ in range(2):
            encoder(x_BTD, state).output.float().square().sum().backward()
        encoder.eval()(x_BTD, state).output.float().square().sum().backward()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"weight_drop": 1.0}, "AWDLSTM: weight_drop = 1.0: must be at least 0 and less than 1"),
        ({"output_dim": 0}, "AWDLSTM: output_dim = 0: must be at least 1"),
        ({"layers": 0}, "AWDLSTM: layers = 0: must be at least 1"),
    ],
)
def test_wrong_arguments_are_sentences(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        AWDLSTM(IN, HIDDEN, **wrong)
