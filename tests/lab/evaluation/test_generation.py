"""Generated text: the best word, the chosen few, the right distribution, the same seed."""

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
    """The first word after a fixed prompt, over many seeds."""
    return torch.tensor([next(generate(model, [2, 5], 1, seed=seed, **options)) for seed in range(draws)])  # type: ignore[arg-type]


def greedy(model: LanguageModel, prompt: list[int], length: int) -> list[int]:
    """The best word each time, the whole text read again for every word."""
    text = list(prompt)
    for _ in range(length):
        text.append(int(next_probabilities(model, text).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}])
def test_the_best_word_every_time(model_for: Build, options: dict[str, float]) -> None:
    model = model_for(WORDS)
    assert list(generate(model, [2, 5], 12, **options)) == greedy(model, [2, 5], 12)  # type: ignore[arg-type]


def test_a_seed_is_a_text(model_for: Build) -> None:
    model = model_for(WORDS)
    texts = [list(generate(model, [2], 30, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 30
    # Nothing else in the process may change it.
    torch.manual_seed(99)
    assert list(generate(model, [2], 30, seed=0)) == texts[0]


def test_dropout_is_off(model_for: Build) -> None:
    model = model_for(WORDS).train()
    assert list(generate(model, [2], 20, temperature=0.0)) == list(generate(model, [2], 20, temperature=0.0))


@pytest.mark.parametrize("training", [True, False])
def test_the_model_keeps_its_mode_between_the_words(model_for: Build, training: bool) -> None:
    model = model_for(WORDS).train(training)
    for _ in generate(model, [2], 3):
        assert model.training is model.encoder.training is training


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_draws_follow_the_distribution(model_for: Build, temperature: float) -> None:
    model = model_for(WORDS)
    p_V = next_probabilities(model, [2, 5]).double() ** (1 / temperature)
    p_V /= p_V.sum()
    draws = 1_500
    seen = torch.bincount(first_words(model, draws, temperature=temperature), minlength=WORDS).double()
    # The chi-square test wants a few draws in every class: the rarest go together.
    rare = p_V * draws < 5
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([p_V[~rare], p_V[rare].sum()[None]]) * draws
    kept = expected > 0
    assert chisquare(seen[kept], expected[kept]).pvalue > 1e-3


def test_top_k_keeps_the_k_best(model_for: Build) -> None:
    model = model_for(WORDS)
    best = set(next_probabilities(model, [2, 5]).topk(3).indices.tolist())
    assert set(first_words(model, 300, top_k=3, temperature=3.0).tolist()) == best
    assert set(first_words(model, 50, top_k=10**6).tolist()) <= set(range(WORDS))


def test_top_p_keeps_the_fewest_that_reach_p(model_for: Build) -> None:
    model = model_for(WORDS)
    p_V, ids = next_probabilities(model, [2, 5]).sort(descending=True)
    wanted = 0.5 * float(p_V[0]) + 0.5 * float(p_V[:2].sum())  # more than the best has, less than the two best
    assert set(first_words(model, 300, top_p=wanted).tolist()) == set(ids[:2].tolist())
    just = float(p_V[0]) * 0.999
    assert set(first_words(model, 50, top_p=just).tolist()) == {int(ids[0])}


def test_top_p_is_taken_of_what_top_k_leaves(model_for: Build) -> None:
    model = model_for(WORDS)
    best = next_probabilities(model, [2, 5]).topk(2).indices.tolist()
    assert set(first_words(model, 300, top_k=2, top_p=1.0, temperature=3.0).tolist()) == set(best)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.4}])
def test_never_is_never(model_for: Build, options: dict[str, float]) -> None:
    model = model_for(WORDS)
    best = int(next_probabilities(model, [2, 5]).argmax())
    found = list(generate(model, [2, 5], 60, never=(best, 0), **options))  # type: ignore[arg-type]
    assert not {best, 0} & set(found)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), 1e300])
