"""Monte-Carlo dropout: probabilities averaged, masks seeded, and everything else left alone."""

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
from reefknot.lab.evaluation.perplexity import one_stream, score, window_log_probs
from reefknot.lab.evaluation.windows import Complete
from reefknot.lab.text.dataset import Dataset, Split
from reefknot.nn.classifiers.drill import LabelDropout
from reefknot.nn.encoders.stacked import Stacked
from reefknot.nn.models.language_model import LanguageModel

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]


def set_rate(model: LanguageModel, rate: float) -> LanguageModel:
    assert isinstance(model.encoder, Stacked)
    model.encoder.dropout = rate
    return model


def test_without_dropout_it_is_plain_scoring(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = set_rate(model_for(len(dataset.vocabulary)), 0.0)
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    plain = score(model, split, vocabulary, window=7)
    found = monte_carlo_score(model, split, vocabulary, passes=3, window=7)
    np.testing.assert_array_equal(found.nll, plain.nll)
    assert found.summary().perplexity == plain.summary().perplexity
    assert len(found.passes) == 1
    assert "this model has no dropout, so there is one pass" in found.definition
    assert found.definition.endswith(f"without dropout: perplexity {math.exp(plain.mean):,.2f}")


@pytest.mark.parametrize("end_of_line", [True, False])
def test_is_the_mean_of_the_probabilities(opened: Open, model_for: Build, end_of_line: bool) -> None:
    dataset = opened(end_of_line=end_of_line)
    model = model_for(len(dataset.vocabulary))
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    found = monte_carlo_score(model, split, vocabulary, passes=4, window=6, seed=5)
    ids = torch.from_numpy(split.ids.astype(np.int64))
    x, y = (torch.cat([torch.tensor([vocabulary.eos]), ids[:-1]]), ids) if end_of_line else (ids[:-1], ids[1:])
    torch.manual_seed(5)
    model.train()
    passes = []
    for _ in range(4):
        state, logp = None, []
        for start in range(0, len(x), 6):
            with torch.no_grad():
                each, state = model.target_log_probs(x[None, start : start + 6], y[None, start : start + 6], state)
            logp.append(each[0].double())
        passes.append(torch.cat(logp).numpy())
    expected = math.log(4) - logsumexp(np.stack(passes), axis=0)
    np.testing.assert_allclose(found.nll, expected, rtol=1e-6)
    assert len(found.nll) == split.tokens - (0 if end_of_line else 1)
    alone = [math.exp(-each.mean()) for each in passes]
    assert list(found.passes) == pytest.approx(alone)
    assert found.deviation == pytest.approx(np.std(alone, ddof=1))
    told = found.summary()
    assert told.passes == found.passes
    assert told.passes_deviation == found.deviation
    assert found.deviation > 0
    assert "independent" not in found.definition
    assert "mean probability of 4 passes, masks drawn for every 6 tokens (seed 5)" in found.definition
    assert f"single passes: perplexity {min(alone):,.2f} to {max(alone):,.2f}" in found.definition
    # The mean of the probabilities is never worse than the mean of their logarithms.
    assert found.mean <= np.mean([-each.mean() for each in passes]) + 1e-6


def test_seeds_and_generators(opened: Open, model_for: Build) -> None:
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


def test_all_is_put_back_after_an_error(opened: Open, model_for: Build) -> None:
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
def test_dropout_of_the_labels_is_on_too(output: str) -> None:
    model = Case("lookup", "lstm", output, "drill", True).build()
    for each in model.modules():
        if isinstance(each, LabelDropout):
            each.rate = 0.5
    ids = np.random.default_rng(0).integers(0, len(WORDS), 30).astype(np.int32)
    split = Split("made", ids, words=30, lines=1, bytes=30, unknown=0)
    found = monte_carlo_score(model, split, WORDS, passes=2, window=10)
    assert found.passes[0] != found.passes[1]


def test_a_model_that_knows_nothing(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    with pytest.raises(SettingsError, match="passes = 0"):
        monte_carlo_score(model, dataset.splits["test"], dataset.vocabulary, passes=0, window=9)
    with torch.no_grad():
        next(model.encoder.parameters()).fill_(math.nan)
    with pytest.raises(NonFiniteError):
        monte_carlo_score(model, dataset.splits["test"], dataset.vocabulary, passes=2, window=9)


def test_windows_have_masks_of_their_own(opened: Open, transformer_for: Build) -> None:
    dataset = opened()
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    model, windows = transformer_for(len(vocabulary)), Complete(12)
    found = monte_carlo_score(model, split, vocabulary, passes=3, window=windows, seed=5)
    x_1T, y_1T = one_stream(split, vocabulary)
    torch.manual_seed(5)
    model.train()
    with torch.no_grad():
        spans = windows.cut(y_1T[0], vocabulary.eos)
        passes = [window_log_probs(model, x_1T[0], y_1T[0], spans).numpy() for _ in range(3)]
    assert not np.allclose(passes[0], passes[1])
    np.testing.assert_allclose(found.nll, math.log(3) - logsumexp(np.stack(passes), axis=0), rtol=1e-5)
    assert "3 passes, masks drawn for every window (seed 5)" in found.definition
    assert "blocks of whole lines of at most 12 tokens" in found.definition
    assert found.summary().windows == "complete-12"
