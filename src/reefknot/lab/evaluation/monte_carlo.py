"""Monte-Carlo dropout (Gal & Ghahramani 2016): the probabilities of many passes with dropout on, averaged.

Each pass reads the text once, as training does: masks are drawn for every window, and the state is carried or every
window computed afresh. What is averaged over the passes is the probability of each token, not its logarithm. Of a model
that drops nothing one pass is made, whatever was asked for: all are the same.

Shapes: T tokens of the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.lab.evaluation.grid import Progress, unheard
from reefknot.lab.evaluation.perplexity import (
    Score,
    autocast,
    log_probs,
    one_stream,
    score,
    window_log_probs,
)
from reefknot.lab.evaluation.windows import Spans, Windows
from reefknot.lab.runs.scores import MonteCarlo, TextScore
from reefknot.lab.runs.units import perplexity
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel

_ROUNDING = 1e-3  # by which a loss in training mode may differ where nothing is dropped


@dataclass(frozen=True)
class MonteCarloScore(Score):
    """A score by the mean probability of several passes, and what each pass gives alone."""

    passes: tuple[float, ...] = field(default=(), kw_only=True)
    """Perplexity of each."""

    def summary(self) -> TextScore:
        return super().summary().replace(passes=self.passes, passes_deviation=self.deviation)

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
    window: int | Windows,
    seed: int = 0,
    precision: str = "float32",
    progress: Progress = unheard,
) -> MonteCarloScore:
    """Score a text by several passes with dropout.

    Arguments:
        window: tokens of one stream that share their masks; training's `steps`, for what the model was trained with.
            Or windows that are computed afresh, each with masks of its own.
        seed: of the masks. The generators of the process are afterwards where they were.
    """
    steps, windows = (window, None) if isinstance(window, int) else (None, window)
    if passes < 1 or (steps is not None and steps < 1):
        raise SettingsError(f"Monte-Carlo dropout: passes = {passes}, window = {window}: both must be at least 1")
    if not 0 <= seed < 2**63:
        raise SettingsError(f"Monte-Carlo dropout: seed = {seed}: must be at least 0 and less than 2**63")
    plain = score(model, split, vocabulary, window=steps, windows=windows, precision=precision)
    device = next(model.parameters()).device
    x_1T, y_1T = one_stream(split, vocabulary)
    cut = window if isinstance(window, int) else window.cut(y_1T[0], vocabulary.eos)
    alone: list[float] = []
    together_T = torch.full(plain.nll.shape, -math.inf, dtype=torch.float64, device=device)
    with _dropping(model, seed), autocast(device, precision):
        for number in range(passes):
            logp_T = _pass(model, x_1T, y_1T, cut)
            # Asking the device for the mean keeps the host from running a whole text ahead.
            alone.append(perplexity(-float(logp_T.mean())))
            if number == 0 and np.allclose(logp_T.cpu().numpy(), -plain.nll, rtol=_ROUNDING, atol=_ROUNDING):
                return _in_mode(plain, plain.nll, alone, steps, seed, drops=False)
            together_T = torch.logaddexp(together_T, logp_T)
            progress("passes with dropout", (number + 1) / passes)
    nll = (math.log(passes) - together_T).float().cpu().numpy()
    if not np.isfinite(nll).all():
        raise NonFiniteError(f"with dropout the model gives the {split.name} text a probability that is not a number")
    return _in_mode(plain, nll, alone, steps, seed)


def _pass(model: LanguageModel, x_1T: Tensor, y_1T: Tensor, cut: int | Spans) -> Tensor:
    """logp_T of one pass, in one stream by windows of so many tokens, or in windows computed afresh."""
    if isinstance(cut, Spans):
        return window_log_probs(model, x_1T[0], y_1T[0], cut).double()
    return torch.cat(list(log_probs(model, x_1T, y_1T, cut)), dim=1)[0].double()


def _in_mode(
    plain: Score, nll: NDArray[np.float32], alone: Sequence[float], window: int | None, seed: int, *, drops: bool = True
) -> MonteCarloScore:
    """The score by the mean of passes, from the plain one."""
    mode = MonteCarlo(
        kind="mc",
        passes=len(alone),
        window=window,
        seed=seed,
        drops=drops,
        lowest=min(alone),
        highest=max(alone),
        plain=perplexity(plain.mean),
    )
    return MonteCarloScore(**vars(plain) | {"nll": nll, "mode": mode}, passes=tuple(alone))


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
