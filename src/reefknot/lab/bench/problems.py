"""The inputs that output ends (classifier and loss) are measured on: hidden states, targets and weights.

Start with `make_problem`, which builds the `Problem` of one end at one shape. All competitors (the implementations that
are compared) get the same problem.
`Problem.floor_flops` counts the operations that no exact method avoids.

The data imitate a trained model, because the distribution of the logits decides speed and error in practice: a few
likely words, a long tail, and a target that stands out.

- Targets follow Zipf's law: p(word v) is proportional to 1 / (v + 1).
- The logits of a token are the sum of the log-unigram, noise, and a boost of its target. They are an exact product of
  D dimensions:
    - the first few dimensions hold the log-unigram: every hidden state is 1 there, and the log-probability of a class
      is divided equally among them;
    - in the other dimensions, a class vector is noise of length 1, and a hidden state is noise plus `TARGET_BOOST`
      times the vector of its target.
- Seeds are fixed. All numbers are rounded to the data type of the computation, so that all competitors and the float64
  gradients start from the same inputs.

The floor: a product of N x D by D x V takes 2NDV floating-point operations, and each of its two gradients takes the
same number. All other work of a method, and every product that it computes twice, comes on top of the floor.

Shapes: N tokens, D dimensions, V classes, K experts, S classes of a band (a cluster of words of similar frequency),
R tokens whose target is in a band.
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
"""The output ends: a softmax, an adaptive softmax, the augmented loss with and without gradients of its soft targets, a
mixture of softmaxes, and DRILL (a softmax over class vectors that a label encoder computes)."""
NUM_EXPERTS = 15
"""Softmaxes of the mixture."""
DRILL_LAYERS = 4
TAU, ALPHA = 20.0, 20.0
"""Temperature and weight of the augmented loss. The weight is gamma tau, with gamma = 1."""
TARGET_BOOST, NOISE_SCALE, SEED = 4.0, 1.0, 11
Weights = Mapping[str, Tensor]


class Shape(NamedTuple):
    """The numbers of tokens (N), dimensions (D) and classes (V)."""

    tokens: int
    dim: int
    classes: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse "N,D,V", such as "700,200,10000"."""
        try:
            shape = cls(*(int(part.replace("_", "")) for part in text.split(",")))
        except (ValueError, TypeError):
            raise SettingsError(f"--shape {text}: must be rows,dim,classes, such as 700,200,10000") from None
        if shape.tokens < 1 or shape.dim < 8 or shape.classes < 50:
            raise SettingsError(f"--shape {text}: needs at least 1 row, 8 dimensions and 50 classes")
        return shape

    def __str__(self) -> str:
        return f"N = {self.tokens:,}, D = {self.dim:,}, V = {self.classes:,}"


@dataclass(frozen=True)
class Problem:
    """One end at one shape: the input of all competitors."""

    end: str
    shape: Shape
    hidden: Tensor
    """Hidden states hidden_ND."""
    targets: Tensor
    """Targets targets_N, on the CPU, like a batch of text."""
    weights: Weights
    """Weights by name. Their gradients are compared under the same names."""

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """The first ids of the tails of an adaptive end, that is, of all bands but the first."""
        return choose_cutoffs(self.shape.classes)

    @property
    def floor_flops(self) -> float:
        """The floating-point operations that one forward and backward pass cannot avoid."""
        N, D, V = self.shape
        distinct_targets = len(torch.unique(self.targets))
        plain_flops = 6.0 * N * D * V
        if self.end == "adaptive":
            return self._count_adaptive_flops()
        if self.end == "augmented":
            # Soft targets are computed once per distinct target: scores, mean vectors, and the gradients of both.
            return plain_flops + 10.0 * distinct_targets * D * V
        if self.end == "augmented-detached":
            return plain_flops + 6.0 * distinct_targets * D * V
        if self.end == "mixture":
            return NUM_EXPERTS * (plain_flops + 6.0 * N * D * D)
        if self.end == "drill":
            return plain_flops + DRILL_LAYERS * 6.0 * V * D * D
        return plain_flops

    def _count_adaptive_flops(self) -> float:
        """Count the head (first band and one class per tail) on all tokens, and each tail on the tokens in it."""
        N, D, V = self.shape
        bounds = (*self.cutoffs, V)
        num_tails = len(self.cutoffs)
        flops = 6.0 * N * D * (bounds[0] + num_tails)
        for dim, (start, stop) in zip(compute_band_dims(D)[1:], pairwise(bounds), strict=True):
            tokens_in_tail = int(((self.targets >= start) & (self.targets < stop)).sum())
            flops += 6.0 * tokens_in_tail * dim * (stop - start) + 6.0 * tokens_in_tail * D * dim
        return flops


