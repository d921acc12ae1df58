"""Input and output layers of language models in plain PyTorch, the baseline of `bench heads` and `bench steps`.

An input end turns ids into vectors, and an output end is a classifier with its loss. The ends here store the scores of
all classes in memory. They come in two forms:

- `LOSSES` has the output ends as functions, for `bench heads`. `compute_exact_gradients` computes their gradients in
  float64, which all competitors are compared with.
- `use_plain_ends` replaces the ends of a model, for `bench steps`. `compile_plain_model` then compiles the model.

An adaptive softmax divides the classes into bands, which are groups of words of similar frequency. Its head scores the
first band and one class for each of the other bands, which are the tails.

Shapes: N tokens, D dimensions, V classes, K experts, R tokens of a tail, S classes of a tail; B sequences of a window,
T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.kernels.reference import transform_scores
from reefknot.lab.bench.problems import (
    ALPHA,
    DRILL_LAYERS,
    ENTROPY_WEIGHT,
    NUM_EXPERTS,
    SOFTCAP,
    TAU,
    Problem,
    Weights,
)
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan
from reefknot.nn.outputs.softmax import Softmax

LossFunction = Callable[[Tensor, Tensor, Weights], Tensor]
"""(hidden_ND, targets_N, weights) -> the loss summed over the tokens. `weights` also has the constants of a problem."""
ScoreFunction = Callable[[Tensor], Tensor]
"""hidden_RD -> scores_RS, the scores of the classes of a band."""
MAX_EXACT_SCORES = {"cuda": 2**27, "cpu": 2**24}
"""The largest number of float64 scores in memory for the exact gradients: 1 GiB on a GPU, 128 MiB on a CPU."""


# -- losses of `bench heads` -----------------------------------------------------------------------------------------


def summed_cross_entropy(scores_NV: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(scores_NV, targets_N, reduction="sum")


def adaptive_cross_entropy(
    hidden_ND: Tensor, targets_N: Tensor, bounds: Sequence[int], head: ScoreFunction, tails: Sequence[ScoreFunction]
) -> Tensor:
    """Return the summed loss of an adaptive softmax.

    Args:
        hidden_ND: Hidden states.
        targets_N: Targets.
        bounds: The first id of every tail, and the number of words.
        head: Scores the words before the first tail, then one class for each tail.
        tails: Functions that score the words of a tail, for the tokens whose target is in the tail.
    """
    head_targets_N = targets_N.clone()
    losses = []
    for tail, (first_id, end_id) in enumerate(pairwise(bounds)):
        tokens_R = ((targets_N >= first_id) & (targets_N < end_id)).nonzero().squeeze(-1)
        head_targets_N[tokens_R] = bounds[0] + tail
        losses.append(summed_cross_entropy(tails[tail](hidden_ND[tokens_R]), targets_N[tokens_R] - first_id))
    losses.append(summed_cross_entropy(head(hidden_ND), head_targets_N))
    return torch.stack(losses).sum()


def plain_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    """Return the loss of a softmax."""
    return summed_cross_entropy(F.linear(hidden_ND, weights["table"]), targets_N)


def softcap_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    """Return the loss of a softmax over scores that tanh limits to -SOFTCAP to SOFTCAP."""
    scores_NV = F.linear(hidden_ND, weights["table"])
    return summed_cross_entropy(SOFTCAP * torch.tanh(scores_NV / SOFTCAP), targets_N)


def log_probs_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    """Return the objective of a policy gradient, from log-probabilities of all classes."""
    log_probs_NV = torch.log_softmax(at_least_float32(F.linear(hidden_ND, weights["table"])), dim=-1)
    target_log_probs_N = log_probs_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(-1)
    return policy_objective(target_log_probs_N, entropy_N, weights["advantages"])


def policy_objective(log_probs_N: Tensor, entropy_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Return the summed objective of a policy gradient: tokens with an advantage become likelier, and entropy grows."""
    return (-(advantages_N * log_probs_N) - ENTROPY_WEIGHT * entropy_N).sum()


