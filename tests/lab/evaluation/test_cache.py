"""The continuous cache equals a loop over all pairs for any block size, and helps where words recur."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.lab.config.settings import check_settings
from reefknot.lab.evaluation import cache as module
from reefknot.lab.evaluation.cache import (
    CacheSettings,
    Fill,
    cache_log_probs,
    cache_score,
    compute_outputs,
    search_cache,
)
from reefknot.lab.evaluation.perplexity import build_stream, score
from reefknot.lab.evaluation.windows import Sliding
from reefknot.lab.text.dataset import Dataset
from reefknot.nn.models.language_model import LanguageModel

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]

REPEATED = "dog dog dog mat mat saw saw saw saw\n" * 12
RARELY_REPEATED = "dog mat saw the cat\nsat on a dog mat\n" * 10


def random_states(tokens: int, dim: int = 4, words: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden_TD = torch.randn(tokens, dim, dtype=torch.float64, generator=generator)
    return hidden_TD, torch.randint(words, (tokens,), generator=generator)


def brute_force(hidden_TD: Tensor, targets_T: Tensor, theta: float, window: int) -> list[float]:
    """Return the probability of every target under the cache alone; 0 at the start."""
    probabilities = []
    for t in range(len(targets_T)):
        scores = {i: math.exp(theta * float(hidden_TD[i] @ hidden_TD[t])) for i in range(max(0, t - window), t)}
        total = sum(scores.values())
        probabilities.append(
            sum(s for i, s in scores.items() if targets_T[i] == targets_T[t]) / total if scores else 0.0
        )
    return probabilities


@pytest.mark.parametrize("window", [1, 3, 40, 200])
@pytest.mark.parametrize("theta", [0.0, 0.7])
@pytest.mark.parametrize("budget", [2**23, 1, 300])
def test_cache_log_probs_equal_brute_force(
    monkeypatch: pytest.MonkeyPatch, window: int, theta: float, budget: int
) -> None:
    monkeypatch.setattr(module, "SCORES_AT_ONCE", budget)
    hidden_TD, targets_T = random_states(90)
    log_probs = cache_log_probs(hidden_TD, targets_T, theta, window)
    torch.testing.assert_close(
        log_probs.exp(),
        torch.tensor(brute_force(hidden_TD, targets_T, theta, window), dtype=torch.float64),
        rtol=1e-12,
        atol=0,
    )


def test_first_token_has_an_empty_cache() -> None:
    hidden_TD, targets_T = random_states(1)
    assert cache_log_probs(hidden_TD, targets_T, 1.0, 5).tolist() == [-math.inf]


def test_large_scores_do_not_overflow() -> None:
    hidden_TD, targets_T = random_states(50)
    log_probs = cache_log_probs(1e3 * hidden_TD, targets_T, 1e3, 20)
    assert not log_probs.isnan().any()
    assert (log_probs <= 0).all()


@pytest.mark.parametrize("fill", ["partial", "full"])
@pytest.mark.parametrize("end_of_line", [True, False])
def test_score_mixes_model_and_cache_probabilities(
    opened: Open, model_for: Build, fill: Fill, end_of_line: bool
) -> None:
    dataset = opened(REPEATED, end_of_line=end_of_line)
    vocabulary, split = dataset.vocabulary, dataset.splits["test"]
    model = model_for(len(vocabulary)).double().train()
    settings = CacheSettings(weight=0.3, theta=0.4, window=20, fill=fill)
    cached = cache_score(model, split, vocabulary, settings)
    plain = score(model, split, vocabulary)
    outputs = compute_outputs(model, split, vocabulary)
    from_cache = np.array(brute_force(outputs.hidden, outputs.targets, 0.4, 20))
    expected = np.exp(outputs.log_probs.numpy())
    np.testing.assert_allclose(-outputs.log_probs.numpy(), plain.nll, rtol=1e-6)
    used = np.arange(len(expected)) > (0 if fill == "partial" else 20)
    expected[used] = 0.7 * expected[used] + 0.3 * from_cache[used]
    np.testing.assert_allclose(cached.nll, -np.log(expected), rtol=1e-6)
    assert (len(cached.nll), cached.words, cached.bytes) == (len(plain.nll), plain.words, plain.bytes)
    assert "independent of how the text is divided into windows" in cached.definition
    assert "weight 0.3, theta 0.4, over the last 20 positions, used " in cached.definition
    assert f"without it: perplexity {math.exp(plain.mean):,.2f}" in cached.definition
    assert ("only once the cache is full" in cached.definition) == (fill == "full")
    assert model.training


def test_cached_states_are_taken_before_the_last_dropout(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary)).eval()
    outputs = compute_outputs(model, dataset.splits["test"], dataset.vocabulary)
    ids = torch.from_numpy(dataset.splits["test"].ids.astype(np.int64))
    with torch.no_grad():
        raw_1TD = model(torch.cat([torch.tensor([dataset.vocabulary.eos]), ids[:-1]])[None]).raw
    torch.testing.assert_close(outputs.hidden, raw_1TD[0])
    assert outputs.targets.tolist() == ids.tolist()


def test_cache_improves_repeated_words(opened: Open, model_for: Build) -> None:
    dataset = opened(REPEATED)
    model = model_for(len(dataset.vocabulary))
    plain = score(model, dataset.splits["test"], dataset.vocabulary)
    cached = cache_score(model, dataset.splits["test"], dataset.vocabulary, CacheSettings(weight=0.3, window=40))
    assert cached.mean < plain.mean - 0.3


def test_weight_zero_equals_plain_scoring(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    cached = cache_score(model, dataset.splits["test"], dataset.vocabulary, CacheSettings(weight=0.0))
    np.testing.assert_array_equal(cached.nll, score(model, dataset.splits["test"], dataset.vocabulary).nll)


@pytest.mark.parametrize("fill", ["partial", "full"])
def test_search_finds_the_best_theta_and_weight(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch, fill: Fill
) -> None:
    dataset = opened(REPEATED)
    model = model_for(len(dataset.vocabulary))
    test, vocabulary = dataset.splits["test"], dataset.vocabulary
    computed: list[tuple[float, int]] = []

    def counted(hidden_TD: Tensor, targets_T: Tensor, theta: float, window: int) -> Tensor:
        computed.append((theta, window))
        return cache_log_probs(hidden_TD, targets_T, theta, window)

    monkeypatch.setattr(module, "cache_log_probs", counted)
    best, grid = search_cache(model, test, vocabulary, CacheSettings(window=30, fill=fill))
    assert len(computed) <= len(set(computed)) + 1, "weights need no new computation"
    assert set(computed) == {(point["theta"], point["window"]) for point, _ in grid.points}
    assert grid.axes["window"] == [30]
    assert set(grid.axes["theta"]) > set(module.THETAS)
    assert grid.axes["weight"] == [*module.WEIGHTS, 0.45, 0.675], "a weight is below 1"
    assert (best.window, best.fill) == (30, fill)
    assert {"window": 30, "theta": best.theta, "weight": best.weight} == grid.best
    losses = {tuple(point.values()): nll for point, nll in grid.points}
    scored = slice(0 if fill == "partial" else 31, None)
    for theta, weight in ((0.3, 0.2), (best.theta, best.weight)):
        settings = CacheSettings(weight=weight, theta=theta, window=30, fill=fill)
        nll = cache_score(model, test, vocabulary, settings).nll[scored]
        assert nll.mean() == pytest.approx(losses[30, theta, weight], abs=1e-6)
    assert min(losses.values()) == losses[30, best.theta, best.weight]


def test_search_over_windows_stays_below_the_text_length(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache used from the start is compared on the whole text."""
    dataset = opened(RARELY_REPEATED)
    test = dataset.splits["test"]
    model = model_for(len(dataset.vocabulary))
    vocabulary = dataset.vocabulary
    best, grid = search_cache(model, test, vocabulary)
    assert isinstance(best.window, int)
    assert all(isinstance(window, int) for window in grid.axes["window"])
    note = "windows left out (500, 1,000, 2,000, 4,000): they hold all 120 tokens of the test text"
    assert max(grid.axes["window"]) < 120
    assert (grid.text, grid.note) == ("the test text, 120 tokens", note)
    monkeypatch.setattr(module, "WINDOWS", (80, 100))
    best, grid = search_cache(model, test, vocabulary, CacheSettings(theta=0.3, weight=0.3))
    assert best.window == 100
    assert grid.axes["window"] == [80, 100], "125 is longer than the text"
    assert grid.edges == ["window"]


