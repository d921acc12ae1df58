"""Ends in plain torch give the losses and gradients of our ends in float64, for every kind of tying and projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from reefknot.kernels.scores import IGNORE
from reefknot.lab.bench.plain_ends import MaskedLookup, StoredAdaptive, StoredSoftmax, use_plain_ends
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.encoders.transformer import Transformer
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs import adaptive
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

WORDS, DIM = 40, 8
HeadProjection = Literal["none", "own", "shared"]


def _banded() -> BandedTable:
    return BandedTable(WORDS, DIM, sizes=[6, 14], factor=2)


def _adaptive(
    tied: bool = True,
    shared: bool = True,
    head_projection: HeadProjection = "none",
    biases: bool = False,
    project_to: int | None = None,
    tail_dropout: float = 0.0,
    softmax_dropout: float = 0.0,
) -> tuple[InputEnd, OutputEnd]:
    table = _banded()
    classes = table if tied else _banded()
    projections = BandProjections(table, DIM)
    output_projections = projections if shared else BandProjections(classes, DIM, head=False)
    classifier = [Plain(band) for band in classes.tables] if biases else classes
    output = AdaptiveSoftmax(
        classifier,
        output_projections,
        head_projection=head_projection,
        project_to=project_to,
        tail_dropout=tail_dropout,
        softmax_dropout=softmax_dropout,
    )
    return AdaptiveLookup(table, projections, scale=2.0), output


def _plain(tied: bool = True, dim: int = DIM, bias: bool = True) -> tuple[InputEnd, OutputEnd]:
    table = WordTable(WORDS, dim)
    classes = table if tied else WordTable(WORDS, dim)
    classifier = Plain(classes, bias) if dim == DIM else Projected(classes, DIM, bias)
    return Lookup(table, project_to=None if dim == DIM else DIM), Softmax(classifier)


ENDS: dict[str, Callable[[], tuple[InputEnd, OutputEnd]]] = {
    "adaptive, tied": _adaptive,
    "adaptive, untied": lambda: _adaptive(tied=False, shared=False),
    "adaptive, tables tied": lambda: _adaptive(shared=False),
    "adaptive, projections tied": lambda: _adaptive(tied=False),
    "adaptive, head projected by the shared": lambda: _adaptive(head_projection="shared"),
    "adaptive, head projected, biases": lambda: _adaptive(head_projection="own", biases=True),
    "adaptive, hidden state projected": lambda: _adaptive(project_to=DIM),
    "plain, tied": _plain,
    "plain, untied, no bias": lambda: _plain(tied=False, bias=False),
    "plain, tied, projected": lambda: _plain(dim=6),
    "plain, untied, projected": lambda: _plain(tied=False, dim=6, bias=False),
    "narrow lookup, adaptive": lambda: (Lookup(WordTable(WORDS, 2), project_to=DIM), _adaptive(False, False)[1]),
}


def _model(ends: Callable[[], tuple[InputEnd, OutputEnd]]) -> LanguageModel:
    torch.manual_seed(0)
    source, output = ends()
    encoder = Transformer(DIM, layers=1, heads=2, ffn_dim=8)
    return LanguageModel(source, encoder, output).double()


def _loss_and_gradients(
    model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss and the gradients of all parameters, which are then cleared."""
    torch.manual_seed(1)
    parameters = list(model.parameters())
    losses = model.loss(inputs_BT, targets_BT)
    objective = losses.mean()
    objective.backward()
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return objective.detach(), gradients


def _compare(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor) -> None:
    """Check that plain ends give the loss and the gradients of ours."""
    parameters = list(model.parameters())
    exact, gradients = _loss_and_gradients(model, inputs_BT, targets_BT)
    use_plain_ends(model)
    assert all(before is after for before, after in zip(parameters, model.parameters(), strict=True))
    loss, plain_gradients = _loss_and_gradients(model, inputs_BT, targets_BT)
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=0.0)
    for plain_gradient, gradient in zip(plain_gradients, gradients, strict=True):
        assert plain_gradient is not None
        torch.testing.assert_close(plain_gradient, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ENDS)
def test_plain_ends_have_equal_losses_and_gradients(name: str) -> None:
    model = _model(ENDS[name])
    inputs_BT, targets_BT = torch.randint(WORDS, (2, 3, 11), generator=torch.Generator().manual_seed(2))
    _compare(model, inputs_BT, targets_BT)
    assert isinstance(model.output, StoredAdaptive if "adaptive" in name else StoredSoftmax)
    assert isinstance(model.input, MaskedLookup) == name.startswith("adaptive")


def test_empty_band_and_ignored_targets() -> None:
    inputs_BT = torch.zeros(2, 5, dtype=torch.long)
    targets_BT = inputs_BT.clone()
    targets_BT[1, 2:] = IGNORE
    _compare(_model(_adaptive), inputs_BT, targets_BT)


def test_dropout_is_applied_in_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both draw the same masks if the tails have no filler rows."""
    monkeypatch.setattr(adaptive, "PAD_MULTIPLE", 1)
    model = _model(lambda: _adaptive(tail_dropout=0.5, softmax_dropout=0.25))
    inputs_BT, targets_BT = torch.randint(WORDS, (2, 2, 7), generator=torch.Generator().manual_seed(2))
    _compare(model, inputs_BT, targets_BT)
    with_dropout, _ = _loss_and_gradients(model, inputs_BT, targets_BT)
    without_dropout, _ = _loss_and_gradients(model.eval(), inputs_BT, targets_BT)
    assert not torch.isclose(with_dropout, without_dropout, rtol=1e-3)


def test_ends_without_a_plain_form_are_unchanged() -> None:
    table = WordTable(WORDS, DIM)
    source, output = Lookup(table), MixtureOfSoftmaxes(Plain(table), DIM, experts=2)
    model = LanguageModel(source, Transformer(DIM, layers=1, heads=2, ffn_dim=8), output)
    use_plain_ends(model)
    assert model.input is source
    assert model.output is output
