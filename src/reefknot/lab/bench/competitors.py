"""The output ends that `bench heads` compares: ours, plain torch, torch's fused losses, and losses of other packages.

Some packages have a fused cross-entropy of a linear classifier. Other ends are composed of it: it is called once per
band (cluster of words of similar frequency), on the rows of every expert, or on DRILL's class vectors. A competitor (an
implementation that is compared with others) that cannot be measured gets a note with the reason. It never stops the
benchmark.

Shapes: N rows (tokens), D dimensions, V classes, K experts, R rows of a tail.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.kernels.choice import Impl, using
from reefknot.lab.bench.measure import Absent, Step
from reefknot.lab.bench.plain_ends import LOSSES, Loss, experts, label_encoder
from reefknot.lab.bench.problems import ALPHA, DEPTH, EXPERTS, TAU, Problem, Weights, band_dims
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

PACKAGES = {"liger": "liger_kernel", "cce": "cut_cross_entropy"}
"""Families of competitors that need another package, and the name of the package."""
Fused = Callable[..., Tensor]
"""A fused loss: (h_ND, w_VD, y_N, reduction="sum" or "none") -> loss."""


def autocast(problem: Problem, dtype: torch.dtype) -> torch.autocast:
    """Return autocast as training uses it: enabled if the types of weights and hidden states differ."""
    hidden = problem.hidden
    return torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=dtype != hidden.dtype)


# -- ours ------------------------------------------------------------------------------------------------------------


def our_step(problem: Problem, dtype: torch.dtype, impl: Impl = "auto", memory: float | None = None) -> Step:
    """Return a training step of our end, with the problem's weights in `dtype`."""
    hidden_ND = problem.hidden.clone().requires_grad_()
    device = hidden_ND.device
    with device:
        end = _build(problem).to(dtype)
    parameters_of = _parameters(problem, end)
    with torch.no_grad():
        for name, parameters in parameters_of.items():
            sizes = [len(_transposed(name, parameter)) for parameter in parameters]
            parts = torch.split(problem.weights[name], sizes)
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(_transposed(name, part))
    plan, y_N = end.prepare(problem.targets).to(device), problem.targets.to(device)

    def loss() -> Tensor:
        with autocast(problem, dtype):
            parts = end.loss(hidden_ND, y_N, plan).values()
        return torch.stack([part.weight * part.sum for part in parts]).sum() / plan.count

    def gradients() -> dict[str, Tensor | None]:
        by_name: dict[str, Tensor | None] = {"hidden": hidden_ND.grad}
        for name, parameters in parameters_of.items():
            grads = [_transposed(name, parameter.grad) for parameter in parameters if parameter.grad is not None]
            by_name[name] = torch.cat(grads) if len(grads) == len(parameters) else None
        return by_name

    return Step(loss, [hidden_ND, *end.parameters()], gradients, partial(using, impl=impl, memory=memory))


