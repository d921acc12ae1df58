"""The continuous cache (Grave, Joulin & Usunier 2017): words that followed similar hidden states become more likely.

`cache_score` scores a text with a model and a cache, and `search_cache` searches for the settings of the cache on a
validation text:

    settings, grid = search_cache(model, valid_split, vocabulary)
    score = cache_score(model, test_split, vocabulary, settings)

Nothing is learned. The cache stores the last W hidden states h_i and the words y_i that followed them, and its
probabilities are mixed with the probabilities of the model:

    p(y_t) = (1 - weight) p_model(y_t) + weight sum_{i in the last W} softmax_i(theta h_i . h_t) [y_i = y_t]

h is the last output of the encoder before its dropout. W is the cache window, the number of earlier positions that the
cache stores. An evaluation window (`windows.py`) is something else: the part of a text that the model reads at once.

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
from reefknot.lab.evaluation.contexts import iterate_contexts
from reefknot.lab.evaluation.grid import Grid, Point, extend_axis, grid_search
from reefknot.lab.evaluation.perplexity import Score, autocast, build_stream, chunked_log_probs, score
from reefknot.lab.evaluation.windows import Windows
from reefknot.lab.runs.definition import perplexity
from reefknot.lab.runs.scores import Cache
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel, evaluating
from reefknot.storage.progress import ProgressCallback, ignore_progress

SCORES_AT_ONCE = 2**23
"""Number of scores in a block. It bounds the memory and does not change the result."""

WEIGHTS = (0.05, 0.1, 0.15, 0.2, 0.3)
THETAS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
WINDOWS = (100, 500, 1000, 2000, 4000)
"""The grid of weights, thetas and cache windows that a search starts from. Merity et al. use 0.1, 1.0, 500 on Penn
Treebank and 0.1279, 0.662, 3785 on WikiText-2."""

Fill = Literal["partial", "full"]
"""When the cache is used: from the start of the text, or only after its window has filled up."""


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


def cache_score(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    settings: CacheSettings | None = None,
    *,
    windows: Windows | None = None,
    precision: str = "float32",
    progress: ProgressCallback = ignore_progress,
) -> Score:
    """Score a text with a model and a cache.

    `windows` are the evaluation windows of the model. The cache also stores hidden states of earlier windows.
    """
    settings = settings or CacheSettings()
    plain = score(model, split, vocabulary, windows=windows, precision=precision)
    outputs = compute_outputs(model, split, vocabulary, windows=windows, precision=precision, progress=progress)
    cache_logp_T = cache_log_probs(outputs.hidden, outputs.targets, settings.theta, settings.window)
    nll_T = -_mix_log_probs(outputs.log_probs, cache_logp_T, settings)
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
    progress: ProgressCallback = ignore_progress,
) -> tuple[CacheSettings, Grid]:
    """Search for the settings of a cache on a validation text, over a grid and beyond its edges.

    Settings that are given explicitly are not searched. Returns the best settings, and the losses of all points. The
    model reads the text only once.
    """
    settings = settings or CacheSettings()
    comparable, axes = _search_axes(settings, split)
    outputs = compute_outputs(model, split, vocabulary, windows=windows, precision=precision, progress=progress)

    @lru_cache(maxsize=1)  # the weight varies fastest, and does not change the probabilities of the cache
    def compute_cache_logp(theta: float, window: int) -> Tensor:
        return cache_log_probs(outputs.hidden, outputs.targets, theta, window)

    def settings_at(point: Point) -> CacheSettings:
        return settings.model_copy(update={**point, "window": int(point["window"])})

    def measure(point: Point, progress: ProgressCallback) -> float:
        point_settings = settings_at(point)
        cache_logp_T = compute_cache_logp(point_settings.theta, point_settings.window)
        mixed_T = _mix_log_probs(outputs.log_probs, cache_logp_T, point_settings)
        return -float(mixed_T[comparable.first_token :].double().mean())

    bounds = {"window": (0, comparable.limit), "weight": (0, 1)}
    grid = grid_search(axes, measure, split, progress, bounds)
    if comparable.first_token:
        grid = replace(grid, text=f"{grid.text}, all but the first {comparable.first_token:,} scored")
    grid = replace(grid, note=comparable.note)
    return settings_at(grid.best), grid


def _search_axes(settings: CacheSettings, split: Split) -> tuple[_ComparableWindows, dict[str, Sequence[float]]]:
    """Return the cache windows to compare, and the values to try for each setting.

    A setting that is given explicitly has a single value.
    """
    given_names = settings.model_fields_set
    windows: Sequence[int] = WINDOWS
    thetas: Sequence[float] = THETAS
    weights: Sequence[float] = WEIGHTS
    if "window" in given_names:
        windows = [settings.window]
    if "theta" in given_names:
        thetas = [settings.theta]
    if "weight" in given_names:
        weights = [settings.weight]
    comparable = _comparable_windows(windows, settings.fill, split)
    return comparable, {"window": comparable.windows, "theta": thetas, "weight": weights}


class ModelOutputs(NamedTuple):
    """Outputs of a model on a text, from which the probabilities of a cache are computed."""

    hidden: Tensor
    """Hidden state before each token, hidden_TD."""
    targets: Tensor
    """The word that follows each hidden state, targets_T."""
    log_probs: Tensor
    """Log-probability of each target under the model, log_probs_T."""


@torch.no_grad()
def compute_outputs(
    model: LanguageModel,
    split: Split,
    vocabulary: Vocabulary,
    *,
    windows: Windows | None = None,
    precision: str = "float32",
    progress: ProgressCallback = ignore_progress,
) -> ModelOutputs:
    """Run the model over a text, in one stream or in evaluation windows."""
    device = next(model.parameters()).device
    inputs_1T, targets_1T = build_stream(split, vocabulary)
    spans = windows.spans(targets_1T[0], vocabulary.eos) if windows else None
    targets_T = targets_1T[0].to(device)

    # Run the model, chunk by chunk.
    hidden_chunks: list[Tensor] = []
    log_prob_chunks: list[Tensor] = []
    position_chunks: list[Tensor] = []
    done_tokens = 0
    with evaluating(model), autocast(device, precision):
        for output_ND, raw_ND, positions_N in iterate_contexts(model, inputs_1T[0], spans):
            log_probs_N = chunked_log_probs(model, output_ND, targets_T[positions_N])
            hidden_chunks.append(at_least_float32(raw_ND))
            log_prob_chunks.append(at_least_float32(log_probs_N))
            position_chunks.append(positions_N)
            done_tokens += len(positions_N)
            progress(f"reading the {split.name} text", done_tokens / len(targets_T))

    # Evaluation windows come in any order, so restore the order of the text.
    order_T = torch.cat(position_chunks).argsort()
    hidden_TD = torch.cat(hidden_chunks)[order_T]
    log_probs_T = torch.cat(log_prob_chunks)[order_T]
    return ModelOutputs(hidden_TD, targets_T, log_probs_T)


@torch.no_grad()
def cache_log_probs(hidden_TD: Tensor, targets_T: Tensor, theta: float, window: int) -> Tensor:
    """Return the log-probability of every target under the cache alone, log_probs_T; -inf if the word is not stored.

    The softmax over stored positions is computed in blocks of Q positions, each against the K positions that they can
    see, so that no matrix is as wide as the vocabulary or the text. For example, with window = 2 and blocks of 3
    positions, the second block (positions 3, 4, 5) reads the stored positions 1 to 4, and position 5 sees only 3 and 4
    of them. The probability of the target is the share of the softmax that falls on positions with the same word. Its
    logarithm is a difference of two logsumexp.

    Args:
        hidden_TD: Hidden states.
        targets_T: The word that follows each hidden state.
        theta: Sharpness of the cache.
        window: Cache window, the number of earlier positions that the cache stores.
    """
    num_tokens = len(targets_T)
    largest_block = SCORES_AT_ONCE // (2 * min(window, num_tokens))
    block_size = max(1, min(max(window, 64), largest_block))
    positions_T = torch.arange(num_tokens, device=targets_T.device)

    log_prob_blocks = []
    for start in range(0, num_tokens, block_size):
        block = slice(start, start + block_size)
        stored = slice(max(0, start - window), min(start + block_size, num_tokens) - 1)

        # The softmax over the stored positions that each position of the block can see.
        age_QK = positions_T[block, None] - positions_T[stored]
        is_outside_QK = (age_QK < 1) | (age_QK > window)
        scores_QK = theta * (hidden_TD[block] @ hidden_TD[stored].T)
        scores_QK.masked_fill_(is_outside_QK, -math.inf)
        log_normaliser_Q = scores_QK.logsumexp(dim=1)

        # The share of the softmax on positions with the same word.
        is_other_word_QK = targets_T[block, None] != targets_T[stored]
        scores_QK.masked_fill_(is_other_word_QK, -math.inf)
        log_prob_blocks.append(scores_QK.logsumexp(dim=1) - log_normaliser_Q)

    log_probs_T = torch.cat(log_prob_blocks)
    log_probs_T[0] = -math.inf  # nothing is stored yet
    return log_probs_T


class _ComparableWindows(NamedTuple):
    """Cache windows that can be compared fairly with each other."""

    windows: Sequence[int]
    limit: int
    """Exclusive upper bound on the cache windows that a search may try."""
    first_token: int
    """Position of the first token whose loss is compared."""
    note: str
    """Which cache windows were left out, and why."""


def _comparable_windows(windows: Sequence[int], fill: Fill, split: Split) -> _ComparableWindows:
    """Select the cache windows that can be compared on a text.

    With fill = "full", a cache is not used before it is full, so a cache with a longer window is used for fewer tokens.
    For a fair comparison, all windows are compared on the tokens after the longest window that may be tried. Windows
    of half of the text or more are left out. With fill = "partial", all windows that hold the whole text are
    equivalent.
    """
    text_size = f"{split.tokens:,} tokens of the {split.name} text"
    if fill == "full":
        limit = split.tokens // 2
        reason = f"--cache-fill full would use them for less than half of the {text_size}"
    else:
        limit = split.tokens
        reason = f"they hold all {text_size}"

    comparable = [window for window in windows if window < limit]
    if not comparable:
        smallest = min(windows)
        if fill == "full":
            raise SettingsError(
                f"--cache-fill full would use a window of {smallest:,} for less than half of the {text_size}; "
                "use a smaller --cache-window, more --search-tokens, or --cache-fill partial"
            )
        comparable = [smallest]

    first_token = 0
    if fill == "full":
        extended = extend_axis(comparable, max(comparable), (0, limit))
        first_token = int(max([*comparable, *extended])) + 1

    note = ""
    left_out = ", ".join(f"{window:,}" for window in windows if window not in comparable)
    if left_out:
        note = f"windows left out ({left_out}): {reason}"
    return _ComparableWindows(comparable, limit, first_token, note)


def _mix_log_probs(log_probs_T: Tensor, cache_logp_T: Tensor, settings: CacheSettings) -> Tensor:
    """Return the log-probability of every target under the mixture of model and cache.

    Before the cache is in use, only the model counts.
    """
    if settings.weight == 0.0:
        return log_probs_T
    weighted_model_T = math.log1p(-settings.weight) + log_probs_T
    weighted_cache_T = math.log(settings.weight) + cache_logp_T
    mixed_T = torch.logaddexp(weighted_model_T, weighted_cache_T)

    last_unused = 0
    if settings.fill == "full":
        last_unused = settings.window
    is_cache_used_T = torch.arange(len(log_probs_T), device=log_probs_T.device) > last_unused
    return torch.where(is_cache_used_T, mixed_T, log_probs_T)
