"""The data that output ends are measured on, and the smallest number of operations that they need.

Hidden states, targets and weights imitate a trained model. Targets follow Zipf's law: p(word v) is proportional to
1 / (v + 1). The logits of a row are the sum of the log-unigram, noise and a boost of its target, and they are an exact
product of D dimensions. In the first few dimensions, every hidden state is 1, and the log-probability of a class is
divided equally among them. In the other dimensions, a class vector is noise of length 1, and a hidden state is noise
plus `BOOST` times the vector of its target. A softmax over such logits has the properties that decide speed and error
in practice: a few likely words, a long tail, and a target that stands out. The seeds are fixed.

All numbers are rounded to the type of the computation before anything is measured, so that all competitors (the
implementations that are compared) and the float64 gradients start from the same inputs.

The floor counts the multiply-adds that no exact method avoids, forward and backward. A product of N x D by D x V takes
2NDV floating-point operations, and each of its two gradients takes the same number. All other work of a method, and
every product that it computes twice, comes on top of the floor.

Shapes: N rows (tokens), D dimensions, V classes, K experts, S classes of a band (cluster of words of
similar frequency).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from reefknot.errors import SettingsError

ENDS = ("plain", "adaptive", "augmented", "augmented-detached", "mixture", "drill")
EXPERTS, DEPTH, TAU, GAMMA = 15, 4, 20.0, 1.0
"""Experts of the mixture, layers of DRILL, and the two settings of the augmented loss (alpha = gamma tau)."""
ALPHA = GAMMA * TAU
BOOST, NOISE, SEED = 4.0, 1.0, 11
Weights = Mapping[str, Tensor]


class Shape(NamedTuple):
    """The numbers of rows, dimensions and classes."""

    rows: int
    dim: int
    words: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """Parse "N,D,V"."""
        try:
            shape = cls(*(int(part.replace("_", "")) for part in text.split(",")))
        except (ValueError, TypeError):
            raise SettingsError(f"--shape {text}: must be rows,dim,classes, such as 700,200,10000") from None
        if shape.rows < 1 or shape.dim < 8 or shape.words < 50:
            raise SettingsError(f"--shape {text}: needs at least 1 row, 8 dimensions and 50 classes")
        return shape

    def __str__(self) -> str:
        return f"N = {self.rows:,}, D = {self.dim:,}, V = {self.words:,}"


@dataclass(frozen=True)
class Problem:
    """One end at one shape: the input of all competitors."""

    end: str
    shape: Shape
    hidden: Tensor
    """Hidden states h_ND."""
    targets: Tensor
    """Targets y_N, on the host, like a batch of text."""
    weights: Weights
    """Weights by name. Their gradients are compared under the same names."""

    @property
    def cutoffs(self) -> tuple[int, ...]:
        return cutoffs(self.shape.words)

    @property
    def distinct(self) -> int:
        """The number of distinct targets, U."""
        return len(torch.unique(self.targets))

    @property
    def floor(self) -> float:
        """The floating-point operations that one forward and backward pass cannot avoid."""
        N, D, V = self.shape
        plain = 6.0 * N * D * V
        if self.end == "adaptive":
            return self._adaptive_floor()
        if self.end == "augmented":
            # Soft targets are computed once per distinct target: scores, mean vectors, and the gradients of both.
            return plain + 10.0 * self.distinct * D * V
        if self.end == "augmented-detached":
            return plain + 6.0 * self.distinct * D * V
        if self.end == "mixture":
            return EXPERTS * (plain + 6.0 * N * D * D)
        return plain + (6.0 * V * D * D * DEPTH if self.end == "drill" else 0.0)

    def _adaptive_floor(self) -> float:
        """Count the head with its clusters on all rows, and each tail on the rows whose target is in it."""
        N, D, V = self.shape
        bounds = (*self.cutoffs, V)
        operations = 6.0 * N * D * (bounds[0] + len(bounds) - 1)
        for dim, (start, stop) in zip(band_dims(D)[1:], pairwise(bounds), strict=True):
            rows = int(((self.targets >= start) & (self.targets < stop)).sum())
            operations += 6.0 * rows * dim * (stop - start) + 6.0 * rows * D * dim
        return operations


def cutoffs(words: int) -> tuple[int, ...]:
    """Return the first ids of the second and third band of an adaptive end."""
    if words > 100_000:
        return (20_000, 60_000)
    return (2_800, 20_000) if words > 30_000 else (words // 10, words // 2)


def band_dims(dim: int) -> tuple[int, ...]:
    """Return the dimensions of three bands. Each is a quarter of the one before, or a half if `dim` is small."""
    factor = 4 if dim >= 64 else 2
    return (dim, dim // factor, dim // factor**2)


def make_problem(end: str, shape: Shape, device: str, dtype: torch.dtype) -> Problem:
    """Make a problem. Equal calls on one kind of device give equal numbers."""
    host = torch.Generator().manual_seed(SEED)
    unigram_V = 1.0 / torch.arange(1, shape.words + 1, dtype=torch.float64)
    unigram_V /= unigram_V.sum()
    picks_N = torch.rand(shape.rows, dtype=torch.float64, generator=host)
    y_N = torch.searchsorted(unigram_V.cumsum(0), picks_N).clamp_(max=shape.words - 1)
    narrowest = band_dims(shape.dim)[-1] if end == "adaptive" else shape.dim
    make = _Maker(
        shape,
        torch.Generator(device).manual_seed(SEED),
        unigram_V.to(device),
        y_N.to(device),
        shared=max(1, min(16, narrowest // 4)),
    )
    if end == "adaptive":
        vectors_ND, weights = make.banded()
    else:
        table_VD = make.classes(make.unigram.log(), shape.dim)
        vectors_ND, weights = table_VD[make.targets], {"table": table_VD}
    hidden_ND = make.hidden(vectors_ND)
    if end == "mixture":
        weights |= make.experts()
    if end == "drill":
        weights |= make.layers()
    rounded = {name: weight.to(dtype) for name, weight in weights.items()}
    return Problem(end, shape, hidden_ND.to(dtype), y_N, rounded)


@dataclass(frozen=True)
class _Maker:
    """Draws the hidden states and weights of a problem."""

    shape: Shape
    generator: torch.Generator
    unigram: Tensor
    targets: Tensor
    shared: int
    """The number of dimensions that hold the log-unigram."""

    def noise(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator, device=self.generator.device)

    def classes(self, log_p_V: Tensor, dim: int) -> Tensor:
        w_VD = self.noise(len(log_p_V), dim).mul_(dim**-0.5)
        w_VD[:, : self.shared] = (log_p_V / self.shared).float()[:, None]
        return w_VD

    def hidden(self, target_ND: Tensor) -> Tensor:
        h_ND = BOOST * target_ND + NOISE * self.noise(*target_ND.shape)
        h_ND[:, : self.shared] = 1.0
        return h_ND

    def banded(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the vector of each row's target, and the weights of head and tails."""
        D = self.shape.dim
        bounds, dims = (0, *cutoffs(self.shape.words), self.shape.words), band_dims(D)
        masses = [self.unigram[start:stop].sum() for start, stop in pairwise(bounds)]
        head_p = torch.cat([self.unigram[: bounds[1]], torch.stack(masses[1:])])
        weights = {"head": self.classes(head_p.log(), D)}
        target_ND = weights["head"][self.targets.clamp(max=bounds[1] - 1)]
        for band, (start, stop) in enumerate(pairwise(bounds[1:]), start=1):
            dim = dims[band]
            log_p_S = (self.unigram[start:stop] / masses[band]).log()
            weights[f"band{band}"] = band_SD = self.classes(log_p_S, dim)
            identity = torch.eye(dim, D, device=self.generator.device)
            weights[f"down{band}"] = identity + self.noise(dim, D) * (0.1 * D**-0.5)
            rows_R = ((self.targets >= start) & (self.targets < stop)).nonzero().squeeze(-1)
            target_ND[rows_R] = weights["head"][bounds[1] + band - 1]
            target_ND[rows_R, :dim] += band_SD[self.targets[rows_R] - start]
        return target_ND, weights

    def experts(self) -> dict[str, Tensor]:
        """Return the weights of experts. Every expert changes the hidden state only a little, by its own noise."""
        D = self.shape.dim
        identity = torch.eye(D, device=self.generator.device).repeat(EXPERTS, 1)
        return {
            "latent": identity + self.noise(EXPERTS * D, D) * (0.3 * D**-0.5),
            "latent_bias": 0.1 * self.noise(EXPERTS * D),
            "prior": self.noise(EXPERTS, D) * D**-0.5,
        }

    def layers(self) -> dict[str, Tensor]:
        """Return the weights of DRILL's label encoder."""
        D, weights = self.shape.dim, {}
        for layer in range(1, DEPTH + 1):
            weights[f"layer{layer}"] = self.noise(D, D) * D**-0.5
            weights[f"layer{layer}_bias"] = 0.1 * self.noise(D)
        return weights
