"""Rows and memories that keep their size, and steps that are replayed, against steps that run as they are.

A GPU replays what it has captured; where there is none, the operators of a step are recorded and run again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recorded_graph import RecordedGraph
from reefknot.errors import ArgumentError
from reefknot.kernels import capture
from reefknot.kernels.capture import GraphCache
from reefknot.lab.evaluation import decoding as module
from reefknot.lab.evaluation.beam import Hypothesis, SearchSettings, beam_search, greedy, sample
from reefknot.lab.evaluation.decoding import Decoder, FixedRows, Rows, _filled, decoding
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.encoders.contract import State
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.models.translator import Translator
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

from .test_beam import DIM, ENCODERS, EOS, EVERY, OUTPUTS, assert_same, settings, sources, translator

LENGTHS = (5, 2, 9, 3, 4)
HOW = SearchSettings(longest=1.5, beyond=2)


def searched(decoder: Decoder, source_BS: Tensor, width: int, n_best: int = 1) -> list[list[Hypothesis]]:
    return beam_search(decoder, source_BS, EOS, HOW.model_copy(update={"beam": width}), n_best=n_best)


def assert_all_same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    assert len(found) == len(expected)
    for some, others in zip(found, expected, strict=True):
        assert_same(some, others)


# -- rows and memories that keep their size --------------------------------------------------------------------------


@pytest.mark.parametrize(("encoder", "output"), EVERY)
@pytest.mark.parametrize(("width", "n_best"), [(1, 1), (5, 1), (5, 5)])
def test_what_keeps_its_size_finds_the_same(encoder: str, output: str, width: int, n_best: int) -> None:
    source_BS, lengths = sources(*LENGTHS), []
    for seed in range(4):
        model = translator(encoder, output, seed=seed)
        with decoding(model, fixed=True) as fixed:
            found = searched(fixed, source_BS, width, n_best)
        expected = beam_search(model, source_BS, EOS, HOW.model_copy(update={"beam": width}), n_best=n_best)
        assert_all_same(found, expected)
        lengths.append({len(best.ids) for best, *_ in found})
    assert max(map(len, lengths)) > 1, "some batches have sentences that end before others"


@pytest.mark.parametrize("encoder", ENCODERS)
def test_words_that_are_drawn_and_the_best_each_time(encoder: str) -> None:
    model, source_BS = translator(encoder, seed=1), sources(*LENGTHS)
    with decoding(model, fixed=True) as fixed, decoding(model, fixed=False) as grown:
        assert_same(greedy(fixed, source_BS, EOS, HOW), greedy(grown, source_BS, EOS, HOW))
        for options in ({}, {"top_k": 3, "temperature": 0.7}):
            one, other = (sample(each, source_BS, EOS, HOW, seed=3, never=(4,), **options) for each in (fixed, grown))
            assert_same(one, other)


def test_a_beam_wider_than_the_vocabulary() -> None:
    """Sentences then have fewer hypotheses than rows, and their number changes."""
    model, source_BS = translator("encoder_decoder", words=5), sources(4, 2)
    with decoding(model, fixed=True) as fixed:
        found = beam_search(fixed, source_BS, EOS, settings(4, beam=9, early_stop=False), n_best=9)
    assert_all_same(found, beam_search(model, source_BS, EOS, settings(4, beam=9, early_stop=False), n_best=9))


def test_rows_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step to the last a batch has one shape, and one for all batches of like size."""
    model = translator("encoder_decoder", seed=2)
    shapes: list[set[tuple[int, ...]]] = []
    forward = Translator.forward

    def counted(self: Translator, tokens_BT: Tensor, state: State) -> object:
        shapes.append({tuple(each.shape) for each in state.values()} | {tuple(tokens_BT.shape)})
        return forward(self, tokens_BT, state)

    monkeypatch.setattr(Translator, "forward", counted)
    with decoding(model, fixed=True) as fixed:
        for lengths in (LENGTHS, (16, 2, 11, 3, 4), (10, 10, 10, 10, 9)):
            searched(fixed, sources(*lengths), 3)
    assert len(shapes) > 10
    assert all(each == shapes[0] for each in shapes)
    assert (2, 15, 2, HOW.limit(16), DIM // 2) in shapes[0]


def test_how_rows_are_chosen() -> None:
    model, source_BS = translator("encoder_decoder"), sources(3, 4)
    with decoding(model) as decoder:
        assert not decoder.fixed, "a CPU launches fast enough"
        assert decoder.width(9) == 9
        assert type(decoder.begin(source_BS, HOW.limit, 2, 3, ())) is Rows
        with decoding(decoder) as same:
            assert same is decoder
    with decoding(model, fixed=True) as decoder:
        assert (decoder.width(0), decoder.width(9), decoder.width(16)) == (0, 16, 16)
        assert decoder.graphs is None
        assert type(decoder.begin(source_BS, HOW.limit, 2, 3, ())) is FixedRows
        assert type(decoder.begin(source_BS, lambda _: module.ROOM + 1, 2, 3, ())) is Rows, "too long to hold"
        assert type(decoder.begin(source_BS[:0], HOW.limit, 2, 3, ())) is Rows
        assert beam_search(decoder, source_BS[:0], EOS) == []


def test_numbers_of_sentences_are_few() -> None:
    found = [_filled(number) for number in range(1, 1000)]
    assert all(number <= filled <= 1.125 * number for number, filled in enumerate(found, start=1))
    assert len(set(found)) < 70
    assert [_filled(number) for number in (1, 16, 17, 33, 100, 128, 129)] == [1, 16, 18, 36, 104, 128, 144]


def test_ends_say_whether_they_wait() -> None:
    assert [translator(output=each).output.waits for each in OUTPUTS] == [False, True, False, False]


def test_a_decoder_that_was_left_is_refused() -> None:
    model, source_BS = translator(), sources(3, 4)
    with decoding(model) as decoder:
        searched(decoder, source_BS, 2)
    with pytest.raises(ArgumentError, match="this decoder is closed"):
        searched(decoder, source_BS, 2)


def test_autocast_goes_around() -> None:
    model, source_BS = translator("encoder_decoder").float(), sources(3, 4)
    with torch.autocast("cpu", torch.bfloat16), decoding(model, fixed=True) as decoder:
        found = searched(decoder, source_BS, 2)
        with torch.autocast("cpu", enabled=False), pytest.raises(ArgumentError, match="enter autocast before"):
            searched(decoder, source_BS, 2)
        for (mine, *_), (other, *_) in zip(found, searched(decoder, source_BS, 2), strict=True):
            assert mine == other


def test_the_mode_comes_back_and_vectors_are_computed_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = translator().train()
    model.output = Softmax(Drill(WordTable(9, DIM), depth=1)).double()
    calls: list[int] = []
    encode = Drill.encode
    monkeypatch.setattr(Drill, "encode", lambda *given: calls.append(1) or encode(*given))
    with decoding(model) as decoder:
        assert not model.training
        assert not torch.is_grad_enabled()
        for _ in range(3):
            searched(decoder, sources(3, 4), 2)
    assert model.training
    assert torch.is_grad_enabled()
    assert len(calls) == 1


# -- steps that are replayed, as they were recorded -------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_replayed_steps_find_the_same(encoder: str, dtype: torch.dtype, recorded: list[RecordedGraph]) -> None:
    """Over batches of several shapes, some of which come up again: a state of another batch is never gone on from."""
    graphs: Any = GraphCache(torch.device("cpu"), limit=4)
    model = translator(encoder, seed=2)
    if dtype == torch.bfloat16:
        model = model.float()
    with (
        torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16),
        decoding(model, fixed=True) as replayed,
        decoding(model, fixed=True) as run,
    ):
        replayed.graphs = graphs
        for number, lengths in enumerate((LENGTHS, (3, 4, 5, 9, 2), (3, 2), (9, 9, 2, 2, 10), (4, 7))):
            source_BS = sources(*lengths, seed=number)
            for width in (1, 3):
                assert_all_same(
                    searched(replayed, source_BS, width, n_best=width), searched(run, source_BS, width, n_best=width)
                )
    assert len(recorded) == len(graphs) == 4
    assert replayed.graphs is None, "what it read is no longer held"


