"""The variational LSTM of Inan et al. equals torch without dropout and the equations with dropout."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.nn.encoders import variational_lstm
from reefknot.nn.encoders.variational_lstm import VariationalLSTM

from .reference import HIDDEN, IN, STREAMS, Recorder, assert_same_as_torch, lstm_loop, vectors


@pytest.mark.parametrize("biases", [1, 2])
def test_values_and_gradients_equal_torch(biases: Literal[1, 2]) -> None:
    torch.manual_seed(0)
    assert_same_as_torch(VariationalLSTM(IN, HIDDEN, biases=biases).double())


def test_evaluation_with_dropout_rates_equals_torch() -> None:
    torch.manual_seed(0)
    assert_same_as_torch(VariationalLSTM(IN, HIDDEN, dropout=0.5, dropout_input=0.5).double().eval())


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the masks of the hidden states in the order in which they are drawn."""
    recorder = Recorder(variational_lstm.sample_mask)
    monkeypatch.setattr(variational_lstm, "sample_mask", recorder)
    return recorder.returned


def test_layer_uses_one_mask_for_its_state_and_its_output(masks: list[Any]) -> None:
    torch.manual_seed(0)
    encoder = VariationalLSTM(IN, HIDDEN, layers=2, dropout=0.4).double()
    inputs_BTD = vectors()
    start = {name: torch.randn(2, STREAMS, HIDDEN, dtype=torch.float64) for name in ("h", "c")}
    encoded = encoder(inputs_BTD, start)
    assert [mask.shape for mask in masks] == [(STREAMS, 1, HIDDEN)] * 2
    assert not torch.equal(*masks)

    no_mask = torch.ones(STREAMS, 1, dtype=torch.float64)
    expected = inputs_BTD
    for layer, mask, hidden_BH, cell_BH, last_state in zip(
        encoder.layers, masks, start["h"], start["c"], encoded.state["h"], strict=True
    ):
        raw, _ = lstm_loop(layer, expected, hidden_BH, cell_BH, [no_mask] * 4, [mask[:, 0]] * 4)
        torch.testing.assert_close(last_state, raw[:, -1])
        expected = raw * mask
    torch.testing.assert_close(encoded.raw, raw)
    torch.testing.assert_close(encoded.output, expected)


def test_every_window_has_new_masks_and_an_undropped_state(masks: list[Any]) -> None:
    torch.manual_seed(0)
    encoder = VariationalLSTM(IN, 40, layers=1, dropout=0.5)
    first = encoder(vectors().float(), encoder.initial_state(STREAMS))
    encoder(vectors().float(), first.state)
    assert not torch.equal(*masks)
    assert torch.equal(first.state["h"][0], first.raw[:, -1])
    assert (first.state["h"] != 0).all()
    assert (first.state["c"] != 0).all()


def test_mask_is_equal_at_every_step_and_differs_between_examples() -> None:
    torch.manual_seed(0)
    encoder = VariationalLSTM(IN, 60, dropout=0.5)
    dropped = encoder(vectors().float(), encoder.initial_state(STREAMS)).output == 0
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert len(dropped[:, 0].unique(dim=0)) == STREAMS


def test_input_dropout_has_its_own_rate(masks: list[Any]) -> None:
    torch.manual_seed(0)
    encoder = VariationalLSTM(IN, HIDDEN, dropout_input=0.5)
    encoded = encoder(vectors().float(), encoder.initial_state(STREAMS))
    assert masks == [None, None]
    assert torch.equal(encoded.output, encoded.raw)
    assert not torch.equal(encoded.output, encoder.eval()(vectors().float(), encoder.initial_state(STREAMS)).output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 1.0}, "VariationalLSTM: dropout = 1.0: must be at least 0 and less than 1"),
        ({"dropout_input": -0.1}, "VariationalLSTM: dropout_input = -0.1: must be at least 0"),
        ({"layers": 0}, "VariationalLSTM: layers = 0: must be at least 1"),
        ({"biases": 0}, "VariationalLSTM: biases = 0: must be 1 or 2"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        VariationalLSTM(IN, HIDDEN, **arguments)
