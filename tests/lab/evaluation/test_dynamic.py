"""Dynamic evaluation equals the published equations, adapts to repetition, and restores the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from contract.combinations import WORDS, Case
from reefknot.errors import DataError, NonFiniteError, SettingsError
from reefknot.lab.config.parts import ENCODERS, INPUTS, OUTPUTS
from reefknot.lab.config.settings import check_settings
from reefknot.lab.evaluation import dynamic
from reefknot.lab.evaluation.dynamic import (
    DEFAULTS,
    DynamicSettings,
    GradientStatistics,
    Rates,
    adapting,
    dynamic_score,
    gradient_statistics,
    search_rates,
)
from reefknot.lab.evaluation.perplexity import score
from reefknot.lab.text.dataset import Dataset, Split
from reefknot.nn.models.language_model import LanguageModel

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]

REPEATED = "a dog saw a mat and a mat saw a dog\n" * 25
BOLD = DynamicSettings(eta=0.02, decay=0.001, epsilon=0.01)


def ids_split(tokens: int, seed: int = 0) -> Split:
    ids = np.random.default_rng(seed).integers(0, len(WORDS), tokens).astype(np.int32)
    return Split("made", ids, words=tokens, lines=1, bytes=tokens, unknown=0)


def weights(model: LanguageModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def weights_equal(model: LanguageModel, before: list[Tensor]) -> bool:
    return all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def segment_loss(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor, state: object) -> tuple[Tensor, object]:
    """Return the losses from all log-probabilities, and the detached state."""
    encoded = model(inputs_BT, state)
    log_probs_NV = model.output.log_probs(encoded.output.flatten(0, 1))
    nll_N = -log_probs_NV.gather(1, targets_BT.reshape(-1, 1)).squeeze(1)
    return nll_N, {name: tensor.detach() for name, tensor in encoded.state.items()}


def published_losses(
    model: LanguageModel,
    train: Tensor,
    text: Tensor,
    rates: tuple[float, float, float],
    scale: Literal["mean", "sum"],
    segment: int = 5,
) -> list[float]:
    """Apply the published equations to a model, which they change. `text` begins with <eos>."""
    eta, decay, epsilon = rates
    model.eval()
    parameters = list(model.parameters())
    squares = [torch.zeros_like(parameter) for parameter in parameters]
    streams = train[: len(train) // 100 * 100].view(100, -1)
    state, batches = None, 0
    for start in range(0, streams.shape[1] - 1, 5):
        stop = min(start + 5, streams.shape[1] - 1)
        model.zero_grad()
        nll, state = segment_loss(model, streams[:, start:stop], streams[:, start + 1 : stop + 1], state)
        nll.mean().backward()
        for square, parameter in zip(squares, parameters, strict=True):
            square += parameter.grad.square()
        batches += 1
    if scale == "mean":
        ms = [(square / batches).sqrt() for square in squares]
        total = sum(float(spread.mean()) for spread in ms) / len(ms)
    else:
        ms = [square.sqrt() for square in squares]
        total = sum(float(spread.mean()) for spread in ms)
    trained = weights(model)
    losses: list[float] = []
    state = None
    for start in range(0, len(text) - 1, segment):
        stop = min(start + segment, len(text) - 1)
        model.zero_grad()
        nll, state = segment_loss(model, text[None, start:stop], text[None, start + 1 : stop + 1], state)
        losses += nll.tolist()
        nll.mean().backward()
        with torch.no_grad():
            for parameter, then, spread in zip(parameters, trained, ms, strict=True):
                rate = (spread / total).clamp(max=1 / decay)
                parameter += decay * rate * (then - parameter) - eta * parameter.grad / (spread + epsilon)
    return losses


@pytest.mark.parametrize(("scale", "rates"), [("mean", (0.01, 0.3, 0.003)), ("sum", (0.02, 3.0, 0.005))])
def test_score_equals_the_published_equations(
    opened: Open, model_for: Build, scale: Literal["mean", "sum"], rates: tuple[float, float, float]
) -> None:
    dataset = opened(REPEATED)
    model = model_for(len(dataset.vocabulary)).double()
    eta, decay, epsilon = rates
    settings = DynamicSettings(scale=scale, eta=eta, decay=decay, epsilon=epsilon, segment=7)
    statistics = gradient_statistics(model, dataset.splits["train"])
    # The decay must reach its bound for some weights and not for others.
    at_mean = settings.rates().on_scale("mean", batches=statistics.batches, tensors=len(statistics.ms))
    pulls = torch.cat([at_mean.decay * rate.flatten() for rate in statistics.pull_rates()])
    assert (pulls > 1).any()
    assert (pulls < 1).any()
    adapted = dynamic_score(model, dataset.splits["test"], dataset.vocabulary, statistics, settings)
    train, test = (torch.from_numpy(dataset.splits[name].ids.astype(np.int64)) for name in ("train", "test"))
    text = torch.cat([torch.tensor([dataset.vocabulary.eos]), test])
    expected = published_losses(model, train, text, rates, scale, segment=7)
    np.testing.assert_allclose(adapted.nll, np.float32(expected), rtol=1e-6)
    plain = score(model_for(len(dataset.vocabulary)), dataset.splits["test"], dataset.vocabulary)
    assert np.abs(adapted.nll - plain.nll).max() > 0.1, "the model did not adapt, so nothing was compared"


def test_rates_convert_between_scales() -> None:
    older = Rates(eta=0.002, decay=0.02, epsilon=0.001, scale="sum")
    newer = older.on_scale("mean", batches=1600, tensors=10)
    assert newer.scale == "mean"
    assert (newer.eta, newer.decay, newer.epsilon) == pytest.approx((5e-5, 2e-3, 2.5e-5))
    back = newer.on_scale("sum", batches=1600, tensors=10)
    assert (back.eta, back.decay, back.epsilon) == pytest.approx((older.eta, older.decay, older.epsilon))
    assert older.on_scale("sum", batches=3, tensors=3) is older


def test_converted_rates_give_the_same_losses(opened: Open, model_for: Build) -> None:
    dataset = opened(REPEATED)
    model = model_for(len(dataset.vocabulary)).double()
    statistics = gradient_statistics(model, dataset.splits["train"])
    older = Rates(eta=0.02, decay=3.0, epsilon=0.005, scale="sum")
    newer = older.on_scale("mean", batches=statistics.batches, tensors=len(statistics.ms))
    losses = []
    for rates in (older, newer):
        settings = DynamicSettings(scale=rates.scale, eta=rates.eta, decay=rates.decay, epsilon=rates.epsilon)
        losses.append(dynamic_score(model, dataset.splits["test"], dataset.vocabulary, statistics, settings).nll)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_repeated_text_is_learned_and_weights_are_restored(opened: Open, model_for: Build) -> None:
    dataset = opened(REPEATED)
    model = model_for(len(dataset.vocabulary))
    model.train()
    before = weights(model)
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    plain = score(model, split, vocabulary)
    statistics = gradient_statistics(model, dataset.splits["train"])
    adapted = dynamic_score(model, split, vocabulary, statistics, BOLD)
    assert adapted.mean < plain.mean - 0.3
    # The first segment is scored before the first update.
    np.testing.assert_allclose(adapted.nll[:5], plain.nll[:5], atol=1e-6)
    assert not np.allclose(adapted.nll[5:10], plain.nll[5:10], atol=1e-4)
    assert (len(adapted.nll), adapted.words, adapted.bytes) == (len(plain.nll), plain.words, plain.bytes)
    assert "segments of 5 tokens are scored, then trained on" in adapted.definition
    assert "independent" not in adapted.definition
    assert "eta 0.02, lambda 0.001, epsilon 0.01 on the scale 'mean'" in adapted.definition
    assert f"without it: perplexity {math.exp(plain.mean):,.2f}" in adapted.definition
    assert weights_equal(model, before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    again = dynamic_score(model, split, vocabulary, statistics, BOLD)
    np.testing.assert_array_equal(again.nll, adapted.nll)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_weights_are_restored_after_an_exception(opened: Open, model_for: Build, error: type[BaseException]) -> None:
    dataset = opened(REPEATED)
    model = model_for(len(dataset.vocabulary))
    before = weights(model)
    statistics = gradient_statistics(model, dataset.splits["train"])

    def interrupt(what: str, done: float) -> None:
        if done > 0:
            assert not weights_equal(model, before)
            raise error

    with pytest.raises(error):
        dynamic_score(model, dataset.splits["test"], dataset.vocabulary, statistics, BOLD, progress=interrupt)
    assert weights_equal(model, before)
    assert model.training


def carries_state(encoder: str) -> bool:
    return bool(ENCODERS.load(encoder).carries_state)


def all_parts() -> list[Case]:
    """Return one case per encoder, output and input that can be evaluated dynamically."""
    encoders = [Case("lookup", encoder, "softmax", "plain", True) for encoder in ENCODERS if carries_state(encoder)]
    outputs = [Case("lookup", "lstm", output, "drill", True) for output in OUTPUTS if output != "adaptive"]
    inputs = [Case(source, "lstm", "softmax", "plain", False) for source in INPUTS]
    bands = [
        Case("adaptive", "lstm", "adaptive", "plain", True),
        Case("lookup", "lstm", "adaptive", "projected", False),
    ]
    return list(dict.fromkeys(encoders + outputs + inputs + bands))


@pytest.mark.parametrize("case", all_parts(), ids=lambda case: case.name)
def test_every_part_adapts_and_is_restored(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout is off, so two passes agree; class vectors follow the weights; the result equals the equations."""
    model = case.build().double().train()
    before = weights(model)
    split = ids_split(220)
    statistics = gradient_statistics(model, split)
    settings = DynamicSettings(eta=0.02, epsilon=0.001, segment=4)
    text = ids_split(9, seed=1)
    adapted, again = (dynamic_score(model, text, WORDS, statistics, settings) for _ in range(2))
    np.testing.assert_array_equal(adapted.nll, again.nll)
    assert weights_equal(model, before)
    ids = torch.from_numpy(text.ids.astype(np.int64))
    stream = torch.cat([torch.tensor([WORDS.eos]), ids])
    rates = settings.rates()
    expected = published_losses(
        model, torch.from_numpy(split.ids.astype(np.int64)), stream, (rates.eta, rates.decay, rates.epsilon), "mean", 4
    )
    np.testing.assert_allclose(adapted.nll, np.float32(expected), rtol=3e-7)


