"""The implementations of output ends (classifier and loss) that `bench heads` compares: reefknot and its competitors.

`COMPETITORS`, at the end of the file, lists the competitors: plain torch, torch's own losses, and other packages.
`build_reefknot_step` builds the same training step with reefknot's end.

To add a package that has a fused cross-entropy of a linear classifier, write a function that imports it and returns a
`FusedLoss`, such as `_load_liger`, and add one line to `COMPETITORS`:

    _fused_competitor("liger", "Liger", _load_liger, package="liger-kernel"),

It is then measured on all ends that are composed of such a loss: the loss is called once per band (a cluster of words
of similar frequency), on the hidden states of every expert, or on DRILL's class vectors. A competitor with its own form
of an end is a function from a problem to a `LossFunction`, such as `_build_torch_adaptive`, and also one line. A new
family (the value of `--competitor`) must be added to the help text in `lab/cli/bench/heads.py` too.

A competitor that cannot be measured raises `Unavailable` or any other error. The reason becomes a note in the table,
and the benchmark continues.

Shapes: N tokens, D dimensions, V classes, K experts, R tokens of a tail (a band other than the first).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.kernels.choice import Impl, using
from reefknot.lab.bench.measure import Step, Unavailable
from reefknot.lab.bench.plain_ends import LOSSES, LossFunction, compute_experts, encode_classes
from reefknot.lab.bench.problems import (
    ALPHA,
    DRILL_LAYERS,
    ENDS,
    NUM_EXPERTS,
    TAU,
    Problem,
    Weights,
    compute_band_dims,
)
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

FusedLoss = Callable[..., Tensor]
"""A fused cross-entropy of a linear classifier: (hidden_ND, weight_VD, targets_N, reduction) -> loss."""
COMPOSED_ENDS = ("plain", "adaptive", "mixture", "drill")
"""The ends that can be composed of a fused loss."""


@dataclass(frozen=True)
class Competitor:
    """An implementation of output ends that is not reefknot's."""

    family: str
    """The name that a user chooses with `--competitor`. Several competitors can have the same family."""
    label: str
    """The name in the table."""
    build_loss: Callable[[Problem], LossFunction]
    """Returns the loss function for a problem."""
    ends: Sequence[str]
    """The ends that it implements."""
    package: str | None = None
    """The package to install, if it is not a part of torch. Its version is recorded."""

    def build_step(self, problem: Problem, dtype: torch.dtype) -> Step:
        """Return a training step with the problem's weights in `dtype`.

        Raises:
            Unavailable: The competitor cannot be used here. Its code may raise other errors too.
        """
        hidden_ND = problem.hidden.clone().requires_grad_()
        weights = {name: weight.to(dtype, copy=True).requires_grad_() for name, weight in problem.weights.items()}
        targets_N = problem.targets.to(hidden_ND.device)
        compute_summed_loss = self.build_loss(problem)

        def compute_mean_loss() -> Tensor:
            with _autocast(problem, dtype):
                return compute_summed_loss(hidden_ND, targets_N, weights) / problem.shape.tokens

        def get_gradients() -> dict[str, Tensor | None]:
            return {name: leaf.grad for name, leaf in {"hidden": hidden_ND, **weights}.items()}

        return Step(compute_mean_loss, [hidden_ND, *weights.values()], get_gradients)


def competitors_for(end: str) -> list[Competitor]:
    """Return the competitors that implement an end, whether or not they are installed."""
    return [competitor for competitor in COMPETITORS if end in competitor.ends]


def _autocast(problem: Problem, dtype: torch.dtype) -> torch.autocast:
    """Return autocast as training uses it: enabled if weights and hidden states have different data types."""
    hidden = problem.hidden
    return torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=dtype != hidden.dtype)


# -- reefknot --------------------------------------------------------------------------------------------------------


