"""DRILL: special cases equal other classifiers, and deep networks equal the formula in numpy.

Shapes: N rows, D dimensions, V classes.
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

DIM = 4

MakeTable = Callable[[int], WordTable]
LossAndGradients = Callable[[Classifier], dict[str, Tensor]]


def test_depth_zero_equals_tied_softmax(make_table: MakeTable, loss_and_gradients: LossAndGradients) -> None:
    classifier = Drill(make_table(DIM), depth=0, dropout=0.5)
    torch.testing.assert_close(loss_and_gradients(classifier), loss_and_gradients(Plain(make_table(DIM))))
    assert classifier.weight() is classifier.table.weight


@pytest.mark.parametrize("residual", [False, True])
def test_one_linear_layer_equals_bilinear(
    make_table: MakeTable, loss_and_gradients: LossAndGradients, residual: bool
) -> None:
    """(E U) h = E (U h) with one U. A layer's weight is U transposed, because it acts on rows."""
    drill = Drill(make_table(DIM), depth=1, activation="linear", residual=residual, layer_bias=False)
    bilinear = Bilinear(make_table(DIM), DIM, residual=residual)
    layer = drill.layers[0]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        bilinear.matrix.weight.copy_(layer.weight.T)
    torch.testing.assert_close(loss_and_gradients(drill), loss_and_gradients(bilinear))
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.T, bilinear.matrix.weight.grad)
    assert not torch.allclose(layer.weight.grad, bilinear.matrix.weight.grad)


def test_residual_adds_the_identity_to_the_matrix(make_table: MakeTable, loss_and_gradients: LossAndGradients) -> None:
    drill = Drill(make_table(DIM), depth=1, activation="linear", layer_bias=False).double()
    bilinear = Bilinear(make_table(DIM), DIM).double()
    with torch.no_grad():
        bilinear.matrix.weight.copy_(drill.layers[0].weight.T + torch.eye(DIM))
    torch.testing.assert_close(loss_and_gradients(drill), loss_and_gradients(bilinear))


