"""The continuous cache (Grave, Joulin & Usunier 2017): words that followed states like this one are likely again.

    p(y_t) = (1 - weight) p_model(y_t) + weight sum_{i in the last W} softmax_i(theta h_i . h_t) [y_i = y_t]

h is the encoder's last output before its dropout, and y_i the word that followed h_i. Nothing is learned. Only the
target's probability is computed, in blocks along the diagonal: no row is as wide as the vocabulary, or as the text.
States and log-probabilities of the model are computed once, whatever is tried on them.

Shapes: T tokens of the text, N of them at once, D width of h, Q positions of a block, K those they look back on.
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
from reefknot.lab.evaluation.grid import Grid, Point, Progress, further, search, unheard
from reefknot.lab.evaluation.perplexity import Score, autocast, one_stream, score, scored_rows
from reefknot.lab.evaluation.windows import Windows
from reefknot.lab.runs.scores import Cache
from reefknot.lab.runs.units import perplexity
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel, evaluating

SCORES_AT_ONCE = 2**23
"""Scores of a block: bounds the memory, never the result."""

WEIGHTS = (0.05, 0.1, 0.15, 0.2, 0.3)
THETAS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
WINDOWS = (100, 500, 1000, 2000, 4000)
"""Where a search begins. Merity et al. have 0.1, 1.0, 500 on Penn Treebank and 0.1279, 0.662, 3785 on WikiText-2."""

Fill = Literal["partial", "full"]


class CacheSettings(Settings):
    """How much a cache says, how sharply, and how far it looks back."""

    weight: Annotated[Probability, Field(description="share of the cache in the probability (the papers' lambda)")] = (
        0.1
    )
    theta: Annotated[NonNegative, Field(description="sharpness; 0: all positions of the window count the same")] = 1.0
    window: Annotated[Count, Field(description="positions that it looks back on")] = 500
    fill: Annotated[
        Fill,
        Field(description="used from the start (partial), or only once the window is full (full, as AWD-LSTM's)"),
    ] = "partial"


class Reading(NamedTuple):
    """What a model makes of a text, all that a cache needs to know of it."""

    states: Tensor
    """h_TD."""
    targets: Tensor
    """y_T, the word that follows each."""
    log_probs: Tensor
    """logp_T of the targets, by the model."""


@torch.no_grad()
def read(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    *,
    windows: Windows | None = None,
    precision: str = "float32",
    progress: Progress = unheard,
) -> Reading:
    """Run the model over a text, in one stream or in windows."""
    device = next(model.parameters()).device
    x_1T, y_1T = one_stream(split, vocabulary)
    spans = windows.cut(y_1T[0], vocabulary.eos) if windows else None
    y_T = y_1T[0].to(device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    done = 0
    with evaluating(model), autocast(device, precision):
        for output_ND, raw_ND, place_N in contexts(model, x_1T[0], spans):
            logp_N = scored_rows(model, output_ND, y_T[place_N])
            found.append((at_least_float32(raw_ND), at_least_float32(logp_N), place_N))
            done += len(place_N)
            progress(f"reading the {split.name} text", done / len(y_T))
    states_TD, logp_T, place_T = map(torch.cat, zip(*found, strict=True))
    order_T = place_T.argsort()
    return Reading(states_TD[order_T], y_T, logp_T[order_T])


@torch.no_grad()
def cache_log_probs(h_TD: Tensor, y_T: Tensor, theta: float, window: int) -> Tensor:
    """Log-probability of every target by the cache alone, logp_T; -inf where it is not among the words stored."""
    tokens = len(y_T)
    rows = max(1, min(max(window, 64), SCORES_AT_ONCE // (2 * min(window, tokens))))
    place_T = torch.arange(tokens, device=y_T.device)
    pieces = []
    for start in range(0, tokens, rows):
        here = slice(start, start + rows)
        stored = slice(max(0, start - window), min(start + rows, tokens) - 1)
        age_QK = place_T[here, None] - place_T[stored]
        scores_QK = (theta * (h_TD[here] @ h_TD[stored].T)).masked_fill_((age_QK < 1) | (age_QK > window), -math.inf)
        all_Q = scores_QK.logsumexp(dim=1)
        scores_QK.masked_fill_(y_T[here, None] != y_T[stored], -math.inf)
        pieces.append(scores_QK.logsumexp(dim=1) - all_Q)
    logp_T = torch.cat(pieces)
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
    progress: Progress = unheard,
) -> Score:
    """Score a text with a model and a cache, which keeps the states of all windows."""
    settings = settings or CacheSettings()
    plain = score(model, split, vocabulary, windows=windows, precision=precision)
    reading = read(model, split, vocabulary, windows=windows, precision=precision, progress=progress)
    from_cache_T = cache_log_probs(reading.states, reading.targets, settings.theta, settings.window)
    nll_T = -_mix(reading.log_probs, from_cache_T, settings)
    if not bool(nll_T.isfinite().all()):
        raise NonFiniteError(f"the model and its cache give the {split.name} text a probability that is not a number")
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
    progress: Progress = unheard,
) -> tuple[CacheSettings, Grid]:
    """Try a grid on a validation text, and beyond it. What the settings were given stays as it is."""
    settings = settings or CacheSettings()
    fixed = settings.model_fields_set
    given = [settings.window] if "window" in fixed else list(WINDOWS)
    tried = _windows(given, settings.fill, split)
    axes: dict[str, Sequence[float]] = {
        "window": tried.windows,
        "theta": [settings.theta] if "theta" in fixed else THETAS,
        "weight": [settings.weight] if "weight" in fixed else WEIGHTS,
    }
    reading = read(model, split, vocabulary, windows=windows, precision=precision, progress=progress)

    @lru_cache(maxsize=1)  # weights run fastest, and what the cache says does not depend on them
    def from_cache(theta: float, window: int) -> Tensor:
        return cache_log_probs(reading.states, reading.targets, theta, window)

    def at(point: Point) -> CacheSettings:
        return settings.model_copy(update={**point, "window": int(point["window"])})

    def measure(point: Point, progress: Progress) -> float:
        here = at(point)
        mixed_T = _mix(reading.log_probs, from_cache(here.theta, here.window), here)
        return -float(mixed_T[tried.first :].double().mean())

    grid = search(axes, measure, split, progress, {"window": (0, tried.below), "weight": (0, 1)})
    if tried.first:
        grid = replace(grid, text=f"{grid.text}, all but the first {tried.first:,} scored")
    return at(grid.best), replace(grid, note=tried.note)


class _Windows(NamedTuple):
    """Windows that can be compared with each other."""

    windows: Sequence[int]
    below: int
    """How long one may not be, however far the search goes on."""
    first: int = 0
    """The position from which on they are compared."""
    note: str = ""
    """Which were left out, and why."""


def _windows(windows: Sequence[int], fill: Fill, split: Split) -> _Windows:
    """A cache that is used only once it is full is used for fewer tokens the longer its window is. So that none looks
    worse for that, all are compared on the tokens after the longest that may be tried, and those that would not leave
    half of the text for it are left out. Else those that hold the whole text are all the same."""
    text = f"{split.tokens:,} tokens of the {split.name} text"
    below, why = split.tokens, f"they hold all {text}"
    if fill == "full":
        below, why = split.tokens // 2, f"--fill full would use them for less than half of the {text}"
    short = [window for window in windows if window < below]
    if not short and fill == "full":
        raise SettingsError(
            f"--fill full would use a window of {min(windows):,} for less than half of the {text}; "
            "use a smaller --window, more --search-tokens, or --fill partial"
        )
    short = short or [min(windows)]
    first = int(max([*short, *further(short, max(short), (0, below))])) + 1 if fill == "full" else 0
    long = ", ".join(f"{window:,}" for window in windows if window not in short)
    return _Windows(short, below, first, f"windows left out ({long}): {why}" if long else "")


def _mix(logp_T: Tensor, from_cache_T: Tensor, settings: CacheSettings) -> Tensor:
    """Both shares added up; the model alone where there is no cache yet, or where it has no share."""
    if settings.weight == 0.0:
        return logp_T
    least = 0 if settings.fill == "partial" else settings.window
    used_T = torch.arange(len(logp_T), device=logp_T.device) > least
    mixed_T = torch.logaddexp(math.log1p(-settings.weight) + logp_T, math.log(settings.weight) + from_cache_T)
    return torch.where(used_T, mixed_T, logp_T)
