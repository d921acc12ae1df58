"""The implementations of output layers that `bench heads` compares: reefknot and its competitors.

An output end is a classifier with its loss. `COMPETITORS`, at the end of the file, lists the competitors: plain torch,
torch's own losses, and other packages. `build_reefknot_step` builds the same training step with reefknot's end, or with
its function if the end is one of the library's functions. `build_products_step` computes only the matrix products.

To add a package that has a fused cross-entropy of a linear classifier, write a function that imports it and returns a
`FusedLoss`, such as `_load_liger`, and add one line to `COMPETITORS`:

    _fused_competitor("liger", "Liger", _load_liger, package="liger-kernel"),

A new family (the value of `--competitor`) must be added to the help text in `lab/cli/bench/heads.py` too.

Shapes: N tokens, D dimensions, V classes, K experts. An adaptive softmax divides the classes into bands, which are
groups of words of similar frequency. All bands but the first are tails, and R tokens have their target in a tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reefknot.kernels.choice import Impl, using
from reefknot.kernels.divergence import linear_divergence
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.kernels.log_probs import linear_log_probs
from reefknot.lab.bench.measure import Step, Unavailable
from reefknot.lab.bench.packages import build_liger_chunks, build_liger_cute, build_liger_rows, build_quack
from reefknot.lab.bench.packages import import_module as _import_module
from reefknot.lab.bench.plain_ends import (
    LOSSES,
    LossFunction,
    at_least_float32,
    compute_experts,
    encode_classes,
    policy_objective,
)
from reefknot.lab.bench.problems import (
    ALPHA,
    DRILL_LAYERS,
    ENDS,
    NUM_EXPERTS,
    NUM_PRODUCTS,
    SOFTCAP,
    TAU,
    Problem,
    Weights,
    compute_band_dims,
)
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.contract import OutputEnd, add_scalars
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

FusedLoss = Callable[..., Tensor]
"""A fused cross-entropy of a linear classifier: (hidden_ND, weight_VD, targets_N, reduction) -> loss.

If it can cap scores, it also has an argument `softcap`.
"""
CHECKPOINTED_ROWS = 1024
"""Rows of a chunk of the competitor that computes log-probabilities in chunks, as TRL does."""
COMPOSED_ENDS = ("plain", "adaptive", "mixture", "drill")
"""The ends that can be built from a fused loss.

The loss is called once (plain), once per band (adaptive), on the hidden states of all experts (mixture), or on the
class vectors that the label encoder computes (drill).
"""


@dataclass(frozen=True)
class Competitor:
    """An implementation of output ends that is not reefknot's.

    A competitor that cannot be measured raises `Unavailable` or any other error. The reason becomes a note in the
    table, and the benchmark continues.
    """

    family: str
    """The name that a user chooses with `--competitor`. Several competitors can have the same family."""
    label: str
    """The name in the table."""
    build_loss: Callable[[Problem], LossFunction]
    """Returns the loss function for a problem."""
    ends: Sequence[str]
    """The ends that the competitor implements."""
    package: str | None = None
    """The package to install, if it is not a part of torch. Its version is recorded."""

    def build_step(self, problem: Problem, dtype: torch.dtype) -> Step:
        """Return a training step with the problem's weights in `dtype`.

        Raises:
            Unavailable: The competitor cannot be used here. Its code may raise other errors too.
        """
        return _build_loss_step(problem, dtype, self.build_loss(problem))


def _build_loss_step(
    problem: Problem,
    dtype: torch.dtype,
    compute_summed_loss: LossFunction,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """Return a training step of a loss function, with the problem's weights in `dtype`."""
    hidden_ND = problem.hidden.clone().requires_grad_()
    weights = {name: weight.to(dtype, copy=True).requires_grad_() for name, weight in problem.weights.items()}
    constants = {name: constant.to(dtype) for name, constant in problem.constants.items()}
    tensors = {**weights, **constants, **problem.row_constants}
    leaves = {"hidden": hidden_ND, **weights}
    targets_N = problem.targets.to(hidden_ND.device)

    def compute_mean_loss() -> Tensor:
        with _autocast(problem, dtype):
            return compute_summed_loss(hidden_ND, targets_N, tensors) / problem.shape.tokens

    def get_gradients() -> dict[str, Tensor | None]:
        return {name: leaf.grad for name, leaf in leaves.items()}

    return Step(compute_mean_loss, list(leaves.values()), get_gradients, context)