@pytest.mark.parametrize("activation", ["linear", "tanh", "sigmoid", "relu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layer_residual", [False, True])
def test_three_layers_equal_the_formula_in_numpy(
    make_table: MakeTable, activation: Any, residual: bool, layer_residual: bool
) -> None:
    classifier = Drill(
        make_table(DIM), depth=3, activation=activation, residual=residual, layer_residual=layer_residual
    ).double()
    activate = {
        "linear": lambda x: x,
        "tanh": np.tanh,
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "relu": lambda x: np.maximum(x, 0),
    }[activation]
    table_VD = classifier.table.weight.detach().numpy()
    parameters = classifier.state_dict()
    vectors_VD = table_VD
    for layer in range(3):
        matrix = parameters[f"layers.{layer}.weight"].numpy().T
        bias = parameters[f"layers.{layer}.bias"].numpy()
        output_VD = activate(vectors_VD @ matrix + bias)
        if layer_residual and layer > 0:
            output_VD = output_VD + vectors_VD
        if residual:
            output_VD = output_VD + table_VD
        vectors_VD = output_VD
    np.testing.assert_allclose(classifier.weight().detach().numpy(), vectors_VD, rtol=1e-12)


def test_class_subset_runs_the_network_on_its_rows_only(make_table: MakeTable) -> None:
    classifier = Drill(make_table(DIM), depth=2).double()
    all_VD = classifier.weight()
    rows: list[int] = []
    classifier.layers[0].register_forward_hook(lambda _module, inputs, _output: rows.append(len(inputs[0])))
    ids = torch.tensor([7, 0, 7])
    torch.testing.assert_close(classifier.weight(ids), all_VD[ids])
    assert rows == [3]


@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
@pytest.mark.parametrize("layer_residual", [False, True])
def test_four_layer_gradients_match_finite_differences(activation: Any, layer_residual: bool) -> None:
    torch.manual_seed(0)
    classifier = Drill(WordTable(5, 3), 4, activation, layer_residual=layer_residual, init=0.8).double()
    output, targets_N = Softmax(classifier), torch.tensor([1, 4])
    hidden_ND = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def value(*_: Tensor) -> Tensor:
        # gradcheck changes its inputs in place, and the parameters are among these inputs.
        return output.loss(hidden_ND, targets_N, output.prepare(targets_N))["nll"].sum

    parameters = list(output.parameters())
    assert len(parameters) == 10
    assert torch.autograd.gradcheck(value, (hidden_ND, *parameters))


@pytest.mark.parametrize("position", ["input", "output"])
@pytest.mark.parametrize(("variational", "mask_shape"), [(True, (DIM,)), (False, (11, DIM))])
def test_dropout_acts_before_or_after_each_layer(
    make_table: MakeTable,
    halved_mask_shapes: list[tuple[int, ...]],
    position: Literal["input", "output"],
    variational: bool,
    mask_shape: tuple[int, ...],
) -> None:
    classifier = Drill(
        make_table(DIM), 2, "tanh", layer_residual=True, dropout=0.5, variational=variational, dropout_position=position
    ).double()
    table_VD = classifier.table.weight
    before, after = (0.5, 1.0) if position == "input" else (1.0, 0.5)
    first_VD = after * torch.tanh(classifier.layers[0](before * table_VD)) + table_VD
    second_VD = after * torch.tanh(classifier.layers[1](before * first_VD)) + first_VD + table_VD
    torch.testing.assert_close(classifier.weight(), second_VD)
    assert halved_mask_shapes == [mask_shape, mask_shape]


@pytest.mark.parametrize("position", ["input", "output"])
def test_evaluation_does_not_call_dropout(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, position: Literal["input", "output"]
) -> None:
    plain = Drill(make_table(DIM), 2).double()
    classifier = Drill(make_table(DIM), 2, dropout=0.9, dropout_position=position).double()
    classifier.load_state_dict(plain.state_dict())
    monkeypatch.delattr(F, "dropout")
    assert torch.equal(classifier.eval().weight(), plain.weight())


@pytest.mark.parametrize("variational", [True, False])
def test_dropout_masks_are_scaled_redrawn_and_shared_if_variational(variational: bool) -> None:
    torch.manual_seed(0)
    dropout = LabelDropout(0.6, variational)
    ones_VD = torch.ones(50, 400, dtype=torch.float64)
    first_VD, second_VD = dropout(ones_VD), dropout(ones_VD)
    assert {round(value, 9) for value in first_VD.unique().tolist()} == {0.0, 2.5}
    assert bool((first_VD == first_VD[0]).all()) == variational
    assert not torch.equal(first_VD, second_VD)
    dropped = (first_VD == 0).double().mean().item()
    assert dropped == pytest.approx(0.6, abs=0.1 if variational else 0.01)


def test_adds_only_the_layers_and_draws_small_values() -> None:
    torch.manual_seed(0)
    counts = [
        sum(parameter.numel() for parameter in Drill(WordTable(7, 400), depth).parameters()) for depth in (0, 1, 4)
    ]
    assert counts[0] == sum(parameter.numel() for parameter in Plain(WordTable(7, 400)).parameters())
    assert counts[1] - counts[0] == 160_400
    assert counts[2] - counts[0] == 4 * 160_400
    classifier = Drill(WordTable(7, 400), 2, init=0.3)
    for layer in classifier.layers:
        assert isinstance(layer, nn.Linear)
        assert 0.299 < layer.weight.abs().max().item() <= 0.3
        assert 0.049 < layer.bias.abs().max().item() <= 400**-0.5
    assert Drill(WordTable(7, 400)).layers[3].weight.abs().max().item() <= 0.1


def test_invalid_settings_are_rejected(make_table: MakeTable) -> None:
    table = make_table(DIM)
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
