"""Monte-Carlo dropout (Gal & Ghahramani 2016): the probabilities of many passes with dropout on, averaged.

Each pass reads the text once, as training does: masks are drawn for every window, the state is carried. What is
averaged over the passes is the probability of each token, not its logarithm.

Shapes: T tokens of the one stream, W of them in a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.evaluation.grid import Progress, one_stream, unheard
from reefknot.evaluation.perplexity import Score, score
from reefknot.evaluation.units import perplexity
from reefknot.models.language_model import LanguageModel
from reefknot.text.dataset import Split
from reefknot.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class MonteCarloScore(Score):
    """A score by the mean probability of several passes, and what each pass gives alone."""

    passes: tuple[float, ...]
    """Perplexity of each."""

    def summary(self) -> dict[str, Any]:
        return super().summary() | {"passes": list(self.passes), "passes_deviation": self.deviation}

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the passes' perplexities; None for a single one."""
        return float(np.std(self.passes, ddof=1)) if len(self.passes) > 1 else None


@torch.no_grad()
def monte_carlo_score(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    *,
    passes: int,
    window: int,
    seed: int = 0,
    precision: str = "float32",
    progress: Progress = unheard,
) -> MonteCarloScore:
    """Score a text by several passes with dropout.

    Arguments:
        window: tokens that share their masks; training's `steps`, for what the model was trained with.
        seed: of the masks. The generators of the process are afterwards where they were.
    """
    if passes < 1 or window < 1:
        raise SettingsError(f"Monte-Carlo dropout: passes = {passes}, window = {window}: both must be at least 1")
    plain = score(model, split, vocabulary, precision=precision)
    device = next(model.parameters()).device
    x_1T, y_1T = (each.to(device) for each in one_stream(split, vocabulary))
    alone = []
    together_T = torch.full(y_1T.shape[1:], -math.inf, dtype=torch.float64, device=device)
    with _dropping(model, seed), torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        for number in range(passes):
            logp_T = _one_pass(model, x_1T, y_1T, window).double()
            together_T = torch.logaddexp(together_T, logp_T)
            # Asking the device for the mean keeps the host from running a whole text ahead.
            alone.append(perplexity(-float(logp_T.mean())))
            progress("passes with dropout", (number + 1) / passes)
    nll = (math.log(passes) - together_T).float().cpu().numpy()
    if not np.isfinite(nll).all():
        raise NonFiniteError(f"with dropout the model gives the {split.name} text a probability that is not a number")
    definition = (
        f"Monte-Carlo dropout: mean probability of {passes:,} passes, masks drawn for every {window:,} tokens (seed "
        f"{seed}), so this figure depends on both; a pass alone: perplexity {min(alone):,.2f} to {max(alone):,.2f}; "
        f"without dropout: {perplexity(plain.mean):,.2f}"
    )
    definition = f"{plain.definition}\n{definition}"
    return MonteCarloScore(nll, plain.first, plain.words, plain.bytes, definition, tuple(alone))


def _one_pass(model: LanguageModel, x_1T: Tensor, y_1T: Tensor, window: int) -> Tensor:
    state = model.initial_state(1)
    pieces = []
    for start in range(0, x_1T.shape[1], window):
        here = slice(start, start + window)
        logp_1W, state = model.target_log_probs(x_1T[:, here], y_1T[:, here], state)
        pieces.append(logp_1W[0])
    return torch.cat(pieces)


@contextmanager
def _dropping(model: LanguageModel, seed: int) -> Iterator[None]:
    """The model with its dropout on, drawing from this seed; afterwards mode and generators are as they were."""
    device = next(model.parameters()).device
    # Not torch.manual_seed: that one seeds the generators of all GPUs.
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [each.get_state() for each in generators]
    was_training = model.training
    try:
        for each in generators:
            each.manual_seed(seed)
        model.train()
        yield
    finally:
        model.train(was_training)
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
