"""Beam search against exhaustive search and against a plain one that knows no cache, no batch and no early end."""

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
EVERY = list(itertools.product(ENCODERS, OUTPUTS))


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
    """A small model with dropout, whose predictions are far from flat."""
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
    """Random sources of so many tokens, the last of which is <eos>."""
    random = np.random.default_rng(seed)
    rows = [[*random.integers(2, SOURCE_WORDS, length - 1), EOS] for length in lengths]
    return torch.tensor([row + [PAD] * (max(lengths) - len(row)) for row in rows])


def settings(limit: int, **chosen: object) -> SearchSettings:
    return SearchSettings.model_validate({"longest": 0.0, "beyond": limit, **chosen})


@torch.no_grad()
def log_probs(model: Translator, source_S: Tensor, targets: Sequence[Sequence[int]]) -> list[float]:
    """Of each of some targets of one length, all of its tokens, under teacher forcing."""
    y_BT = torch.tensor(targets)
    first_B1 = torch.full((len(y_BT), 1), EOS)
    x_BU = torch.cat([source_S.expand(len(y_BT), -1), first_B1, y_BT[:, :-1]], dim=1)
    model.eval()
    return model.target_log_probs(x_BU, y_BT)[0].sum(1).tolist()


def log_prob(model: Translator, source_S: Tensor, target: Sequence[int]) -> float:
    return log_probs(model, source_S, [target])[0]


def score(logp: float, length: int, penalty: float) -> float:
    return logp / length**penalty


@torch.no_grad()
def plainly(
    model: Translator,
    source_S: Tensor,
    limit: int,
    width: int,
    penalty: float,
    early_stop: bool,
    never: int | None = None,
) -> list[Hypothesis]:
    """All that a beam finds: everything is read again for every word, and only `limit` ends it, or `early_stop`."""
    model.eval()
    open_: list[tuple[float, list[int]]] = [(0.0, [])]
    found: list[Hypothesis] = []
    for length in range(1, limit + 1):
        x_WT = torch.tensor([[EOS, *ids] for _, ids in open_])
        h_WD = model(x_WT, model.read(source_S.expand(len(x_WT), -1))).output[:, -1]
        ranked = [
            (logp + each, [*ids, word])
            for (logp, ids), words in zip(open_, model.output.log_probs(h_WD).tolist(), strict=True)
            for word, each in enumerate(words)
            if word != never
        ]
        ranked.sort(key=lambda each: -each[0])
        ended = [(logp, ids) for logp, ids in ranked[:width] if ids[-1] == EOS]
        found += [Hypothesis(tuple(ids[:-1]), logp, score(logp, length, penalty), True) for logp, ids in ended]
        open_ = [each for each in ranked if each[1][-1] != EOS][:width]
        found.sort(key=lambda each: -each.score)
        if early_stop and len(found) >= width and found[width - 1].score >= score(open_[0][0], length, penalty):
            break
    return found + [Hypothesis(tuple(ids), logp, score(logp, limit, penalty), False) for logp, ids in open_]


