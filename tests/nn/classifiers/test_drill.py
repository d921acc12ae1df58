"""DRILL: its special cases are other classifiers, and any depth is the formula written out.

Shapes: N rows, D width, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.classifiers.bilinear import Bilinear
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.drill import Drill, LabelDropout
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

WIDTH = 4

Words = Callable[[int], WordTable]
Outcome = Callable[[Classifier], dict[str, Tensor]]


def test_depth_zero_is_the_tied_softmax(words: Words, outcome: Outcome) -> None:
    classifier = Drill(words(WIDTH), depth=0, dropout=0.5)
    torch.testing.assert_close(outcome(classifier), outcome(Plain(words(WIDTH))))
    assert classifier.weight() is classifier.table.weight


@pytest.mark.parametrize("residual", [False, True])
def test_one_linear_layer_is_bilinear(words: Words, outcome: Outcome, residual: bool) -> None:
    """(E U) h = E (U h) with one U. A layer's weight is U transposed, because it acts on rows."""
    drill = Drill(words(WIDTH), depth=1, activation="linear", residual=residual, layer_bias=False)
    bilinear = Bilinear(words(WIDTH), WIDTH, residual=residual)
    layer = drill.layers[0]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        bilinear.matrix.weight.copy_(layer.weight.T)
    torch.testing.assert_close(outcome(drill), outcome(bilinear))
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.T, bilinear.matrix.weight.grad)
    assert not torch.allclose(layer.weight.grad, bilinear.matrix.weight.grad)


def test_the_residual_is_the_identity_added_to_the_matrix(words: Words, outcome: Outcome) -> None:
    drill = Drill(words(WIDTH), depth=1, activation="linear", layer_bias=False).double()
    bilinear = Bilinear(words(WIDTH), WIDTH).double()
    with torch.no_grad():
        bilinear.matrix.weight.copy_(drill.layers[0].weight.T + torch.eye(WIDTH))
    torch.testing.assert_close(outcome(drill), outcome(bilinear))


