"""Losses of other packages that `bench heads` measures: QuACK, and the variants of Liger's fused cross-entropy.

Every function imports its package when it is called. It raises `Unavailable` if the package is not installed or refuses
the shape or the device, and the reason becomes a note in the table.

Shapes: N tokens, D dimensions, V classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from reefknot.lab.bench.measure import Unavailable
from reefknot.lab.bench.plain_ends import LossFunction, policy_objective
from reefknot.lab.bench.problems import SOFTCAP, Problem, Weights

QUACK_ALIGNMENT = 8
"""QuACK's fused loss needs N, D and V divisible by this number."""


def import_module(name: str) -> Any:
    """Import a module of another package. Raise `Unavailable` if the package is not installed."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise Unavailable("not installed")
    return importlib.import_module(name)


def build_quack(problem: Problem) -> LossFunction:
    """Use QuACK's fused loss with its default chunks of 4,096 rows. It chooses its kernels for the GPU itself."""
    loss_function = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    if any(size % QUACK_ALIGNMENT for size in problem.shape):
        raise Unavailable(f"needs N, D and V divisible by {QUACK_ALIGNMENT}")

    def compute_summed_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        loss: Tensor = loss_function(hidden_ND, weights["table"], targets_N, reduction="sum")
        return loss

    return compute_summed_loss


def build_liger_chunks(chunk_rows: int, problem: Problem) -> LossFunction:
    """Use Liger's fused loss with chunks of about `chunk_rows` rows. Its default chunks are smaller.

    Liger takes no number of rows but a memory factor C: a chunk has N / ceil(V / (C D)) rows, rounded up to a power of
    two.
    """
    function = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction
    parameters = [parameter for name, parameter in signature(function.forward).parameters.items() if name != "ctx"]
    if "chunk_mem_const" not in [parameter.name for parameter in parameters]:
        raise Unavailable("this release has no setting for the chunks")
    N, D, V = problem.shape
    settings: dict[str, object] = {
        "reduction": "sum",
        "softcap": SOFTCAP if problem.end == "softcap" else None,
        "chunk_mem_const": max(1, math.ceil(V * chunk_rows / (N * D))),
    }
    # The function takes its arguments by position, after the hidden states, the class vectors and the targets.
    arguments = [settings.get(parameter.name, parameter.default) for parameter in parameters[3:]]

    def compute_summed_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        loss: Tensor = function.apply(hidden_ND, weights["table"], targets_N, *arguments)[0]
        return loss

    return compute_summed_loss


def build_liger_cute(problem: Problem) -> LossFunction:
    """Use Liger's fused loss in CuTe DSL, which it has for Hopper GPUs."""
    device = problem.hidden.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        raise Unavailable("needs a Hopper GPU")
    import_module("cutlass")
    module = import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")

    def compute_summed_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        loss: Tensor = module.liger_fused_linear_cross_entropy_sm90(
            hidden_ND, weights["table"], targets_N, reduction="sum"
        )
        return loss

    return compute_summed_loss


def build_liger_rows(problem: Problem) -> LossFunction:
    """Use Liger's fused scaled cross-entropy (FLSCE), which returns the loss, and the entropy, of each row."""
    operations = import_module("liger_kernel.ops")
    if not hasattr(operations, "LigerFusedLinearScaledCrossEntropyFunction"):
        raise Unavailable("this release does not have it")
    function = operations.LigerFusedLinearScaledCrossEntropyFunction

    def compute_summed_loss(hidden_ND: Tensor, targets_N: Tensor, weights: Weights) -> Tensor:
        if problem.end == "log_probs":
            nll_N, entropy_N = function.apply(hidden_ND, weights["table"], targets_N, return_entropy=True)
            return policy_objective(-nll_N, entropy_N, weights["advantages"])
        losses_N: Tensor = function.apply(hidden_ND, weights["table"], targets_N)
        return losses_N.sum()

    return compute_summed_loss
