"""Monte-Carlo dropout (Gal & Ghahramani 2016): average the probabilities of many passes with dropout.

Start with `monte_carlo_score`:

    score = monte_carlo_score(model, split, vocabulary, passes=100, window=35)

Each pass reads the text once, in windows as in training. A window is the part of the text that shares dropout masks.
Either the state is carried from window to window, or every window is computed independently. The probability of each
token, not its logarithm, is averaged over the passes.

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
from reefknot.lab.evaluation.perplexity import (
    Score,
    autocast,
    build_stream,
    score,
    stream_log_probs,
    window_log_probs,
)
from reefknot.lab.evaluation.windows import Spans, Windows
from reefknot.lab.runs.definition import perplexity
from reefknot.lab.runs.scores import MonteCarlo, TextScore
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel
from reefknot.storage.progress import ProgressCallback, ignore_progress

_ROUNDING_TOLERANCE = 1e-3  # a larger difference between losses in training and evaluation mode is not due to rounding


@dataclass(frozen=True)
class MonteCarloScore(Score):
    """Score of a text by the mean probability over several passes, with the perplexity of each pass."""

    passes: tuple[float, ...] = field(default=(), kw_only=True)
    """Perplexity of each pass."""

    def summary(self) -> TextScore:
        return super().summary().replace(passes=self.passes, passes_deviation=self.deviation)

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the perplexities of the passes; None for a single pass."""
        if len(self.passes) < 2:
            return None
        return float(np.std(self.passes, ddof=1))


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
    progress: ProgressCallback = ignore_progress,
) -> MonteCarloScore:
    """Score a text by the mean probability over several passes with dropout.

    For a model without dropout, all passes are the same, so only one pass is made.

    Args:
        model: The language model.
        split: The text.
        vocabulary: The vocabulary of the text.
        passes: Number of passes over the text.
        window: Number of tokens that share dropout masks, if the text is one stream; in training, it is `steps`.
            Alternatively, evaluation windows that are computed independently, each with its own masks.
        seed: Seed of the masks. The state of the global random generators is restored afterwards.
        precision: `float32`, or `bfloat16` or `float16` for autocast.
        progress: Callback for progress.
    """
    _check_arguments(passes, window, seed)
    device = next(model.parameters()).device
    inputs_1T, targets_1T = build_stream(split, vocabulary)

    # A number of tokens means windows of one stream; otherwise, windows are independent of each other.
    steps: int | None = None
    windows: Windows | None = None
    window_or_spans: int | Spans
    if isinstance(window, int):
        steps = window
        window_or_spans = window
    else:
        windows = window
        window_or_spans = window.spans(targets_1T[0], vocabulary.eos)
    plain_score = score(model, split, vocabulary, window=steps, windows=windows, precision=precision)

    # Add up the probabilities of the passes, as logarithms.
    perplexities: list[float] = []
    log_sum_T = torch.full(plain_score.nll.shape, -math.inf, dtype=torch.float64, device=device)
    with _dropout_enabled(model, seed), autocast(device, precision):
        for pass_index in range(passes):
            log_probs_T = _run_pass(model, inputs_1T, targets_1T, window_or_spans)
            # Reading the mean waits for the device, so that the host is never more than one pass ahead.
            perplexities.append(perplexity(-float(log_probs_T.mean())))
            if pass_index == 0 and _has_no_dropout(log_probs_T, plain_score):
                return _build_score(plain_score, plain_score.nll, perplexities, steps, seed, drops=False)
            log_sum_T = torch.logaddexp(log_sum_T, log_probs_T)
            progress("passes with dropout", (pass_index + 1) / passes)

    nll_T = (math.log(passes) - log_sum_T).float().cpu().numpy()
    if not np.isfinite(nll_T).all():
        raise NonFiniteError(f"the loss of Monte-Carlo dropout on the {split.name} text is NaN or infinite")
    return _build_score(plain_score, nll_T, perplexities, steps, seed)


def _check_arguments(passes: int, window: int | Windows, seed: int) -> None:
    if passes < 1 or (isinstance(window, int) and window < 1):
        raise SettingsError(f"Monte-Carlo dropout: passes = {passes}, window = {window}: both must be at least 1")
    if not 0 <= seed < 2**63:
        raise SettingsError(f"Monte-Carlo dropout: seed = {seed}: must be at least 0 and less than 2**63")


def _has_no_dropout(log_probs_T: Tensor, plain_score: Score) -> bool:
    """Return whether a pass gives the plain score, so that all other passes would give it, too."""
    plain_log_probs_T = -plain_score.nll
    tolerance = _ROUNDING_TOLERANCE
    return np.allclose(log_probs_T.cpu().numpy(), plain_log_probs_T, rtol=tolerance, atol=tolerance)


def _run_pass(model: LanguageModel, inputs_1T: Tensor, targets_1T: Tensor, window_or_spans: int | Spans) -> Tensor:
    """Return the log-probabilities of one pass, log_probs_T.

    The text is read as one stream, in windows of a number of tokens, or in evaluation windows (`Spans`).
    """
    if isinstance(window_or_spans, Spans):
        return window_log_probs(model, inputs_1T[0], targets_1T[0], window_or_spans).double()
    chunks = list(stream_log_probs(model, inputs_1T, targets_1T, window_or_spans))
    log_probs_1T = torch.cat(chunks, dim=1)
    return log_probs_1T[0].double()


def _build_score(
    plain_score: Score,
    nll_T: NDArray[np.float32],
    perplexities: Sequence[float],
    steps: int | None,
    seed: int,
    *,
    drops: bool = True,
) -> MonteCarloScore:
    """Return the plain score with the losses and the mode of Monte-Carlo dropout.

    `steps` is the number of tokens that share dropout masks, if the text is one stream. `drops` says whether the model
    has any dropout.
    """
    mode = MonteCarlo(
        kind="mc",
        passes=len(perplexities),
        window=steps,
        seed=seed,
        drops=drops,
        lowest=min(perplexities),
        highest=max(perplexities),
        plain=perplexity(plain_score.mean),
    )
    fields = vars(plain_score) | {"nll": nll_T, "mode": mode}
    return MonteCarloScore(**fields, passes=tuple(perplexities))


@contextmanager
def _dropout_enabled(model: LanguageModel, seed: int) -> Iterator[None]:
    """Turn dropout on and seed the random generators; restore the mode and the generators on exit."""
    device = next(model.parameters()).device
    # torch.manual_seed would seed the generators of all GPUs.
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    was_training = model.training
    try:
        for generator in generators:
            generator.manual_seed(seed)
        model.train()
        yield
    finally:
        model.train(was_training)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