@pytest.mark.parametrize("activation", ["linear", "tanh", "sigmoid", "relu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layer_residual", [False, True])
def test_three_layers_are_the_formula(words: Words, activation: Any, residual: bool, layer_residual: bool) -> None:
    classifier = Drill(
        words(WIDTH), depth=3, activation=activation, residual=residual, layer_residual=layer_residual
    ).double()
    act = {
        "linear": lambda x: x,
        "tanh": np.tanh,
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "relu": lambda x: np.maximum(x, 0),
    }[activation]
    e = classifier.table.weight.detach().numpy()
    (u1, b1), (u2, b2), (u3, b3) = (
        (classifier.state_dict()[f"layers.{i}.weight"].numpy().T, classifier.state_dict()[f"layers.{i}.bias"].numpy())
        for i in range(3)
    )
    to_table, to_layer = int(residual), int(layer_residual)
    e1 = act(e @ u1 + b1) + to_table * e
    e2 = act(e1 @ u2 + b2) + to_layer * e1 + to_table * e
    e3 = act(e2 @ u3 + b3) + to_layer * e2 + to_table * e
    np.testing.assert_allclose(classifier.weight().detach().numpy(), e3, rtol=1e-12)


def test_some_classes_run_the_network_on_their_rows_only(words: Words) -> None:
    classifier = Drill(words(WIDTH), depth=2).double()
    every_VD = classifier.weight()
    rows: list[int] = []
    classifier.layers[0].register_forward_hook(lambda module, given, found: rows.append(len(given[0])))
    ids = torch.tensor([7, 0, 7])
    torch.testing.assert_close(classifier.weight(ids), every_VD[ids])
    assert rows == [3]


@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
@pytest.mark.parametrize("layer_residual", [False, True])
def test_four_layers_against_differences(activation: Any, layer_residual: bool) -> None:
    torch.manual_seed(0)
    classifier = Drill(WordTable(5, 3), 4, activation, layer_residual=layer_residual, init=0.8).double()
    output, y_N = Softmax(classifier), torch.tensor([1, 4])
    h_ND = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def value(*_: Tensor) -> Tensor:
        # gradcheck moves its inputs in place, and the parameters are those inputs.
        return output.loss(h_ND, y_N, output.prepare(y_N))["nll"].sum

    parameters = list(output.parameters())
    assert len(parameters) == 10
    assert torch.autograd.gradcheck(value, (h_ND, *parameters))


@pytest.mark.parametrize("position", ["input", "output"])
@pytest.mark.parametrize(("variational", "mask"), [(True, (WIDTH,)), (False, (11, WIDTH))])
def test_where_dropout_acts(
    words: Words,
    halving: list[tuple[int, ...]],
    position: Literal["input", "output"],
    variational: bool,
    mask: tuple[int, ...],
) -> None:
    classifier = Drill(
        words(WIDTH), 2, "tanh", layer_residual=True, dropout=0.5, variational=variational, dropout_position=position
    ).double()
    e_VD = classifier.table.weight
    before, after = (0.5, 1.0) if position == "input" else (1.0, 0.5)
    first_VD = after * torch.tanh(classifier.layers[0](before * e_VD)) + e_VD
    second_VD = after * torch.tanh(classifier.layers[1](before * first_VD)) + first_VD + e_VD
    torch.testing.assert_close(classifier.weight(), second_VD)
    assert halving == [mask, mask]


@pytest.mark.parametrize("position", ["input", "output"])
def test_evaluation_drops_nothing(
    words: Words, monkeypatch: pytest.MonkeyPatch, position: Literal["input", "output"]
) -> None:
    plain = Drill(words(WIDTH), 2).double()
    classifier = Drill(words(WIDTH), 2, dropout=0.9, dropout_position=position).double()
    classifier.load_state_dict(plain.state_dict())
    monkeypatch.delattr(F, "dropout")
    assert torch.equal(classifier.eval().weight(), plain.weight())


@pytest.mark.parametrize("variational", [True, False])
def test_masks_are_scaled_drawn_anew_and_shared_as_named(variational: bool) -> None:
    torch.manual_seed(0)
    drop = LabelDropout(0.6, variational)
    ones_VD = torch.ones(50, 400, dtype=torch.float64)
    first_VD, second_VD = drop(ones_VD), drop(ones_VD)
    assert {round(value, 9) for value in first_VD.unique().tolist()} == {0.0, 2.5}
    assert bool((first_VD == first_VD[0]).all()) == variational
    assert not torch.equal(first_VD, second_VD)
    dropped = (first_VD == 0).double().mean().item()
    assert dropped == pytest.approx(0.6, abs=0.1 if variational else 0.01)


def test_the_layers_are_all_it_adds_and_start_small() -> None:
    torch.manual_seed(0)
    counts = [sum(p.numel() for p in Drill(WordTable(7, 400), depth).parameters()) for depth in (0, 1, 4)]
    assert counts[0] == sum(p.numel() for p in Plain(WordTable(7, 400)).parameters())
    assert counts[1] - counts[0] == 160_400
    assert counts[2] - counts[0] == 4 * 160_400
    classifier = Drill(WordTable(7, 400), 2, init=0.3)
    for layer in classifier.layers:
        assert isinstance(layer, nn.Linear)
        assert 0.299 < layer.weight.abs().max().item() <= 0.3
        assert 0.049 < layer.bias.abs().max().item() <= 400**-0.5
    assert Drill(WordTable(7, 400)).layers[3].weight.abs().max().item() <= 0.1


def test_impossible_settings_are_refused(words: Words) -> None:
    table = words(WIDTH)
    with pytest.raises(SettingsError, match="depth = -1: must be at least 0"):
        Drill(table, depth=-1)
    with pytest.raises(SettingsError, match="activation = 'gelu': must be one of linear, tanh, sigmoid, relu"):
        Drill(table, activation="gelu")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="dropout_position = 'between': must be input or output"):
        Drill(table, dropout_position="between")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="dropout = nan: must be"):
        Drill(table, dropout=float("nan"))
    with pytest.raises(SettingsError, match=r"init = 0\.0: must be positive"):
        Drill(table, init=0.0)
