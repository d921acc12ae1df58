"""The continuous cache (Grave, Joulin & Usunier 2017): words that followed similar hidden states become more likely.

    p(y_t) = (1 - weight) p_model(y_t) + weight sum_{i in the last W} softmax_i(theta h_i . h_t) [y_i = y_t]

h is the last output of the encoder before its dropout, and y_i is the word that followed h_i. W is the cache window,
the number of earlier positions that the cache stores. Nothing is learned. Only the probability of the target is
computed, in blocks along the diagonal, so that no row is as long as the vocabulary or the text. A search computes the
hidden states and log-probabilities of the model only once.

Shapes: T tokens of the text, N tokens computed at once, D hidden dimension, Q positions of a block, K stored positions
that a block reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.kernels.scores import at_least_float32
from reefknot.lab.config.settings import Count, NonNegative, Probability, Settings
from reefknot.lab.evaluation.contexts import contexts
from reefknot.lab.evaluation.grid import Grid, Point, Progress, extend_axis, ignore_progress, search
from reefknot.lab.evaluation.perplexity import Score, autocast, one_stream, score, scored_rows
from reefknot.lab.evaluation.windows import Windows
from reefknot.lab.runs.definition import perplexity
from reefknot.lab.runs.scores import Cache
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel, evaluating

SCORES_AT_ONCE = 2**23
"""Number of scores in a block. It bounds the memory and does not change the result."""

WEIGHTS = (0.05, 0.1, 0.15, 0.2, 0.3)
THETAS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
WINDOWS = (100, 500, 1000, 2000, 4000)
"""The grid of weights, thetas and cache windows that a search starts from. Merity et al. use 0.1, 1.0, 500 on Penn
Treebank and 0.1279, 0.662, 3785 on WikiText-2."""

Fill = Literal["partial", "full"]


class CacheSettings(Settings):
    """Settings of a continuous cache: its weight, its sharpness, and its window, the number of stored positions."""

    weight: Annotated[
        Probability, Field(description="Weight of the cache in the mixture with the model (lambda in the papers).")
    ] = 0.1
    theta: Annotated[
        NonNegative,
        Field(description="Sharpness of the cache distribution. With 0, all positions of the window count equally."),
    ] = 1.0
    window: Annotated[Count, Field(description="Number of past positions in the cache.")] = 500
    fill: Annotated[
        Fill,
        Field(
            description="When the cache is used: from the start (partial), or only after the window has filled up "
            "(full, as in AWD-LSTM)."
        ),
    ] = "partial"


class Reading(NamedTuple):
    """Outputs of a model on a text, from which the probabilities of a cache are computed."""

    states: Tensor
    """Hidden states h_TD."""
    targets: Tensor
    """Words y_T that follow the hidden states."""
    log_probs: Tensor
    """Log-probabilities logp_T that the model gives the targets."""


@torch.no_grad()
def read(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    *,
    windows: Windows | None = None,
    precision: str = "float32",
    progress: Progress = ignore_progress,
) -> Reading:
    """Run the model over a text, in one stream or in evaluation windows."""
    device = next(model.parameters()).device
    x_1T, y_1T = one_stream(split, vocabulary)
    spans = windows.spans(y_1T[0], vocabulary.eos) if windows else None
    y_T = y_1T[0].to(device)
    chunks: list[tuple[Tensor, Tensor, Tensor]] = []
    done = 0
    with evaluating(model), autocast(device, precision):
        for output_ND, raw_ND, position_N in contexts(model, x_1T[0], spans):
            logp_N = scored_rows(model, output_ND, y_T[position_N])
            chunks.append((at_least_float32(raw_ND), at_least_float32(logp_N), position_N))
            done += len(position_N)
            progress(f"reading the {split.name} text", done / len(y_T))
    states_TD, logp_T, position_T = map(torch.cat, zip(*chunks, strict=True))
    order_T = position_T.argsort()
    return Reading(states_TD[order_T], y_T, logp_T[order_T])


@torch.no_grad()
def cache_log_probs(h_TD: Tensor, y_T: Tensor, theta: float, window: int) -> Tensor:
    """Return the log-probability of every target under the cache alone, logp_T; -inf if the word is not stored.

    Args:
        h_TD: Hidden states.
        y_T: The word that follows each hidden state.
        theta: Sharpness of the cache.
        window: Cache window, the number of earlier positions that the cache stores.
    """
    tokens = len(y_T)
    rows = max(1, min(max(window, 64), SCORES_AT_ONCE // (2 * min(window, tokens))))
    position_T = torch.arange(tokens, device=y_T.device)
    blocks = []
    for start in range(0, tokens, rows):
        block = slice(start, start + rows)
        stored = slice(max(0, start - window), min(start + rows, tokens) - 1)
        age_QK = position_T[block, None] - position_T[stored]
        scores_QK = (theta * (h_TD[block] @ h_TD[stored].T)).masked_fill_((age_QK < 1) | (age_QK > window), -math.inf)
        normaliser_Q = scores_QK.logsumexp(dim=1)
        scores_QK.masked_fill_(y_T[block, None] != y_T[stored], -math.inf)
        blocks.append(scores_QK.logsumexp(dim=1) - normaliser_Q)
    logp_T = torch.cat(blocks)
    logp_T[0] = -math.inf  # nothing is stored yet
    return logp_T


def cache_score(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    settings: CacheSettings | None = None,
    *,
    windows: Windows | None = None,
    precision: str = "float32",
    progress: Progress = ignore_progress,
) -> Score:
    """Score a text with a model and a cache.

    `windows` are the evaluation windows of the model. The cache also stores hidden states of earlier windows.
    """
    settings = settings or CacheSettings()
    plain = score(model, split, vocabulary, windows=windows, precision=precision)
    reading = read(model, split, vocabulary, windows=windows, precision=precision, progress=progress)
    from_cache_T = cache_log_probs(reading.states, reading.targets, settings.theta, settings.window)
    nll_T = -_mix(reading.log_probs, from_cache_T, settings)
    if not bool(nll_T.isfinite().all()):
        raise NonFiniteError(f"the loss of the model with a cache on the {split.name} text is NaN or infinite")
    mode = Cache(kind="cache", **settings.model_dump(), plain=perplexity(plain.mean))
    return replace(plain, nll=nll_T.float().cpu().numpy(), mode=mode)


def search_cache(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    settings: CacheSettings | None = None,
    *,
    windows: Windows | None = None,
    precision: str = "float32",
    progress: Progress = ignore_progress,
) -> tuple[CacheSettings, Grid]:
    """Search for the settings of a cache on a validation text, over a grid and beyond its edges.

    Settings that are given explicitly are not searched. Returns the best settings, and the losses of all points.
    """
    settings = settings or CacheSettings()
    fixed = settings.model_fields_set
    candidates = [settings.window] if "window" in fixed else list(WINDOWS)
    comparable = _comparable_windows(candidates, settings.fill, split)
    axes: dict[str, Sequence[float]] = {
        "window": comparable.windows,
        "theta": [settings.theta] if "theta" in fixed else THETAS,
        "weight": [settings.weight] if "weight" in fixed else WEIGHTS,
    }
    reading = read(model, split, vocabulary, windows=windows, precision=precision, progress=progress)

    @lru_cache(maxsize=1)  # the weight varies fastest, and does not change the probabilities of the cache
    def from_cache(theta: float, window: int) -> Tensor:
        return cache_log_probs(reading.states, reading.targets, theta, window)

    def settings_at(point: Point) -> CacheSettings:
        return settings.model_copy(update={**point, "window": int(point["window"])})

    def measure(point: Point, progress: Progress) -> float:
        tried = settings_at(point)
        mixed_T = _mix(reading.log_probs, from_cache(tried.theta, tried.window), tried)
        return -float(mixed_T[comparable.first :].double().mean())

    grid = search(axes, measure, split, progress, {"window": (0, comparable.below), "weight": (0, 1)})
    if comparable.first:
        grid = replace(grid, text=f"{grid.text}, all but the first {comparable.first:,} scored")
    return settings_at(grid.best), replace(grid, note=comparable.note)


class _ComparableWindows(NamedTuple):
    """Cache windows that can be compared fairly with each other."""

    windows: Sequence[int]
    below: int
    """Exclusive upper bound on the cache windows that a search may try."""
    first: int = 0
    """Position of the first token whose loss is compared."""
    note: str = ""
    """Which cache windows were left out, and why."""


def _comparable_windows(windows: Sequence[int], fill: Fill, split: Split) -> _ComparableWindows:
    """Select the cache windows that can be compared on a text.

    With fill = "full", a cache is not used before it is full, so a cache with a longer window is used for fewer tokens.
    For a fair comparison, all windows are compared on the tokens after the longest window that may be tried. Windows
    of half of the text or more are left out. With fill = "partial", all windows that hold the whole text are
    equivalent.
    """
    text = f"{split.tokens:,} tokens of the {split.name} text"
    below, reason = split.tokens, f"they hold all {text}"
    if fill == "full":
        below, reason = split.tokens // 2, f"--cache-fill full would use them for less than half of the {text}"
    short = [window for window in windows if window < below]
    if not short and fill == "full":
        raise SettingsError(
            f"--cache-fill full would use a window of {min(windows):,} for less than half of the {text}; "
            "use a smaller --cache-window, more --search-tokens, or --cache-fill partial"
        )
    short = short or [min(windows)]
    first = int(max([*short, *extend_axis(short, max(short), (0, below))])) + 1 if fill == "full" else 0
    long = ", ".join(f"{window:,}" for window in windows if window not in short)
    return _ComparableWindows(short, below, first, f"windows left out ({long}): {reason}" if long else "")


def _mix(logp_T: Tensor, from_cache_T: Tensor, settings: CacheSettings) -> Tensor:
    """Mix the probabilities of model and cache. Tokens before the cache is in use get those of the model alone."""
    if settings.weight == 0.0:
        return logp_T
    unused = 0 if settings.fill == "partial" else settings.window
    used_T = torch.arange(len(logp_T), device=logp_T.device) > unused
    mixed_T = torch.logaddexp(math.log1p(-settings.weight) + logp_T, math.log(settings.weight) + from_cache_T)
    return torch.where(used_T, mixed_T, logp_T)
