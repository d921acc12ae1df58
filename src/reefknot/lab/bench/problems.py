"""Inputs for measuring the output layers of language models: random hidden states, targets and weights.

An output end is a classifier with its loss, such as a softmax or a mixture of softmaxes. Start with `make_problem`,
which builds the `Problem` of one end at one shape. All competitors (the implementations that are compared) get the same
problem:

    problem = make_problem("plain", Shape(tokens=700, dim=200, classes=10_000), "cpu", torch.float32)

Three of the ends are functions of the library instead of modules: a softmax over capped scores, the log-probabilities
and entropies of a policy, and the divergence of a student from a teacher.

An adaptive softmax divides the classes into bands, which are groups of words of similar frequency. Its head scores the
first band and one class for each of the other bands, which are the tails.

Shapes: N tokens, D dimensions, V classes, S classes of a band, R tokens whose target is in a band.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from reefknot.errors import SettingsError

ENDS = (
    "plain",
    "adaptive",
    "augmented",
    "augmented-detached",
    "mixture",
    "drill",
    "softcap",
    "log_probs",
    "distil",
)
"""The output ends:

- plain: a softmax;
- adaptive: an adaptive softmax;
- augmented, augmented-detached: the augmented loss, with and without gradients of its soft targets;
- mixture: a mixture of softmaxes;
- drill: DRILL, a softmax over class vectors that a label encoder computes;
- softcap: a softmax over capped scores, as in Gemma 2;
- log_probs: the log-probabilities of the targets and the entropies, in the objective of a policy gradient;
- distil: the forward divergence KL(teacher || student) of a softmax from that of a frozen teacher.
"""
NUM_PRODUCTS = {"plain": 3, "softcap": 3, "log_probs": 4, "distil": 4}
"""The N x D x V matrix products that a method without stored scores computes, for ends that have no other products.

The scores and the gradients of the hidden states and of the class vectors take three products. The fourth product of
`log_probs` computes the scores again in the backward pass, and that of `distil` computes the scores of the teacher.
"""
SOFTCAP = 30.0
"""The cap of the scores, as in Gemma 2."""
ENTROPY_WEIGHT = 0.01
"""Weight of the entropy in the objective of `log_probs`."""
NUM_EXPERTS = 15
"""Softmaxes of the mixture."""
DRILL_LAYERS = 4
"""Layers of DRILL's label encoder."""
TAU = 20.0
"""Temperature of the augmented loss."""
ALPHA = 20.0
"""Weight of the soft targets in the augmented loss: gamma tau, with gamma = 1."""
TARGET_BOOST = 4.0
"""How far hidden states point towards the class vectors of their targets."""
NOISE_SCALE = 1.0
"""Scale of the noise in hidden states."""
SEED = 11
Weights = Mapping[str, Tensor]
"""The tensors of an end by name, such as {"table": table_VD}."""


