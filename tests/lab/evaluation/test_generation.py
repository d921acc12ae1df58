"""Generated text: greedy choice, top-k and top-p, the right distribution, and reproducible seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.generation import generate
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.encoders.transformer import Transformer
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

WORDS = 9
Build = Callable[[int], LanguageModel]


@torch.no_grad()
def next_probabilities(model: LanguageModel, prompt: list[int]) -> Tensor:
    model.eval()
    return model.output.log_probs(model(torch.tensor([prompt])).output[:, -1])[0].exp()


def first_words(model: LanguageModel, draws: int, **options: object) -> Tensor:
    """Return the first word after a fixed prompt for each of many seeds."""
    return torch.tensor([next(generate(model, [2, 5], 1, seed=seed, **options)) for seed in range(draws)])  # type: ignore[arg-type]


def greedy(model: LanguageModel, prompt: list[int], length: int) -> list[int]:
    """Return the most probable words; the whole text is read again for every word."""
    text = list(prompt)
    for _ in range(length):
        text.append(int(next_probabilities(model, text).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}])
def test_zero_temperature_and_top_one_are_greedy(model_for: Build, options: dict[str, float]) -> None:
    model = model_for(WORDS)
    assert list(generate(model, [2, 5], 12, **options)) == greedy(model, [2, 5], 12)  # type: ignore[arg-type]


def test_text_depends_only_on_the_seed(model_for: Build) -> None:
    model = model_for(WORDS)
    texts = [list(generate(model, [2], 30, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 30
    # The global random state must not matter.
    torch.manual_seed(99)
    assert list(generate(model, [2], 30, seed=0)) == texts[0]


def test_generation_switches_dropout_off(model_for: Build) -> None:
    model = model_for(WORDS).train()
    assert list(generate(model, [2], 20, temperature=0.0)) == list(generate(model, [2], 20, temperature=0.0))


@pytest.mark.parametrize("training", [True, False])
def test_model_mode_is_restored_between_words(model_for: Build, training: bool) -> None:
    model = model_for(WORDS).train(training)
    for _ in generate(model, [2], 3):
        assert model.training is model.encoder.training is training


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_samples_follow_the_distribution(model_for: Build, temperature: float) -> None:
    model = model_for(WORDS)
    probs_V = next_probabilities(model, [2, 5]).double() ** (1 / temperature)
    probs_V /= probs_V.sum()
    draws = 1_500
    seen = torch.bincount(first_words(model, draws, temperature=temperature), minlength=WORDS).double()
    # The chi-square test needs several draws in every class, so the rarest are merged.
    rare = probs_V * draws < 5
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([probs_V[~rare], probs_V[rare].sum()[None]]) * draws
    possible = expected > 0
    assert chisquare(seen[possible], expected[possible]).pvalue > 1e-3


def test_top_k_draws_from_the_k_best_words(model_for: Build) -> None:
    model = model_for(WORDS)
    best = set(next_probabilities(model, [2, 5]).topk(3).indices.tolist())
    assert set(first_words(model, 300, top_k=3, temperature=3.0).tolist()) == best
    assert set(first_words(model, 50, top_k=10**6).tolist()) <= set(range(WORDS))


def test_top_p_draws_from_the_fewest_words_that_reach_p(model_for: Build) -> None:
    model = model_for(WORDS)
    probs_V, ids = next_probabilities(model, [2, 5]).sort(descending=True)
    threshold = 0.5 * float(probs_V[0]) + 0.5 * float(
        probs_V[:2].sum()
    )  # between the probability of the best word and of the two best
    assert set(first_words(model, 300, top_p=threshold).tolist()) == set(ids[:2].tolist())
    below_best = float(probs_V[0]) * 0.999
    assert set(first_words(model, 50, top_p=below_best).tolist()) == {int(ids[0])}


def test_top_p_applies_after_top_k(model_for: Build) -> None:
    model = model_for(WORDS)
    best = next_probabilities(model, [2, 5]).topk(2).indices.tolist()
    assert set(first_words(model, 300, top_k=2, top_p=1.0, temperature=3.0).tolist()) == set(best)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.4}])
def test_banned_words_are_not_generated(model_for: Build, options: dict[str, float]) -> None:
    model = model_for(WORDS)
    best = int(next_probabilities(model, [2, 5]).argmax())
    words = list(generate(model, [2, 5], 60, banned=(best, 0), **options))  # type: ignore[arg-type]
    assert not {best, 0} & set(words)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), 1e300])
def test_invalid_temperature_is_rejected(model_for: Build, temperature: float) -> None:
    with pytest.raises(SettingsError, match=r"temperature .*: must be a number from 0"):
        next(generate(model_for(WORDS), [2], 1, temperature=temperature))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k = 0: must be at least 1, or left out"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p = 1.5: must be above 0 and at most 1"),
        ({"banned": tuple(range(WORDS))}, "all 9 words are excluded"),
    ],
)
def test_options_that_exclude_every_word_are_rejected(
    model_for: Build, options: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        next(generate(model_for(WORDS), [2], 1, **options))  # type: ignore[arg-type]


def test_words_are_generated_lazily(model_for: Build) -> None:
    words = generate(model_for(WORDS), [2], 10**9)
    assert len([next(words) for _ in range(5)]) == 5


def test_adaptive_softmax_samples_without_a_full_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 1 the output end samples; an excluded word is drawn again among the others."""
    torch.manual_seed(0)
    bands = BandedTable(WORDS, 8, sizes=[3, 3], factor=2)
    projections = BandProjections(bands, 8)
    output = AdaptiveSoftmax(bands, projections)
    model = LanguageModel(AdaptiveLookup(bands, projections), LSTM(8, 8, layers=1), output)
    probs_V = next_probabilities(model, [2, 5]).double()
    probs_V /= probs_V.sum()
    searched: list[int] = []
    search = output.search
    monkeypatch.setattr(output, "search", lambda hidden_ND, k: searched.append(k) or search(hidden_ND, k))
    draws = 3000
    seen = torch.bincount(first_words(model, draws), minlength=WORDS)
    assert not searched
    assert chisquare(seen, probs_V * draws).pvalue > 1e-4
    allowed_V = probs_V.clone()
    allowed_V[[1, 7]] = 0.0
    seen = torch.bincount(first_words(model, draws, banned=(1, 7)), minlength=WORDS)
    possible = allowed_V > 0
    assert searched
    assert not seen[~possible].any()
    assert chisquare(seen[possible], allowed_V[possible] / allowed_V.sum() * draws).pvalue > 1e-4


