"""Numerical rank of the matrix of log-probabilities, one row per context (Yang et al. 2018; Pappas & Henderson 2019).

A softmax over W h + b has log-probabilities of rank D + 2 at most, D the width of h: one for the bias, one for the
normaliser. A mixture of softmaxes has no such bound.

The matrix is never stored: blocks of rows are folded into a triangular factor with the same singular values (QR), in
float64 and from log-probabilities that are computed in float64. Rounding then stays far below the tolerance of numpy's
`matrix_rank`; through the Gram matrix, which squares the singular values, it would not.

Shapes: N contexts, M = min(N, V), D width, V classes.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reefknot.errors import DataError, NonFiniteError, ResourceError, SettingsError
from reefknot.lab.evaluation.contexts import contexts, inside
from reefknot.lab.evaluation.windows import Windows
from reefknot.lab.text.dataset import Split
from reefknot.nn.models.language_model import LanguageModel, evaluating
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax

AUTHORS = 1.0
"""The tolerance of Pappas & Henderson: their program passes numpy `tol=True`."""
SCORES_AT_ONCE = 2**24
"""Scores of an output end that are held at once."""


@dataclass(frozen=True)
class Spectrum:
    """The singular values of a matrix of log-probabilities, largest first."""

    values: Tensor
    contexts: int
    classes: int

    @property
    def numpy_tolerance(self) -> float:
        """What numpy takes for rounding: the largest singular value times the longer side times the machine epsilon."""
        return float(self.values[0]) * max(self.contexts, self.classes) * float(np.finfo(np.float64).eps)

    def rank(self, tolerance: float | None = None) -> int:
        """Singular values above the tolerance; None is numpy's."""
        if tolerance is not None and not 0 <= tolerance < float("inf"):
            raise SettingsError(f"tolerance = {tolerance}: must be a number from 0")
        return int((self.values > (self.numpy_tolerance if tolerance is None else tolerance)).sum())


class TriangularFactor:
    """Rows folded into a factor R_MV of the same singular values, so that their number does not matter."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.rows = 0
        self._blocks: list[Tensor] = []
        self._held = 0

    def add(self, rows_NV: Tensor) -> None:
        self.rows += len(rows_NV)
        self._held += len(rows_NV)
        self._blocks.append(rows_NV.double())
        # As many new rows as the factor has: fewer cost more arithmetic, more cost more memory.
        if self._held >= 2 * self.classes:
            self._fold()

    def singular_values(self) -> Tensor:
        """Largest first, on the CPU."""
        if self._held > self.classes:
            self._fold()
        rows_MV = torch.cat(self._blocks)
        # torch tries Jacobi's method first, which takes minutes where this takes seconds.
        values_M: Tensor = torch.linalg.svdvals(rows_MV, driver="gesvd" if rows_MV.is_cuda else None)
        return values_M.cpu()

    def _fold(self) -> None:
        stacked = torch.cat(self._blocks)
        self._blocks.clear()
        self._blocks = [torch.linalg.qr(stacked, mode="r").R]
        self._held = len(self._blocks[0])


@torch.no_grad()
def bound(output: OutputEnd) -> int:
    """The largest rank that the log-probabilities of an output end can have, however many contexts there are."""
    one_softmax = isinstance(output, Softmax) and not isinstance(output, MixtureOfSoftmaxes)
    return min(output.vocab_size, output.vectors().shape[1] + 2) if one_softmax else output.vocab_size


def memory(contexts: int, classes: int) -> int:
    """Bytes that the factor and its decomposition take at most: four matrices of float64."""
    return 4 * 8 * min(contexts, 2 * classes) * classes


@torch.no_grad()
def spectrum(
    model: LanguageModel,
    split: Split,
    limit: int | None = None,
    *,
    windows: Windows | None = None,
    eos: int | None = None,
) -> Spectrum:
    """Singular values of the log-probabilities after the first `limit` tokens of a text, or after all but the last.

    The text is read as one stream, or in windows, some of which may have to know the token that ends a line. The hidden
    states are the model's own, in its precision.
    """
    there = split.tokens - 1
    if there < 1:
        raise DataError(f"the {split.name} text has one token, which no other follows: there is no context in it")
    count = there if limit is None else min(limit, there)
    if count < 1:
        raise SettingsError(f"contexts = {limit}: must be at least 1")
    classes = model.output.vocab_size
    _refuse_too_large(memory(count, classes), next(model.parameters()).device)
    exact = deepcopy(model.output).double().eval()
    factor = TriangularFactor(classes)
    x_T, y_T = (each[:count] for each in inside(split))
    spans = windows.cut(y_T, eos) if windows else None
    with evaluating(model), exact.holding():
        for found in contexts(model, x_T, spans):
            for h_ND in torch.split(found.output.double(), _rows_at_once(exact)):
                logp_NV = exact.log_probs(h_ND)
                if not bool(torch.isfinite(logp_NV).all()):
                    raise NonFiniteError(f"the model gives the {split.name} text a probability that is not a number")
                factor.add(logp_NV)
    return Spectrum(factor.singular_values(), factor.rows, classes)


def _rows_at_once(output: OutputEnd) -> int:
    return max(1, SCORES_AT_ONCE // (output.rows_per_token * output.vocab_size))


def _refuse_too_large(needed: int, device: torch.device) -> None:
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[0]
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ResourceError(
            f"the rank needs {needed / 2**30:,.1f} GiB on {device} and there are {there / 2**30:,.1f}; "
            "ask for fewer contexts, though the rank cannot be larger than their number"
        )
