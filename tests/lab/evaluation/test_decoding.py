"""Decoding with fixed-size rows and with replayed steps equals decoding step by step.

A GPU replays captured graphs; without one, the operators of a step are recorded and run again.
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
from reefknot.lab.evaluation.decoding import Decoder, DecodingBatch, FixedSizeBatch, _round_up, decoding
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.encoders.contract import State
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.models.translator import Translator
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

from .test_beam import (
    DIM,
    ENCODERS,
    ENCODERS_AND_OUTPUTS,
    EOS,
    OUTPUTS,
    assert_same,
    search_settings,
    sources,
    translator,
)

LENGTHS = (5, 2, 9, 3, 4)
SEARCH = SearchSettings(longest=1.5, beyond=2)


def search(decoder: Decoder, source_BS: Tensor, width: int, n_best: int = 1) -> list[list[Hypothesis]]:
    return beam_search(decoder, source_BS, EOS, SEARCH.model_copy(update={"beam": width}), n_best=n_best)


def assert_all_same(actual: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    assert len(actual) == len(expected)
    for ours, reference in zip(actual, expected, strict=True):
        assert_same(ours, reference)


# -- fixed-size rows and KV caches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoder", "output"), ENCODERS_AND_OUTPUTS)
@pytest.mark.parametrize(("width", "n_best"), [(1, 1), (5, 1), (5, 5)])
def test_fixed_size_rows_find_the_same_hypotheses(encoder: str, output: str, width: int, n_best: int) -> None:
    source_BS = sources(*LENGTHS)
    lengths = []
    for seed in range(4):
        model = translator(encoder, output, seed=seed)
        with decoding(model, fixed=True) as fixed:
            hypotheses = search(fixed, source_BS, width, n_best)
        expected = beam_search(model, source_BS, EOS, SEARCH.model_copy(update={"beam": width}), n_best=n_best)
        assert_all_same(hypotheses, expected)
        lengths.append({len(best.ids) for best, *_ in hypotheses})
    assert max(map(len, lengths)) > 1, "sentences of a batch end at different steps"


@pytest.mark.parametrize("encoder", ENCODERS)
def test_fixed_size_rows_give_the_same_samples(encoder: str) -> None:
    model = translator(encoder, seed=1)
    source_BS = sources(*LENGTHS)
    with decoding(model, fixed=True) as fixed, decoding(model, fixed=False) as grown:
        assert_same(greedy(fixed, source_BS, EOS, SEARCH), greedy(grown, source_BS, EOS, SEARCH))
        for options in ({}, {"top_k": 3, "temperature": 0.7}):
            from_fixed, from_grown = (
                sample(decoder, source_BS, EOS, SEARCH, seed=3, banned=(4,), **options) for decoder in (fixed, grown)
            )
            assert_same(from_fixed, from_grown)


def test_beam_can_be_wider_than_the_vocabulary() -> None:
    """A sentence then has fewer hypotheses than rows, and their number changes."""
    model = translator("encoder_decoder", words=5)
    source_BS = sources(4, 2)
    with decoding(model, fixed=True) as fixed:
        hypotheses = beam_search(fixed, source_BS, EOS, search_settings(4, beam=9, early_stop=False), n_best=9)
    assert_all_same(
        hypotheses, beam_search(model, source_BS, EOS, search_settings(4, beam=9, early_stop=False), n_best=9)
    )


def test_fixed_size_rows_keep_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps of a batch have one shape, which batches of similar size share."""
    model = translator("encoder_decoder", seed=2)
    shapes: list[set[tuple[int, ...]]] = []
    forward = Translator.forward

    def counted(self: Translator, tokens_BT: Tensor, state: State) -> object:
        shapes.append({tuple(tensor.shape) for tensor in state.values()} | {tuple(tokens_BT.shape)})
        return forward(self, tokens_BT, state)

    monkeypatch.setattr(Translator, "forward", counted)
    with decoding(model, fixed=True) as fixed:
        for lengths in (LENGTHS, (16, 2, 11, 3, 4), (10, 10, 10, 10, 9)):
            search(fixed, sources(*lengths), 3)
    assert len(shapes) > 10
    assert all(shape == shapes[0] for shape in shapes)
    assert (2, 15, 2, SEARCH.limit(16), DIM // 2) in shapes[0]


def test_kind_of_rows_depends_on_device_and_length() -> None:
    model = translator("encoder_decoder")
    source_BS = sources(3, 4)
    with decoding(model) as decoder:
        assert not decoder.fixed, "a CPU gains nothing from fixed sizes"
        assert decoder.padded_length(9) == 9
        assert type(decoder.start_batch(source_BS, SEARCH.limit, 2, 3, ())) is DecodingBatch
        with decoding(decoder) as same:
            assert same is decoder
    with decoding(model, fixed=True) as decoder:
        assert (decoder.padded_length(0), decoder.padded_length(9), decoder.padded_length(16)) == (0, 16, 16)
        assert decoder.graphs is None
        assert type(decoder.start_batch(source_BS, SEARCH.limit, 2, 3, ())) is FixedSizeBatch
        assert type(decoder.start_batch(source_BS, lambda _: module.MAX_STEPS + 1, 2, 3, ())) is DecodingBatch, (
            "too long to hold"
        )
        assert type(decoder.start_batch(source_BS[:0], SEARCH.limit, 2, 3, ())) is DecodingBatch
        assert beam_search(decoder, source_BS[:0], EOS) == []


def test_batch_sizes_are_rounded_up_to_few_values() -> None:
    sizes = [_round_up(number) for number in range(1, 1000)]
    assert all(number <= size <= 1.125 * number for number, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 70
    assert [_round_up(number) for number in (1, 16, 17, 33, 100, 128, 129)] == [1, 16, 18, 36, 104, 128, 144]


def test_only_the_adaptive_softmax_waits_for_the_device() -> None:
    assert [translator(output=kind).output.synchronizes for kind in OUTPUTS] == [False, True, False, False]


def test_closed_decoder_is_rejected() -> None:
    model = translator()
    source_BS = sources(3, 4)
    with decoding(model) as decoder:
        search(decoder, source_BS, 2)
    with pytest.raises(ArgumentError, match="this decoder is closed"):
        search(decoder, source_BS, 2)


def test_autocast_must_surround_decoding() -> None:
    model = translator("encoder_decoder").float()
    source_BS = sources(3, 4)
    with torch.autocast("cpu", torch.bfloat16), decoding(model, fixed=True) as decoder:
        hypotheses = search(decoder, source_BS, 2)
        with torch.autocast("cpu", enabled=False), pytest.raises(ArgumentError, match="enter autocast before"):
            search(decoder, source_BS, 2)
        for (first, *_), (second, *_) in zip(hypotheses, search(decoder, source_BS, 2), strict=True):
            assert first == second


def test_class_vectors_are_computed_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = translator().train()
    model.output = Softmax(Drill(WordTable(9, DIM), depth=1)).double()
    calls: list[int] = []
    encode = Drill.encode
    monkeypatch.setattr(Drill, "encode", lambda *arguments: calls.append(1) or encode(*arguments))
    with decoding(model) as decoder:
        assert not model.training
        assert not torch.is_grad_enabled()
        for _ in range(3):
            search(decoder, sources(3, 4), 2)
    assert model.training
    assert torch.is_grad_enabled()
    assert len(calls) == 1


# -- replayed steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_replayed_steps_find_the_same_hypotheses(
    encoder: str, dtype: torch.dtype, recorded: list[RecordedGraph]
) -> None:
    """Batches of several shapes alternate; no batch may continue from the state of another."""
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
                    search(replayed, source_BS, width, n_best=width), search(run, source_BS, width, n_best=width)
                )
    assert len(recorded) == len(graphs) == 4
    assert replayed.graphs is None, "graphs are released on exit"