def competitors_for(end: str) -> list[Competitor]:
    """Return the competitors that implement an end, whether or not they are installed."""
    return [competitor for competitor in COMPETITORS if end in competitor.ends]


def _autocast(problem: Problem, weight_dtype: torch.dtype) -> torch.autocast:
    """Return autocast as training uses it: enabled if weights and hidden states have different data types."""
    hidden_ND = problem.hidden
    return torch.autocast(hidden_ND.device.type, dtype=torch.bfloat16, enabled=weight_dtype != hidden_ND.dtype)


# -- reefknot --------------------------------------------------------------------------------------------------------


def build_reefknot_step(problem: Problem, dtype: torch.dtype, impl: Impl = "auto", memory: float | None = None) -> Step:
    """Return a training step of reefknot's end or function, with the problem's weights in `dtype`.

    Args:
        problem: Hidden states, targets and weights.
        dtype: The data type of the weights.
        impl: The implementation of the kernels.
        memory: The budget of working memory in MiB.
    """
    context = partial(using, impl=impl, memory=memory)
    if problem.end in _REEFKNOT_FUNCTIONS:
        return _build_loss_step(problem, dtype, _REEFKNOT_FUNCTIONS[problem.end], context)

    hidden_ND = problem.hidden.clone().requires_grad_()
    device = hidden_ND.device
    with device:
        end = _build_end(problem).to(dtype)
    parameters_by_weight = _match_parameters(problem, end)
    _copy_weights(problem, parameters_by_weight)
    # The plan is what an end computes from the targets on the CPU, such as the positions of the targets of each band.
    plan = end.prepare(problem.targets).to(device)
    targets_N = problem.targets.to(device)

    def compute_loss() -> Tensor:
        with _autocast(problem, dtype):
            losses = end.loss(hidden_ND, targets_N, plan).values()
        return add_scalars([loss.weighted_sum() for loss in losses]) / plan.count

    def get_gradients() -> dict[str, Tensor | None]:
        gradients: dict[str, Tensor | None] = {"hidden": hidden_ND.grad}
        for name, parameters in parameters_by_weight.items():
            parameter_gradients = [
                _transpose_projection(name, parameter.grad) for parameter in parameters if parameter.grad is not None
            ]
            is_complete = len(parameter_gradients) == len(parameters)
            gradients[name] = torch.cat(parameter_gradients) if is_complete else None
        return gradients

    return Step(compute_loss, [hidden_ND, *end.parameters()], get_gradients, context)


def _reefknot_softcap_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    return linear_cross_entropy(
        hidden_ND, weights["table"], targets_N, reduction="sum", softcap=SOFTCAP, check_targets=False
    )


def _reefknot_log_probs_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    policy = linear_log_probs(hidden_ND, weights["table"], targets_N, check_targets=False)
    return policy_objective(policy.log_probs, policy.entropy, weights["advantages"])


def _reefknot_distil_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    student = (hidden_ND, weights["table"])
    teacher = (weights["teacher_hidden"], weights["teacher_table"])
    return linear_divergence(student, teacher, reduction="sum")


_REEFKNOT_FUNCTIONS: dict[str, LossFunction] = {
    "softcap": _reefknot_softcap_loss,
    "log_probs": _reefknot_log_probs_loss,
    "distil": _reefknot_distil_loss,
}
"""The ends that are functions of the library, not modules. Like their competitors, they do not check the targets, which
would make the host wait for a GPU."""


