"""The loss function of a patched model: transformers' own shift and division, with our kernel.

transformers has two losses over a vocabulary. The causal loss compares the logits at one position with the label at the
next position, and the masked loss with the label at the same position. Both are means over the labels that are not
ignored, or sums divided by `num_items_in_batch`, the number of labels in all micro-batches of a step.

Shapes: (..., T, V) logits, (..., T) labels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from reefknot.hf.deferred import DeferredLogits
from reefknot.hf.scores import cross_entropy
from reefknot.hf.traced import TracedLogits
from reefknot.kernels.linear_cross_entropy import Reduction

LossFunction = Callable[..., Any]


class LogitsFreeLoss:
    """Replaces the loss function of a model. Real logits, and other losses, go to the model's own loss function."""

    def __init__(self, original: LossFunction) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss, with the arguments of the model's own loss function."""
        loss = None
        if self.original in (ForCausalLMLoss, ForMaskedLMLoss):
            try:
                arguments = inspect.signature(self.original).bind(*args, **kwargs).arguments
            except TypeError:
                return self.original(*args, **kwargs)  # raises its own error
            loss = self._logits_free(**{**arguments.pop("kwargs", {}), **arguments})
        return self.original(*args, **kwargs) if loss is None else loss

    def _logits_free(
        self,
        logits: Any,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor | None:
        """Return the loss, or None if it needs real logits."""
        is_deferred = isinstance(logits, DeferredLogits | TracedLogits) and logits.dense_logits is None
        if not is_deferred or logits.shape[-1] != vocab_size:
            return None
        targets = labels
        if self.original is ForCausalLMLoss:
            targets = shift_labels
            if targets is None and labels is not None:
                targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if targets is None or targets.shape.numel() != logits.shape[:-1].numel():
            return None
        targets = targets.reshape(logits.shape[:-1]).to(logits.device)
        reduction: Reduction = "mean" if num_items_in_batch is None else "sum"
        loss = cross_entropy(logits.scores, targets, ignore_index=ignore_index, reduction=reduction)
        if loss is None:
            return None
        logits.scores.log("loss_function", False)
        return loss if num_items_in_batch is None else _divide(loss, num_items_in_batch)


def _divide(loss: Tensor, count: Tensor | float) -> Tensor:
    """Divide a sum of losses by the number of labels. As in torch, no labels give NaN, with gradients of zero."""
    if isinstance(count, Tensor):
        count = count.to(loss.device)
    elif count:
        return loss / count
    is_empty = (loss.detach() == 0) & (count == 0)
    return loss / torch.where(is_empty, 1, count) + torch.where(is_empty, math.nan, 0.0)
