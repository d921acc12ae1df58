"""Beam search against exhaustive search, and against a simple search without cache, batching or early stop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy.stats import chisquare
from torch import Tensor

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.lab.evaluation import beam
from reefknot.lab.evaluation.beam import Hypothesis, SearchSettings, beam_search, greedy, sample
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.attention_gru import AttentionGRU
from reefknot.nn.encoders.contract import Encoded, State
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.translator import PAD, Translator
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

EOS, DIM, SOURCE_WORDS = 1, 8, 11
ENCODERS = ("attention_gru", "encoder_decoder")
OUTPUTS = ("softmax", "adaptive", "mixture", "augmented")
ENCODERS_AND_OUTPUTS = list(itertools.product(ENCODERS, OUTPUTS))


def output_end(kind: str, words: WordTable) -> OutputEnd:
    if kind == "adaptive":
        bands = BandedTable(words.vocab_size, DIM, sizes=[2, 2], factor=2)
        return AdaptiveSoftmax(bands, BandProjections(bands, DIM, head=False))
    if kind == "mixture":
        return MixtureOfSoftmaxes(Plain(words), DIM, experts=3)
    if kind == "augmented":
        return Augmented(Plain(words), words, gamma=1.0)
    return Softmax(Plain(words))


def translator(encoder: str = "attention_gru", output: str = "softmax", words: int = 9, seed: int = 0) -> Translator:
    """Return a small float64 model with dropout, whose predictions are far from uniform."""
    torch.manual_seed(seed)
    table = WordTable(words, DIM)
    body = (
        AttentionGRU(DIM, DIM, units=6, dropout=0.5)
        if encoder == "attention_gru"
        else EncoderDecoder(DIM, DIM, layers=2, heads=2, ffn_dim=12, dropout=0.5)
    )
    model = Translator(Lookup(WordTable(SOURCE_WORDS, DIM)), Lookup(table), body, output_end(output, table))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.6)
    return model.double()


def sources(*lengths: int, seed: int = 0) -> Tensor:
    """Return padded random sources of these lengths, each ending with <eos>."""
    random = np.random.default_rng(seed)
    rows = [[*random.integers(2, SOURCE_WORDS, length - 1), EOS] for length in lengths]
    return torch.tensor([row + [PAD] * (max(lengths) - len(row)) for row in rows])


def search_settings(limit: int, **chosen: object) -> SearchSettings:
    return SearchSettings.model_validate({"longest": 0.0, "beyond": limit, **chosen})


@torch.no_grad()
def log_probs(model: Translator, source_S: Tensor, targets: Sequence[Sequence[int]]) -> list[float]:
    """Return the log-probability of each target, all of equal length, under teacher forcing."""
    targets_BT = torch.tensor(targets)
    first_B1 = torch.full((len(targets_BT), 1), EOS)
    pairs_BU = torch.cat([source_S.expand(len(targets_BT), -1), first_B1, targets_BT[:, :-1]], dim=1)
    model.eval()
    return model.target_log_probs(pairs_BU, targets_BT)[0].sum(1).tolist()


def log_prob(model: Translator, source_S: Tensor, target: Sequence[int]) -> float:
    return log_probs(model, source_S, [target])[0]


def score(logp: float, length: int, penalty: float) -> float:
    return logp / length**penalty


@torch.no_grad()
def simple_search(
    model: Translator,
    source_S: Tensor,
    limit: int,
    width: int,
    penalty: float,
    early_stop: bool,
    banned: int | None = None,
) -> list[Hypothesis]:
    """Return all results of a search that reads everything again for every word."""
    model.eval()
    unfinished: list[tuple[float, list[int]]] = [(0.0, [])]
    hypotheses: list[Hypothesis] = []
    for length in range(1, limit + 1):
        inputs_WT = torch.tensor([[EOS, *ids] for _, ids in unfinished])
        hidden_WD = model(inputs_WT, model.encode_source(source_S.expand(len(inputs_WT), -1))).output[:, -1]
        ranked = [
            (logp + word_logp, [*ids, word])
            for (logp, ids), words in zip(unfinished, model.output.log_probs(hidden_WD).tolist(), strict=True)
            for word, word_logp in enumerate(words)
            if word != banned
        ]
        ranked.sort(key=lambda candidate: -candidate[0])
        ended = [(logp, ids) for logp, ids in ranked[:width] if ids[-1] == EOS]
        hypotheses += [Hypothesis(tuple(ids[:-1]), logp, score(logp, length, penalty), True) for logp, ids in ended]
        unfinished = [(logp, ids) for logp, ids in ranked if ids[-1] != EOS][:width]
        hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        if (
            early_stop
            and len(hypotheses) >= width
            and hypotheses[width - 1].score >= score(unfinished[0][0], length, penalty)
        ):
            break
    return hypotheses + [Hypothesis(tuple(ids), logp, score(logp, limit, penalty), False) for logp, ids in unfinished]


def assert_same(actual: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    assert [(hypothesis.ids, hypothesis.finished) for hypothesis in actual] == [
        (hypothesis.ids, hypothesis.finished) for hypothesis in expected
    ]
    for ours, reference in zip(actual, expected, strict=True):
        assert ours[1:3] == pytest.approx(reference[1:3], abs=1e-11)


@pytest.mark.parametrize(("encoder", "output"), ENCODERS_AND_OUTPUTS)
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_beam_of_all_prefixes_equals_exhaustive_search(encoder: str, output: str, penalty: float) -> None:
    words, limit = 5, 4
    model = translator(encoder, output, words)
    source_1S = sources(4)
    others = [word for word in range(words) if word != EOS]
    every = []
    for length in range(1, limit + 1):
        targets = [[*ids, EOS] for ids in itertools.product(others, repeat=length - 1)]
        pairs = zip(targets, log_probs(model, source_1S[0], targets), strict=True)
        every += [Hypothesis(tuple(ids[:-1]), logp, score(logp, length, penalty), True) for ids, logp in pairs]
    every.sort(key=lambda hypothesis: -hypothesis.score)
    wide = search_settings(limit, beam=words * len(others) ** (limit - 1), length_penalty=penalty, early_stop=False)
    (hypotheses,) = beam_search(model, source_1S, EOS, wide, n_best=len(every))
    assert_same(hypotheses, every)
    (best,) = beam_search(model, source_1S, EOS, wide)
    assert_same(best, every[:1])


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("early_stop", [True, False])
def test_beam_search_equals_simple_search(encoder: str, penalty: float, early_stop: bool) -> None:
    """A batched sentence must not end early, for any number of requested hypotheses."""
    limit = 7
    source_BS = sources(4, 2, 6)
    seen = set()
    for seed, width in ((1, 1), (2, 2), (1, 3), (2, 5)):
        model = translator(encoder, seed=seed)
        search = search_settings(limit, beam=width, length_penalty=penalty, early_stop=early_stop)
        best, several = (beam_search(model, source_BS, EOS, search, n_best=number) for number in (1, width))
        for row, hypotheses in enumerate(several):
            source_S = source_BS[row][source_BS[row] != PAD]
            expected = simple_search(model, source_S, limit, width, penalty, early_stop)[:width]
            assert_same(hypotheses, expected)
            assert_same(best[row], expected[:1])
            seen.update((hypothesis.finished, len(hypothesis.ids)) for hypothesis in hypotheses)
    assert len(seen) > 3


def test_early_stop_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The score is never better than without early stop."""
    steps = 0
    read = Translator.forward

    def counted(self: Translator, *arguments: Any) -> Encoded:
        nonlocal steps
        steps += 1
        return read(self, *arguments)

    monkeypatch.setattr(Translator, "forward", counted)
    spent = {True: 0, False: 0}
    for seed in range(6):
        model = translator(seed=seed)
        scores = {}
        for stop in spent:
            before = steps
            (hypothesis,) = beam_search(model, sources(5), EOS, search_settings(12, beam=2, early_stop=stop))[0]
            spent[stop] += steps - before
            scores[stop] = hypothesis.score
        assert scores[False] >= scores[True]
    assert spent[True] < spent[False]