def build_reefknot_step(problem: Problem, dtype: torch.dtype, impl: Impl = "auto", memory: float | None = None) -> Step:
    """Return a training step of reefknot's end, with the problem's weights in `dtype`.

    Args:
        problem: Hidden states, targets and weights.
        dtype: The data type of the weights.
        impl: The implementation of the kernels.
        memory: The budget of working memory in MiB.
    """
    hidden_ND = problem.hidden.clone().requires_grad_()
    device = hidden_ND.device
    with device:
        end = _build_end(problem).to(dtype)
    parameters_by_weight = _match_parameters(problem, end)
    with torch.no_grad():
        for name, parameters in parameters_by_weight.items():
            sizes = [len(_transpose_projection(name, parameter)) for parameter in parameters]
            slices = torch.split(problem.weights[name], sizes)
            for parameter, weight in zip(parameters, slices, strict=True):
                parameter.copy_(_transpose_projection(name, weight))
    # The plan groups target positions by band.
    plan, targets_N = end.prepare(problem.targets).to(device), problem.targets.to(device)

    def compute_loss() -> Tensor:
        with _autocast(problem, dtype):
            losses = end.loss(hidden_ND, targets_N, plan).values()
        return torch.stack([loss.weight * loss.sum for loss in losses]).sum() / plan.count

    def get_gradients() -> dict[str, Tensor | None]:
        gradients: dict[str, Tensor | None] = {"hidden": hidden_ND.grad}
        for name, parameters in parameters_by_weight.items():
            grads = [
                _transpose_projection(name, parameter.grad) for parameter in parameters if parameter.grad is not None
            ]
            gradients[name] = torch.cat(grads) if len(grads) == len(parameters) else None
        return gradients

    context = partial(using, impl=impl, memory=memory)
    return Step(compute_loss, [hidden_ND, *end.parameters()], get_gradients, context)


def _build_end(problem: Problem) -> OutputEnd:
    _, D, V = problem.shape
    if problem.end == "adaptive":
        banded_table = BandedTable(V, D, cutoffs=problem.cutoffs, factor=D // compute_band_dims(D)[1])
        return AdaptiveSoftmax(banded_table, BandProjections(banded_table, D, head=False))
    table = WordTable(V, D)
    if problem.end == "drill":
        return Softmax(Drill(table, depth=DRILL_LAYERS, bias=False))
    classifier = Plain(table, bias=False)
    if problem.end.startswith("augmented"):
        detach = problem.end == "augmented-detached"
        return Augmented(classifier, table, tau=TAU, alpha=ALPHA, detach_target=detach)
    if problem.end == "mixture":
        return MixtureOfSoftmaxes(classifier, D, experts=NUM_EXPERTS)
    return Softmax(classifier)


def _match_parameters(problem: Problem, end: OutputEnd) -> dict[str, list[Tensor]]:
    """Return the parameters of reefknot's end by the name of the problem's weight.

    If a weight has several parameters, it is their concatenation.
    """
    parameters: dict[str, Tensor] = dict(end.named_parameters())
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


def _load_torch() -> FusedLoss:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable("not in this torch")
    # Without options, torch composes it of eager operations. With default options, torch computes it in chunks.
    return partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())


def _build_torch_adaptive(problem: Problem) -> LossFunction:
    D, V = problem.shape.dim, problem.shape.classes
    factor = D / problem.weights["band1"].shape[1]
    with torch.device("meta"):
        module = torch.nn.AdaptiveLogSoftmaxWithLoss(D, V, list(problem.cutoffs), div_value=factor)

    def loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        state = {"head.weight": weights["head"]}
        for tail in range(len(problem.cutoffs)):
            state[f"tail.{tail}.0.weight"] = weights[f"down{tail + 1}"]
            state[f"tail.{tail}.1.weight"] = weights[f"band{tail + 1}"]
        mean_loss: Tensor = torch.func.functional_call(module, state, (hidden_ND, targets_N)).loss
        return mean_loss * len(hidden_ND)

    return loss


# -- other packages --------------------------------------------------------------------------------------------------


def _import_module(name: str) -> Any:
    """Import a module of another package. Raise `Unavailable` if the package is not installed."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise Unavailable("not installed")
    return importlib.import_module(name)


def _load_liger() -> FusedLoss:
    loss_class = _import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss

    def compute_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, reduction: str) -> Tensor:
        loss: Tensor = loss_class(reduction=reduction)(weight_VD, hidden_ND, targets_N)
        return loss

    return compute_loss


def _load_cce() -> FusedLoss:
    """Load cut-cross-entropy with its default filter, which skips small gradients."""
    return partial(_import_module("cut_cross_entropy").linear_cross_entropy, filter_eps="high")


def _load_unfiltered_cce() -> FusedLoss:
    """Load cut-cross-entropy without its filter. It sums gradients in float32 if the release can, to be exact."""
    loss_function = _import_module("cut_cross_entropy").linear_cross_entropy
    available = signature(loss_function).parameters
    options = {name: True for name in ("accum_e_fp32", "accum_c_fp32") if name in available}
    return partial(loss_function, filter_eps=None, **options)


def _build_liger_augmented(problem: Problem) -> LossFunction:
    """Combine Liger's cross-entropy with its fused divergence. The soft target is a teacher that is not trained."""
    cross_entropy = _load_liger()
    divergence = _import_module("liger_kernel.transformers").LigerFusedLinearJSD(jsd_beta=0.0, temperature=TAU)

    def loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        table_VD = weights["table"]
        teacher_VD = table_VD.detach()
        mean_divergence: Tensor = divergence(hidden_ND, table_VD, teacher_VD[targets_N], teacher_VD, None)
        return cross_entropy(hidden_ND, table_VD, targets_N, reduction="sum") + ALPHA * len(hidden_ND) * mean_divergence

    return loss