def test_full_windows_are_compared_on_the_same_tokens(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tokens after the longest window count, because a full cache starts late."""
    dataset = opened(RARELY_REPEATED)
    model = model_for(len(dataset.vocabulary))
    vocabulary = dataset.vocabulary
    test = dataset.splits["test"]
    monkeypatch.setattr(module, "WINDOWS", (4, 20, 50, 60, 4000))
    given = CacheSettings(theta=0.3, weight=0.3, fill="full")
    best, grid = search_cache(model, test, vocabulary, given)
    scores = {
        window: cache_score(model, test, vocabulary, given.model_copy(update={"window": window}))
        for window in (4, 20, 50)
    }
    assert min(scores, key=lambda window: scores[window].mean) == 20
    assert best.window == 50
    assert grid.axes["window"] == [4, 20, 50]
    for point, nll in grid.points:
        assert nll == pytest.approx(scores[int(point["window"])].nll[51:].mean(), abs=1e-6)
    assert grid.text == "the test text, 120 tokens, all but the first 51 scored"
    reason = "less than half of the 120 tokens of the test text"
    assert (
        grid.table().splitlines()[-1] == f"windows left out (60, 4,000): --cache-fill full would use them for {reason}"
    )
    assert grid.summary().record()["note"] == grid.note != ""


def test_search_reserves_tokens_for_longer_windows(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that extends to longer windows compares all of them on the tokens where the longest is full."""
    dataset = opened(RARELY_REPEATED)
    model = model_for(len(dataset.vocabulary))
    vocabulary = dataset.vocabulary
    test = dataset.splits["test"]
    monkeypatch.setattr(module, "WINDOWS", (3, 6))
    given = CacheSettings(theta=0.3, weight=0.3, fill="full")
    _, grid = search_cache(model, test, vocabulary, given)
    assert max(grid.axes["window"]) > 6
    assert grid.text == "the test text, 120 tokens, all but the first 49 scored"
    assert grid.note == ""
    for point, nll in grid.points:
        settings = given.model_copy(update={"window": point["window"]})
        assert nll == pytest.approx(cache_score(model, test, vocabulary, settings).nll[49:].mean(), abs=1e-6)


@pytest.mark.parametrize(("given", "window"), [({}, 100), ({"window": 60}, 60)])
def test_search_rejects_windows_that_are_all_too_long(
    opened: Open, model_for: Build, given: dict[str, int], window: int
) -> None:
    dataset = opened(REPEATED)
    model = model_for(len(dataset.vocabulary))
    vocabulary = dataset.vocabulary
    test = dataset.splits["test"]
    message = f"a window of {window} for less than half of the 120 tokens of the test text; use a smaller --cache-wi"
    with pytest.raises(SettingsError, match=message):
        search_cache(model, test, vocabulary, CacheSettings(fill="full", **given))
    best, _ = search_cache(model, test, vocabulary, CacheSettings(fill="full", window=59))
    assert best.window == 59, "this window leaves half of the text"


def test_nan_model_is_rejected(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    with torch.no_grad():
        next(model.encoder.parameters()).fill_(math.nan)
    with pytest.raises(NonFiniteError):
        cache_score(model, dataset.splits["test"], dataset.vocabulary)
    with pytest.raises(NonFiniteError, match="NaN or infinite at all 30 points"):
        search_cache(model, dataset.splits["test"], dataset.vocabulary)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": 1.0}, "weight: must be less than 1"),
        ({"theta": -0.1}, "theta: must be greater than or equal to 0"),
        ({"window": 0}, "window: must be greater than or equal to 1"),
        ({"fill": "empty"}, "fill: must be 'partial' or 'full'"),
    ],
)
def test_invalid_cache_settings_are_rejected(given: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_settings(CacheSettings, given, "here")


def test_one_cache_spans_all_windows(opened: Open, transformer_for: Build) -> None:
    """States come from their own windows, and the cache holds all of them in text order."""
    dataset = opened(REPEATED)
    vocabulary, split = dataset.vocabulary, dataset.splits["test"]
    model = transformer_for(len(vocabulary)).eval()
    windows = Sliding(5, 7)
    outputs = compute_outputs(model, split, vocabulary, windows=windows)
    inputs_1T, targets_1T = build_stream(split, vocabulary)
    spans = windows.spans(targets_1T[0], None)
    with torch.no_grad():
        states = [
            model(inputs_1T[:, start:stop]).raw[0, scored - start :] for start, scored, stop in zip(*spans, strict=True)
        ]
    torch.testing.assert_close(outputs.hidden, torch.cat(states))
    plain = score(model, split, vocabulary, windows=windows)
    np.testing.assert_allclose(-outputs.log_probs.numpy(), plain.nll, rtol=1e-6)
    cached = cache_score(model, split, vocabulary, CacheSettings(weight=0.3, theta=0.4, window=20), windows=windows)
    from_cache = np.array(brute_force(outputs.hidden, outputs.targets, 0.4, 20))
    expected = 0.7 * outputs.log_probs.exp().numpy() + 0.3 * from_cache
    np.testing.assert_allclose(cached.nll[1:], -np.log(expected[1:]), rtol=1e-5)
    assert "windows of 12 tokens, of which the last 7 are scored" in cached.definition
    assert "independent of how windows are computed together\ncontinuous cache: weight 0.3" in cached.definition
    _, grid = search_cache(model, split, vocabulary, CacheSettings(theta=0.4, window=20), windows=windows)
    assert grid.axes == {"window": [20], "theta": [0.4], "weight": [*module.WEIGHTS, 0.45, 0.675]}
    with pytest.raises(SettingsError, match="Transformer carries no state"):
        cache_score(model, split, vocabulary)