@pytest.mark.parametrize(("encoder", "output"), ENCODERS_AND_OUTPUTS)
def test_beam_of_one_is_greedy_search(encoder: str, output: str) -> None:
    model = translator(encoder, output, seed=3)
    source_BS = sources(3, 5, 2, 4)
    hypotheses = greedy(model, source_BS, EOS, search_settings(8, beam=7, early_stop=False))
    assert [[hypothesis] for hypothesis in hypotheses] == beam_search(model, source_BS, EOS, search_settings(8, beam=1))
    for row, hypothesis in zip(source_BS, hypotheses, strict=True):
        ids: list[int] = []
        with torch.no_grad():
            while len(ids) < 8 and EOS not in ids:
                hidden_1D = model.eval()(torch.tensor([[EOS, *ids]]), model.encode_source(row[None])).output[:, -1]
                ids.append(int(model.output.log_probs(hidden_1D).argmax()))
        assert (*hypothesis.ids, *[EOS] * hypothesis.finished) == tuple(ids)
        assert hypothesis.logp == pytest.approx(log_prob(model, row[row != PAD], ids), abs=1e-11)


@pytest.mark.parametrize(("encoder", "output"), ENCODERS_AND_OUTPUTS)
def test_scores_equal_teacher_forcing(encoder: str, output: str) -> None:
    model = translator(encoder, output)
    source_BS = sources(3, 5, 2)
    for row, hypotheses in zip(
        source_BS, beam_search(model, source_BS, EOS, search_settings(9, beam=4), n_best=4), strict=True
    ):
        assert len({hypothesis.ids for hypothesis in hypotheses}) == len(hypotheses) == 4
        finished = [hypothesis for hypothesis in hypotheses if hypothesis.finished]
        assert hypotheses[: len(finished)] == sorted(finished, key=lambda hypothesis: -hypothesis.score)
        for hypothesis in hypotheses:
            tokens = [*hypothesis.ids, EOS] if hypothesis.finished else list(hypothesis.ids)
            assert hypothesis.logp == pytest.approx(log_prob(model, row[row != PAD], tokens), abs=1e-11)
            assert hypothesis.score == pytest.approx(hypothesis.logp / len(tokens))
            assert EOS not in hypothesis.ids


