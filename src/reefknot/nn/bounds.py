"""Types for constructor arguments that must lie in a range, such as `Dim` or `Probability`.

    def __init__(self, dim: Dim, dropout: Probability = 0.0) -> None: ...

`Dim` is `Annotated[int, Ge(1), Le(65_536)]`. The annotation documents the argument and lets other code, such as the
reader of recipes, check a value before it builds the module. A constructor itself checks only what would otherwise fail
late or silently, for example with `check_rates`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any

from reefknot.errors import SettingsError


@dataclass(frozen=True)
class Bound:
    """A lower or upper limit of a number, as `Gt`, `Ge`, `Lt` or `Le`."""

    limit: float


class Gt(Bound):
    """The value is greater than `limit`."""


class Ge(Bound):
    """The value is greater than or equal to `limit`."""


class Lt(Bound):
    """The value is less than `limit`."""


class Le(Bound):
    """The value is less than or equal to `limit`."""


@dataclass(frozen=True)
class Length:
    """The sequence has at least `minimum` entries and, if `maximum` is given, at most that many."""

    minimum: int
    maximum: int | None = None


BOUNDS = (Bound, Length)
"""The classes of annotations that limit a value."""

# The upper bounds are far above all useful values. They turn a typo such as an extra zero into an error message.
Count = Annotated[int, Ge(1), Le(10**9)]
"""A number of items."""
Dim = Annotated[int, Ge(1), Le(65_536)]
"""The dimension of a vector."""
Layers = Annotated[int, Ge(1), Le(256)]
"""A number of layers, or of experts of a mixture."""
Probability = Annotated[float, Ge(0.0), Lt(1.0)]
"""A probability less than 1, such as a dropout rate."""
Share = Annotated[float, Ge(0.0), Le(1.0)]
"""A share, from 0 to 1."""
Positive = Annotated[float, Gt(0.0), Le(1e9)]
"""A number greater than 0."""
NonNegative = Annotated[float, Ge(0.0), Le(1e9)]
"""A number that is 0 or greater."""


def check_rates(module: str, **rates: float) -> None:
    """Raise a `SettingsError` if a rate is not at least 0 and less than 1. The message names `module`."""
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise SettingsError(f"{module}: {name} = {rate}: must be at least 0 and less than 1")


def check_sizes(module: str, **sizes: int) -> None:
    """Raise a `SettingsError` if a size is less than 1. The message names `module`."""
    for name, size in sizes.items():
        if size < 1:
            raise SettingsError(f"{module}: {name} = {size}: must be at least 1")


def check_positive(module: str, **numbers: Any) -> None:
    """Raise a `SettingsError` if a number is not finite and greater than 0. None is allowed.

    Args:
        module: The name of the part, for the message.
        numbers: The numbers by the names of their arguments.
    """
    for name, number in numbers.items():
        if number is not None and not (isinstance(number, Real) and 0 < float(number) < math.inf):
            raise SettingsError(f"{module}: {name} = {number!r}: must be a number greater than 0, or None")
