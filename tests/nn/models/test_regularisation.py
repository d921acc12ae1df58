"""AR and TAR as the AWD-LSTM has them: the one reads what was dropped, the other what was not."""

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

STREAMS, STEPS, WIDTH = 3, 5, 4
BOTH = RegularisationSettings(activation=2.0, temporal_activation=1.5)


def encoded(steps: int = STEPS, dtype: torch.dtype = torch.float64) -> Encoded:
    """A window whose output is its raw states with some numbers dropped."""
    torch.manual_seed(0)
    raw_BTD = torch.randn(STREAMS, steps, WIDTH, dtype=dtype)
    return Encoded(raw_BTD * (torch.rand_like(raw_BTD) > 0.5) * 2, raw_BTD, {})


def test_means_of_squares() -> None:
    window = encoded()
    parts = activation_losses(window, BOTH)
    assert parts.keys() == {"activation", "temporal_activation"}
    small, slow = parts["activation"], parts["temporal_activation"]
    assert (small.count, slow.count) == (STREAMS * STEPS,) * 2
    assert (small.weight, slow.weight) == (2.0, 1.5)
    steps = window.raw[:, 1:] - window.raw[:, :-1]
    torch.testing.assert_close(small.sum / small.count, window.output.pow(2).mean())
    torch.testing.assert_close(slow.sum / slow.count, steps.pow(2).mean())


def test_streams_in_pieces_add_up() -> None:
    window = encoded()
    pieces = [Encoded(output, raw, {}) for output, raw in zip(window.output.split(1), window.raw.split(1), strict=True)]
    whole = activation_losses(window, BOTH)
    for name, part in whole.items():
        apart = [activation_losses(piece, BOTH)[name] for piece in pieces]
        assert sum(each.count for each in apart) == part.count
        torch.testing.assert_close(torch.stack([each.sum for each in apart]).sum(), part.sum)


def test_padding_adds_nothing() -> None:
    """Two streams of two tokens in a window of five: the states behind them, and the step to them, do not count."""
    window = encoded()
    there_BT = (torch.arange(STREAMS)[:, None] < 2) & (torch.arange(STEPS) < 2)
    short = Encoded(window.output[:2, :2], window.raw[:2, :2], {})
    padded, alone = activation_losses(window, BOTH, there_BT, 4), activation_losses(short, BOTH)
    assert {part.count for part in (*padded.values(), *alone.values())} == {4}
    torch.testing.assert_close(padded["activation"].sum, alone["activation"].sum)
    # A window of five has four steps for five tokens, one of two has one for two.
    torch.testing.assert_close(padded["temporal_activation"].sum * 4 / 5, alone["temporal_activation"].sum / 2)
    everything = activation_losses(window, BOTH, torch.ones_like(there_BT), STREAMS * STEPS)
    for name, part in activation_losses(window, BOTH).items():
        torch.testing.assert_close(everything[name].sum, part.sum)
        assert everything[name].count == part.count


def test_one_step_has_no_successor() -> None:
    window = encoded(steps=1)
    window.raw.requires_grad_()
    part = activation_losses(window, BOTH)["temporal_activation"]
    assert (part.sum.item(), part.count) == (0.0, STREAMS)
    part.sum.backward()
    assert window.raw.grad is not None
    assert not window.raw.grad.any()


@pytest.mark.parametrize("name", ["activation", "temporal_activation"])
def test_no_weight_leaves_no_part(name: str) -> None:
    assert activation_losses(encoded(), RegularisationSettings()) == {}
    assert activation_losses(encoded(), RegularisationSettings(**{name: 0.5})).keys() == {name}


def test_sums_are_not_rounded_to_half_precision() -> None:
    window = encoded(dtype=torch.bfloat16)
    for part in activation_losses(window, BOTH).values():
        assert part.sum.dtype == torch.float32


def test_a_model_adds_them_to_its_loss() -> None:
    torch.manual_seed(0)
    table = WordTable(11, WIDTH)
    ends = Lookup(table), LSTM(WIDTH, WIDTH, layers=1), Softmax(Plain(table))
    plain, held = LanguageModel(*ends).double(), LanguageModel(*ends, BOTH).double()
    tokens_BT = torch.randint(11, (STREAMS, STEPS + 1))
    without, found = plain.loss(tokens_BT), held.loss(tokens_BT)
    assert without.parts.keys() == {"nll"}
    h_BTD = plain(tokens_BT[:, :-1]).output
    added = 2.0 * h_BTD.square().mean() + 1.5 * (h_BTD[:, 1:] - h_BTD[:, :-1]).square().mean()
    torch.testing.assert_close(found.mean(), without.mean() + added)
    torch.testing.assert_close(found.sum(), without.sum() + STREAMS * STEPS * added)
