"""Let a new end give the outputs of the layer that it replaces (`start="same"` of `replace_head`).

The old layer has the scores W h + b. These ends can have the same log-probabilities:

    Plain, Augmented, SampledSoftmax      the table is W
    Projected                             P = I, p = 0
    Bilinear                              U = 0 with a residual, U = I without
    Drill                                 the last layer has U = 0 and the same bias in all dimensions, so that it adds
                                          the same number to the scores of all classes, which cancels in the softmax
                                          (but not under a cap, where it must be 0)

All of them still learn: no gradient vanishes, except that the earlier layers of DRILL have none in the first step.
"""

from __future__ import annotations

from functools import singledispatch
from typing import cast

import torch
from torch import Tensor, nn

from reefknot.errors import ArgumentError, describe_type
from reefknot.nn.classifiers.bilinear import Bilinear
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.sampled import SampledSoftmax
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import EmbeddingTable

RELU_BIAS = 0.1
"""The bias of DRILL's last layer with relu. At 0, the gradient of relu is 0, and the layer would never learn."""


@torch.no_grad()
def start_same(end: OutputEnd, weight: Tensor, bias: Tensor) -> None:
    """Set the parameters of an end so that its scores are those of a linear layer.

    Args:
        end: The new end.
        weight: The weight of the layer, with shape (V, D).
        bias: The bias of the layer, with shape (V,). It is zero for a layer without bias.
    """
    if type(end) not in (Softmax, Augmented, SampledSoftmax):
        raise _impossible(f"{describe_type(end)} cannot compute a single softmax of linear scores")
    classifier = cast(Softmax, end).classifier
    _copy_table(classifier, weight)
    _copy_bias(classifier, bias)
    set_identity(classifier)
    has_layers = isinstance(classifier, Drill) and len(classifier.layers)
    if cast(Softmax, end).softcap is not None and has_layers and not isinstance(classifier.activation, nn.Tanh):
        raise _impossible(
            'DRILL adds the same number to all scores, which changes capped scores; make it with activation="tanh", '
            "which adds 0"
        )


def _impossible(reason: str) -> ArgumentError:
    """Return the error for an end that cannot start with the outputs of the old layer."""
    return ArgumentError(f'replace_head: start = "same" is not possible: {reason}; use start="new"')


def _copy_table(classifier: Classifier, weight: Tensor) -> None:
    """Copy the weight of the old layer into the table, or check that a tied table already has it."""
    table = classifier.table
    if table.unit_norm:
        raise _impossible("the table scales its vectors to length 1")
    if table.weight.shape != weight.shape:
        raise _impossible(
            f"the table is {tuple(table.weight.shape)} but the weight of the output layer is {tuple(weight.shape)}"
        )
    if not isinstance(table, EmbeddingTable):
        table.weight.copy_(weight)
    elif table.weight is not weight and not torch.equal(table.weight.to(weight), weight):
        raise _impossible(
            "the table holds the input embedding, but the model has another weight in its output layer; pass "
            "WordTable.from_embedding(model.get_output_embeddings()) or a new WordTable, which is not tied"
        )


def _copy_bias(classifier: Classifier, bias: Tensor) -> None:
    """Copy the bias of the old layer."""
    if classifier.bias is not None:
        classifier.bias.copy_(bias)
    elif bool(bias.any()):
        raise _impossible("the output layer has a bias, but the classifier does not; make it with bias=True")


@singledispatch
def set_identity(classifier: Classifier) -> None:
    """Set the parameters of a classifier so that its scores are dot products of the table's rows with h, plus a bias.

    Args:
        classifier: The classifier. Its scores may also have a number added that is the same for all classes.
    """
    raise _impossible(f"{describe_type(classifier)} classifier cannot compute linear scores")


@set_identity.register
def _(classifier: Plain) -> None:
    return


@set_identity.register
def _(classifier: Projected) -> None:
    _check_square(classifier)
    nn.init.eye_(classifier.projection.weight)
    if classifier.projection.bias is not None:
        classifier.projection.bias.zero_()


@set_identity.register
def _(classifier: Bilinear) -> None:
    _check_square(classifier)
    if classifier.residual:
        classifier.matrix.weight.zero_()
    else:
        nn.init.eye_(classifier.matrix.weight)


@set_identity.register
def _(classifier: Drill) -> None:
    if not len(classifier.layers):
        return
    if not classifier.residual:
        raise _impossible("DRILL without residual=True does not add the table to its last layer")
    if classifier.layer_residual and len(classifier.layers) > 1:
        raise _impossible("DRILL with layer_residual=True adds the table more than once")
    last = cast(nn.Linear, classifier.layers[-1])
    is_relu = isinstance(classifier.activation, nn.ReLU)
    if is_relu and last.bias is None:
        raise _impossible("the last layer of DRILL would not learn: with relu it needs layer_bias=True")
    last.weight.zero_()
    if last.bias is not None:
        last.bias.fill_(RELU_BIAS if is_relu else 0.0)


def _check_square(classifier: Classifier) -> None:
    """Raise an error unless the table has the dimension of the hidden state."""
    if classifier.table.dim != classifier.context_dim:
        raise _impossible(
            f"the table has {classifier.table.dim} dimensions but the hidden state has {classifier.context_dim}"
        )