def test_gradient_statistics_are_computed_without_dropout(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    first, second = (gradient_statistics(model, dataset.splits["train"]) for _ in range(2))
    assert isinstance(first, GradientStatistics)
    assert all(torch.equal(a, b) for a, b in zip(first.ms, second.ms, strict=True))
    # A rate is MS divided by the mean over tensors of mean(MS), so the mean rate is one.
    assert float(torch.stack([rate.mean() for rate in first.pull_rates()]).mean()) == pytest.approx(1.0)


def test_bfloat16_uses_the_adapted_weights(opened: Open, model_for: Build) -> None:
    dataset = opened(REPEATED)
    model = model_for(len(dataset.vocabulary))
    statistics = gradient_statistics(model, dataset.splits["train"], precision="bfloat16")
    adapted = dynamic_score(model, dataset.splits["test"], dataset.vocabulary, statistics, BOLD, precision="bfloat16")
    full = dynamic_score(model, dataset.splits["test"], dataset.vocabulary, statistics, BOLD)
    assert adapted.mean == pytest.approx(full.mean, rel=0.03)
    assert "bfloat16" in adapted.definition


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", all_parts(), ids=lambda case: case.name)
def test_replayed_segments_score_like_launched_segments(
    case: Case, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the text is scored by replaying one graph."""
    model = case.build().cuda()
    before = weights(model)
    statistics = gradient_statistics(model, ids_split(220), precision=precision)
    settings = DynamicSettings(eta=0.005, epsilon=0.002, segment=4)
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(replay(graph)))
    adapted = dynamic_score(model, ids_split(63, seed=1), WORDS, statistics, settings, precision=precision)
    assert len(replays) == (0 if model.synchronizes else 14), "15 full segments, of which the first is launched"
    assert weights_equal(model, before)
    monkeypatch.setattr(dynamic.RepeatedSteps, "__call__", lambda self, key, step: step())
    launched = dynamic_score(model, ids_split(63, seed=1), WORDS, statistics, settings, precision=precision)
    np.testing.assert_allclose(adapted.nll, launched.nll, rtol=1e-4 if precision == "float32" else 2e-2)
    assert np.abs(launched.nll - score(model, ids_split(63, seed=1), WORDS).nll).max() > 0.05, "the model did not adapt"


def test_search_extends_the_grid_and_points_are_independent(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    before = weights(model)
    valid, vocabulary = dataset.splits["valid"], dataset.vocabulary
    statistics = gradient_statistics(model, dataset.splits["train"])
    monkeypatch.setattr(dynamic, "ETA_FACTORS", (1.0, 100.0))
    monkeypatch.setattr(dynamic, "LAMBDA_FACTORS", (0.5, 400.0, 1.0))
    fractions: list[float] = []
    best, grid = search_rates(
        model,
        valid,
        vocabulary,
        statistics,
        DynamicSettings(epsilon=0.01),
        progress=lambda _, done: fractions.append(done),
    )
    assert weights_equal(model, before)
    first_points = [(point["eta"], point["lambda"]) for point, _ in grid.points[:6]]
    assert first_points == [(pytest.approx(eta), decay) for eta in (5e-5, 5e-3) for decay in (0.001, 0.8, 0.002)]
    # The best point is (0.005, 0.001), at the edge of both axes.
    assert grid.points[6][0] == {"eta": 0.5, "lambda": 0.001}
    assert grid.points[7][0] == {"eta": pytest.approx(5e-3), "lambda": 5e-4}
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    # Every point starts from the original weights and rates.
    for point, nll in grid.points:
        settings = DynamicSettings(eta=point["eta"], decay=point["lambda"], epsilon=0.01)
        assert dynamic_score(model, valid, vocabulary, statistics, settings).mean == pytest.approx(nll, abs=1e-6)
    assert {"eta": best.eta, "lambda": best.decay} == grid.best
    assert best.epsilon == 0.01
    best_fixed, narrow = search_rates(model, valid, vocabulary, statistics, DynamicSettings(eta=0.001))
    assert narrow.axes["eta"] == [0.001]
    assert best_fixed.eta == 0.001


def test_diverging_rates_are_rejected_or_skipped(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    before = weights(model)
    valid, vocabulary = dataset.splits["valid"], dataset.vocabulary
    statistics = gradient_statistics(model, dataset.splits["train"])
    diverging = DynamicSettings(eta=1e9, decay=0.0, epsilon=1e-30)
    statistics = statistics._replace(ms=[spread * 1e-35 for spread in statistics.ms])
    with pytest.raises(NonFiniteError, match="smaller eta"):
        dynamic_score(model, valid, vocabulary, statistics, diverging)
    assert weights_equal(model, before)
    monkeypatch.setattr(dynamic, "ETA_FACTORS", (1e-38, 1e14))
    best, grid = search_rates(model, valid, vocabulary, statistics, DynamicSettings(decay=0.0, epsilon=1e-30))
    assert math.isinf(grid.points[1][1])
    assert best.eta == grid.points[0][0]["eta"]
    monkeypatch.setattr(dynamic, "ETA_FACTORS", (1e14,))
    with pytest.raises(NonFiniteError, match="NaN or infinite at all 1 points"):
        search_rates(model, valid, vocabulary, statistics, DynamicSettings(decay=0.0, epsilon=1e-30))


def test_default_rates_depend_on_scale_and_segment() -> None:
    assert DynamicSettings().rates() == DEFAULTS["mean"] == Rates(5e-5, 2e-3, 2e-5, "mean")
    assert DynamicSettings(scale="sum").rates() == DEFAULTS["sum"] == Rates(0.002, 0.02, 0.001, "sum")
    longer = DynamicSettings(segment=10, epsilon=0.5).rates()
    assert (longer.eta, longer.decay, longer.epsilon) == (1e-4, 4e-3, 0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eta": 0.0}, "eta: must be greater than 0"),
        ({"lambda": -1.0}, "lambda: must be greater than or equal to 0"),
        ({"scale": "max"}, "scale: must be 'mean' or 'sum'"),
        ({"segment": 0}, "segment: must be greater than or equal to 1"),
    ],
)
def test_invalid_dynamic_settings_are_rejected(given: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_settings(DynamicSettings, given, "here")


def test_too_short_training_text_is_rejected(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    with pytest.raises(DataError, match="100 streams need at least 200"):
        gradient_statistics(model, ids_split(150))


def test_frozen_parameters_are_not_adapted(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    frozen = next(model.parameters()).requires_grad_(False)
    with adapting(model) as (parameters, trained):
        assert len(parameters) == len(trained) == len(list(model.parameters())) - 1
        assert all(parameter is not frozen for parameter in parameters)


def test_encoder_without_state_is_rejected(opened: Open, transformer_for: Build) -> None:
    dataset = opened()
    model = transformer_for(len(dataset.vocabulary))
    with pytest.raises(SettingsError, match=r"Transformer carries none; use more context instead \(--context"):
        gradient_statistics(model, dataset.splits["train"])