def distil_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    """Return the divergence KL(teacher || student) of a softmax. The targets are not used."""
    with torch.no_grad():
        teacher_scores_NV = F.linear(weights["teacher_hidden"], weights["teacher_table"])
        teacher_log_probs_NV = torch.log_softmax(at_least_float32(teacher_scores_NV), dim=-1)
        del teacher_scores_NV  # memory is measured
    log_probs_NV = torch.log_softmax(at_least_float32(F.linear(hidden_ND, weights["table"])), dim=-1)
    return F.kl_div(log_probs_NV, teacher_log_probs_NV, reduction="sum", log_target=True)


def adaptive_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    """Return the loss of an adaptive softmax. `_Sampler.sample_adaptive_weights` documents its weights."""
    num_tails = sum(name.startswith("band") for name in weights)
    band_sizes = [len(weights["head"]) - num_tails]
    tails = []
    for tail in range(1, num_tails + 1):
        classes_SD = weights[f"band{tail}"]
        band_sizes.append(len(classes_SD))
        tails.append(partial(_score_tail, weights[f"down{tail}"], classes_SD))
    head = partial(F.linear, weight=weights["head"])
    bounds = list(accumulate(band_sizes))
    return adaptive_cross_entropy(hidden_ND, targets_N, bounds, head, tails)


def _score_tail(projection: Tensor, classes_SD: Tensor, hidden_RD: Tensor) -> Tensor:
    """Project hidden states to the dimension of a tail and score the classes of the tail."""
    return F.linear(F.linear(hidden_RD, projection), classes_SD)


def augmented_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    """Return the augmented loss, with gradients of its soft targets."""
    return _augmented_loss(hidden_ND, targets_N, weights["table"], weights["table"])


def augmented_detached_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    """Return the augmented loss, without gradients of its soft targets."""
    return _augmented_loss(hidden_ND, targets_N, weights["table"], weights["table"].detach())


def _augmented_loss(hidden_ND: Tensor, targets_N: Tensor, table_VD: Tensor, soft_table_VD: Tensor) -> Tensor:
    """Return the cross-entropy plus ALPHA times the divergence from soft targets.

    The soft targets of a token are a softmax over the similarities of its target to all classes, in `soft_table_VD`.
    """
    scores_NV = at_least_float32(F.linear(hidden_ND, table_VD))
    # Not split into named steps: a name would keep another N x V matrix in memory, and memory is measured.
    soft_targets_NV = torch.softmax(at_least_float32(F.linear(soft_table_VD[targets_N], soft_table_VD)) / TAU, dim=-1)
    divergence = F.kl_div(torch.log_softmax(scores_NV / TAU, dim=-1), soft_targets_NV, reduction="sum")
    return summed_cross_entropy(scores_NV, targets_N) + ALPHA * divergence


def mixture_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    """Return the loss of a mixture of softmaxes. It stores one distribution for every token and expert."""
    latent_NKD, log_prior_NK = compute_experts(hidden_ND, weights)
    probs_NKV = torch.softmax(at_least_float32(F.linear(latent_NKD, weights["table"])), dim=-1)
    probs_NV = (log_prior_NK.exp()[..., None] * probs_NKV).sum(1)
    return F.nll_loss(probs_NV.log(), targets_N, reduction="sum")