def _build_end(problem: Problem) -> OutputEnd:
    """Return reefknot's end for a problem, with new weights."""
    D = problem.shape.dim
    V = problem.shape.classes
    if problem.end == "adaptive":
        factor = D // compute_band_dims(D)[1]
        banded_table = BandedTable(V, D, cutoffs=problem.cutoffs, factor=factor)
        projections = BandProjections(banded_table, D, head=False)
        return AdaptiveSoftmax(banded_table, projections)

    table = WordTable(V, D)
    if problem.end == "drill":
        return Softmax(Drill(table, depth=DRILL_LAYERS, bias=False))
    classifier = Plain(table, bias=False)
    if problem.end.startswith("augmented"):
        is_detached = problem.end == "augmented-detached"
        return Augmented(classifier, table, tau=TAU, alpha=ALPHA, detach_target=is_detached)
    if problem.end == "mixture":
        return MixtureOfSoftmaxes(classifier, D, experts=NUM_EXPERTS)
    return Softmax(classifier)


def _match_parameters(problem: Problem, end: OutputEnd) -> dict[str, list[Tensor]]:
    """Return, for the name of each of the problem's weights, the parameters of reefknot's end that store it.

    If there are several parameters, the weight is their concatenation.
    """
    parameters: dict[str, Tensor] = dict(end.named_parameters())
    matches: dict[str, list[Tensor]]
    if problem.end == "adaptive":
        matches = {"head": [parameters["classifiers.0.table.weight"], parameters["clusters"]]}
        for band in range(1, len(problem.cutoffs) + 1):
            matches[f"band{band}"] = [parameters[f"classifiers.{band}.table.weight"]]
            matches[f"down{band}"] = [parameters[f"projections.bands.{band - 1}"]]
        return matches

    matches = {"table": [parameters["classifier.table.weight"]]}
    if problem.end == "mixture":
        matches["latent"] = [parameters["latent.weight"]]
        matches["latent_bias"] = [parameters["latent.bias"]]
        matches["prior"] = [parameters["prior.weight"]]
    if problem.end == "drill":
        for layer in range(1, DRILL_LAYERS + 1):
            matches[f"layer{layer}"] = [parameters[f"classifier.layers.{layer - 1}.weight"]]
            matches[f"layer{layer}_bias"] = [parameters[f"classifier.layers.{layer - 1}.bias"]]
    return matches


@torch.no_grad()
def _copy_weights(problem: Problem, parameters_by_weight: Mapping[str, Sequence[Tensor]]) -> None:
    """Copy the problem's weights into the parameters of reefknot's end."""
    for name, parameters in parameters_by_weight.items():
        lengths = [len(_transpose_projection(name, parameter)) for parameter in parameters]
        slices = torch.split(problem.weights[name], lengths)
        for parameter, weight in zip(parameters, slices, strict=True):
            parameter.copy_(_transpose_projection(name, weight))


def _transpose_projection(name: str, matrix: Tensor) -> Tensor:
    """Transpose a projection (`down1` and so on), because reefknot stores projections transposed."""
    return matrix.T if name.startswith("down") else matrix


# -- torch -----------------------------------------------------------------------------------------------------------


def _get_eager_loss(problem: Problem) -> LossFunction:
    return LOSSES[problem.end]


def _compile_eager_loss(problem: Problem) -> LossFunction:
    torch.compiler.reset()
    compiled: LossFunction = torch.compile(LOSSES[problem.end], dynamic=False)
    return compiled


def _build_checkpointed_log_probs(problem: Problem) -> LossFunction:
    """Compute log-probabilities as TRL does: in chunks of rows, whose scores the backward pass computes again."""

    def compute_summed_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        chunks = []
        hidden_chunks = torch.split(hidden_ND, CHECKPOINTED_ROWS)
        target_chunks = torch.split(targets_N, CHECKPOINTED_ROWS)
        for hidden_chunk, target_chunk in zip(hidden_chunks, target_chunks, strict=True):
            arguments = (hidden_chunk, target_chunk, weights["table"])
            chunks.append(checkpoint(_selective_log_probs, *arguments, use_reentrant=False, preserve_rng_state=False))
        log_probs_N, entropy_N = (torch.cat(results) for results in zip(*chunks, strict=True))
        return policy_objective(log_probs_N, entropy_N, weights["advantages"])

    return compute_summed_loss


