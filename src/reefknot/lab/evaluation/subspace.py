"""Distance between the subspaces that two tables of word vectors span (Inan et al. 2017, appendix B).

Start with `between_ends`, which compares the two ends of a model: its input embeddings and its output classifier. The
theory says that the class vectors W (one vector per output word) lie in the space of the input vectors L: W = L A for
some matrix A. With orthonormal bases U and O of the two spaces, the distance d is

    d^2 = |O - U U' O|^2 / D = mean over the principal angles of sin^2

It is 0 for equal spaces, 1 for orthogonal spaces, and the same for L and for L A.

Softmax cannot see a constant that is added to all logits. The gradient of W is therefore orthogonal to the vector of
ones, and the mean of the class vectors is not trained. Zero loss only means W = L A + 1 m', where 1 m' has the same
vector m in every row. The spaces of W and L then differ in one direction, so the distance is up to sqrt(1 / D),
which is 0.058 for D = 300. For centred tables, from which the mean vectors are subtracted, m disappears and the
distance is 0.

Shapes: V words, D dimension, R rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import ArgumentError
from reefknot.lab.runs.result import Subspace

Array = NDArray[np.floating[Any]]


def between_ends(input_VD: Array, output_VD: Array) -> Subspace:
    """Return the distance between the two ends (input and output) of a model, and the distance expected by chance.

    The distance of the centred tables is included, too.
    """
    num_words, dim = input_VD.shape
    return Subspace(
        distance=subspace_distance(input_VD, output_VD),
        chance=chance_distance(num_words, dim),
        words=num_words,
        dim=dim,
        centred_distance=_centred_distance(input_VD, output_VD),
    )


def _centred_distance(first_VD: Array, second_VD: Array) -> float | None:
    """Return the distance of two tables after centring, or None if all rows of a table are equal."""
    centred = [table - table.mean(axis=0, dtype=np.float64).astype(table.dtype) for table in (first_VD, second_VD)]
    if not all(table.any() for table in centred):
        return None
    return subspace_distance(*centred)


def subspace_distance(first_VD: Array, second_VD: Array) -> float:
    """Return the distance between the column spaces of two tables with the same words, computed in float64.

    A table with linearly dependent columns spans a space of lower rank. If the ranks differ, the divisor is the larger
    rank. A dimension that the other space lacks counts as orthogonal, so only equal spaces have distance 0.
    """
    if first_VD.ndim != 2 or second_VD.ndim != 2 or len(first_VD) != len(second_VD):
        first_shape = " x ".join(map(str, first_VD.shape))
        second_shape = " x ".join(map(str, second_VD.shape))
        raise ArgumentError(
            f"subspace distance: tables of {first_shape} and {second_shape}: pass two tables with the same words as "
            "rows"
        )
    first_VR = _orthonormal_basis(first_VD)
    second_VR = _orthonormal_basis(second_VD)
    smaller_VR, larger_VR = first_VR, second_VR
    if first_VR.shape[1] > second_VR.shape[1]:
        smaller_VR, larger_VR = second_VR, first_VR

    # Use the residual, because 1 - cos^2 would round every distance below 1e-8 to 0.
    projection_VR = smaller_VR @ (smaller_VR.T @ larger_VR)
    residual_VR = larger_VR - projection_VR
    larger_rank = larger_VR.shape[1]
    return float(min(np.linalg.norm(residual_VR) / np.sqrt(larger_rank), 1.0))


def chance_distance(num_words: int, dim: int) -> float:
    """Return the root mean square distance between two random spaces of dimension `dim`.

    It is below 1, because two spaces that together fill much of the whole space cannot be orthogonal.
    """
    return float(np.sqrt(max(1.0 - dim / num_words, 0.0)))


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