def compute_experts(hidden_ND: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return the hidden states of the experts of a mixture, latent_NKD, and their log-weights, log_prior_NK."""
    latent = torch.tanh(F.linear(hidden_ND, weights["latent"], weights["latent_bias"]))
    latent_NKD = latent.view(len(hidden_ND), NUM_EXPERTS, -1)
    log_prior_NK = torch.log_softmax(at_least_float32(F.linear(hidden_ND, weights["prior"])), dim=-1)
    return latent_NKD, log_prior_NK


def drill_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    """Return the loss of a softmax over the class vectors of DRILL's label encoder."""
    return summed_cross_entropy(F.linear(hidden_ND, encode_classes(weights)), targets_N)


def encode_classes(weights: Weights) -> Tensor:
    """Return the class vectors that DRILL's label encoder, a network over the table, computes."""
    table_VD = weights["table"]
    encoded_VD = table_VD
    for layer in range(1, DRILL_LAYERS + 1):
        weight_DD = weights[f"layer{layer}"]
        bias_D = weights[f"layer{layer}_bias"]
        encoded_VD = torch.sigmoid(F.linear(encoded_VD, weight_DD, bias_D)) + table_VD
    return encoded_VD


def at_least_float32(scores: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32. Other types do not change."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


LOSSES: dict[str, LossFunction] = {
    "plain": plain_loss,
    "adaptive": adaptive_loss,
    "augmented": augmented_loss,
    "augmented-detached": augmented_detached_loss,
    "mixture": mixture_loss,
    "drill": drill_loss,
    "softcap": softcap_loss,
    "log_probs": log_probs_loss,
    "distil": distil_loss,
}
"""The loss of each end of `problems.ENDS`."""


def compute_exact_gradients(problem: Problem) -> dict[str, Tensor]:
    """Return all gradients of the mean loss by name, computed in float64.

    They are a reference for reefknot's kernels, because `LOSSES` shares no code with the kernels. A few tokens are
    computed at a time, to limit the memory.
    """
    weights = {name: weight.double().requires_grad_() for name, weight in problem.weights.items()}
    constants = {name: constant.double() for name, constant in problem.constants.items()}
    hidden_ND = problem.hidden.double().requires_grad_()
    targets_N = problem.targets.to(hidden_ND.device)

    scores_per_token = problem.shape.classes
    if problem.end == "mixture":
        scores_per_token *= NUM_EXPERTS
    chunk_size = max(1, MAX_EXACT_SCORES[targets_N.device.type] // scores_per_token)

    compute_loss = LOSSES[problem.end]
    for first_row in range(0, problem.shape.tokens, chunk_size):
        rows = slice(first_row, first_row + chunk_size)
        row_constants = {name: constant[rows].double() for name, constant in problem.row_constants.items()}
        loss = compute_loss(hidden_ND[rows], targets_N[rows], {**weights, **constants, **row_constants})
        torch.autograd.backward(loss / problem.shape.tokens)

    gradients = {}
    for name, leaf in {"hidden": hidden_ND, **weights}.items():
        gradients[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return gradients


# -- ends of a model, for `bench steps` ------------------------------------------------------------------------------


def use_plain_ends(model: LanguageModel) -> None:
    """Replace the ends of a model that have a form in plain torch.

    A replacement keeps the original end and uses its tables and matrices, so ties are preserved and every parameter
    gets the same gradient. Ends that have no simpler form (a lookup, a char-CNN, a mixture) are not replaced.
    """
    if isinstance(model.input, AdaptiveLookup):
        model.input = MaskedLookup(model.input)
    if isinstance(model.output, AdaptiveSoftmax):
        model.output = StoredAdaptive(model.output)
    elif type(model.output) is Softmax:  # not a subclass such as a mixture, which computes something else
        model.output = StoredSoftmax(model.output)


def compile_plain_model(model: LanguageModel) -> None:
    """Compile a model with plain ends by `torch.compile`, for training on windows of one shape.

    The number of tokens in a band varies, so the ends are compiled with torch's default, which makes a size dynamic
    once it has changed.
    """
    torch.compiler.reset()
    setattr(model.encoder, "forward", torch.compile(model.encoder.forward, dynamic=False))  # noqa: B010
    if isinstance(model.input, MaskedLookup):
        setattr(model.input, "forward", torch.compile(model.input.forward))  # noqa: B010
    if isinstance(model.output, StoredScoresEnd):
        setattr(model.output, "nll", torch.compile(model.output.nll))  # noqa: B010


class MaskedLookup(InputEnd):
    """An adaptive input end that finds the tokens of a band by a mask and writes their vectors through the mask."""

    synchronizes = True

    def __init__(self, end: AdaptiveLookup) -> None:
        super().__init__()
        self.end = end
        self.vocab_size = end.vocab_size
        self.dim = end.dim

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the vectors of the ids, inputs_BTD."""
        end = self.end
        band_masks = []
        projected_vectors = []
        for band, (first_id, end_id) in enumerate(pairwise(end.table.bounds)):
            in_band_BT = (ids_BT >= first_id) & (ids_BT < end_id)
            band_vectors = end.table.tables[band].vectors(ids_BT[in_band_BT] - first_id)
            band_masks.append(in_band_BT)
            projected_vectors.append(end.projections.to_model_dim(band, band_vectors))

        inputs_BTD = projected_vectors[0].new_zeros(*ids_BT.shape, self.dim)
        for in_band_BT, vectors_RD in zip(band_masks, projected_vectors, strict=True):
            inputs_BTD[in_band_BT] = vectors_RD
        return F.dropout(end.scale * inputs_BTD, end.dropout, self.training)


class StoredScoresEnd(OutputEnd):
    """An output end that computes the loss of another end with stored scores. It can only be trained."""

    end: OutputEnd

    def __init__(self, end: OutputEnd) -> None:
        super().__init__()
        self.end = end
        self.vocab_size = end.vocab_size
        self.context_dim = end.context_dim

    def nll(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Return the loss, summed over the tokens."""
        raise NotImplementedError

    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        return {"nll": LossPart(self.nll(hidden_ND, targets_N), plan.count)}

    def penalties(self) -> dict[str, Tensor]:
        return self.end.penalties()


class StoredSoftmax(StoredScoresEnd):
    """A softmax with all scores in one matrix."""

    end: Softmax

    def nll(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        scores_NV = _score(self.end.classifier, hidden_ND)
        if self.end.softcap is not None:
            scores_NV = transform_scores(scores_NV, self.end.transform)
        return summed_cross_entropy(scores_NV, targets_N)


class StoredAdaptive(StoredScoresEnd):
    """An adaptive softmax with a matrix of scores for the head and one for each tail."""

    end: AdaptiveSoftmax

    def nll(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        end = self.end
        if end.front is not None:
            hidden_ND = end.front(hidden_ND)
        hidden_ND = F.dropout(hidden_ND, end.softmax_dropout, self.training)
        tails = [partial(self._score_tail, band) for band in range(1, len(end.bounds) - 1)]
        return adaptive_cross_entropy(hidden_ND, targets_N, end.bounds[1:], self._score_head, tails)

    def _score_head(self, hidden_ND: Tensor) -> Tensor:
        """Return the scores of the first band and of one class per tail."""
        end = self.end
        if end.head is not None:
            hidden_ND = end.head(hidden_ND)
        elif end.head_projection == "shared":
            hidden_ND = end.projections.to_band_dim(0, hidden_ND)
        return _score(self._get_classifier(0), hidden_ND, end.clusters, end.cluster_bias)

    def _score_tail(self, band: int, hidden_RD: Tensor) -> Tensor:
        """Return the scores of the words of a tail."""
        end = self.end
        projected = F.dropout(end.projections.to_band_dim(band, hidden_RD), end.tail_dropout, self.training)
        return _score(self._get_classifier(band), projected)

    def _get_classifier(self, band: int) -> Classifier:
        classifier = self.end.classifiers[band]
        assert isinstance(classifier, Classifier)
        return classifier


def _score(
    classifier: Classifier, hidden_ND: Tensor, clusters: Tensor | None = None, cluster_bias: Tensor | None = None
) -> Tensor:
    """Return the scores of a classifier. `clusters` are vectors of further classes, whose scores are appended."""
    weight: Tensor = classifier.weight()
    bias: Tensor | None = classifier.bias
    if clusters is not None:
        weight = torch.cat([weight, clusters])
    if bias is not None and cluster_bias is not None:
        bias = torch.cat([bias, cluster_bias])
    return F.linear(classifier.context(hidden_ND), weight, bias)
