"""Our ends, built around a problem's weights and called as training calls them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from reefknot.kernels.choice import Impl, using
from reefknot.lab.bench.measure import Step
from reefknot.lab.bench.problems import ALPHA, DEPTH, EXPERTS, TAU, Problem, band_widths
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable


def make_step(problem: Problem, dtype: torch.dtype, impl: Impl = "auto", memory: float | None = None) -> Step:
    """A training step of our end; weights wider than the hidden state are computed with under autocast."""
    hidden_ND = problem.hidden.clone().requires_grad_()
    device = hidden_ND.device
    with device:
        end = _build(problem).to(dtype)
    held = _parameters(problem, end)
    with torch.no_grad():
        for name, parameters in held.items():
            parts = torch.split(problem.weights[name], [len(_turned(name, each)) for each in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(_turned(name, part))
    plan, y_N = end.prepare(problem.targets).to(device), problem.targets.to(device)

    def loss() -> Tensor:
        with autocast(problem, dtype):
            parts = end.loss(hidden_ND, y_N, plan).values()
        return torch.stack([part.weight * part.sum for part in parts]).sum() / plan.count

    def gradients() -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {"hidden": hidden_ND.grad}
        for name, parameters in held.items():
            grads = [_turned(name, each.grad) for each in parameters if each.grad is not None]
            found[name] = torch.cat(grads) if len(grads) == len(parameters) else None
        return found

    return Step(loss, [hidden_ND, *end.parameters()], gradients, partial(using, impl=impl, memory=memory))


def autocast(problem: Problem, dtype: torch.dtype) -> torch.autocast:
    """As training has it: on where weights are wider than what is computed in."""
    hidden = problem.hidden
    return torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=dtype != hidden.dtype)


def _build(problem: Problem) -> OutputEnd:
    _, D, V = problem.shape
    if problem.end == "adaptive":
        bands = BandedTable(V, D, cutoffs=problem.cutoffs, factor=D // band_widths(D)[1])
        return AdaptiveSoftmax(bands, BandProjections(bands, D, head=False))
    table = WordTable(V, D)
    if problem.end.startswith("augmented"):
        detach = problem.end == "augmented-detached"
        return Augmented(Plain(table, bias=False), table, tau=TAU, alpha=ALPHA, detach_target=detach)
    if problem.end == "mixture":
        return MixtureOfSoftmaxes(Plain(table, bias=False), D, experts=EXPERTS)
    return Softmax(Drill(table, depth=DEPTH, bias=False) if problem.end == "drill" else Plain(table, bias=False))


def _parameters(problem: Problem, end: OutputEnd) -> dict[str, list[Tensor]]:
    """Which of the end's parameters hold each of the problem's weights, one below the other."""
    named: dict[str, Tensor] = dict(end.named_parameters())
    if problem.end == "adaptive":
        found = {"head": [named["classifiers.0.table.weight"], named["clusters"]]}
        for band in range(1, len(problem.cutoffs) + 1):
            found[f"band{band}"] = [named[f"classifiers.{band}.table.weight"]]
            found[f"down{band}"] = [named[f"projections.bands.{band - 1}"]]
        return found
    found = {"table": [named["classifier.table.weight"]]}
    if problem.end == "mixture":
        found |= {"latent": [named["latent.weight"]], "latent_bias": [named["latent.bias"]]}
        found["prior"] = [named["prior.weight"]]
    for layer in range(1, DEPTH + 1) if problem.end == "drill" else ():
        found[f"layer{layer}"] = [named[f"classifier.layers.{layer - 1}.weight"]]
        found[f"layer{layer}_bias"] = [named[f"classifier.layers.{layer - 1}.bias"]]
    return found


def _turned(name: str, matrix: Tensor) -> Tensor:
    """Between what a problem holds and what our end does: it stores the matrices down as maps up."""
    return matrix.T if name.startswith("down") else matrix