@pytest.mark.parametrize(("encoder", "output"), ENCODERS_AND_OUTPUTS)
@pytest.mark.parametrize("early_stop", [True, False])
def test_translation_is_independent_of_batch_and_padding(encoder: str, output: str, early_stop: bool) -> None:
    model = translator(encoder, output, seed=5)
    source_BS = sources(5, 2, 7, 3, 4)
    search = SearchSettings(beam=3, longest=1.5, beyond=2, early_stop=early_stop)
    together = beam_search(model, source_BS, EOS, search, n_best=3)
    padded = torch.cat([source_BS, torch.full((5, 6), PAD)], dim=1)
    order = [3, 0, 4, 2, 1]
    shuffled = beam_search(model, padded[order], EOS, search, n_best=3)
    for row, (position, hypotheses) in enumerate(zip(order, shuffled, strict=True)):
        assert_same(hypotheses, together[position])
        alone = source_BS[row][source_BS[row] != PAD][None]
        assert_same(beam_search(model, alone, EOS, search, n_best=3)[0], together[row])


def test_never_words_are_not_produced() -> None:
    model = translator(seed=1)
    source_BS = sources(4, 3)
    free = beam_search(model, source_BS, EOS, search_settings(6, beam=3))
    excluded = free[0][0].ids[0]
    for row, hypotheses in zip(
        source_BS, beam_search(model, source_BS, EOS, search_settings(6, beam=3), [excluded], 3), strict=True
    ):
        assert_same(hypotheses, simple_search(model, row[row != PAD], 6, 3, 1.0, True, banned=excluded)[:3])
    # Three words and <eos> are left: fewer than the beam holds.
    hypotheses = beam_search(model, source_BS, EOS, search_settings(2, beam=5), banned=range(4, 9), n_best=5)[0]
    assert {word for hypothesis in hypotheses for word in hypothesis.ids} <= {0, 2, 3}
    assert len(hypotheses) == 5


def suppress_eos(model: Translator) -> Translator:
    """Return the model with an <eos> that is almost never predicted."""
    assert isinstance(model.output, Softmax)
    assert model.output.classifier.bias is not None
    with torch.no_grad():
        model.output.classifier.bias[EOS] = -100.0
    return model


def test_length_limit_depends_on_the_source() -> None:
    model = suppress_eos(translator())
    source_BS = sources(6, 2, 3)
    search = SearchSettings(beam=3, longest=1.5, beyond=1, length_penalty=0.5)
    for hypotheses, limit in zip(beam_search(model, source_BS, EOS, search, n_best=3), (10, 4, 5), strict=True):
        assert [len(hypothesis.ids) for hypothesis in hypotheses] == [limit] * 3
        assert not any(hypothesis.finished for hypothesis in hypotheses)
        assert [hypothesis.score for hypothesis in hypotheses] == sorted(
            (hypothesis.logp / limit**0.5 for hypothesis in hypotheses), reverse=True
        )
    assert [len(hypothesis.ids) for hypothesis in sample(model, source_BS, EOS, search)] == [10, 4, 5]
    assert SearchSettings(longest=0.1, beyond=0).limit(2) == 1