def _build(problem: Problem) -> OutputEnd:
    _, D, V = problem.shape
    if problem.end == "adaptive":
        bands = BandedTable(V, D, cutoffs=problem.cutoffs, factor=D // band_dims(D)[1])
        return AdaptiveSoftmax(bands, BandProjections(bands, D, head=False))
    table = WordTable(V, D)
    if problem.end.startswith("augmented"):
        detach = problem.end == "augmented-detached"
        return Augmented(Plain(table, bias=False), table, tau=TAU, alpha=ALPHA, detach_target=detach)
    if problem.end == "mixture":
        return MixtureOfSoftmaxes(Plain(table, bias=False), D, experts=EXPERTS)
    return Softmax(Drill(table, depth=DEPTH, bias=False) if problem.end == "drill" else Plain(table, bias=False))


def _parameters(problem: Problem, end: OutputEnd) -> dict[str, list[Tensor]]:
    """Return the parameters of our end by the name of the problem's weight. Several parameters are concatenated."""
    named: dict[str, Tensor] = dict(end.named_parameters())
    if problem.end == "adaptive":
        parameters_of = {"head": [named["classifiers.0.table.weight"], named["clusters"]]}
        for band in range(1, len(problem.cutoffs) + 1):
            parameters_of[f"band{band}"] = [named[f"classifiers.{band}.table.weight"]]
            parameters_of[f"down{band}"] = [named[f"projections.bands.{band - 1}"]]
        return parameters_of
    parameters_of = {"table": [named["classifier.table.weight"]]}
    if problem.end == "mixture":
        parameters_of |= {"latent": [named["latent.weight"]], "latent_bias": [named["latent.bias"]]}
        parameters_of["prior"] = [named["prior.weight"]]
    for layer in range(1, DEPTH + 1) if problem.end == "drill" else ():
        parameters_of[f"layer{layer}"] = [named[f"classifier.layers.{layer - 1}.weight"]]
        parameters_of[f"layer{layer}_bias"] = [named[f"classifier.layers.{layer - 1}.bias"]]
    return parameters_of


def _transposed(name: str, matrix: Tensor) -> Tensor:
    """Convert between a matrix of a problem and the parameter of our end, which stores projections transposed."""
    return matrix.T if name.startswith("down") else matrix


# -- everyone else ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A competitor: the family that a user can choose, its name in a table, and a function that makes its loss."""

    family: str
    label: str
    make: Callable[[Problem], Loss]

    def make_step(self, problem: Problem, dtype: torch.dtype) -> Step:
        """Return a training step.

        Raises:
            Absent: The competitor is not available. Its code may raise other errors too.
        """
        hidden_ND = problem.hidden.clone().requires_grad_()
        weights = {name: weight.to(dtype, copy=True).requires_grad_() for name, weight in problem.weights.items()}
        y_N = problem.targets.to(hidden_ND.device)
        loss = self.make(problem)

        def mean() -> Tensor:
            with autocast(problem, dtype):
                return loss(hidden_ND, y_N, weights) / problem.shape.rows

        def gradients() -> dict[str, Tensor | None]:
            return {name: leaf.grad for name, leaf in {"hidden": hidden_ND, **weights}.items()}

        return Step(mean, [hidden_ND, *weights.values()], gradients)


def peers(end: str) -> list[Peer]:
    """Return the competitors that implement an end of this kind, whether or not they are installed."""
    suited = [Peer("eager", "eager torch", lambda problem: LOSSES[problem.end])]
    if end in ("plain", "mixture"):
        suited.append(Peer("compile", "torch.compile", _compiled))
    if end == "adaptive":
        suited.append(Peer("torch", "nn.AdaptiveLogSoftmax", _torch_adaptive))
    if end == "augmented-detached":
        suited.append(Peer("liger", "Liger CE + JSD", _liger_augmented))
    if not end.startswith("augmented"):
        suited.append(Peer("torch", "F.linear_cross_entropy", partial(_composed, _torch_fused)))
        suited.append(Peer("liger", "Liger", partial(_composed, _liger_fused)))
        suited.append(Peer("cce", "CCE", partial(_composed, _cce_fused)))
        suited.append(Peer("cce", "CCE, unfiltered", partial(_composed, partial(_cce_fused, filter_eps=None))))
    return suited


# -- torch -----------------------------------------------------------------------------------------------------------


def _compiled(problem: Problem) -> Loss:
    torch.compiler.reset()
    compiled: Loss = torch.compile(LOSSES[problem.end], dynamic=False)
    return compiled


def _torch_fused() -> Fused:
    if not hasattr(F, "linear_cross_entropy"):
        raise Absent("not in this torch")
    # Without options, torch composes it of eager operations. With default options, torch computes it in chunks.
    return partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())