@pytest.fixture
def transformer_model() -> LanguageModel:
    """Return a transformer between adaptive ends, whose texts do not soon repeat one word forever."""
    torch.manual_seed(0)
    bands = BandedTable(WORDS, 8, sizes=[3, 3], factor=2)
    projections = BandProjections(bands, 8)
    encoder = Transformer(8, layers=2, heads=2, ffn_dim=16, dropout=0.5, final_norm=True)
    model = LanguageModel(AdaptiveLookup(bands, projections), encoder, AdaptiveSoftmax(bands, projections)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.7)
    return model


@torch.no_grad()
def generate_without_cache(
    model: LanguageModel, prompt: list[int], length: int, seed: int | None, window: int
) -> list[int]:
    """Generate by reading again, for every word, all tokens that the KV cache would hold.

    A long prompt is treated like a text that was generated token by token.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed or 0)
    text = list(prompt)
    for _ in range(length):
        begin = 0
        for end in range(1, len(text) + 1):
            if end - begin > window:
                begin = end - max(1, window // 2)
        hidden_1D = model(torch.tensor([text[begin:]])).output[:, -1]
        drawn = (
            model.output.log_probs(hidden_1D).argmax() if seed is None else model.output.sample(hidden_1D, generator)
        )
        text.append(int(drawn))
    return text[len(prompt) :]


@pytest.mark.parametrize("prompt", [[2, 5, 1], [1, 8, 7, 6, 5, 4, 3, 2, 1, 0, 3, 3]])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_kv_cache_generates_the_same_text_as_reading_again(
    transformer_model: LanguageModel, prompt: list[int], seed: int | None
) -> None:
    """Greedy or sampled, without a window and with windows that fill up."""
    options = {"temperature": 0.0} if seed is None else {"seed": seed}
    texts = set()
    for window in (None, 1, 2, 7, 10):
        plain = generate_without_cache(transformer_model, prompt, 20, seed, window or 10**6)
        words = list(generate(transformer_model.train(), prompt, 20, window=window, **options))  # type: ignore[arg-type]
        assert words == plain
        texts.add(tuple(words))
    assert len(texts) > 2  # shorter windows change the text


def test_kv_cache_holds_at_most_one_window(transformer_model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    forward = Transformer.forward

    def counted(self: Transformer, inputs_BTD: Tensor, state: dict[str, Tensor]) -> object:
        read.append((inputs_BTD.shape[1], state["block.0"].shape[-2]))
        return forward(self, inputs_BTD, state)

    monkeypatch.setattr(Transformer, "forward", counted)
    assert len(list(generate(transformer_model, [2, 5], 9, window=6))) == 9
    assert read == [(2, 0), (1, 2), (1, 3), (1, 4), (1, 5), (3, 0), (1, 3), (1, 4), (1, 5)]


def test_window_has_no_effect_on_a_carried_state(model_for: Build) -> None:
    model = model_for(WORDS)
    assert list(generate(model, [2, 5], 30, window=3)) == list(generate(model, [2, 5], 30))


def test_window_of_zero_tokens_is_rejected(transformer_model: LanguageModel) -> None:
    with pytest.raises(SettingsError, match="window = 0: must be at least 1 token, or left out"):
        next(generate(transformer_model, [2], 1, window=0))


@pytest.mark.parametrize(("training", "computed"), [(False, 1), (True, 6)])
def test_class_vectors_are_computed_once_in_eval_mode(
    training: bool, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in training mode may change between the words."""
    table = WordTable(WORDS, 8)
    model = LanguageModel(Lookup(table), LSTM(8, 8), Softmax(Drill(table, depth=1))).train(training)
    calls: list[int] = []
    encode = Drill.encode
    monkeypatch.setattr(Drill, "encode", lambda *arguments: calls.append(1) or encode(*arguments))
    assert len(list(generate(model, [2], 6))) == 6
    assert len(calls) == computed
    assert model.training is training
    with torch.no_grad():
        model.target_log_probs(torch.tensor([[1]]), torch.tensor([[2]]))
    assert len(calls) == computed + 1  # class vectors are no longer cached