# -- ends composed of a fused loss -----------------------------------------------------------------------------------


def _fused_competitor(family: str, label: str, load: Callable[[], FusedLoss], package: str | None = None) -> Competitor:
    """Return a competitor that is composed of a fused loss. `load` is called when the competitor is measured."""
    return Competitor(family, label, partial(_compose_loss, load), COMPOSED_ENDS, package)


def _compose_loss(load: Callable[[], FusedLoss], problem: Problem) -> LossFunction:
    fused = load()
    if problem.end == "adaptive":
        return _compose_adaptive(fused, problem)
    composed = {"plain": _composed_plain_loss, "mixture": _composed_mixture_loss, "drill": _composed_drill_loss}
    return partial(composed[problem.end], fused)


def _composed_plain_loss(fused: FusedLoss, hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    return fused(hidden_ND, weights["table"], targets_N, reduction="sum")


def _composed_drill_loss(fused: FusedLoss, hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    return fused(hidden_ND, encode_classes(weights), targets_N, reduction="sum")


def _composed_mixture_loss(fused: FusedLoss, hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
    latent_NKD, log_prior_NK = compute_experts(hidden_ND, weights)
    nll = fused(latent_NKD.flatten(0, 1), weights["table"], targets_N.repeat_interleave(NUM_EXPERTS), reduction="none")
    return -torch.logsumexp(log_prior_NK - nll.view(-1, NUM_EXPERTS), dim=-1).sum()


def _compose_adaptive(fused: FusedLoss, problem: Problem) -> LossFunction:
    """Call the loss once per band. Like in reefknot's end, the tokens of each band are found beforehand on the CPU."""
    device = problem.hidden.device
    head_targets_N = problem.targets.clone()
    tails = []
    for tail, (start, stop) in enumerate(pairwise((*problem.cutoffs, problem.shape.classes)), start=1):
        tokens_R = ((problem.targets >= start) & (problem.targets < stop)).nonzero().squeeze(-1)
        head_targets_N[tokens_R] = problem.cutoffs[0] + tail - 1
        if len(tokens_R):
            tails.append((tail, tokens_R.to(device), (problem.targets[tokens_R] - start).to(device)))
    head_targets_N = head_targets_N.to(device)

    def loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        total = fused(hidden_ND, weights["head"], head_targets_N, reduction="sum")
        for tail, tokens_R, targets_R in tails:
            projected_RD = F.linear(hidden_ND[tokens_R], weights[f"down{tail}"])
            total = total + fused(projected_RD, weights[f"band{tail}"], targets_R, reduction="sum")
        return total

    return loss


# -- all competitors -------------------------------------------------------------------------------------------------

COMPETITORS = (
    Competitor("eager", "eager torch", _get_eager_loss, ENDS),
    Competitor("compile", "torch.compile", _compile_eager_loss, ("plain", "mixture")),
    Competitor("torch", "nn.AdaptiveLogSoftmax", _build_torch_adaptive, ("adaptive",)),
    _fused_competitor("torch", "F.linear_cross_entropy", _load_torch),
    _fused_competitor("liger", "Liger", _load_liger, package="liger-kernel"),
    Competitor("liger", "Liger CE + JSD", _build_liger_augmented, ("augmented-detached",), package="liger-kernel"),
    _fused_competitor("cce", "CCE", _load_cce, package="cut-cross-entropy"),
    _fused_competitor("cce", "CCE, unfiltered", _load_unfiltered_cce, package="cut-cross-entropy"),
)
"""All competitors, in the order of the tables."""
FAMILIES = ("reefknot", *dict.fromkeys(competitor.family for competitor in COMPETITORS))
"""The values of `--competitor`."""
PACKAGES = tuple(dict.fromkeys(competitor.package for competitor in COMPETITORS if competitor.package))
"""Packages other than torch that competitors need."""