def _torch_adaptive(problem: Problem) -> Loss:
    D, V = problem.shape.dim, problem.shape.words
    factor = D / problem.weights["band1"].shape[1]
    with torch.device("meta"):
        module = torch.nn.AdaptiveLogSoftmaxWithLoss(D, V, list(problem.cutoffs), div_value=factor)

    def loss(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
        state = {"head.weight": weights["head"]}
        for tail in range(len(problem.cutoffs)):
            state[f"tail.{tail}.0.weight"] = weights[f"down{tail + 1}"]
            state[f"tail.{tail}.1.weight"] = weights[f"band{tail + 1}"]
        mean: Tensor = torch.func.functional_call(module, state, (h_ND, y_N)).loss
        return mean * len(h_ND)

    return loss


# -- other packages --------------------------------------------------------------------------------------------------


def _package(family: str, module: str) -> Any:
    if importlib.util.find_spec(PACKAGES[family]) is None:
        raise Absent("not installed")
    return importlib.import_module(f"{PACKAGES[family]}{module}")


def _liger_fused() -> Fused:
    kind = _package("liger", ".transformers").LigerFusedLinearCrossEntropyLoss

    def fused(h_ND: Tensor, w_VD: Tensor, y_N: Tensor, reduction: str) -> Tensor:
        loss: Tensor = kind(reduction=reduction)(w_VD, h_ND, y_N)
        return loss

    return fused


def _cce_fused(filter_eps: str | None = "high") -> Fused:
    loss = _package("cce", "").linear_cross_entropy
    # Newer releases can sum gradients in float32. The unfiltered variant uses it, because it is meant to be exact.
    options = [
        name for name in ("accum_e_fp32", "accum_c_fp32") if filter_eps is None and name in signature(loss).parameters
    ]
    return partial(loss, filter_eps=filter_eps, **dict.fromkeys(options, True))


def _liger_augmented(problem: Problem) -> Loss:
    """Combine Liger's cross-entropy with its fused divergence. The soft target is a teacher that is not trained."""
    fused = _liger_fused()
    divergence = _package("liger", ".transformers").LigerFusedLinearJSD(jsd_beta=0.0, temperature=TAU)

    def loss(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
        table_VD = weights["table"]
        teacher_VD = table_VD.detach()
        mean: Tensor = divergence(h_ND, table_VD, teacher_VD[y_N], teacher_VD, None)
        return fused(h_ND, table_VD, y_N, reduction="sum") + ALPHA * len(h_ND) * mean

    return loss


# -- ends composed of a fused loss -----------------------------------------------------------------------------------


def _composed(load: Callable[[], Fused], problem: Problem) -> Loss:
    fused = load()
    if problem.end == "adaptive":
        return _composed_adaptive(fused, problem)
    return partial({"plain": _plain_of, "mixture": _mixture_of, "drill": _drill_of}[problem.end], fused)


def _plain_of(fused: Fused, h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    return fused(h_ND, weights["table"], y_N, reduction="sum")


def _drill_of(fused: Fused, h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    return fused(h_ND, label_encoder(weights), y_N, reduction="sum")


def _mixture_of(fused: Fused, h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    latent_NKD, log_prior_NK = experts(h_ND, weights)
    nll = fused(latent_NKD.flatten(0, 1), weights["table"], y_N.repeat_interleave(EXPERTS), reduction="none")
    return -torch.logsumexp(log_prior_NK - nll.view(-1, EXPERTS), dim=-1).sum()


def _composed_adaptive(fused: Fused, problem: Problem) -> Loss:
    """Call the loss once per band. Like in our end, the rows of the bands are determined beforehand on the host."""
    device = problem.hidden.device
    head_N = problem.targets.clone()
    tails = []
    for tail, (start, stop) in enumerate(pairwise((*problem.cutoffs, problem.shape.words)), start=1):
        rows_R = ((problem.targets >= start) & (problem.targets < stop)).nonzero().squeeze(-1)
        head_N[rows_R] = problem.cutoffs[0] + tail - 1
        if len(rows_R):
            tails.append((tail, rows_R.to(device), (problem.targets[rows_R] - start).to(device)))
    head_N = head_N.to(device)

    def loss(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
        total = fused(h_ND, weights["head"], head_N, reduction="sum")
        for tail, rows_R, words_R in tails:
            narrow_RD = F.linear(h_ND[rows_R], weights[f"down{tail}"])
            total = total + fused(narrow_RD, weights[f"band{tail}"], words_R, reduction="sum")
        return total

    return loss
