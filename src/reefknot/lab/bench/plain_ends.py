"""The ends of a model in plain PyTorch, with all scores stored. Benchmarks compare our ends with them.

    plain           one matrix of scores, and torch's cross-entropy of it
    adaptive        the rows of each tail found by a mask on the device; the scores of head and tails stored
    augmented       two distributions over V for every row
    mixture         one distribution over V for every row and expert
    drill           the class vectors of the label encoder, then the same as plain
    adaptive input  boolean masks over the ids, band by band

`LOSSES` has the output ends as functions of a problem's weights. They are one of the implementations (competitors) that
`bench heads` compares. In float64, they also compute the gradients that all competitors are compared with, because they
share no code with our kernels.

`use_plain_ends` replaces the ends of a model, for `bench steps`. A replacement keeps the original end and uses its
tables and matrices, so ties are preserved and every parameter gets the same gradient. Ends that have no simpler form (a
lookup, a char-CNN, a mixture) are not replaced.

Shapes: N rows (tokens), D dimensions, V classes, K experts, R rows of a tail, S classes of a tail; B rows of a window,
T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.lab.bench.problems import ALPHA, DEPTH, EXPERTS, TAU, Problem, Weights
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan
from reefknot.nn.outputs.softmax import Softmax

Loss = Callable[[Tensor, Tensor, Weights], Tensor]
"""(h_ND, y_N, weights) -> the loss summed over the rows."""
Scores = Callable[[Tensor], Tensor]
"""h_RD -> scores_RS."""
_SCORES_AT_ONCE = {"cuda": 2**27, "cpu": 2**24}
"""The largest number of float64 scores in memory for the exact gradients: 1 GiB on a GPU, 128 MiB on a CPU."""


# -- losses ----------------------------------------------------------------------------------------------------------


def summed_cross_entropy(scores_NV: Tensor, y_N: Tensor) -> Tensor:
    return F.cross_entropy(scores_NV, y_N, reduction="sum")


def adaptive_cross_entropy(
    h_ND: Tensor, y_N: Tensor, bounds: Sequence[int], head: Scores, tails: Sequence[Scores]
) -> Tensor:
    """Return the summed loss of an adaptive softmax.

    Args:
        h_ND: Hidden states.
        y_N: Targets.
        bounds: The first id of every tail, and the number of words.
        head: Scores the words before the first tail, then a cluster for each tail.
        tails: Functions that score the words of a tail, for the rows whose target is in the tail.
    """
    head_N, losses = y_N.clone(), []
    for tail, (start, stop) in enumerate(pairwise(bounds)):
        rows_R = ((y_N >= start) & (y_N < stop)).nonzero().squeeze(-1)
        head_N[rows_R] = bounds[0] + tail
        losses.append(summed_cross_entropy(tails[tail](h_ND[rows_R]), y_N[rows_R] - start))
    return torch.stack([*losses, summed_cross_entropy(head(h_ND), head_N)]).sum()


def plain(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    return summed_cross_entropy(F.linear(h_ND, weights["table"]), y_N)


def adaptive(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    tails = range(1, 1 + sum(name.startswith("band") for name in weights))
    sizes = [len(weights["head"]) - len(tails), *(len(weights[f"band{tail}"]) for tail in tails)]

    def tail_scores(down: Tensor, classes: Tensor, h_RD: Tensor) -> Tensor:
        return F.linear(F.linear(h_RD, down), classes)

    return adaptive_cross_entropy(
        h_ND,
        y_N,
        list(accumulate(sizes)),
        partial(F.linear, weight=weights["head"]),
        [partial(tail_scores, weights[f"down{tail}"], weights[f"band{tail}"]) for tail in tails],
    )


def augmented(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    return _augmented(h_ND, y_N, weights["table"], weights["table"])


def augmented_detached(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    return _augmented(h_ND, y_N, weights["table"], weights["table"].detach())


def _augmented(h_ND: Tensor, y_N: Tensor, table_VD: Tensor, soft_VD: Tensor) -> Tensor:
    scores_NV = _at_least_float32(F.linear(h_ND, table_VD))
    soft_NV = torch.softmax(_at_least_float32(F.linear(soft_VD[y_N], soft_VD)) / TAU, dim=-1)
    kl = F.kl_div(torch.log_softmax(scores_NV / TAU, dim=-1), soft_NV, reduction="sum")
    return summed_cross_entropy(scores_NV, y_N) + ALPHA * kl


def mixture(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    latent_NKD, log_prior_NK = experts(h_ND, weights)
    p_NKV = torch.softmax(_at_least_float32(F.linear(latent_NKD, weights["table"])), dim=-1)
    p_NV = (log_prior_NK.exp()[..., None] * p_NKV).sum(1)
    return F.nll_loss(p_NV.log(), y_N, reduction="sum")


def experts(h_ND: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return the hidden states of the experts of a mixture, latent_NKD, and their log-weights, log_prior_NK."""
    latent_NKD = torch.tanh(F.linear(h_ND, weights["latent"], weights["latent_bias"])).view(len(h_ND), EXPERTS, -1)
    return latent_NKD, torch.log_softmax(_at_least_float32(F.linear(h_ND, weights["prior"])), dim=-1)