def test_as_many_graphs_are_kept_as_are_used(recorded: list[RecordedGraph]) -> None:
    model = translator("attention_gru")
    with decoding(model, fixed=True) as decoder:
        decoder.graphs = GraphCache(decoder.device, limit=2)
        made = []
        for sentences in (1, 2, 1, 3, 1, 2):
            searched(decoder, sources(*[4] * sentences), 2)
            made.append(len(recorded))
            assert len(decoder.graphs) <= 2
    assert made == [1, 2, 2, 3, 3, 4]


def test_rows_nobody_reads_may_hold_anything(recorded: list[RecordedGraph]) -> None:
    """17 sentences fill up 18, and those that are done go on beside the others."""
    model, source_BS = translator("encoder_decoder", seed=2), sources(*np.arange(2, 19).tolist())
    with decoding(model, fixed=True) as decoder:
        decoder.graphs = GraphCache(decoder.device, limit=2)
        found = searched(decoder, source_BS, 2)
        assert {graph.inputs[0].shape[1] for graph in decoder.graphs._graphs.values()} == {36}
    assert_all_same(found, beam_search(model, source_BS, EOS, HOW.model_copy(update={"beam": 2})))


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("output", ["softmax", "mixture", "drill"])
def test_captured_steps_find_what_others_do(
    encoder: str, output: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRAPHS", 4)
    model = translator(encoder, "softmax" if output == "drill" else output, seed=2).float()
    if output == "drill":
        model.output = Softmax(Drill(WordTable(9, DIM), depth=1))
    model = model.cuda()
    narrow = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16")
    with narrow, decoding(model) as captured, decoding(model, fixed=True) as run:
        assert captured.graphs is not None
        run.graphs = None
        for _ in range(2):
            for lengths in (LENGTHS, (3, 2), (9, 9, 2, 2, 10)):
                source_BS = sources(*lengths).cuda()
                found, expected = (searched(each, source_BS, 3, n_best=3) for each in (captured, run))
                for some, others in zip(found, expected, strict=True):
                    assert [each.ids for each in some] == [each.ids for each in others]
                    scores = [[each.score for each in one] for one in (some, others)]
                    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
                drawn, others = (sample(each, source_BS, EOS, HOW, seed=1) for each in (captured, run))
                assert [each.ids for each in drawn] == [each.ids for each in others]
        assert len(captured.graphs) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("encoder", ENCODERS)
def test_captured_steps_find_what_a_growing_memory_does(encoder: str) -> None:
    model, source_BS = translator(encoder, seed=2).cuda(), sources(*LENGTHS).cuda()
    with decoding(model) as captured, decoding(model, fixed=False) as grown:
        for width in (1, 5):
            for _ in range(2):
                assert_all_same(*(searched(each, source_BS, width, n_best=width) for each in (captured, grown)))


@pytest.mark.gpu
def test_graphs_are_captured_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRAPHS", 2)
    made: list[int] = []
    record = capture._record
    monkeypatch.setattr(capture, "_record", lambda *given: made.append(1) or record(*given))
    model = translator("encoder_decoder").cuda()
    with decoding(model) as decoder:
        counts = []
        for sentences in (1, 2, 1, 3, 1, 2):
            searched(decoder, sources(*[4] * sentences).cuda(), 2)
            counts.append(len(made))
            assert decoder.graphs is not None
            assert len(decoder.graphs) <= 2
    assert counts == [1, 2, 2, 3, 3, 4]


@pytest.mark.gpu
def test_what_waits_is_not_captured() -> None:
    for model in (
        translator(output="adaptive").cuda(),
        Translator(*_parts(EncoderDecoder(DIM, DIM, layers=1, heads=2, recompute=True))).cuda(),
    ):
        with decoding(model) as decoder:
            assert decoder.graphs is None
            assert not decoder.fixed
            assert searched(decoder, sources(3, 4).cuda(), 2)


def _parts(encoder: EncoderDecoder) -> tuple[Any, ...]:
    model = translator("encoder_decoder").float()
    return model.source, model.input, encoder, model.output
