"""The cross-entropy of a linear classifier as a module that owns the classifier, like torch's own module.

criterion = rk.LinearCrossEntropyLoss(in_features=512, num_classes=50_000, softcap=30.0)
loss = criterion(hidden, target)     # (B, T, 512), (B, T) -> ()
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from reefknot.kernels.arguments import choose, score_transform
from reefknot.kernels.choice import Impl
from reefknot.kernels.linear_cross_entropy import (
    Reduction,
    check_class_weight,
    check_settings,
    linear_cross_entropy,
)


class LinearCrossEntropyLoss(nn.Module):
    """A linear classifier with its cross-entropy, which never stores all scores at once.

    The arguments up to `options` and the parameter names (`linear.weight`, `linear.bias`) are those of
    `torch.nn.LinearCrossEntropyLoss`, so a state dict of one fits the other. The other arguments are ours; see
    `linear_cross_entropy`.

    Args:
        in_features: Size of the hidden states, D.
        num_classes: Number of classes, V.
        out_features: Sizes d_1, ..., d_K of a loss with several groups of classes. Such a loss stores all scores.
        bias: Learn one bias per class.
        device: Device of the parameters.
        dtype: Type of the parameters.
        reduction: `mean`, `sum` or `none`.
        weight: The weight of each class in the loss, with shape (V,), or None.
        ignore_index: Targets with this value have a loss of zero. The default is -100.
        label_smoothing: The share of every target that is spread over all classes, from 0 to 1.
        options: Accepted as in torch, and not used.
        z_loss: Weight of the squared log-sum-exp of a row's scores.
        logit_scale: The scores are multiplied by this number first.
        softcap: If given, the scaled scores x become softcap * tanh(x / softcap).
        temperature: The scores are divided by this number last.
        check_targets: Raise an error if a target is out of range.
        impl: The implementation (see `using`).
        memory: Working memory in MiB.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        check_targets: bool = True,
        impl: Impl | None = None,
        memory: float | None = None,
    ) -> None:
        super().__init__()
        check_settings(reduction, label_smoothing, z_loss, ignore_index, None)
        score_transform("LinearCrossEntropyLoss", logit_scale, softcap, temperature)
        choose(impl, memory)
        if weight is not None:
            check_class_weight(weight, num_classes)
        self.num_classes = num_classes
        self.out_features = out_features
        num_rows = math.prod(out_features, start=num_classes)
        self.linear = nn.Linear(in_features, num_rows, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.settings: dict[str, Any] = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "options": options,
            "z_loss": z_loss,
            "logit_scale": logit_scale,
            "softcap": softcap,
            "temperature": temperature,
            "check_targets": check_targets,
            "impl": impl,
            "memory": memory,
        }

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of hidden states, with shape (..., D), and their targets, with shape (...)."""
        weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        if self.out_features:
            weight = weight.view(self.num_classes, *self.out_features, -1)
            bias = None if bias is None else bias.view(self.num_classes, *self.out_features)
        return linear_cross_entropy(input, weight, target, bias, weight=self.weight, **self.settings)

    def extra_repr(self) -> str:
        """Return the settings that are not None, for `repr`."""
        changed = {name: value for name, value in self.settings.items() if value is not None}
        return ", ".join(f"{name}={value!r}" for name, value in changed.items())