def _selective_log_probs(hidden_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, without those of the other classes, and the entropy of each row."""
    scores_NV = at_least_float32(F.linear(hidden_ND, table_VD))
    target_scores_N = scores_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    target_log_probs_N = target_scores_N - torch.logsumexp(scores_NV, dim=-1)
    log_probs_NV = torch.log_softmax(scores_NV, dim=-1)
    entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(-1)
    return target_log_probs_N, entropy_N


def _load_torch() -> FusedLoss:
    """Load torch's own fused cross-entropy, which only recent releases have."""
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable("this version of torch does not have it")
    # Without options, torch computes it by eager operations. With default options, torch computes it in chunks.
    return partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())


def _build_torch_adaptive(problem: Problem) -> LossFunction:
    """Use torch's module as a function of the problem's weights. On the meta device, its own weights take no memory."""
    D = problem.shape.dim
    V = problem.shape.classes
    factor = D / problem.weights["band1"].shape[1]
    with torch.device("meta"):
        module = torch.nn.AdaptiveLogSoftmaxWithLoss(D, V, list(problem.cutoffs), div_value=factor)

    def compute_summed_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        state_dict = {"head.weight": weights["head"]}
        for tail in range(len(problem.cutoffs)):
            state_dict[f"tail.{tail}.0.weight"] = weights[f"down{tail + 1}"]
            state_dict[f"tail.{tail}.1.weight"] = weights[f"band{tail + 1}"]
        mean_loss: Tensor = torch.func.functional_call(module, state_dict, (hidden_ND, targets_N)).loss
        return mean_loss * len(hidden_ND)

    return compute_summed_loss


# -- other packages --------------------------------------------------------------------------------------------------


def _load_liger() -> FusedLoss:
    loss_class = _import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss

    def compute_loss(
        hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, reduction: str, **options: float
    ) -> Tensor:
        loss: Tensor = loss_class(reduction=reduction, **options)(weight_VD, hidden_ND, targets_N)
        return loss

    return compute_loss


def _load_cce() -> FusedLoss:
    """Load cut-cross-entropy with its default filter, which skips small gradients."""
    loss_function = _import_module("cut_cross_entropy").linear_cross_entropy
    return partial(loss_function, filter_eps="high")


def _load_unfiltered_cce() -> FusedLoss:
    """Load cut-cross-entropy without its filter. It sums gradients in float32 if the release supports it."""
    loss_function = _import_module("cut_cross_entropy").linear_cross_entropy
    supported_options = signature(loss_function).parameters
    options = {name: True for name in ("accum_e_fp32", "accum_c_fp32") if name in supported_options}
    return partial(loss_function, filter_eps=None, **options)


def _build_liger_augmented(problem: Problem) -> LossFunction:
    """Combine Liger's cross-entropy with its fused divergence. The soft target is a teacher that is not trained."""
    cross_entropy = _load_liger()
    divergence = _import_module("liger_kernel.transformers").LigerFusedLinearJSD(jsd_beta=0.0, temperature=TAU)

    def compute_summed_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        table_VD = weights["table"]
        teacher_VD = table_VD.detach()
        mean_divergence: Tensor = divergence(hidden_ND, table_VD, teacher_VD[targets_N], teacher_VD, None)
        summed_nll = cross_entropy(hidden_ND, table_VD, targets_N, reduction="sum")
        return summed_nll + ALPHA * len(hidden_ND) * mean_divergence

    return compute_summed_loss


