"""Monte-Carlo dropout averages probabilities, seeds its masks, and restores model and generator."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from contract.combinations import WORDS, Case
from reefknot.errors import NonFiniteError, SettingsError
from reefknot.lab.evaluation.monte_carlo import monte_carlo_score
from reefknot.lab.evaluation.perplexity import build_stream, score, window_log_probs
from reefknot.lab.evaluation.windows import Complete
from reefknot.lab.text.dataset import Dataset, Split
from reefknot.nn.classifiers.drill import LabelDropout
from reefknot.nn.encoders.stacked import LayerDropoutEncoder
from reefknot.nn.models.language_model import LanguageModel

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]


def set_rate(model: LanguageModel, rate: float) -> LanguageModel:
    assert isinstance(model.encoder, LayerDropoutEncoder)
    model.encoder.dropout = rate
    return model


def test_without_dropout_equals_plain_scoring(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = set_rate(model_for(len(dataset.vocabulary)), 0.0)
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    plain = score(model, split, vocabulary, window=7)
    score_mc = monte_carlo_score(model, split, vocabulary, passes=3, window=7)
    np.testing.assert_array_equal(score_mc.nll, plain.nll)
    assert score_mc.summary().perplexity == plain.summary().perplexity
    assert len(score_mc.passes) == 1
    assert "this model has no dropout, so there is one pass" in score_mc.definition
    assert score_mc.definition.endswith(f"without dropout: perplexity {math.exp(plain.mean):,.2f}")


@pytest.mark.parametrize("end_of_line", [True, False])
def test_score_is_the_mean_of_the_probabilities(opened: Open, model_for: Build, end_of_line: bool) -> None:
    dataset = opened(end_of_line=end_of_line)
    model = model_for(len(dataset.vocabulary))
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    score_mc = monte_carlo_score(model, split, vocabulary, passes=4, window=6, seed=5)
    ids = torch.from_numpy(split.ids.astype(np.int64))
    inputs_T = ids[:-1]
    targets_T = ids[1:]
    if end_of_line:
        inputs_T = torch.cat([torch.tensor([vocabulary.eos]), ids[:-1]])
        targets_T = ids
    torch.manual_seed(5)
    model.train()
    passes = []
    for _ in range(4):
        state = None
        log_prob_chunks = []
        for start in range(0, len(inputs_T), 6):
            window = slice(start, start + 6)
            with torch.no_grad():
                log_probs_1N, state = model.target_log_probs(inputs_T[None, window], targets_T[None, window], state)
            log_prob_chunks.append(log_probs_1N[0].double())
        passes.append(torch.cat(log_prob_chunks).numpy())
    expected = math.log(4) - logsumexp(np.stack(passes), axis=0)
    np.testing.assert_allclose(score_mc.nll, expected, rtol=1e-6)
    assert len(score_mc.nll) == split.tokens - (0 if end_of_line else 1)
    alone = [math.exp(-pass_logp.mean()) for pass_logp in passes]
    assert list(score_mc.passes) == pytest.approx(alone)
    assert score_mc.deviation == pytest.approx(np.std(alone, ddof=1))
    summary = score_mc.summary()
    assert summary.passes == score_mc.passes
    assert summary.passes_deviation == score_mc.deviation
    assert score_mc.deviation > 0
    assert "independent" not in score_mc.definition
    assert "mean probability of 4 passes, masks drawn for every 6 tokens (seed 5)" in score_mc.definition
    assert f"individual passes: perplexity {min(alone):,.2f} to {max(alone):,.2f}" in score_mc.definition
    # The mean of the probabilities is never worse than the mean of their logarithms.
    assert score_mc.mean <= np.mean([-pass_logp.mean() for pass_logp in passes]) + 1e-6


def test_score_depends_only_on_the_seed(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary)).eval()
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, again, other = (monte_carlo_score(model, split, vocabulary, passes=2, window=9, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(first.nll, again.nll)
    assert not np.array_equal(first.nll, other.nll)
    assert first.passes[0] != first.passes[1]
    assert not model.training
    assert monte_carlo_score(model, split, vocabulary, passes=1, window=9).deviation is None


def test_mode_and_generator_are_restored_after_an_exception(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary)).eval()
    before = torch.get_rng_state()

    def interrupt(what: str, done: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        monte_carlo_score(model, dataset.splits["test"], dataset.vocabulary, passes=2, window=9, progress=interrupt)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training


@pytest.mark.parametrize("output", ["softmax", "mixture", "augmented", "sampled"])
def test_label_dropout_is_active(output: str) -> None:
    model = Case("lookup", "lstm", output, "drill", True).build()
    for module in model.modules():
        if isinstance(module, LabelDropout):
            module.rate = 0.5
    ids = np.random.default_rng(0).integers(0, len(WORDS), 30).astype(np.int32)
    split = Split("made", ids, words=30, lines=1, bytes=30, unknown=0)
    score_mc = monte_carlo_score(model, split, WORDS, passes=2, window=10)
    assert score_mc.passes[0] != score_mc.passes[1]


def test_zero_passes_and_nan_models_are_rejected(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    with pytest.raises(SettingsError, match="passes = 0"):
        monte_carlo_score(model, dataset.splits["test"], dataset.vocabulary, passes=0, window=9)
    with torch.no_grad():
        next(model.encoder.parameters()).fill_(math.nan)
    with pytest.raises(NonFiniteError):
        monte_carlo_score(model, dataset.splits["test"], dataset.vocabulary, passes=2, window=9)


def test_every_window_has_its_own_masks(opened: Open, transformer_for: Build) -> None:
    dataset = opened()
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    model = transformer_for(len(vocabulary))
    windows = Complete(12)
    score_mc = monte_carlo_score(model, split, vocabulary, passes=3, window=windows, seed=5)
    inputs_1T, targets_1T = build_stream(split, vocabulary)
    torch.manual_seed(5)
    model.train()
    with torch.no_grad():
        spans = windows.spans(targets_1T[0], vocabulary.eos)
        passes = [window_log_probs(model, inputs_1T[0], targets_1T[0], spans).numpy() for _ in range(3)]
    assert not np.allclose(passes[0], passes[1])
    np.testing.assert_allclose(score_mc.nll, math.log(3) - logsumexp(np.stack(passes), axis=0), rtol=1e-5)
    assert "3 passes, masks drawn for every window (seed 5)" in score_mc.definition
    assert "blocks of whole lines of at most 12 tokens" in score_mc.definition
    assert score_mc.summary().windows == "complete-12"
