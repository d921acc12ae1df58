"""Numerical rank of the matrix of log-probabilities of a language model (Yang et al. 2018; Pappas & Henderson 2019).

Start with `compute_spectrum`:

    spectrum = compute_spectrum(model, split)    # the singular values of the matrix
    spectrum.rank()                              # the number of singular values above a tolerance

The matrix has one row per context (the text before a token) and one column per class (word). The log-probabilities of a
softmax over the scores W h + b, where h is the hidden state of dimension D, have rank at most D + 2: the bias b and the
normaliser add one each. A mixture of softmaxes and a softmax of capped scores have no such bound.

Shapes: N contexts, M = min(N, V), D hidden dimension, V classes, T tokens of the text.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reefknot.errors import DataError, NonFiniteError, ResourceError, SettingsError
from reefknot.lab.evaluation.contexts import inputs_and_targets, iterate_contexts
from reefknot.lab.evaluation.windows import Windows
from reefknot.lab.text.dataset import Split
from reefknot.nn.models.language_model import LanguageModel, evaluating
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax

AUTHORS_TOLERANCE = 1.0
"""The tolerance of Pappas & Henderson, whose program passes `tol=True` to numpy."""
SCORES_AT_ONCE = 2**24
"""Number of scores in memory at once."""


@dataclass(frozen=True)
class Spectrum:
    """The singular values of a matrix of log-probabilities, largest first."""

    values: Tensor
    """Singular values, values_M."""
    contexts: int
    """Number of rows of the matrix."""
    classes: int
    """Number of columns of the matrix."""

    @property
    def numpy_tolerance(self) -> float:
        """Default tolerance of numpy: largest singular value x longer side of the matrix x machine epsilon."""
        largest_value = float(self.values[0])
        machine_epsilon = float(np.finfo(np.float64).eps)
        return largest_value * max(self.contexts, self.classes) * machine_epsilon

    def rank(self, tolerance: float | None = None) -> int:
        """Return the number of singular values above a tolerance, by default numpy's."""
        if tolerance is not None and not 0 <= tolerance < float("inf"):
            raise SettingsError(f"tolerance = {tolerance}: must be a finite number of at least 0")
        if tolerance is None:
            tolerance = self.numpy_tolerance
        return int((self.values > tolerance).sum())


@torch.no_grad()
def compute_spectrum(
    model: LanguageModel,
    split: Split,
    limit: int | None = None,
    *,
    windows: Windows | None = None,
    eos: int | None = None,
) -> Spectrum:
    """Return the singular values of the matrix of next-word log-probabilities.

    The matrix has one row for each of the first `limit` tokens of a text, which are the contexts. The hidden states are
    computed in the precision of the model.

    Args:
        model: The language model.
        split: The text.
        limit: Number of contexts; by default, all tokens but the last.
        windows: Evaluation windows to read the text in; by default, it is read as one stream.
        eos: Id of the token that ends a line, which windows of whole lines need.
    """
    num_contexts = _count_contexts(split, limit)
    classes = model.output.vocab_size
    _check_memory(required_memory(num_contexts, classes), next(model.parameters()).device)

    inputs_T, targets_T = inputs_and_targets(split)
    inputs_T = inputs_T[:num_contexts]
    targets_T = targets_T[:num_contexts]
    spans = windows.spans(targets_T, eos) if windows else None

    # The copy computes in float64; the hidden states keep the precision of the model.
    output = deepcopy(model.output).double().eval()
    factor = TriangularFactor(classes)
    with evaluating(model), output.cache_for_evaluation():
        for contexts in iterate_contexts(model, inputs_T, spans):
            for hidden_ND in torch.split(contexts.output.double(), _chunk_size(output)):
                log_probs_NV = output.log_probs(hidden_ND)
                if not bool(torch.isfinite(log_probs_NV).all()):
                    raise NonFiniteError(f"a log-probability of the model on the {split.name} text is NaN or infinite")
                factor.add(log_probs_NV)
    return Spectrum(factor.singular_values(), factor.rows, classes)


class TriangularFactor:
    """A triangular factor R_MV that has the singular values of all rows added so far, but a bounded size.

    So the matrix of log-probabilities is never stored: a QR decomposition folds blocks of rows into the factor. The
    factor is float64, so that rounding errors are far below the tolerance of numpy's `matrix_rank`. A Gram matrix would
    be less exact, because it squares the singular values.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.rows = 0
        """Number of rows added so far."""
        self._blocks: list[Tensor] = []
        """The factor, and rows that are not folded into it yet."""
        self._stored_rows = 0
        """Number of rows in `_blocks`."""

    def add(self, rows_NV: Tensor) -> None:
        """Add rows of the matrix."""
        self.rows += len(rows_NV)
        self._stored_rows += len(rows_NV)
        self._blocks.append(rows_NV.double())
        # Fold when there are as many new rows as rows in the factor. To fold more often would take more arithmetic, and
        # to fold less often would take more memory.
        if self._stored_rows >= 2 * self.classes:
            self._fold_rows()

    def singular_values(self) -> Tensor:
        """Return the singular values, largest first, on the CPU."""
        if self._stored_rows > self.classes:
            self._fold_rows()
        rows_MV = torch.cat(self._blocks)
        driver = None
        if rows_MV.is_cuda:
            # By default torch tries Jacobi's method first, which takes minutes instead of seconds.
            driver = "gesvd"
        values_M: Tensor = torch.linalg.svdvals(rows_MV, driver=driver)
        return values_M.cpu()

    def _fold_rows(self) -> None:
        """Replace the stored rows by their triangular factor, which has at most as many rows as classes."""
        stored_rows = torch.cat(self._blocks)
        self._blocks.clear()  # frees the memory of the blocks before the decomposition
        factor_MV = torch.linalg.qr(stored_rows, mode="r").R
        self._blocks = [factor_MV]
        self._stored_rows = len(factor_MV)


@torch.no_grad()
def rank_bound(output: OutputEnd) -> int:
    """Return the upper bound on the rank of the log-probabilities of an output end, for any number of contexts."""
    if not isinstance(output, Softmax) or isinstance(output, MixtureOfSoftmaxes) or output.softcap is not None:
        return output.vocab_size
    dim = output.vectors().shape[1]
    return min(output.vocab_size, dim + 2)


def required_memory(contexts: int, classes: int) -> int:
    """Return the maximum number of bytes that the factor and its decomposition need: four float64 matrices."""
    bytes_per_number = 8
    matrix_size = min(contexts, 2 * classes) * classes
    return 4 * bytes_per_number * matrix_size


def _count_contexts(split: Split, limit: int | None) -> int:
    """Return the number of contexts to read: all tokens but the last, or at most `limit`."""
    num_available = split.tokens - 1
    if num_available < 1:
        raise DataError(f"the {split.name} text has only one token, so there is no token to predict")
    if limit is None:
        return num_available
    if limit < 1:
        raise SettingsError(f"contexts = {limit}: must be at least 1")
    return min(limit, num_available)


def _chunk_size(output: OutputEnd) -> int:
    """Return the number of contexts whose log-probabilities are computed at once."""
    return max(1, SCORES_AT_ONCE // (output.rows_per_token * output.vocab_size))


def _check_memory(required: int, device: torch.device) -> None:
    """Raise an error if the device has less memory than this number of bytes."""
    if device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(device)
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if required > available:
        raise ResourceError(
            f"the rank needs {required / 2**30:,.1f} GiB on {device}, which has {available / 2**30:,.1f}; "
            "use fewer contexts, though the rank cannot be larger than their number"
        )
