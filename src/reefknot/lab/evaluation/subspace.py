"""Distance between the subspaces that two tables of word vectors span (Inan et al. 2017, appendix B).

Start with `between_ends`, which compares the input and the output of a model. The theory says that the class vectors W
(one vector per output word) lie in the space of the input vectors L: W = L A for some matrix A. With orthonormal bases
U and O of the two spaces,

    d^2 = |O - U U' O|^2 / D = mean over the principal angles of sin^2

which is 0 for equal spaces, 1 for orthogonal ones, and the same for L and for L A.

Shapes: V words, D dimension, R rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import ArgumentError
from reefknot.lab.runs.result import Subspace

Array = NDArray[np.floating[Any]]


def subspace_distance(X_VD: Array, Y_VD: Array) -> float:
    """Return the distance between the column spaces of two tables with the same words, computed in float64.

    A table with linearly dependent columns spans a space of lower rank. If the ranks differ, the divisor is the larger
    rank. A dimension that the other space lacks counts as orthogonal, so only equal spaces have distance 0.
    """
    if X_VD.ndim != 2 or Y_VD.ndim != 2 or len(X_VD) != len(Y_VD):
        shapes = " and ".join(" x ".join(map(str, table.shape)) for table in (X_VD, Y_VD))
        raise ArgumentError(f"subspace distance: tables of {shapes}: pass two tables with the same words as rows")
    smaller_VR, larger_VR = sorted(
        (_orthonormal_basis(X_VD), _orthonormal_basis(Y_VD)), key=lambda basis: basis.shape[1]
    )
    # Use the residual, because 1 - cos^2 would round every distance below 1e-8 to 0.
    residual_VR = larger_VR - smaller_VR @ (smaller_VR.T @ larger_VR)
    return float(min(np.linalg.norm(residual_VR) / np.sqrt(larger_VR.shape[1]), 1.0))


def chance_distance(num_words: int, dim: int) -> float:
    """Return the root mean square distance between two random spaces of dimension `dim`.

    It is below 1, because two spaces that together fill much of the whole space cannot be orthogonal.
    """
    return float(np.sqrt(max(1.0 - dim / num_words, 0.0)))


def between_ends(input_VD: Array, output_VD: Array) -> Subspace:
    """Return the distance between the two ends (input and output) of a model, and the distance expected by chance."""
    num_words, dim = input_VD.shape
    distance = subspace_distance(input_VD, output_VD)
    return Subspace(distance=distance, chance=chance_distance(num_words, dim), words=num_words, dim=dim)


def _orthonormal_basis(table_VD: Array) -> Array:
    """Return an orthonormal basis of the column space."""
    num_words, dim = table_VD.shape
    if num_words < dim:
        raise ArgumentError(
            f"subspace distance: {num_words} words of dimension {dim} span the whole space; use more words"
        )
    if not np.isfinite(table_VD).all():
        raise ArgumentError("subspace distance: a table holds NaN or infinity, so it spans no space")
    left_VD, singular_D, _ = np.linalg.svd(table_VD.astype(np.float64), full_matrices=False)
    # Rounding to the type of the table, and sums of D products in it, add singular values of about this size.
    tolerance = singular_D[:1] * dim * np.finfo(table_VD.dtype).eps
    rank = int((singular_D > tolerance).sum())
    if not rank:
        raise ArgumentError("subspace distance: a table holds only zeros, so it spans no space")
    basis: Array = left_VD[:, :rank]
    return basis
