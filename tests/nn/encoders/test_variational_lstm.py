"""Inan's variational LSTM: torch's where nothing is dropped, the equations where something is."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.nn.encoders import variational_lstm
from reefknot.nn.encoders.variational_lstm import VariationalLSTM

from .authority import HIDDEN, IN, STREAMS, Recorder, plain_loop, same_as_torch, vectors


@pytest.mark.parametrize("biases", [1, 2])
def test_values_and_gradients_are_those_of_torch(biases: Literal[1, 2]) -> None:
    torch.manual_seed(0)
    same_as_torch(VariationalLSTM(IN, HIDDEN, biases=biases).double())


def test_evaluation_is_that_of_torch_whatever_the_rates() -> None:
    torch.manual_seed(0)
    same_as_torch(VariationalLSTM(IN, HIDDEN, dropout=0.5, dropout_input=0.5).double().eval())


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks of the hidden states, as they are drawn."""
    recorder = Recorder(variational_lstm.window_mask)
    monkeypatch.setattr(variational_lstm, "window_mask", recorder)
    return recorder.drawn


def test_a_layer_has_one_mask_in_time_and_upward(masks: list[Any]) -> None:
    torch.manual_seed(0)
    encoder = VariationalLSTM(IN, HIDDEN, layers=2, dropout=0.4).double()
    x_BTD = vectors()
    start = {name: torch.randn(2, STREAMS, HIDDEN, dtype=torch.float64) for name in ("h", "c")}
    found = encoder(x_BTD, start)
    assert [mask.shape for mask in masks] == [(STREAMS, 1, HIDDEN)] * 2
    assert not torch.equal(*masks)

    none = torch.ones(STREAMS, 1, dtype=torch.float64)
    expected = x_BTD
    for layer, mask, h_BH, c_BH, end in zip(
        encoder.layers, masks, start["h"], start["c"], found.state["h"], strict=True
    ):
        raw, _ = plain_loop(layer, expected, h_BH, c_BH, [none] * 4, [mask[:, 0]] * 4)
        torch.testing.assert_close(end, raw[:, -1])
        expected = raw * mask
    torch.testing.assert_close(found.raw, raw)
    torch.testing.assert_close(found.output, expected)


def test_every_window_has_new_masks_and_starts_from_an_undropped_state(masks: list[Any]) -> None:
    torch.manual_seed(0)
    encoder = VariationalLSTM(IN, 40, layers=1, dropout=0.5)
    first = encoder(vectors().float(), encoder.initial_state(STREAMS))
    encoder(vectors().float(), first.state)
    assert not torch.equal(*masks)
    assert torch.equal(first.state["h"][0], first.raw[:, -1])
    assert (first.state["h"] != 0).all()
    assert (first.state["c"] != 0).all()


def test_units_are_absent_at_every_step_and_examples_differ() -> None:
    torch.manual_seed(0)
    encoder = VariationalLSTM(IN, 60, dropout=0.5)
    gone = encoder(vectors().float(), encoder.initial_state(STREAMS)).output == 0
    assert torch.equal(gone, gone[:, :1].expand_as(gone))
    assert len(gone[:, 0].unique(dim=0)) == STREAMS


def test_dropout_at_the_input_is_a_rate_of_its_own(masks: list[Any]) -> None:
    torch.manual_seed(0)
    encoder = VariationalLSTM(IN, HIDDEN, dropout_input=0.5)
    found = encoder(vectors().float(), encoder.initial_state(STREAMS))
    assert masks == [None, None]
    assert torch.equal(found.output, found.raw)
    assert not torch.equal(found.output, encoder.eval()(vectors().float(), encoder.initial_state(STREAMS)).output)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"dropout": 1.0}, "VariationalLSTM: dropout = 1.0: must be at least 0 and less than 1"),
        ({"dropout_input": -0.1}, "VariationalLSTM: dropout_input = -0.1: must be at least 0"),
        ({"layers": 0}, "VariationalLSTM: layers = 0: must be at least 1"),
        ({"biases": 0}, "VariationalLSTM: biases = 0: must be 1 or 2"),
    ],
)
def test_wrong_arguments_are_sentences(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        VariationalLSTM(IN, HIDDEN, **wrong)