def assert_same(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    assert [(each.ids, each.finished) for each in found] == [(each.ids, each.finished) for each in expected]
    for mine, other in zip(found, expected, strict=True):
        assert mine[1:3] == pytest.approx(other[1:3], abs=1e-11)


@pytest.mark.parametrize(("encoder", "output"), EVERY)
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_a_beam_of_all_prefixes_is_exhaustive_search(encoder: str, output: str, penalty: float) -> None:
    words, limit = 5, 4
    model, source_1S = translator(encoder, output, words), sources(4)
    others = [word for word in range(words) if word != EOS]
    every = []
    for length in range(1, limit + 1):
        targets = [[*ids, EOS] for ids in itertools.product(others, repeat=length - 1)]
        pairs = zip(targets, log_probs(model, source_1S[0], targets), strict=True)
        every += [Hypothesis(tuple(ids[:-1]), logp, score(logp, length, penalty), True) for ids, logp in pairs]
    every.sort(key=lambda each: -each.score)
    wide = settings(limit, beam=words * len(others) ** (limit - 1), length_penalty=penalty, early_stop=False)
    (found,) = beam_search(model, source_1S, EOS, wide, n_best=len(every))
    assert_same(found, every)
    (best,) = beam_search(model, source_1S, EOS, wide)
    assert_same(best, every[:1])


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("early_stop", [True, False])
def test_every_beam_finds_what_a_plain_search_does(encoder: str, penalty: float, early_stop: bool) -> None:
    """So a sentence never ends too early, however many are asked for, and goes its own way in a batch."""
    limit = 7
    source_BS = sources(4, 2, 6)
    seen = set()
    for seed, width in ((1, 1), (2, 2), (1, 3), (2, 5)):
        model = translator(encoder, seed=seed)
        how = settings(limit, beam=width, length_penalty=penalty, early_stop=early_stop)
        best, several = (beam_search(model, source_BS, EOS, how, n_best=each) for each in (1, width))
        for row, found in enumerate(several):
            source_S = source_BS[row][source_BS[row] != PAD]
            expected = plainly(model, source_S, limit, width, penalty, early_stop)[:width]
            assert_same(found, expected)
            assert_same(best[row], expected[:1])
            seen.update((each.finished, len(each.ids)) for each in found)
    assert len(seen) > 3


def test_early_stop_ends_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """And finds no better one than a search that goes on until no other can be."""
    steps = 0
    read = Translator.forward

    def counted(self: Translator, *given: Any) -> Encoded:
        nonlocal steps
        steps += 1
        return read(self, *given)

    monkeypatch.setattr(Translator, "forward", counted)
    spent = {True: 0, False: 0}
    for seed in range(6):
        model, scores = translator(seed=seed), {}
        for stop in spent:
            before = steps
            (found,) = beam_search(model, sources(5), EOS, settings(12, beam=2, early_stop=stop))[0]
            spent[stop] += steps - before
            scores[stop] = found.score
        assert scores[False] >= scores[True]
    assert spent[True] < spent[False]


@pytest.mark.parametrize(("encoder", "output"), EVERY)
def test_a_beam_of_one_takes_the_best_word_each_time(encoder: str, output: str) -> None:
    model, source_BS = translator(encoder, output, seed=3), sources(3, 5, 2, 4)
    found = greedy(model, source_BS, EOS, settings(8, beam=7, early_stop=False))
    assert [[each] for each in found] == beam_search(model, source_BS, EOS, settings(8, beam=1))
    for row, each in zip(source_BS, found, strict=True):
        ids: list[int] = []
        with torch.no_grad():
            while len(ids) < 8 and EOS not in ids:
                h_1D = model.eval()(torch.tensor([[EOS, *ids]]), model.read(row[None])).output[:, -1]
                ids.append(int(model.output.log_probs(h_1D).argmax()))
        assert (*each.ids, *[EOS] * each.finished) == tuple(ids)
        assert each.logp == pytest.approx(log_prob(model, row[row != PAD], ids), abs=1e-11)


@pytest.mark.parametrize(("encoder", "output"), EVERY)
def test_scores_are_those_of_teacher_forcing(encoder: str, output: str) -> None:
    model, source_BS = translator(encoder, output), sources(3, 5, 2)
    for row, found in zip(source_BS, beam_search(model, source_BS, EOS, settings(9, beam=4), n_best=4), strict=True):
        assert len({each.ids for each in found}) == len(found) == 4
        finished = [each for each in found if each.finished]
        assert found[: len(finished)] == sorted(finished, key=lambda each: -each.score)
        for each in found:
            tokens = [*each.ids, EOS] if each.finished else list(each.ids)
            assert each.logp == pytest.approx(log_prob(model, row[row != PAD], tokens), abs=1e-11)
            assert each.score == pytest.approx(each.logp / len(tokens))
            assert EOS not in each.ids


@pytest.mark.parametrize(("encoder", "output"), EVERY)
@pytest.mark.parametrize("early_stop", [True, False])
def test_neither_batch_nor_padding_changes_a_translation(encoder: str, output: str, early_stop: bool) -> None:
    model, source_BS = translator(encoder, output, seed=5), sources(5, 2, 7, 3, 4)
    how = SearchSettings(beam=3, longest=1.5, beyond=2, early_stop=early_stop)
    together = beam_search(model, source_BS, EOS, how, n_best=3)
    padded = torch.cat([source_BS, torch.full((5, 6), PAD)], dim=1)
    order = [3, 0, 4, 2, 1]
    shuffled = beam_search(model, padded[order], EOS, how, n_best=3)
    for row, (place, found) in enumerate(zip(order, shuffled, strict=True)):
        assert_same(found, together[place])
        alone = source_BS[row][source_BS[row] != PAD][None]
        assert_same(beam_search(model, alone, EOS, how, n_best=3)[0], together[row])


def test_what_is_never_to_be_produced_is_not() -> None:
    model, source_BS = translator(seed=1), sources(4, 3)
    free = beam_search(model, source_BS, EOS, settings(6, beam=3))
    unwanted = free[0][0].ids[0]
    for row, found in zip(
        source_BS, beam_search(model, source_BS, EOS, settings(6, beam=3), [unwanted], 3), strict=True
    ):
        assert_same(found, plainly(model, row[row != PAD], 6, 3, 1.0, True, never=unwanted)[:3])
    # Two words and <eos> are left: fewer hypotheses than the beam has room for.
    found = beam_search(model, source_BS, EOS, settings(2, beam=5), never=range(4, 9), n_best=5)[0]
    assert {word for each in found for word in each.ids} <= {0, 2, 3}
    assert len(found) == 5


def without_end(model: Translator) -> Translator:
    """The same with an <eos> that hardly ever comes."""
    assert isinstance(model.output, Softmax)
    assert model.output.classifier.bias is not None
    with torch.no_grad():
        model.output.classifier.bias[EOS] = -100.0
    return model


def test_a_limit_is_that_of_its_own_source_and_leaves_a_hypothesis_unfinished() -> None:
    model, source_BS = without_end(translator()), sources(6, 2, 3)
    how = SearchSettings(beam=3, longest=1.5, beyond=1, length_penalty=0.5)
    for found, limit in zip(beam_search(model, source_BS, EOS, how, n_best=3), (10, 4, 5), strict=True):
        assert [len(each.ids) for each in found] == [limit] * 3
        assert not any(each.finished for each in found)
        assert [each.score for each in found] == sorted((each.logp / limit**0.5 for each in found), reverse=True)
    assert [len(each.ids) for each in sample(model, source_BS, EOS, how)] == [10, 4, 5]
    assert SearchSettings(longest=0.1, beyond=0).limit(2) == 1


def test_finished_hypotheses_come_before_those_that_are_not() -> None:
    (found,) = beam_search(translator(), sources(4), EOS, settings(1, beam=9), n_best=9)
    assert found[0].ids == ()
    assert [each.finished for each in found] == [True] + [False] * 8
    assert found[0].score < found[1].score
    assert [each.score for each in found[1:]] == sorted((each.score for each in found[1:]), reverse=True)


def test_equal_continuations_are_told_apart_by_their_ids() -> None:
    search = beam._Search([9], EOS, settings(9, beam=3), 1)
    assert search.step(np.log([[0.25, 0.25, 0.25, 0.25]]), np.array([[7, 2, 5, 3]])).tolist() == [0, 0, 0]
    assert search.ids_AWT.tolist() == [[[EOS, 2], [EOS, 3], [EOS, 5]]]
    rows = search.step(np.log([[0.5, 0.25], [0.5, 0.25], [0.5, 0.25]]), np.array([[8, 2], [4, 2], [8, 2]]))
    assert rows.tolist() == [1, 0, 2]
    assert search.ids_AWT.tolist() == [[[EOS, 3, 4], [EOS, 2, 8], [EOS, 5, 8]]]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_what_is_done_leaves_and_the_source_is_not_copied_meanwhile(
    encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source_BS = without_end(translator(encoder)), sources(2, 3, 6, 5, 4)
    source = "annotations" if encoder == "attention_gru" else "source.1"
    rows: list[int] = []
    held: list[Tensor] = []
    forward = Translator.forward

    def counted(self: Translator, tokens_BT: Tensor, state: State) -> object:
        assert {each.shape[1] for each in state.values()} == {len(tokens_BT)}
        rows.append(len(tokens_BT))
        held.append(state[source])
        return forward(self, tokens_BT, state)

    monkeypatch.setattr(Translator, "forward", counted)
    waits: list[int] = []
    wait = beam._on_host
    monkeypatch.setattr(beam, "_on_host", lambda *given: waits.append(1) or wait(*given))
    how = SearchSettings(beam=3, longest=1.0, beyond=4)
    beam_search(model, source_BS, EOS, how)
    assert rows == [5, 15, 15, 15, 15, 15, 12, 9, 6, 3]
    assert len(waits) == len(rows)
    for before, after in itertools.pairwise(held[1:]):
        assert (before is after) == (before.shape == after.shape)


def test_an_output_end_is_asked_for_no_more_words_than_can_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = translator(output="adaptive", words=30)
    assert isinstance(model.output, AdaptiveSoftmax)
    asked: list[int] = []
    search = model.output.search
    monkeypatch.setattr(model.output, "search", lambda h_ND, k: asked.append(k) or search(h_ND, k))
    beam_search(model, sources(3, 4), EOS, settings(5, beam=3), never=(0,))
    assert set(asked) == {5}


def test_class_vectors_are_computed_once_and_the_mode_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source_BS = translator(), sources(3, 4)
    model.output = Softmax(Drill(WordTable(9, DIM), depth=1, dropout=0.5)).double()
    calls: list[int] = []
    encode = Drill.encode
    monkeypatch.setattr(Drill, "encode", lambda *given: calls.append(1) or encode(*given))
    found = [beam_search(model.train(training), source_BS, EOS, settings(6)) for training in (True, False, True)]
    assert len(calls) == 3
    assert found[0] == found[1] == found[2]
    assert model.training
    assert model.encoder.training


@pytest.mark.parametrize("encoder", ENCODERS)
def test_half_precision(encoder: str) -> None:
    model, source_BS = translator(encoder).float(), sources(3, 5)
    exact = beam_search(model, source_BS, EOS, settings(6))
    with torch.autocast("cpu", torch.bfloat16):
        rough = beam_search(model, source_BS, EOS, settings(6))
    for (mine,), (other,) in zip(rough, exact, strict=True):
        assert mine.score == pytest.approx(other.score, rel=0.1)


def test_no_sources_have_no_translations() -> None:
    model, source_BS = translator(), torch.zeros(0, 3, dtype=torch.long)
    assert beam_search(model, source_BS, EOS) == greedy(model, source_BS, EOS) == sample(model, source_BS, EOS) == []


def test_what_is_refused() -> None:
    model, source_BS = translator(), sources(3)
    with pytest.raises(SettingsError, match="n_best = 6: must be 1 to 5, the beam; use a wider one"):
        beam_search(model, source_BS, EOS, n_best=6)
    with pytest.raises(SettingsError, match="n_best = 0"):
        beam_search(model, source_BS, EOS, n_best=0)
    with pytest.raises(SettingsError, match="<eos> is among the ids"):
        beam_search(model, source_BS, EOS, never=(EOS,))
    with pytest.raises(SettingsError, match="eos = 9 is not a class of the model, which has 9"):
        greedy(model, source_BS, 9)
    with pytest.raises(SettingsError, match="top_k = 0"):
        sample(model, source_BS, EOS, top_k=0)
    with pytest.raises(SettingsError, match="top_p = 0"):
        sample(model, source_BS, EOS, top_p=0.0)
    with pytest.raises(SettingsError, match="temperature -1"):
        sample(model, source_BS, EOS, temperature=-1.0)
    with pytest.raises(SettingsError, match="seed = -1: must be 0 or more"):
        sample(model, source_BS, EOS, seed=-1)
    for wrong in ({"beam": 0}, {"length_penalty": -1.0}, {"longest": -1.0}, {"beyond": -1}, {"length_penalty": 1e9}):
        with pytest.raises(ValidationError):
            SearchSettings.model_validate(wrong)


def test_a_probability_that_is_no_number_is_a_sentence() -> None:
    model = translator()
    with torch.no_grad():
        next(model.encoder.parameters()).fill_(torch.nan)
    for search in (beam_search, greedy, sample):
        with pytest.raises(NonFiniteError, match="not a number"):
            search(model, sources(3), EOS)


# -- drawn translations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}])
def test_a_draw_among_the_best_alone_is_greedy(options: dict[str, float]) -> None:
    model, source_BS = translator(seed=3), sources(3, 5, 2)
    found = sample(model, source_BS, EOS, settings(8), **options)  # type: ignore[arg-type]
    assert_same(found, greedy(model, source_BS, EOS, settings(8)))


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_draw_follows_from_seed_and_source(encoder: str) -> None:
    model, source_BS = translator(encoder, seed=1), sources(3, 5, 2, 4)
    found = [sample(model, source_BS, EOS, settings(8), seed=seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    for row, each in zip(source_BS, found[0], strict=True):
        tokens = [*each.ids, EOS] if each.finished else list(each.ids)
        assert each.logp == pytest.approx(log_prob(model, row[row != PAD], tokens), abs=1e-11)
        assert each.score == pytest.approx(each.logp / len(tokens))
        assert_same(sample(model, row[row != PAD][None], EOS, settings(8)), [each])


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 4)])
def test_draws_follow_the_distribution(temperature: float, top_k: int | None) -> None:
    model, (source_S,), draws, unwanted = translator(seed=1), sources(4), 250, 6
    logp_V = torch.tensor([log_prob(model, source_S, [word]) for word in range(9)])
    p_V = (logp_V / temperature).exp()
    p_V[unwanted] = 0.0
    p_V[p_V < p_V.sort(descending=True).values[(top_k or 9) - 1]] = 0.0
    p_V /= p_V.sum()
    first = settings(1)
    seen = torch.zeros(9)
    for seed in range(draws):
        (found,) = sample(model, source_S[None], EOS, first, temperature, top_k, seed=seed, never=(unwanted,))
        seen[found.ids[0] if found.ids else EOS] += 1
        assert found.finished == (not found.ids)
    # The chi-square test wants a few draws in every class: the rarest go together.
    assert not seen[p_V == 0].any()
    common = p_V * draws >= 5
    seen, expected = (torch.cat([each[common], each[~common].sum()[None]]) for each in (seen, p_V * draws))
    kept = expected > 0
    assert chisquare(seen[kept], expected[kept] * (draws / float(expected[kept].sum()))).pvalue > 1e-3
