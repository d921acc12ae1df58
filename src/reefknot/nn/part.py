"""Code that all parts of a model share: inherited docstrings, and the count of floating-point operations.

Every part (input, classifier, output, encoder) has a method `flops` that counts the operations of its forward and
backward pass. Only matrix products count. For one row (token), a weight of a matrix costs two operations, and two more
for each of the two gradients: 6 in all. Causal attention counts half of the products of all pairs.

Recomputed activations, scores that are computed again in the backward pass, and rows that only pad a shape do not
count. So the measured share of the GPU's peak rises if a program becomes faster, but not if it does more work for the
same result.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from types import FunctionType
from typing import Any

from torch import Tensor, nn

FLOPS_PER_WEIGHT = 6
"""Operations per weight and row: a product and its two gradients, each with a multiplication and an addition."""


class InheritsDocstrings:
    """Base class whose subclasses inherit docstrings.

    A method without a docstring gets that of the method it overrides. `help()` looks it up anyway, but documentation
    generators and notebooks may read only `__doc__`. A class that inherits its constructor and documents no arguments
    gets the `Args:` section of the class that defines the constructor.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in vars(cls).items():
            if isinstance(member, FunctionType) and member.__doc__ is None and not name.startswith("_"):
                overridden = getattr(super(cls, cls), name, None)
                member.__doc__ = getattr(overridden, "__doc__", None)
        if cls.__doc__ and "__init__" not in vars(cls) and "Args:" not in cls.__doc__:
            inherited = inspect.cleandoc(super(cls, cls).__doc__ or "")
            _, heading, arguments = inherited.partition("\n\nArgs:\n")
            cls.__doc__ = inspect.cleandoc(cls.__doc__) + heading + arguments


def count_matrix_weights(module: nn.Module) -> int:
    """Return the number of weights in matrices. Word tables do not count, because their rows are looked up or are
    counted as classes."""
    from reefknot.nn.tables import WordTable

    table_ids = {id(child.weight) for child in module.modules() if isinstance(child, WordTable | nn.Embedding)}
    matrices = [weight for weight in module.parameters() if weight.dim() > 1 and id(weight) not in table_ids]
    return sum(weight.numel() for weight in matrices)


def count_by_band(ids_N: Tensor, bounds: tuple[int, ...]) -> list[int]:
    """Return the number of ids in each band (cluster of words of similar frequency).

    `bounds` has the first id of every band and the end of the last band.
    """
    return [int(((ids_N >= start) & (ids_N < stop)).sum()) for start, stop in pairwise(bounds)]
