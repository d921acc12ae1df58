"""What an output end is measured on: hidden states, targets and weights shaped like those of a trained model.

Targets follow Zipf's law, p(word v) proportional to 1 / (v + 1), and ids fall in frequency. A row's logits are the sum
of the log-unigram, noise, and a boost of its target, and that by an exact product of width D: in the first few
dimensions every hidden state is 1 and a class holds an equal share of its log-probability; in the others classes are
noise of length 1, and a hidden state is noise plus `BOOST` times its target's vector. A softmax of such logits has what
decides speed and error in practice: a few likely words, a long tail, a target that stands out. Seeds are fixed.

Every number is rounded to the type that is computed in before anything is measured, so that all competitors, and the
float64 reference, see the same inputs.

Shapes: N rows (tokens), D width, V classes, K experts, d width of a band.
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
"""Of the mixture, of DRILL, and of the augmented loss (alpha = gamma tau)."""
ALPHA = GAMMA * TAU
BOOST, NOISE, SEED = 4.0, 1.0, 11
Weights = Mapping[str, Tensor]


class Shape(NamedTuple):
    """Rows, width and classes."""

    rows: int
    width: int
    words: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """From "N,D,V"."""
        try:
            shape = cls(*(int(part.replace("_", "")) for part in text.split(",")))
        except (ValueError, TypeError):
            raise SettingsError(f"--shape {text}: must be rows,width,classes, such as 700,200,10000") from None
        if shape.rows < 1 or shape.width < 8 or shape.words < 50:
            raise SettingsError(f"--shape {text}: needs at least 1 row, a width of 8 and 50 classes")
        return shape

    def __str__(self) -> str:
        return f"N = {self.rows:,}, D = {self.width:,}, V = {self.words:,}"


@dataclass(frozen=True)
class Problem:
    """One end at one shape: what all competitors are given."""

    end: str
    shape: Shape
    hidden: Tensor
    """h_ND."""
    targets: Tensor
    """y_N, on the host as a batch of text is."""
    weights: Weights
    """By the names that gradients are compared under."""

    @property
    def cutoffs(self) -> tuple[int, ...]:
        return cutoffs(self.shape.words)

    @property
    def distinct(self) -> int:
        """Distinct targets, U."""
        return len(torch.unique(self.targets))


def cutoffs(words: int) -> tuple[int, ...]:
    """First ids of the second and third band of an adaptive end."""
    if words > 100_000:
        return (20_000, 60_000)
    return (2_800, 20_000) if words > 30_000 else (words // 10, words // 2)


def band_widths(width: int) -> tuple[int, ...]:
    """Each band four times narrower than the one before it; twice, where that would leave almost nothing."""
    factor = 4 if width >= 64 else 2
    return (width, width // factor, width // factor**2)


def make_problem(end: str, shape: Shape, device: str, dtype: torch.dtype) -> Problem:
    """The same numbers whenever it is called on one kind of device."""
    host, draw = torch.Generator().manual_seed(SEED), torch.Generator(device).manual_seed(SEED)
    unigram_V = 1.0 / torch.arange(1, shape.words + 1, dtype=torch.float64)
    unigram_V /= unigram_V.sum()
    picks_N = torch.rand(shape.rows, dtype=torch.float64, generator=host)
    y_N = torch.searchsorted(unigram_V.cumsum(0), picks_N).clamp_(max=shape.words - 1)
    narrowest = band_widths(shape.width)[-1] if end == "adaptive" else shape.width
    make = _Maker(shape, draw, unigram_V.to(device), y_N.to(device), shared=max(1, min(16, narrowest // 4)))
    if end == "adaptive":
        vectors_ND, weights = make.banded()
    else:
        table_VD = make.classes(make.unigram.log(), shape.width)
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
    shape: Shape
    draw: torch.Generator
    unigram: Tensor
    targets: Tensor
    shared: int
    """Dimensions that hold the log-unigram."""

    def noise(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.draw, device=self.draw.device)

    def classes(self, log_p_V: Tensor, width: int) -> Tensor:
        w_VD = self.noise(len(log_p_V), width).mul_(width**-0.5)
        w_VD[:, : self.shared] = (log_p_V / self.shared).float()[:, None]
        return w_VD

    def hidden(self, target_ND: Tensor) -> Tensor:
        h_ND = BOOST * target_ND + NOISE * self.noise(*target_ND.shape)
        h_ND[:, : self.shared] = 1.0
        return h_ND

    def banded(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The head with its clusters, and for each tail a matrix down and its classes."""
        bounds, widths = (0, *cutoffs(self.shape.words), self.shape.words), band_widths(self.shape.width)
        masses = [self.unigram[start:stop].sum() for start, stop in pairwise(bounds)]
        head_p = torch.cat([self.unigram[: bounds[1]], torch.stack(masses[1:])])
        weights = {"head": self.classes(head_p.log(), self.shape.width)}
        target_ND = weights["head"][self.targets.clamp(max=bounds[1] - 1)]
        for band, (start, stop) in enumerate(pairwise(bounds)):
            if band == 0:
                continue
            width = widths[band]
            log_p_S = (self.unigram[start:stop] / masses[band]).log()
            weights[f"band{band}"] = band_SD = self.classes(log_p_S, width)
            keep = torch.eye(width, self.shape.width, device=self.draw.device)
            weights[f"down{band}"] = keep + self.noise(width, self.shape.width) * (0.1 * self.shape.width**-0.5)
            rows_R = ((self.targets >= start) & (self.targets < stop)).nonzero().squeeze(-1)
            target_ND[rows_R] = weights["head"][bounds[1] + band - 1]
            target_ND[rows_R, :width] += band_SD[self.targets[rows_R] - start]
        return target_ND, weights

    def experts(self) -> dict[str, Tensor]:
        """Experts that read the hidden state nearly as it is, each a little differently."""
        width = self.shape.width
        keep = torch.eye(width, device=self.draw.device).repeat(EXPERTS, 1)
        return {
            "latent": keep + self.noise(EXPERTS * width, width) * (0.3 * width**-0.5),
            "latent_bias": 0.1 * self.noise(EXPERTS * width),
            "prior": self.noise(EXPERTS, width) * width**-0.5,
        }

    def layers(self) -> dict[str, Tensor]:
        width, found = self.shape.width, {}
        for layer in range(1, DEPTH + 1):
            found[f"layer{layer}"] = self.noise(width, width) * width**-0.5
            found[f"layer{layer}_bias"] = 0.1 * self.noise(width)
        return found