def drill(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    return summed_cross_entropy(F.linear(h_ND, label_encoder(weights)), y_N)


def label_encoder(weights: Weights) -> Tensor:
    """Return DRILL's class vectors."""
    e_VD = table_VD = weights["table"]
    for layer in range(1, DEPTH + 1):
        e_VD = torch.sigmoid(F.linear(e_VD, weights[f"layer{layer}"], weights[f"layer{layer}_bias"])) + table_VD
    return e_VD


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


LOSSES: dict[str, Loss] = {
    "plain": plain,
    "adaptive": adaptive,
    "augmented": augmented,
    "augmented-detached": augmented_detached,
    "mixture": mixture,
    "drill": drill,
}


def exact_gradients(problem: Problem) -> dict[str, Tensor]:
    """Return all gradients of the mean loss, computed in float64, on a few rows at a time to limit the memory."""
    weights = {name: weight.double().requires_grad_() for name, weight in problem.weights.items()}
    hidden_ND = problem.hidden.double().requires_grad_()
    y_N = problem.targets.to(hidden_ND.device)
    scores_per_row = problem.shape.words * (EXPERTS if problem.end == "mixture" else 1)
    loss = LOSSES[problem.end]
    rows = max(1, _SCORES_AT_ONCE[y_N.device.type] // scores_per_row)
    for rows_ND, rows_N in zip(torch.split(hidden_ND, rows), torch.split(y_N, rows), strict=True):
        torch.autograd.backward(loss(rows_ND, rows_N, weights) / problem.shape.rows)
    leaves = {"hidden": hidden_ND, **weights}
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


# -- in a model ------------------------------------------------------------------------------------------------------


def use_plain_ends(model: LanguageModel) -> None:
    """Replace the ends of a model that have a form in plain torch."""
    if isinstance(model.input, AdaptiveLookup):
        model.input = MaskedLookup(model.input)
    if isinstance(model.output, AdaptiveSoftmax):
        model.output = StoredAdaptive(model.output)
    elif type(model.output) is Softmax:  # not a subclass such as a mixture, which computes something else
        model.output = StoredSoftmax(model.output)


class MaskedLookup(InputEnd):
    """An adaptive input that finds the tokens of a band by a mask and writes their vectors through the mask."""

    synchronizes = True

    def __init__(self, end: AdaptiveLookup) -> None:
        super().__init__()
        self.end = end
        self.vocab_size, self.dim = end.vocab_size, end.dim

    def forward(self, ids_BT: Tensor) -> Tensor:
        end, bands = self.end, []
        for band, (start, stop) in enumerate(pairwise(end.table.bounds)):
            inside_BT = (ids_BT >= start) & (ids_BT < stop)
            vectors = end.table.tables[band].vectors(ids_BT[inside_BT] - start)
            bands.append((inside_BT, end.projections.to_model_dim(band, vectors)))
        x_BTD = bands[0][1].new_zeros(*ids_BT.shape, self.dim)
        for inside_BT, vectors_RD in bands:
            x_BTD[inside_BT] = vectors_RD
        return F.dropout(end.scale * x_BTD, end.dropout, self.training)


class Stored(OutputEnd):
    """An output end that computes the loss of another end with stored scores. It can only be trained."""

    end: OutputEnd

    def __init__(self, end: OutputEnd) -> None:
        super().__init__()
        self.end = end
        self.vocab_size, self.context_dim = end.vocab_size, end.context_dim

    def penalties(self) -> dict[str, Tensor]:
        return self.end.penalties()


class StoredSoftmax(Stored):
    """A softmax with all scores in one matrix."""

    end: Softmax

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        return {"nll": LossPart(summed_cross_entropy(_scores(self.end.classifier, h_ND), y_N), plan.count)}


class StoredAdaptive(Stored):
    """An adaptive softmax with a matrix of scores for the head and one for each tail."""

    end: AdaptiveSoftmax

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        end = self.end
        if end.front is not None:
            h_ND = end.front(h_ND)
        h_ND = F.dropout(h_ND, end.softmax_dropout, self.training)
        tails = [partial(self._tail_scores, band) for band in range(1, len(end.bounds) - 1)]
        nll = adaptive_cross_entropy(h_ND, y_N, end.bounds[1:], self._head_scores, tails)
        return {"nll": LossPart(nll, plan.count)}

    def _head_scores(self, h_ND: Tensor) -> Tensor:
        end = self.end
        if end.head is not None:
            h_ND = end.head(h_ND)
        elif end.head_projection == "shared":
            h_ND = end.projections.to_band_dim(0, h_ND)
        return _scores(self._classifier(0), h_ND, end.clusters, end.cluster_bias)

    def _tail_scores(self, band: int, h_RD: Tensor) -> Tensor:
        narrow = F.dropout(self.end.projections.to_band_dim(band, h_RD), self.end.tail_dropout, self.training)
        return _scores(self._classifier(band), narrow)

    def _classifier(self, band: int) -> Classifier:
        classifier = self.end.classifiers[band]
        assert isinstance(classifier, Classifier)
        return classifier


def _scores(
    classifier: Classifier, h_ND: Tensor, clusters: Tensor | None = None, cluster_bias: Tensor | None = None
) -> Tensor:
    """Return the scores of a classifier, followed by those of `clusters`, which are vectors of further classes."""
    weight: Tensor = classifier.weight()
    bias: Tensor | None = classifier.bias
    if clusters is not None:
        weight = torch.cat([weight, clusters])
    if bias is not None and cluster_bias is not None:
        bias = torch.cat([bias, cluster_bias])
    return F.linear(classifier.context(h_ND), weight, bias)
