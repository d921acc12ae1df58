"""The LSTM of Gal equals torch without dropout, and the equations with a mask per gate with dropout."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.nn.encoders import bayesian_lstm
from reefknot.nn.encoders.bayesian_lstm import BayesianLSTM
from reefknot.nn.encoders.masks import NUM_GATES

from .reference import HIDDEN, IN, STREAMS, Recorder, assert_same_as_torch, lstm_loop, vectors

Gates = Literal["separate", "tied"]


@pytest.mark.parametrize("gates", ["separate", "tied"])
def test_values_and_gradients_equal_torch(gates: Gates) -> None:
    torch.manual_seed(0)
    assert_same_as_torch(BayesianLSTM(IN, HIDDEN, gates=gates).double())
    rates = {"dropout_input": 0.5, "dropout_hidden": 0.3, "dropout_output": 0.5}
    assert_same_as_torch(BayesianLSTM(IN, HIDDEN, gates=gates, **rates).double().eval())


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the masks in the order in which they are drawn: input and state of every layer."""
    recorder = Recorder(bayesian_lstm.sample_mask)
    monkeypatch.setattr(bayesian_lstm, "sample_mask", recorder)
    return recorder.returned


def by_gate(mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return one mask per gate; a missing mask is all ones."""
    if mask is None:
        return [torch.ones(STREAMS, 1, dtype=torch.float64)] * NUM_GATES
    return list(mask.squeeze(-2)) if mask.dim() == 4 else [mask.squeeze(-2)] * NUM_GATES


@pytest.mark.parametrize("gates", ["separate", "tied"])
@pytest.mark.parametrize("rates", [(0.5, 0.3), (0.0, 0.3), (0.5, 0.0)])
def test_masked_gates_follow_the_equations_of_gal(gates: Gates, rates: tuple[float, float], masks: list[Any]) -> None:
    torch.manual_seed(0)
    encoder = BayesianLSTM(IN, HIDDEN, dropout_input=rates[0], dropout_hidden=rates[1], gates=gates).double()
    start = {name: torch.randn(2, STREAMS, HIDDEN, dtype=torch.float64) for name in ("h", "c")}
    encoded = encoder(vectors(), start)
    expected = vectors()
    for layer, input_mask, state_mask, hidden_BH, cell_BH in zip(
        encoder.layers, masks[::2], masks[1::2], start["h"], start["c"], strict=True
    ):
        expected, _ = lstm_loop(layer, expected, hidden_BH, cell_BH, by_gate(input_mask), by_gate(state_mask))
    torch.testing.assert_close(encoded.output, expected)
    for rate, drawn in zip(rates, (masks[::2], masks[1::2]), strict=True):
        assert all((mask is None) == (rate == 0.0) for mask in drawn)
        assert {value for mask in drawn if mask is not None for value in mask.unique().tolist()} <= {
            0.0,
            1 / (1 - rate),
        }
    torch.testing.assert_close(encoded.state["h"][-1], expected[:, -1])


def test_gates_have_separate_masks_or_share_one(masks: list[Any]) -> None:
    torch.manual_seed(0)
    for gates, count in (("separate", NUM_GATES), ("tied", 1)):
        masks.clear()
        encoder = BayesianLSTM(30, 30, dropout_input=0.5, dropout_hidden=0.5, gates=gates)
        encoder(vectors(dim=30).float(), encoder.initial_state(STREAMS))
        assert len(masks) == 4
        assert all(mask.numel() == count * STREAMS * 30 for mask in masks)
        patterns = torch.cat([mask.reshape(-1, 30) for mask in masks])
        assert len(patterns.unique(dim=0)) == 4 * count * STREAMS


def test_output_dropout_has_its_own_mask() -> None:
    torch.manual_seed(0)
    encoder = BayesianLSTM(IN, 60, dropout_output=0.4)
    encoded = encoder(vectors().float(), encoder.initial_state(STREAMS))
    dropped = encoded.output == 0
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert len(dropped[:, 0].unique(dim=0)) == STREAMS
    torch.testing.assert_close(encoded.output[~dropped], encoded.raw[~dropped] / 0.6)
    assert torch.equal(encoded.raw, encoder.eval()(vectors().float(), encoder.initial_state(STREAMS)).raw)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gates": "both"}, "BayesianLSTM: gates = 'both': must be separate or tied"),
        ({"dropout_hidden": 1.0}, "BayesianLSTM: dropout_hidden = 1.0: must be at least 0 and less than 1"),
        ({"hidden_dim": 0}, "BayesianLSTM: hidden_dim = 0: must be at least 1"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        BayesianLSTM(**{"input_dim": IN, "hidden_dim": HIDDEN, **arguments})
