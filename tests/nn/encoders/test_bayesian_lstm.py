"""Gal's LSTM: torch's where nothing is dropped, the equations with a mask per gate where something is."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.nn.encoders import bayesian_lstm
from reefknot.nn.encoders.bayesian_lstm import BayesianLSTM
from reefknot.nn.encoders.masks import GATES

from .authority import HIDDEN, IN, STREAMS, Recorder, plain_loop, same_as_torch, vectors

Gates = Literal["separate", "tied"]


@pytest.mark.parametrize("gates", ["separate", "tied"])
def test_values_and_gradients_are_those_of_torch(gates: Gates) -> None:
    torch.manual_seed(0)
    same_as_torch(BayesianLSTM(IN, HIDDEN, gates=gates).double())
    rates = {"dropout_input": 0.5, "dropout_hidden": 0.3, "dropout_output": 0.5}
    same_as_torch(BayesianLSTM(IN, HIDDEN, gates=gates, **rates).double().eval())


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks of inputs and states, as they are drawn: input and state of the first layer, of the second."""
    recorder = Recorder(bayesian_lstm.window_mask)
    monkeypatch.setattr(bayesian_lstm, "window_mask", recorder)
    return recorder.drawn


def by_gate(mask: torch.Tensor | None) -> list[torch.Tensor]:
    if mask is None:
        return [torch.ones(STREAMS, 1, dtype=torch.float64)] * GATES
    return list(mask.squeeze(-2)) if mask.dim() == 4 else [mask.squeeze(-2)] * GATES


@pytest.mark.parametrize("gates", ["separate", "tied"])
@pytest.mark.parametrize("rates", [(0.5, 0.3), (0.0, 0.3), (0.5, 0.0)])
def test_every_mask_is_where_gal_puts_it(gates: Gates, rates: tuple[float, float], masks: list[Any]) -> None:
    torch.manual_seed(0)
    encoder = BayesianLSTM(IN, HIDDEN, dropout_input=rates[0], dropout_hidden=rates[1], gates=gates).double()
    start = {name: torch.randn(2, STREAMS, HIDDEN, dtype=torch.float64) for name in ("h", "c")}
    found = encoder(vectors(), start)
    expected = vectors()
    for layer, below, before, h_BH, c_BH in zip(
        encoder.layers, masks[::2], masks[1::2], start["h"], start["c"], strict=True
    ):
        expected, _ = plain_loop(layer, expected, h_BH, c_BH, by_gate(below), by_gate(before))
    torch.testing.assert_close(found.output, expected)
    for rate, drawn in zip(rates, (masks[::2], masks[1::2]), strict=True):
        assert all((mask is None) == (rate == 0.0) for mask in drawn)
        assert {kept for mask in drawn if mask is not None for kept in mask.unique().tolist()} <= {0.0, 1 / (1 - rate)}
    torch.testing.assert_close(found.state["h"][-1], expected[:, -1])


def test_masks_of_the_gates_differ_or_are_one(masks: list[Any]) -> None:
    torch.manual_seed(0)
    for gates, drawn in (("separate", GATES), ("tied", 1)):
        masks.clear()
        encoder = BayesianLSTM(30, 30, dropout_input=0.5, dropout_hidden=0.5, gates=gates)
        encoder(vectors(width=30).float(), encoder.initial_state(STREAMS))
        assert len(masks) == 4
        assert all(mask.numel() == drawn * STREAMS * 30 for mask in masks)
        patterns = torch.cat([mask.reshape(-1, 30) for mask in masks])
        assert len(patterns.unique(dim=0)) == 4 * drawn * STREAMS


def test_the_output_has_a_mask_of_its_own() -> None:
    torch.manual_seed(0)
    encoder = BayesianLSTM(IN, 60, dropout_output=0.4)
    found = encoder(vectors().float(), encoder.initial_state(STREAMS))
    gone = found.output == 0
    assert torch.equal(gone, gone[:, :1].expand_as(gone))
    assert len(gone[:, 0].unique(dim=0)) == STREAMS
    torch.testing.assert_close(found.output[~gone], found.raw[~gone] / 0.6)
    assert torch.equal(found.raw, encoder.eval()(vectors().float(), encoder.initial_state(STREAMS)).raw)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"gates": "both"}, "BayesianLSTM: gates = 'both': must be separate or tied"),
        ({"dropout_hidden": 1.0}, "BayesianLSTM: dropout_hidden = 1.0: must be at least 0 and less than 1"),
        ({"hidden_dim": 0}, "BayesianLSTM: hidden_dim = 0: must be at least 1"),
    ],
)
def test_wrong_arguments_are_sentences(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        BayesianLSTM(**{"input_dim": IN, "hidden_dim": HIDDEN, **wrong})
