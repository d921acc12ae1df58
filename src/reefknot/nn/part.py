"""Code that all parts of a model share: inherited docstrings, recorded arguments, and counting FLOPs.

A part is an input, classifier, output or encoder. Every part has a method `flops`, which counts the operations of its
forward and backward pass by these rules:

- Only matrix products count. For one row (token), a weight of a matrix costs 6 operations: a multiplication and an
  addition in the forward pass, and the same for each of the two gradients.
- Causal attention counts half of the products of all pairs.
- Recomputed activations, scores that are computed again in the backward pass, and rows that only pad a shape do not
  count. So the measured share of the GPU's peak rises if a program becomes faster, but not if it does more work for the
  same result.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from types import FunctionType
from typing import Any, Self

from torch import Tensor, nn

FLOPS_PER_WEIGHT = 6
"""Operations per weight and row: a product and its two gradients, each with a multiplication and an addition."""


class InheritsDocstrings:
    """Base class whose subclasses inherit docstrings.

    A method without a docstring gets the docstring of the method that it overrides. `help()` looks it up anyway, but
    documentation generators and notebooks may read only `__doc__`. A class that inherits its constructor and documents
    no arguments gets the `Args:` section of the class that defines the constructor.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in vars(cls).items():
            is_public_method = isinstance(member, FunctionType) and not name.startswith("_")
            if is_public_method and member.__doc__ is None:
                overridden_method = getattr(super(cls, cls), name, None)
                member.__doc__ = getattr(overridden_method, "__doc__", None)

        if cls.__doc__ and "__init__" not in vars(cls) and "Args:" not in cls.__doc__:
            inherited_doc = inspect.cleandoc(super(cls, cls).__doc__ or "")
            _, heading, arguments = inherited_doc.partition("\n\nArgs:\n")
            cls.__doc__ = inspect.cleandoc(cls.__doc__) + heading + arguments


class RecordsArguments:
    """Base class whose objects record the arguments of their constructor in `constructor_arguments`.

    With these arguments an equal object can be built later, for example when a saved model is loaded. The record also
    has the default values of arguments that were left out.
    """

    constructor_arguments: dict[str, Any]
    """The arguments by name."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        instance = super().__new__(cls)
        try:
            bound = inspect.signature(cls).bind(*arguments, **keywords)
        except TypeError:
            return instance  # `copy` and `pickle` pass no arguments; in other calls `__init__` raises the error
        bound.apply_defaults()
        # A module cannot be assigned attributes before its `__init__`. Modules in the record are not registered.
        vars(instance)["constructor_arguments"] = bound.arguments
        return instance


def count_matrix_weights(module: nn.Module) -> int:
    """Return the number of weights in the matrices of a module.

    Word tables do not count, because their rows are looked up or are counted as classes.
    """
    from reefknot.nn.tables import WordTable

    table_ids = {id(child.weight) for child in module.modules() if isinstance(child, WordTable | nn.Embedding)}
    total = 0
    for parameter in module.parameters():
        is_matrix = parameter.dim() > 1
        if is_matrix and id(parameter) not in table_ids:
            total += parameter.numel()
    return total


def count_by_band(ids_N: Tensor, bounds: tuple[int, ...]) -> list[int]:
    """Return the number of ids in each band (group of words of similar frequency).

    `bounds` has the first id of every band and the end of the last band.
    """
    counts = []
    for first_id, end_id in pairwise(bounds):
        is_in_band_N = (ids_N >= first_id) & (ids_N < end_id)
        counts.append(int(is_in_band_N.sum()))
    return counts