def choose_cutoffs(num_classes: int) -> tuple[int, ...]:
    """Return the first ids of the second and third band of an adaptive end."""
    if num_classes > 100_000:
        return (20_000, 60_000)
    if num_classes > 30_000:
        return (2_800, 20_000)
    return (num_classes // 10, num_classes // 2)


def compute_band_dims(dim: int) -> tuple[int, ...]:
    """Return the dimensions of three bands, such as (1024, 256, 64). A small `dim` is halved instead of quartered."""
    factor = 4 if dim >= 64 else 2
    return (dim, dim // factor, dim // factor**2)


def make_problem(end: str, shape: Shape, device: str, dtype: torch.dtype) -> Problem:
    """Build a problem. Equal calls on one kind of device give equal numbers."""
    unigram_V = 1.0 / torch.arange(1, shape.classes + 1, dtype=torch.float64)
    unigram_V /= unigram_V.sum()
    cpu_generator = torch.Generator().manual_seed(SEED)
    uniform_N = torch.rand(shape.tokens, dtype=torch.float64, generator=cpu_generator)
    targets_N = torch.searchsorted(unigram_V.cumsum(0), uniform_N).clamp_(max=shape.classes - 1)
    smallest_dim = compute_band_dims(shape.dim)[-1] if end == "adaptive" else shape.dim
    sampler = _Sampler(
        shape,
        torch.Generator(device).manual_seed(SEED),
        unigram_V.to(device),
        targets_N.to(device),
        unigram_dims=max(1, min(16, smallest_dim // 4)),
    )
    if end == "adaptive":
        target_vectors_ND, weights = sampler.sample_adaptive_weights()
    else:
        table_VD = sampler.sample_class_vectors(sampler.unigram.log(), shape.dim)
        target_vectors_ND, weights = table_VD[sampler.targets], {"table": table_VD}
    hidden_ND = sampler.sample_hidden(target_vectors_ND)
    if end == "mixture":
        weights |= sampler.sample_expert_weights()
    if end == "drill":
        weights |= sampler.sample_label_encoder_weights()
    rounded_weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return Problem(end, shape, hidden_ND.to(dtype), targets_N, rounded_weights)


@dataclass(frozen=True)
class _Sampler:
    """Samples the hidden states and weights of a problem. The order of the calls decides the random numbers."""

    shape: Shape
    generator: torch.Generator
    unigram: Tensor
    targets: Tensor
    unigram_dims: int
    """The number of dimensions that hold the log-unigram."""

    def sample_noise(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator, device=self.generator.device)

    def sample_class_vectors(self, log_p_V: Tensor, dim: int) -> Tensor:
        """Return one vector per class, for classes with these log-probabilities."""
        vectors_VD = self.sample_noise(len(log_p_V), dim).mul_(dim**-0.5)
        vectors_VD[:, : self.unigram_dims] = (log_p_V / self.unigram_dims).float()[:, None]
        return vectors_VD

    def sample_hidden(self, target_vectors_ND: Tensor) -> Tensor:
        """Return hidden states that point towards the class vectors of their targets."""
        hidden_ND = TARGET_BOOST * target_vectors_ND + NOISE_SCALE * self.sample_noise(*target_vectors_ND.shape)
        hidden_ND[:, : self.unigram_dims] = 1.0
        return hidden_ND

    def sample_adaptive_weights(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the vector of each token's target, and the weights of an adaptive softmax.

        The weights are `head` (class vectors of the first band, then one per tail) and, for each tail, `band1` (its
        class vectors) and `down1` (the projection of the hidden state to its dimension).
        """
        D = self.shape.dim
        bounds = (0, *choose_cutoffs(self.shape.classes), self.shape.classes)
        band_dims = compute_band_dims(D)
        band_p = [self.unigram[start:stop].sum() for start, stop in pairwise(bounds)]
        head_p = torch.cat([self.unigram[: bounds[1]], torch.stack(band_p[1:])])
        weights = {"head": self.sample_class_vectors(head_p.log(), D)}
        target_vectors_ND = weights["head"][self.targets.clamp(max=bounds[1] - 1)]
        for band, (start, stop) in enumerate(pairwise(bounds[1:]), start=1):
            dim = band_dims[band]
            log_p_S = (self.unigram[start:stop] / band_p[band]).log()
            weights[f"band{band}"] = band_SD = self.sample_class_vectors(log_p_S, dim)
            identity = torch.eye(dim, D, device=self.generator.device)
            weights[f"down{band}"] = identity + self.sample_noise(dim, D) * (0.1 * D**-0.5)
            tokens_R = ((self.targets >= start) & (self.targets < stop)).nonzero().squeeze(-1)
            target_vectors_ND[tokens_R] = weights["head"][bounds[1] + band - 1]
            target_vectors_ND[tokens_R, :dim] += band_SD[self.targets[tokens_R] - start]
        return target_vectors_ND, weights

    def sample_expert_weights(self) -> dict[str, Tensor]:
        """Return the weights of a mixture's experts. Each expert adds a little noise of its own to the hidden state."""
        D = self.shape.dim
        identity = torch.eye(D, device=self.generator.device).repeat(NUM_EXPERTS, 1)
        return {
            "latent": identity + self.sample_noise(NUM_EXPERTS * D, D) * (0.3 * D**-0.5),
            "latent_bias": 0.1 * self.sample_noise(NUM_EXPERTS * D),
            "prior": self.sample_noise(NUM_EXPERTS, D) * D**-0.5,
        }

    def sample_label_encoder_weights(self) -> dict[str, Tensor]:
        """Return the weights of DRILL's label encoder (the network that computes its class vectors)."""
        D = self.shape.dim
        weights = {}
        for layer in range(1, DRILL_LAYERS + 1):
            weights[f"layer{layer}"] = self.sample_noise(D, D) * D**-0.5
            weights[f"layer{layer}_bias"] = 0.1 * self.sample_noise(D)
        return weights
