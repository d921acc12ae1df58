"""Base class of classifiers, which score every word after a hidden state, and caches of their class vectors.

    score(y | h) = weight()[y] . context(h) + bias[y]

Start reading at `Classifier`. `weight()` returns the class vectors: one vector per class (word). They come from a word
table, the module that holds the embeddings. A classifier may transform them by a network, the *label encoder*, which is
expensive. A `WeightCache` then computes the class vectors only once: for all calls of an evaluation (`EvaluationCache`)
or for all micro-batches of an optimiser step (`StepCache`).

Shapes: N rows (one row per token), V classes, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError, describe_type
from reefknot.kernels.scores import at_least_float32
from reefknot.nn.constants import NEEDS_WORD_TABLE, NO_TABLE_TO_SHARE
from reefknot.nn.part import FLOPS_PER_WEIGHT, InheritsDocstrings, RecordsArguments, count_matrix_weights
from reefknot.nn.tables import BandedTable, WordTable, hint_for_torch_layer, is_input_end

if TYPE_CHECKING:
    from reefknot.kernels.parallel import ClassShard

CacheType = TypeVar("CacheType", bound="WeightCache")


class Classifier(nn.Module, InheritsDocstrings, RecordsArguments):
    """Base class of classifiers: class vectors from a table, a map of the hidden state, and a bias per class.

    A subclass usually overrides `encode`, which computes the class vectors, or `context`, which maps the hidden states.

    Args:
        table: The word table from which the class vectors are made.
        context_dim: Dimension of the hidden states that `context` reads.
        bias: Add a learned bias per class.
        dim: Dimension of the class vectors, if it is not that of the table.
    """

    vocab_size: int
    """Number of classes, V."""
    context_dim: int
    """Dimension of the hidden states that `context` reads."""
    dim: int
    """Dimension of the class vectors and of the output of `context`."""
    bias: nn.Parameter | None
    """One number per class, or None."""
    label_modules: ClassVar[tuple[str, ...]] = ()
    """Names of the submodules that only `encode` uses. `fold_classifier` leaves them out."""
    _cache: WeightCache | None = None

    def __init__(self, table: WordTable, context_dim: int, bias: bool, dim: int | None = None) -> None:
        super().__init__()
        check_word_table(type(self).__name__, table)
        self.table = table
        self.vocab_size = table.vocab_size
        self.context_dim = context_dim
        self.dim = dim or table.dim
        self.register_parameter("bias", nn.Parameter(torch.zeros(table.vocab_size)) if bias else None)

    def encode(self, ids: Tensor | None = None) -> Tensor:
        """Compute the class vectors. A classifier that transforms its table overrides this method.

        Output ends call `weight`, which may take the vectors from a cache.

        Args:
            ids: Class ids, with any shape. By default all classes.
        """
        return self.table.vectors(ids)

    def context(self, hidden_ND: Tensor) -> Tensor:
        """Map the hidden states to the space of the class vectors. The result, the context, has shape (N, dim).

        A matrix that is applied here costs N x D x D operations. In `encode` it would cost V x D x D.

        Args:
            hidden_ND: Hidden states, with shape (N, context_dim).
        """
        return hidden_ND

    def weight(self, ids: Tensor | None = None) -> Tensor:
        """Return the vectors of some classes, with shape (*ids.shape, D), or of all classes, with shape (V, D).

        While the classifier has a cache, the vectors of all classes come from the cache.

        Args:
            ids: Class ids, with any shape. By default all classes.
        """
        if ids is None and self._cache is not None:
            return self._cache.weight(self.encode)
        return self.encode(ids)

    @property
    def shard(self) -> ClassShard | None:
        """Where the classes lie, if other processes have more of them."""
        return self.table.shard

    def flops(self, rows: int, classes: int | None = None) -> int:
        """Return the number of floating-point operations of a training step (see `nn/part.py`).

        Args:
            rows: Number of hidden states, N.
            classes: Number of classes to score. By default all classes.
        """
        if classes is None:
            classes = self.vocab_size
        weights_per_row = count_matrix_weights(self) + self.dim * classes
        return FLOPS_PER_WEIGHT * rows * weights_per_row

    def penalties(self) -> dict[str, Tensor]:
        """Return named penalties on the parameters of the classifier, as scalars (see `OutputEnd.penalties`)."""
        return {}

    @contextmanager
    def use_cache(self, cache: CacheType) -> Iterator[CacheType]:
        """Use `cache` for the vectors of all classes inside the `with` block."""
        previous_cache = self._cache
        self._cache = cache
        try:
            yield cache
        finally:
            self._cache = previous_cache


def check_word_table(classifier: str, table: Any) -> None:
    """Raise a `SettingsError` unless the table is a `WordTable`. The message names the classifier."""
    if isinstance(table, WordTable):
        return
    if isinstance(table, BandedTable):
        raise SettingsError(NEEDS_WORD_TABLE)
    if is_input_end(table):
        raise SettingsError(NO_TABLE_TO_SHARE)
    hint = hint_for_torch_layer(table)
    raise SettingsError(f"{classifier}: needs a word table; {describe_type(table)} is not one{hint}")


# -- caches of class vectors ---------------------------------------------------------------------------------------


class WeightCache:
    """Base class of caches for the vectors of all classes of a classifier."""

    def weight(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return weight_VD, calling `compute` if it is not cached."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None, because nothing would ever remove the cache of a copied classifier."""


