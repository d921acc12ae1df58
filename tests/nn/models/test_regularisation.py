"""AR and TAR of the AWD-LSTM: AR reads activations after dropout, TAR before dropout."""

from __future__ import annotations

import pytest
import torch

from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.contract import Encoded
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.regularisation import RegularisationSettings, activation_losses
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

STREAMS, STEPS, DIM = 3, 5, 4
BOTH = RegularisationSettings(activation=2.0, temporal_activation=1.5)


def encoded(steps: int = STEPS, dtype: torch.dtype = torch.float64) -> Encoded:
    """Return a window whose output is its raw states after dropout."""
    torch.manual_seed(0)
    raw_BTD = torch.randn(STREAMS, steps, DIM, dtype=dtype)
    return Encoded(raw_BTD * (torch.rand_like(raw_BTD) > 0.5) * 2, raw_BTD, {})


def test_losses_are_means_of_squares() -> None:
    window = encoded()
    parts = activation_losses(window, BOTH)
    assert parts.keys() == {"activation", "temporal_activation"}
    small, slow = parts["activation"], parts["temporal_activation"]
    assert (small.count, slow.count) == (STREAMS * STEPS,) * 2
    assert (small.weight, slow.weight) == (2.0, 1.5)
    steps = window.raw[:, 1:] - window.raw[:, :-1]
    torch.testing.assert_close(small.sum / small.count, window.output.pow(2).mean())
    torch.testing.assert_close(slow.sum / slow.count, steps.pow(2).mean())


def test_losses_of_single_streams_add_up() -> None:
    window = encoded()
    streams = [
        Encoded(output, raw, {}) for output, raw in zip(window.output.split(1), window.raw.split(1), strict=True)
    ]
    whole = activation_losses(window, BOTH)
    for name, part in whole.items():
        stream_parts = [activation_losses(stream, BOTH)[name] for stream in streams]
        assert sum(stream_part.count for stream_part in stream_parts) == part.count
        torch.testing.assert_close(torch.stack([stream_part.sum for stream_part in stream_parts]).sum(), part.sum)


def test_padding_does_not_change_the_losses() -> None:
    """In a window of five steps, two streams have two tokens; padding and the step into padding do not count."""
    window = encoded()
    mask_BT = (torch.arange(STREAMS)[:, None] < 2) & (torch.arange(STEPS) < 2)
    short = Encoded(window.output[:2, :2], window.raw[:2, :2], {})
    padded, alone = activation_losses(window, BOTH, mask_BT, 4), activation_losses(short, BOTH)
    assert {part.count for part in (*padded.values(), *alone.values())} == {4}
    torch.testing.assert_close(padded["activation"].sum, alone["activation"].sum)
    # A window of five tokens has four differences, and a window of two tokens has one.
    torch.testing.assert_close(padded["temporal_activation"].sum * 4 / 5, alone["temporal_activation"].sum / 2)
    everything = activation_losses(window, BOTH, torch.ones_like(mask_BT), STREAMS * STEPS)
    for name, part in activation_losses(window, BOTH).items():
        torch.testing.assert_close(everything[name].sum, part.sum)
        assert everything[name].count == part.count


def test_window_of_one_step_has_zero_temporal_loss() -> None:
    window = encoded(steps=1)
    window.raw.requires_grad_()
    part = activation_losses(window, BOTH)["temporal_activation"]
    assert (part.sum.item(), part.count) == (0.0, STREAMS)
    part.sum.backward()
    assert window.raw.grad is not None
    assert not window.raw.grad.any()


@pytest.mark.parametrize("name", ["activation", "temporal_activation"])
def test_losses_without_weight_are_left_out(name: str) -> None:
    assert activation_losses(encoded(), RegularisationSettings()) == {}
    assert activation_losses(encoded(), RegularisationSettings(**{name: 0.5})).keys() == {name}


def test_bfloat16_activations_are_summed_in_float32() -> None:
    window = encoded(dtype=torch.bfloat16)
    for part in activation_losses(window, BOTH).values():
        assert part.sum.dtype == torch.float32


def test_model_adds_both_losses_to_its_objective() -> None:
    torch.manual_seed(0)
    table = WordTable(11, DIM)
    ends = Lookup(table), LSTM(DIM, DIM, layers=1), Softmax(Plain(table))
    plain, regularised = LanguageModel(*ends).double(), LanguageModel(*ends, BOTH).double()
    tokens_BT = torch.randint(11, (STREAMS, STEPS + 1))
    expected, losses = plain.loss(tokens_BT), regularised.loss(tokens_BT)
    assert expected.parts.keys() == {"nll"}
    hidden_BTD = plain(tokens_BT[:, :-1]).output
    added = 2.0 * hidden_BTD.square().mean() + 1.5 * (hidden_BTD[:, 1:] - hidden_BTD[:, :-1]).square().mean()
    torch.testing.assert_close(losses.mean(), expected.mean() + added)
    torch.testing.assert_close(losses.sum(), expected.sum() + STREAMS * STEPS * added)
