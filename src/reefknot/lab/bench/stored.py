"""The ends of a model as people write them in plain torch: what a step with ours is compared with.

    adaptive input      boolean masks over the ids, band by band
    adaptive softmax    the rows of each tail found on the device, the scores of head and tails stored
    softmax             the scores of all classes stored

Each holds the end whose work it does, with its tables and matrices, so ties stay as they are and every parameter gets
the same gradient. Ends that are written in no other way (a lookup, a char-CNN, a mixture) stay as they are too.

Shapes: B rows of a window, T steps, D width, N rows of the hidden state, R tokens of a band.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import rows_by_band


def store(model: LanguageModel) -> None:
    """Put plain torch in the place of the model's ends, where they have such a form."""
    if isinstance(model.input, AdaptiveLookup):
        model.input = MaskedLookup(model.input)
    if isinstance(model.output, AdaptiveSoftmax):
        model.output = StoredAdaptive(model.output)
    elif type(model.output) is Softmax:  # and none of the ends that go further, such as a mixture
        model.output = StoredSoftmax(model.output)


class MaskedLookup(InputEnd):
    """An adaptive input that finds the tokens of a band by a mask, and writes their vectors through it."""

    waits = True

    def __init__(self, end: AdaptiveLookup) -> None:
        super().__init__()
        self.end = end
        self.vocab_size, self.dim = end.vocab_size, end.dim

    def forward(self, ids_BT: Tensor) -> Tensor:
        end, found = self.end, []
        for band, (start, stop) in enumerate(pairwise(end.table.bounds)):
            inside_BT = (ids_BT >= start) & (ids_BT < stop)
            vectors = end.table.tables[band].vectors(ids_BT[inside_BT] - start)
            found.append((inside_BT, end.projections.up(band, vectors)))
        x_BTD = found[0][1].new_zeros(*ids_BT.shape, self.dim)
        for inside_BT, vectors_RD in found:
            x_BTD[inside_BT] = vectors_RD
        return F.dropout(end.scale * x_BTD, end.dropout, self.training)


class Stored(OutputEnd):
    """An output end that is trained and nothing else, with the loss of the end that it holds in another form."""

    end: OutputEnd

    def __init__(self, end: OutputEnd) -> None:
        super().__init__()
        self.end = end
        self.vocab_size, self.context_dim = end.vocab_size, end.context_dim

    def penalties(self) -> dict[str, Tensor]:
        return self.end.penalties()


class StoredSoftmax(Stored):
    """All scores in one matrix, and torch's cross entropy of it."""

    end: Softmax

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        return {"nll": LossPart(_cross_entropy(self.end.classifier, h_ND, y_N), plan.count)}


class StoredAdaptive(Stored):
    """A matrix of scores for the head and one for each tail, whose rows are asked of the device."""

    end: AdaptiveSoftmax

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        end = self.end
        if end.front is not None:
            h_ND = end.front(h_ND)
        h_ND = F.dropout(h_ND, end.softmax_dropout, self.training)
        first, *rest = (each for each in end.classifiers if isinstance(each, Classifier))
        head_N, losses = y_N.clone(), []
        for band, (rows_R, words_R) in enumerate(rows_by_band(y_N, end.bounds)[1:], start=1):
            head_N[rows_R] = first.vocab_size + band - 1
            narrow = F.dropout(end.projections.down(band, h_ND[rows_R]), end.tail_dropout, self.training)
            losses.append(_cross_entropy(rest[band - 1], narrow, words_R))
        if end.head is not None:
            h_ND = end.head(h_ND)
        elif end.head_projection == "shared":
            h_ND = end.projections.down(0, h_ND)
        losses.append(_cross_entropy(first, h_ND, head_N, end.clusters, end.cluster_bias))
        return {"nll": LossPart(torch.stack(losses).sum(), plan.count)}


def _cross_entropy(
    classifier: Classifier, h_ND: Tensor, y_N: Tensor, more: Tensor | None = None, more_bias: Tensor | None = None
) -> Tensor:
    """Summed over the rows. `more`: vectors of classes that follow those of the classifier."""
    weight, bias = classifier.weight(), classifier.bias
    if more is not None:
        weight = torch.cat([weight, more])
    both = bias if bias is None or more_bias is None else torch.cat([bias, more_bias])
    return F.cross_entropy(F.linear(classifier.context(h_ND), weight, both), y_N, reduction="sum")