def test_finished_hypotheses_come_first() -> None:
    (hypotheses,) = beam_search(translator(), sources(4), EOS, search_settings(1, beam=9), n_best=9)
    assert hypotheses[0].ids == ()
    assert [hypothesis.finished for hypothesis in hypotheses] == [True] + [False] * 8
    assert hypotheses[0].score < hypotheses[1].score
    assert [hypothesis.score for hypothesis in hypotheses[1:]] == sorted(
        (hypothesis.score for hypothesis in hypotheses[1:]), reverse=True
    )


def test_ties_are_broken_by_token_ids() -> None:
    state = beam._BeamState([9], EOS, search_settings(9, beam=3), 1)
    assert state.update(np.log([[0.25, 0.25, 0.25, 0.25]]), np.array([[7, 2, 5, 3]])).tolist() == [0, 0, 0]
    assert state.ids_AWT.tolist() == [[[EOS, 2], [EOS, 3], [EOS, 5]]]
    rows = state.update(np.log([[0.5, 0.25], [0.5, 0.25], [0.5, 0.25]]), np.array([[8, 2], [4, 2], [8, 2]]))
    assert rows.tolist() == [1, 0, 2]
    assert state.ids_AWT.tolist() == [[[EOS, 3, 4], [EOS, 2, 8], [EOS, 5, 8]]]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_finished_sources_leave_the_batch_without_extra_copies(encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = suppress_eos(translator(encoder))
    source_BS = sources(2, 3, 6, 5, 4)
    source = "annotations" if encoder == "attention_gru" else "source.1"
    rows: list[int] = []
    sources_read: list[Tensor] = []
    forward = Translator.forward

    def counted(self: Translator, tokens_BT: Tensor, state: State) -> object:
        assert {tensor.shape[1] for tensor in state.values()} == {len(tokens_BT)}
        rows.append(len(tokens_BT))
        sources_read.append(state[source])
        return forward(self, tokens_BT, state)

    monkeypatch.setattr(Translator, "forward", counted)
    synchronizes: list[int] = []
    wait = beam._copy_to_host
    monkeypatch.setattr(beam, "_copy_to_host", lambda *arguments: synchronizes.append(1) or wait(*arguments))
    search = SearchSettings(beam=3, longest=1.0, beyond=4)
    beam_search(model, source_BS, EOS, search)
    assert rows == [5, 15, 15, 15, 15, 15, 12, 9, 6, 3]
    assert len(synchronizes) == len(rows)
    for before, after in itertools.pairwise(sources_read[1:]):
        assert (before is after) == (before.shape == after.shape)


def test_output_end_is_searched_for_beam_plus_excluded_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = translator(output="adaptive", words=30)
    assert isinstance(model.output, AdaptiveSoftmax)
    requested: list[int] = []
    search = model.output.search
    monkeypatch.setattr(model.output, "search", lambda hidden_ND, k: requested.append(k) or search(hidden_ND, k))
    beam_search(model, sources(3, 4), EOS, search_settings(5, beam=3), banned=(0,))
    assert set(requested) == {5}


def test_class_vectors_are_computed_once_per_search(monkeypatch: pytest.MonkeyPatch) -> None:
    model = translator()
    source_BS = sources(3, 4)
    model.output = Softmax(Drill(WordTable(9, DIM), depth=1, dropout=0.5)).double()
    calls: list[int] = []
    encode = Drill.encode
    monkeypatch.setattr(Drill, "encode", lambda *arguments: calls.append(1) or encode(*arguments))
    results = [
        beam_search(model.train(training), source_BS, EOS, search_settings(6)) for training in (True, False, True)
    ]
    assert len(calls) == 3
    assert results[0] == results[1] == results[2]
    assert model.training
    assert model.encoder.training


@pytest.mark.parametrize("encoder", ENCODERS)
def test_bfloat16_scores_are_close_to_float32(encoder: str) -> None:
    model = translator(encoder).float()
    source_BS = sources(3, 5)
    exact = beam_search(model, source_BS, EOS, search_settings(6))
    with torch.autocast("cpu", torch.bfloat16):
        rough = beam_search(model, source_BS, EOS, search_settings(6))
    for (low,), (full,) in zip(rough, exact, strict=True):
        assert low.score == pytest.approx(full.score, rel=0.1)


def test_empty_batch_gives_no_translations() -> None:
    model = translator()
    source_BS = torch.zeros(0, 3, dtype=torch.long)
    assert beam_search(model, source_BS, EOS) == greedy(model, source_BS, EOS) == sample(model, source_BS, EOS) == []


def test_invalid_search_arguments_are_rejected() -> None:
    model = translator()
    source_BS = sources(3)
    with pytest.raises(SettingsError, match="n_best = 6: must be from 1 to the beam size, 5; for more"):
        beam_search(model, source_BS, EOS, n_best=6)
    with pytest.raises(SettingsError, match="n_best = 0"):
        beam_search(model, source_BS, EOS, n_best=0)
    with pytest.raises(SettingsError, match="banned: contains <eos>"):
        beam_search(model, source_BS, EOS, banned=(EOS,))
    with pytest.raises(SettingsError, match="eos = 9: must be from 0 to 8, the classes of the model"):
        greedy(model, source_BS, 9)
    with pytest.raises(SettingsError, match="top_k = 0"):
        sample(model, source_BS, EOS, top_k=0)
    with pytest.raises(SettingsError, match="top_p = 0"):
        sample(model, source_BS, EOS, top_p=0.0)
    with pytest.raises(SettingsError, match="temperature -1"):
        sample(model, source_BS, EOS, temperature=-1.0)
    with pytest.raises(SettingsError, match="seed = -1: must be 0 or more"):
        sample(model, source_BS, EOS, seed=-1)
    for invalid in ({"beam": 0}, {"length_penalty": -1.0}, {"longest": -1.0}, {"beyond": -1}, {"length_penalty": 1e9}):
        with pytest.raises(ValidationError):
            SearchSettings.model_validate(invalid)


def test_nan_probability_is_reported() -> None:
    model = translator()
    with torch.no_grad():
        next(model.encoder.parameters()).fill_(torch.nan)
    for search in (beam_search, greedy, sample):
        with pytest.raises(NonFiniteError, match="not a number"):
            search(model, sources(3), EOS)


# -- sampled translations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}])
def test_sampling_among_one_word_is_greedy(options: dict[str, float]) -> None:
    model = translator(seed=3)
    source_BS = sources(3, 5, 2)
    hypotheses = sample(model, source_BS, EOS, search_settings(8), **options)  # type: ignore[arg-type]
    assert_same(hypotheses, greedy(model, source_BS, EOS, search_settings(8)))


@pytest.mark.parametrize("encoder", ENCODERS)
def test_sample_depends_only_on_seed_and_source(encoder: str) -> None:
    model = translator(encoder, seed=1)
    source_BS = sources(3, 5, 2, 4)
    samples = [sample(model, source_BS, EOS, search_settings(8), seed=seed) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    for row, hypothesis in zip(source_BS, samples[0], strict=True):
        tokens = [*hypothesis.ids, EOS] if hypothesis.finished else list(hypothesis.ids)
        assert hypothesis.logp == pytest.approx(log_prob(model, row[row != PAD], tokens), abs=1e-11)
        assert hypothesis.score == pytest.approx(hypothesis.logp / len(tokens))
        assert_same(sample(model, row[row != PAD][None], EOS, search_settings(8)), [hypothesis])


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 4)])
def test_samples_follow_the_distribution(temperature: float, top_k: int | None) -> None:
    model, (source_S,), draws, excluded = translator(seed=1), sources(4), 250, 6
    log_probs_V = torch.tensor([log_prob(model, source_S, [word]) for word in range(9)])
    probs_V = (log_probs_V / temperature).exp()
    probs_V[excluded] = 0.0
    probs_V[probs_V < probs_V.sort(descending=True).values[(top_k or 9) - 1]] = 0.0
    probs_V /= probs_V.sum()
    first = search_settings(1)
    seen = torch.zeros(9)
    for seed in range(draws):
        (hypothesis,) = sample(model, source_S[None], EOS, first, temperature, top_k, seed=seed, banned=(excluded,))
        seen[hypothesis.ids[0] if hypothesis.ids else EOS] += 1
        assert hypothesis.finished == (not hypothesis.ids)
    # The chi-square test needs several draws in every class, so the rarest are merged.
    assert not seen[probs_V == 0].any()
    common = probs_V * draws >= 5
    expected = probs_V * draws
    seen = torch.cat([seen[common], seen[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    possible = expected > 0
    expected_counts = expected[possible].double().numpy()
    assert chisquare(seen[possible].double(), expected_counts * (draws / expected_counts.sum())).pvalue > 1e-3