def _build_liger_distil(problem: Problem) -> LossFunction:
    """Use Liger's fused divergence, which is KL(teacher || student) with `jsd_beta` = 0."""
    divergence = _import_module("liger_kernel.transformers").LigerFusedLinearJSD(jsd_beta=0.0, temperature=1.0)

    def compute_summed_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        student = (hidden_ND, weights["table"])
        teacher = (weights["teacher_hidden"], weights["teacher_table"])
        mean_divergence: Tensor = divergence(*student, *teacher, None)
        return mean_divergence * len(hidden_ND)

    return compute_summed_loss


# -- ends built from a fused loss --------------------------------------------------------------------------------------


def _fused_competitor(
    family: str, label: str, load: Callable[[], FusedLoss], package: str | None = None, has_softcap: bool = True
) -> Competitor:
    """Return a competitor that is built from a fused loss. `load` is called when the competitor is measured."""
    ends = (*COMPOSED_ENDS, "softcap") if has_softcap else COMPOSED_ENDS
    return Competitor(family, label, partial(_compose_loss, load), ends, package)


def _compose_loss(load: Callable[[], FusedLoss], problem: Problem) -> LossFunction:
    """Load a fused loss and return the loss function of the problem's end."""
    fused_loss = load()
    if problem.end == "adaptive":
        return _compose_adaptive(fused_loss, problem)
    composed_losses = {
        "plain": _composed_plain_loss,
        "softcap": _composed_softcap_loss,
        "mixture": _composed_mixture_loss,
        "drill": _composed_drill_loss,
    }
    return partial(composed_losses[problem.end], fused_loss)