def test_an_impossible_temperature_is_a_sentence(model_for: Build, temperature: float) -> None:
    with pytest.raises(SettingsError, match=r"temperature .*: must be a number from 0"):
        next(generate(model_for(WORDS), [2], 1, temperature=temperature))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"top_k": 0}, "top_k = 0: must be at least 1, or left out"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p = 1.5: must be above 0 and at most 1"),
        ({"never": tuple(range(WORDS))}, "all 9 words are excluded"),
    ],
)
def test_what_leaves_no_word_to_choose_is_a_sentence(
    model_for: Build, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        next(generate(model_for(WORDS), [2], 1, **options))  # type: ignore[arg-type]


def test_words_come_one_by_one(model_for: Build) -> None:
    words = generate(model_for(WORDS), [2], 10**9)
    assert len([next(words) for _ in range(5)]) == 5


def test_an_adaptive_output_opens_what_it_draws_from_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 1 the output end draws itself; a word that is never to come is drawn again among the others."""
    torch.manual_seed(0)
    bands = BandedTable(WORDS, 8, sizes=[3, 3], factor=2)
    projections = BandProjections(bands, 8)
    output = AdaptiveSoftmax(bands, projections)
    model = LanguageModel(AdaptiveLookup(bands, projections), LSTM(8, 8, layers=1), output)
    p_V = next_probabilities(model, [2, 5]).double()
    p_V /= p_V.sum()
    searched: list[int] = []
    search = output.search
    monkeypatch.setattr(output, "search", lambda h_ND, k: searched.append(k) or search(h_ND, k))
    draws = 3000
    seen = torch.bincount(first_words(model, draws), minlength=WORDS)
    assert not searched
    assert chisquare(seen, p_V * draws).pvalue > 1e-4
    allowed_V = p_V.clone()
    allowed_V[[1, 7]] = 0.0
    seen = torch.bincount(first_words(model, draws, never=(1, 7)), minlength=WORDS)
    kept = allowed_V > 0
    assert searched
    assert not seen[~kept].any()
    assert chisquare(seen[kept], allowed_V[kept] / allowed_V.sum() * draws).pvalue > 1e-4


@pytest.fixture
def attentive() -> LanguageModel:
    """A transformer between adaptive ends, whose texts do not soon repeat a word for ever."""
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
def reading_all(model: LanguageModel, prompt: list[int], length: int, seed: int | None, window: int) -> list[int]:
    """The same texts the plain way: for every word, all that the memory would hold is read again."""
    model.eval()
    generator = torch.Generator().manual_seed(seed or 0)
    text, begin = list(prompt), 0
    for _ in range(length):
        if len(text) - begin > window:
            begin = len(text) - max(1, window // 2)
        h_1D = model(torch.tensor([text[begin:]])).output[:, -1]
        drawn = model.output.log_probs(h_1D).argmax() if seed is None else model.output.sample(h_1D, generator)
        text.append(int(drawn))
    return text[len(prompt) :]


@pytest.mark.parametrize("prompt", [[2, 5, 1], [1, 8, 7, 6, 5, 4, 3, 2, 1, 0, 3, 3]])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_memory_writes_what_reading_all_again_does(
    attentive: LanguageModel, prompt: list[int], seed: int | None
) -> None:
    """The best word or a drawn one, without a window and across full ones."""
    options = {"temperature": 0.0} if seed is None else {"seed": seed}
    texts = set()
    for window in (None, 1, 2, 7, 10):
        plain = reading_all(attentive, prompt, 20, seed, window or 10**6)
        found = list(generate(attentive.train(), prompt, 20, window=window, **options))  # type: ignore[arg-type]
        assert found == plain
        texts.add(tuple(found))
    assert len(texts) > 2  # what is forgotten shows


def test_a_memory_holds_a_window_at_most(attentive: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    forward = Transformer.forward

    def counted(self: Transformer, x_BTD: Tensor, state: dict[str, Tensor]) -> object:
        read.append((x_BTD.shape[1], state["block.0"].shape[-2]))
        return forward(self, x_BTD, state)

    monkeypatch.setattr(Transformer, "forward", counted)
    assert len(list(generate(attentive, [2, 5], 9, window=6))) == 9
    assert read == [(2, 0), (1, 2), (1, 3), (1, 4), (1, 5), (3, 0), (1, 3), (1, 4), (1, 5)]


def test_a_carried_state_needs_no_window(model_for: Build) -> None:
    model = model_for(WORDS)
    assert list(generate(model, [2, 5], 30, window=3)) == list(generate(model, [2, 5], 30))


def test_a_window_without_tokens_is_a_sentence(attentive: LanguageModel) -> None:
    with pytest.raises(SettingsError, match="window = 0: must be at least 1 token, or left out"):
        next(generate(attentive, [2], 1, window=0))


@pytest.mark.parametrize(("training", "computed"), [(False, 1), (True, 6)])
def test_a_label_network_runs_once_where_the_model_stays_as_it_is(
    training: bool, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in training may change between the words."""
    table = WordTable(WORDS, 8)
    model = LanguageModel(Lookup(table), LSTM(8, 8), Softmax(Drill(table, depth=1))).train(training)
    calls: list[int] = []
    encode = Drill.encode
    monkeypatch.setattr(Drill, "encode", lambda *given: calls.append(1) or encode(*given))
    assert len(list(generate(model, [2], 6))) == 6
    assert len(calls) == computed
    assert model.training is training
    with torch.no_grad():
        model.target_log_probs(torch.tensor([[1]]), torch.tensor([[2]]))
    assert len(calls) == computed + 1  # nothing is held any longer
