"""Docstrings of contracts, for the methods that implement them."""

from __future__ import annotations

from types import FunctionType
from typing import Any


class Documented:
    """A class whose methods without a docstring take over the docstring of the method that they override.

    `help()` finds an inherited docstring by itself; documentation generators and notebooks may read `__doc__` only.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name, member in vars(cls).items():
            if isinstance(member, FunctionType) and member.__doc__ is None and not name.startswith("_"):
                member.__doc__ = getattr(getattr(super(cls, cls), name, None), "__doc__", None)