class EvaluationCache(WeightCache):
    """Computes the class vectors once, without gradients. A call that needs gradients does not use the cache."""

    def __init__(self) -> None:
        self._weight: Tensor | None = None

    def weight(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return weight_VD, calling `compute` in the first call without gradients and in every call with gradients."""
        if torch.is_grad_enabled():
            return compute()
        if self._weight is None:
            self._weight = compute()
        return self._weight


class StepCache(WeightCache):
    """Computes the class vectors once for all micro-batches of an optimiser step, with one backward pass through them.

    All micro-batches except the last receive a detached copy (a leaf tensor), which accumulates their gradients. The
    last micro-batch receives the weight itself, and the accumulated gradients are added to its gradient. So only the
    last backward pass continues into the label encoder. With three micro-batches and their gradients g1, g2 and g3:

        1  backward()    leaf.grad = g1
        2  backward()    leaf.grad = g1 + g2
        3  backward()    weight receives g1 + g2 + g3 and passes it on to the label encoder
    """

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._leaf: Tensor | None = None
        self._is_last = False

    def weight(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return weight_VD, calling `compute` in the first micro-batch and in every call without gradients."""
        if not torch.is_grad_enabled():
            return compute()
        if self._weight is None:
            weight_VD = compute()
            if torch.is_autocast_enabled(weight_VD.device.type):
                # A label encoder may end in half precision, in which gradients must not be accumulated.
                weight_VD = at_least_float32(weight_VD)
            self._weight = weight_VD

        is_parameter = self._weight.grad_fn is None  # a parameter accumulates gradients itself
        if self._is_last or is_parameter:
            return self._weight
        if self._leaf is None:
            self._leaf = self._weight.detach().requires_grad_()
            self._weight.register_hook(partial(_add_accumulated, self._leaf))  # type: ignore[no-untyped-call]
        return self._leaf

    def announce_last_micro_batch(self) -> None:
        """Announce that the next micro-batch is the last."""
        self._is_last = True

    def check_gradients_passed_on(self) -> None:
        """Raise an error if accumulated gradients would be lost."""
        if self._leaf is not None and self._leaf.grad is not None:
            raise RuntimeError(
                "class vectors were shared between micro-batches, but the last one did not receive the gradients of "
                "the others; call the function that cache_for_step() yields before the last micro-batch, and its "
                "backward() inside the context"
            )


def _add_accumulated(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Move the gradient that `leaf` has accumulated into `gradient`."""
    accumulated = leaf.grad
    leaf.grad = None
    if accumulated is None:
        return gradient
    return accumulated.add_(gradient)
