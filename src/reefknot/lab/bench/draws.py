"""Random numbers that are drawn once and drawn again: how a float64 reference gets the very masks of a float32 run.

Equal seeds would not do, since a generator gives other numbers for other types. Here every drawing that passes through
torch, by whatever function, is kept, and copied into the drawings of a later run, in whatever type that computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DROPOUT = torch.ops.aten.native_dropout.default


class Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, what is drawn is kept in `drawn`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if _draws(func):
            self.drawn.append((found[1] if func is _DROPOUT else found).clone())
        return found


class Again(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, what was drawn is drawn again, in the same order."""

    def __init__(self, drawn: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left: Iterator[Tensor] = iter(drawn)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not _draws(func):
            return found
        drawn = next(self._left, None)
        if drawn is None:
            raise RuntimeError("more is drawn than was kept")
        if func is _DROPOUT:
            vectors, rate = args[:2]
            return vectors * drawn / (1.0 - rate), drawn
        return found.copy_(drawn)


def _draws(func: Any) -> bool:
    """Recurrent layers are marked as random too, for a dropout that nobody here asks them for."""
    random = torch.Tag.nondeterministic_seeded in func.tags
    return random and (func is _DROPOUT or len(func._schema.returns) == 1)