def _composed_plain_loss(fused_loss: FusedLoss, hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    return fused_loss(hidden_ND, weights["table"], targets_N, reduction="sum")


def _composed_softcap_loss(fused_loss: FusedLoss, hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    return fused_loss(hidden_ND, weights["table"], targets_N, reduction="sum", softcap=SOFTCAP)


def _composed_drill_loss(fused_loss: FusedLoss, hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    return fused_loss(hidden_ND, encode_classes(weights), targets_N, reduction="sum")


def _composed_mixture_loss(fused_loss: FusedLoss, hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    """Compute -log p of every target under every expert, and then the negative log of the weighted mean of p."""
    latent_NKD, log_prior_NK = compute_experts(hidden_ND, weights)
    expert_targets = targets_N.repeat_interleave(NUM_EXPERTS)
    nll = fused_loss(latent_NKD.flatten(0, 1), weights["table"], expert_targets, reduction="none")
    nll_NK = nll.view(-1, NUM_EXPERTS)
    return -torch.logsumexp(log_prior_NK - nll_NK, dim=-1).sum()


class _Tail(NamedTuple):
    """The tokens whose target is in a tail of an adaptive softmax."""

    number: int
    """1 for the first tail."""
    positions: Tensor
    """The positions of the tokens, of shape R."""
    targets: Tensor
    """The targets of the tokens, of shape R, counted from the first class of the tail."""


def _compose_adaptive(fused_loss: FusedLoss, problem: Problem) -> LossFunction:
    """Call the loss once per band. Like in reefknot's end, the tokens of each band are found beforehand on the CPU."""
    device = problem.hidden.device
    targets_N = problem.targets
    bounds = (*problem.cutoffs, problem.shape.classes)
    head_targets_N = targets_N.clone()
    tails = []
    for number, (first_id, end_id) in enumerate(pairwise(bounds), start=1):
        tokens_R = ((targets_N >= first_id) & (targets_N < end_id)).nonzero().squeeze(-1)
        head_targets_N[tokens_R] = problem.cutoffs[0] + number - 1
        if len(tokens_R):
            targets_R = targets_N[tokens_R] - first_id
            tails.append(_Tail(number, tokens_R.to(device), targets_R.to(device)))
    head_targets_N = head_targets_N.to(device)

    def compute_summed_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        total = fused_loss(hidden_ND, weights["head"], head_targets_N, reduction="sum")
        for tail in tails:
            projected_RD = F.linear(hidden_ND[tail.positions], weights[f"down{tail.number}"])
            total = total + fused_loss(projected_RD, weights[f"band{tail.number}"], tail.targets, reduction="sum")
        return total

    return compute_summed_loss


# -- matrix products alone -------------------------------------------------------------------------------------------


def build_products_step(problem: Problem) -> Step:
    """Return a step that computes only the matrix products of a problem, as many as `NUM_PRODUCTS` says.

    They are computed by torch, in the data type of the problem. The scores take the place of their gradients.
    """
    hidden_ND = problem.hidden
    table_VD = problem.weights["table"]
    scores_NV = hidden_ND.new_empty(len(hidden_ND), len(table_VD))
    grad_hidden_ND = torch.empty_like(hidden_ND)
    grad_table_VD = torch.empty_like(table_VD)
    # The classifiers whose scores are computed. The backward pass of `log_probs` computes the same scores again.
    classifiers = [(hidden_ND, table_VD)]
    if problem.end == "log_probs":
        classifiers.append((hidden_ND, table_VD))
    if problem.end == "distil":
        classifiers.append((problem.row_constants["teacher_hidden"], problem.constants["teacher_table"]))
    assert len(classifiers) + 2 == NUM_PRODUCTS[problem.end]
    # All products are in the forward pass. The loss is a leaf, so its backward pass does nothing.
    loss = hidden_ND.new_zeros((), requires_grad=True)

    def multiply() -> Tensor:
        for inputs_ND, classes_VD in classifiers:
            torch.mm(inputs_ND, classes_VD.T, out=scores_NV)
        torch.mm(scores_NV, table_VD, out=grad_hidden_ND)
        torch.mm(scores_NV.T, hidden_ND, out=grad_table_VD)
        return loss

    return Step(multiply, [loss], dict)


# -- all competitors -------------------------------------------------------------------------------------------------

COMPETITORS = (
    Competitor("eager", "eager torch", _get_eager_loss, ENDS),
    Competitor("compile", "torch.compile", _compile_eager_loss, ("plain", "mixture", "softcap", "log_probs", "distil")),
    Competitor("torch", "nn.AdaptiveLogSoftmax", _build_torch_adaptive, ("adaptive",)),
    Competitor("trl", "chunks as in TRL", _build_checkpointed_log_probs, ("log_probs",)),
    _fused_competitor("torch", "F.linear_cross_entropy", _load_torch, has_softcap=False),
    _fused_competitor("liger", "Liger", _load_liger, package="liger-kernel"),
    *(
        Competitor(
            "liger",
            f"Liger, {chunk_rows:,}-row chunks",
            partial(build_liger_chunks, chunk_rows),
            ("plain", "softcap"),
            package="liger-kernel",
        )
        for chunk_rows in (1024, 4096)
    ),
    Competitor("liger", "Liger CuTe", build_liger_cute, ("plain",), package="liger-kernel"),
    Competitor("liger", "Liger FLSCE", build_liger_rows, ("plain", "log_probs"), package="liger-kernel"),
    Competitor("quack", "QuACK", build_quack, ("plain",), package="quack-kernels"),
    Competitor("liger", "Liger CE + JSD", _build_liger_augmented, ("augmented-detached",), package="liger-kernel"),
    Competitor("liger", "Liger JSD", _build_liger_distil, ("distil",), package="liger-kernel"),
    _fused_competitor("cce", "CCE", _load_cce, package="cut-cross-entropy"),
    _fused_competitor("cce", "CCE, unfiltered", _load_unfiltered_cce, package="cut-cross-entropy"),
)
"""All competitors, in the order of the tables."""
FAMILIES = ("reefknot", *dict.fromkeys(competitor.family for competitor in COMPETITORS))
"""The values of `--competitor`."""
PACKAGES = tuple(dict.fromkeys(competitor.package for competitor in COMPETITORS if competitor.package))
"""Packages other than torch that competitors need."""