def test_number_of_recorded_graphs_is_bounded(recorded: list[RecordedGraph]) -> None:
    model = translator("attention_gru")
    with decoding(model, fixed=True) as decoder:
        decoder.graphs = GraphCache(decoder.device, limit=2)
        made = []
        for sentences in (1, 2, 1, 3, 1, 2):
            search(decoder, sources(*[4] * sentences), 2)
            made.append(len(recorded))
            assert len(decoder.graphs) <= 2
    assert made == [1, 2, 2, 3, 3, 4]


def test_filler_rows_do_not_change_results(recorded: list[RecordedGraph]) -> None:
    """17 sentences are padded to 18, and finished sentences stay in the batch."""
    model = translator("encoder_decoder", seed=2)
    source_BS = sources(*np.arange(2, 19).tolist())
    with decoding(model, fixed=True) as decoder:
        decoder.graphs = GraphCache(decoder.device, limit=2)
        hypotheses = search(decoder, source_BS, 2)
        assert {graph.inputs[0].shape[1] for graph in decoder.graphs._graphs.values()} == {36}
    assert_all_same(hypotheses, beam_search(model, source_BS, EOS, SEARCH.model_copy(update={"beam": 2})))


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("output", ["softmax", "mixture", "drill"])
def test_captured_steps_find_the_same_hypotheses(
    encoder: str, output: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_GRAPHS", 4)
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
                actual, expected = (search(decoder, source_BS, 3, n_best=3) for decoder in (captured, run))
                for ours, reference in zip(actual, expected, strict=True):
                    assert [hypothesis.ids for hypothesis in ours] == [hypothesis.ids for hypothesis in reference]
                    scores = [[hypothesis.score for hypothesis in beam] for beam in (ours, reference)]
                    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
                drawn, others = (sample(decoder, source_BS, EOS, SEARCH, seed=1) for decoder in (captured, run))
                assert [hypothesis.ids for hypothesis in drawn] == [hypothesis.ids for hypothesis in others]
        assert len(captured.graphs) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("encoder", ENCODERS)
def test_captured_steps_equal_a_growing_kv_cache(encoder: str) -> None:
    model = translator(encoder, seed=2).cuda()
    source_BS = sources(*LENGTHS).cuda()
    with decoding(model) as captured, decoding(model, fixed=False) as grown:
        for width in (1, 5):
            for _ in range(2):
                assert_all_same(*(search(decoder, source_BS, width, n_best=width) for decoder in (captured, grown)))


@pytest.mark.gpu
def test_number_of_captured_graphs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAPHS", 2)
    made: list[int] = []
    record = capture._record
    monkeypatch.setattr(capture, "_record", lambda *arguments: made.append(1) or record(*arguments))
    model = translator("encoder_decoder").cuda()
    with decoding(model) as decoder:
        counts = []
        for sentences in (1, 2, 1, 3, 1, 2):
            search(decoder, sources(*[4] * sentences).cuda(), 2)
            counts.append(len(made))
            assert decoder.graphs is not None
            assert len(decoder.graphs) <= 2
    assert counts == [1, 2, 2, 3, 3, 4]


@pytest.mark.gpu
def test_model_that_waits_for_the_device_is_not_captured() -> None:
    for model in (
        translator(output="adaptive").cuda(),
        Translator(*_parts(EncoderDecoder(DIM, DIM, layers=1, heads=2, recompute=True))).cuda(),
    ):
        with decoding(model) as decoder:
            assert decoder.graphs is None
            assert not decoder.fixed
            assert search(decoder, sources(3, 4).cuda(), 2)


def _parts(encoder: EncoderDecoder) -> tuple[Any, ...]:
    model = translator("encoder_decoder").float()
    return model.source, model.input, encoder, model.output