class Shape(NamedTuple):
    """The numbers of tokens (N), dimensions (D) and classes (V)."""

    tokens: int
    dim: int
    classes: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse "N,D,V", such as "700,200,10000"."""
        try:
            shape = cls(*(int(number.replace("_", "")) for number in text.split(",")))
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
    """The hidden states, hidden_ND."""
    targets: Tensor
    """The targets, targets_N. They are on the CPU, like a batch of text."""
    weights: Weights
    """The weights by name. Their gradients are compared under the same names."""
    constants: Weights = field(default_factory=dict)
    """Tensors by name that are not trained: `teacher_table`, the class vectors of a teacher, teacher_table_VD."""
    row_constants: Weights = field(default_factory=dict)
    """Tensors by name that are not trained and have one row per token: `advantages`, advantages_N, of the objective of
    `log_probs`, and `teacher_hidden`, the hidden states of a teacher, teacher_hidden_ND."""

    @property
    def tensors(self) -> Weights:
        """The weights and all constants by name. A loss function gets them."""
        return {**self.weights, **self.constants, **self.row_constants}

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """The first ids of the tails of an adaptive end, that is, of all bands but the first."""
        return choose_cutoffs(self.shape.classes)

    @property
    def floor_flops(self) -> float:
        """The floating-point operations that one forward and backward pass cannot avoid.

        A product of N x D by D x V takes 2NDV operations, and each of its two gradients takes the same number. All
        other work of a method, and every product that it computes twice, comes on top of this floor.
        """
        N, D, V = self.shape
        distinct_targets = len(torch.unique(self.targets))
        plain_flops = 6.0 * N * D * V
        if self.end == "distil":
            return plain_flops + 2.0 * N * D * V  # the scores of the teacher
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
        for band_dim, (first_id, end_id) in zip(compute_band_dims(D)[1:], pairwise(bounds), strict=True):
            tokens_in_tail = int(((self.targets >= first_id) & (self.targets < end_id)).sum())
            flops += 6.0 * tokens_in_tail * band_dim * (end_id - first_id) + 6.0 * tokens_in_tail * D * band_dim
        return flops


def make_problem(end: str, shape: Shape, device: str, dtype: torch.dtype) -> Problem:
    """Sample the inputs of an end. Equal calls on one kind of device give equal numbers.

    The data imitate a trained model, because the distribution of the logits decides speed and error in practice: a few
    likely words, a long tail, and a target that stands out.

    - Targets follow Zipf's law: p(word v) is proportional to 1 / (v + 1).
    - The logits of a token are the sum of the log-unigram, noise, and a boost of its target.
    - The first few dimensions hold the log-unigram: every hidden state is 1 there, and the log-probability of a class
      is divided equally among them.
    - In the other dimensions, a class vector is noise of length 1, and a hidden state is noise plus `TARGET_BOOST`
      times the vector of its target.

    Args:
        end: One of `ENDS`.
        shape: Numbers of tokens, dimensions and classes.
        device: `cuda` or `cpu`.
        dtype: The data type of the computation. All numbers are rounded to it, so that all competitors and the float64
            gradients start from the same inputs.
    """
    # Sample the targets.
    unigram_V = 1.0 / torch.arange(1, shape.classes + 1, dtype=torch.float64)
    unigram_V /= unigram_V.sum()
    cpu_generator = torch.Generator().manual_seed(SEED)
    uniform_N = torch.rand(shape.tokens, dtype=torch.float64, generator=cpu_generator)
    targets_N = torch.searchsorted(unigram_V.cumsum(0), uniform_N).clamp_(max=shape.classes - 1)

    # Sample the hidden states, and the weights that they depend on.
    smallest_dim = shape.dim
    if end == "adaptive":
        smallest_dim = compute_band_dims(shape.dim)[-1]
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
        target_vectors_ND = table_VD[sampler.targets]
        weights = {"table": table_VD}
    hidden_ND = sampler.sample_hidden(target_vectors_ND)

    # Sample the other weights.
    if end == "mixture":
        weights |= sampler.sample_expert_weights()
    if end == "drill":
        weights |= sampler.sample_label_encoder_weights()

    # Sample what is not trained. The teacher is another model of the same text.
    constants: dict[str, Tensor] = {}
    row_constants: dict[str, Tensor] = {}
    if end == "log_probs":
        row_constants["advantages"] = sampler.sample_noise(shape.tokens).to(torch.promote_types(dtype, torch.float32))
    if end == "distil":
        teacher_VD = sampler.sample_class_vectors(sampler.unigram.log(), shape.dim)
        constants["teacher_table"] = teacher_VD.to(dtype)
        row_constants["teacher_hidden"] = sampler.sample_hidden(teacher_VD[sampler.targets]).to(dtype)

    rounded_weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return Problem(end, shape, hidden_ND.to(dtype), targets_N, rounded_weights, constants, row_constants)


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


@dataclass(frozen=True)
class _Sampler:
    """Samples the hidden states and weights of a problem. The order of the calls decides the random numbers."""

    shape: Shape
    generator: torch.Generator
    unigram: Tensor
    """The probability of each class, unigram_V."""
    targets: Tensor
    """The targets, targets_N."""
    unigram_dims: int
    """The number of dimensions that hold the log-unigram."""

    def sample_class_vectors(self, log_probs_V: Tensor, dim: int) -> Tensor:
        """Return one vector per class, for classes with these log-probabilities."""
        vectors_VD = self.sample_noise(len(log_probs_V), dim).mul_(dim**-0.5)
        vectors_VD[:, : self.unigram_dims] = (log_probs_V / self.unigram_dims).float()[:, None]
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

        # The head. All targets outside the first band get a vector of a tail below.
        band_probs = [self.unigram[first_id:end_id].sum() for first_id, end_id in pairwise(bounds)]
        head_probs = torch.cat([self.unigram[: bounds[1]], torch.stack(band_probs[1:])])
        weights = {"head": self.sample_class_vectors(head_probs.log(), D)}
        target_vectors_ND = weights["head"][self.targets.clamp(max=bounds[1] - 1)]

        for band, (first_id, end_id) in enumerate(pairwise(bounds[1:]), start=1):
            band_dim = band_dims[band]
            log_probs_S = (self.unigram[first_id:end_id] / band_probs[band]).log()
            band_SD = self.sample_class_vectors(log_probs_S, band_dim)
            weights[f"band{band}"] = band_SD
            identity = torch.eye(band_dim, D, device=self.generator.device)
            weights[f"down{band}"] = identity + self.sample_noise(band_dim, D) * (0.1 * D**-0.5)

            # The vector of a target in this tail points to the tail's class of the head and to the target's class.
            tokens_R = ((self.targets >= first_id) & (self.targets < end_id)).nonzero().squeeze(-1)
            target_vectors_ND[tokens_R] = weights["head"][bounds[1] + band - 1]
            target_vectors_ND[tokens_R, :band_dim] += band_SD[self.targets[tokens_R] - first_id]
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

    def sample_noise(self, *sizes: int) -> Tensor:
        """Return standard normal numbers."""
        return torch.randn(*sizes, generator=self.generator, device=self.generator.device)
