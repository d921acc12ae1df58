"""Translators against nn.Transformer and against a search without caches: both compute what ours does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.bench import translation
from reefknot.lab.bench.measure import Absent
from reefknot.lab.bench.plain_translation import PlainTraining, PlainTranslator, search_without_cache
from reefknot.lab.bench.translation import Job, Row, job_of, measure_all, random_pairs
from reefknot.lab.evaluation.beam import SearchSettings, beam_search
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.training.settings import TrainingSettings
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.attention_gru import AttentionGRU
from reefknot.nn.encoders.contract import SourceEncoder
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.translator import PAD, Translator
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

WORDS, DIM, LAYERS = 30, 8, 2
SELF = {"attention_in.": "self_attn.in_proj_", "attention_out.": "self_attn.out_proj.", "attention_norm.": "norm1."}
SELF |= {"ffn_in.": "linear1.", "ffn_out.": "linear2."}
NAMES = {
    "encoder": SELF | {"ffn_norm.": "norm2."},
    "decoder": SELF | {"cross_out.": "multihead_attn.out_proj.", "cross_norm.": "norm2.", "ffn_norm.": "norm3."},
}


def _encoder(norm: str = "pre") -> SourceEncoder:
    return EncoderDecoder(DIM, DIM, layers=LAYERS, heads=2, ffn_dim=12, dropout=0.0, norm=norm)  # type: ignore[arg-type]


def _model(encoder: Callable[[], SourceEncoder] = _encoder, tables: int = 1, classifier: type = Plain) -> Translator:
    torch.manual_seed(0)
    held = [WordTable(WORDS, DIM) for _ in range(tables)]
    output = Softmax(classifier(held[-1]), smoothing=0.1)
    return Translator(Lookup(held[0], scale=2.0), Lookup(held[tables // 3], scale=2.0), encoder(), output)


def _take(plain: PlainTranslator, model: Translator) -> None:
    """Our weights in torch's layers."""
    encoder = model.encoder
    assert isinstance(encoder, EncoderDecoder)
    theirs, taken = plain.state_dict(), dict[str, Tensor]()
    for stack, blocks in (("encoder", encoder.source_blocks), ("decoder", encoder.target_blocks)):
        for number, block in enumerate(blocks):
            for name, tensor in block.state_dict().items():
                part, kind = name.rsplit(".", 1)
                at = f"transformer.{stack}.layers.{number}."
                if part == "cross_in":
                    read = getattr(encoder.source_in, kind).chunk(LAYERS)[number]
                    taken[f"{at}multihead_attn.in_proj_{kind}"] = torch.cat([tensor, read])
                else:
                    taken[at + NAMES[stack][f"{part}."] + kind] = tensor
    for stack, norm in (("encoder", encoder.source_norm), ("decoder", encoder.target_norm)):
        taken |= {f"transformer.{stack}.norm.{name}": tensor for name, tensor in norm.state_dict().items()}
    assert isinstance(model.output, Softmax)
    assert model.output.classifier.bias is not None
    taken |= {"source.weight": model.source.tables()[0].weight, "target.weight": model.input.tables()[0].weight}
    taken |= {"generator.weight": model.output.tables()[0].weight, "generator.bias": model.output.classifier.bias}
    assert taken.keys() == theirs.keys()
    plain.load_state_dict(taken)


def _window() -> tuple[Tensor, Tensor]:
    """x_BU and y_BT of two pairs, the second shorter on both sides."""
    x_BU = torch.tensor([[5, 6, 7, 0, 0, 9, 8, 7], [4, 0, PAD, PAD, 0, 3, 0, 0]])
    return x_BU, torch.tensor([[9, 8, 7, 0], [3, 0, PAD, PAD]])


@pytest.mark.parametrize("tables", [1, 2, 3])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_plain_model_is_ours(norm: str, tables: int) -> None:
    """Its loss and the gradients of its tables, tied as ours are."""
    model = _model(lambda: _encoder(norm), tables).double()
    plain = PlainTranslator(model).double()
    _take(plain, model)
    count = sum(each.numel() for each in plain.parameters())
    assert count == sum(each.numel() for each in model.parameters())
    x_BU, y_BT = _window()
    parts = model.loss(x_BU, y_BT).parts
    ours = torch.stack([part.weight * part.sum for part in parts.values()]).sum()
    theirs = plain.loss(x_BU, y_BT)
    torch.testing.assert_close(theirs, ours)
    gradients = torch.autograd.grad(ours, [model.source.tables()[0].weight, model.output.tables()[0].weight])
    torch.testing.assert_close(torch.autograd.grad(theirs, [plain.source.weight, plain.generator.weight]), gradients)


def test_drop_rates_are_where_ours_are() -> None:
    def encoder() -> SourceEncoder:
        return EncoderDecoder(DIM, DIM, 1, 2, 12, dropout=0.3, dropout_attention=0.2, dropout_relu=0.1)

    plain = PlainTranslator(_model(encoder))
    for layer in (plain.transformer.encoder.layers[0], plain.transformer.decoder.layers[0]):
        assert layer.dropout.p == 0.1
        assert layer.self_attn.dropout == 0.2
        assert layer.dropout1.p == layer.dropout2.p == 0.3
    assert plain.transformer.decoder.layers[0].multihead_attn.dropout == 0.2
    assert plain.dropout == 0.3


def test_what_has_no_plain_form_says_so() -> None:
    with pytest.raises(Absent, match="cannot express the encoder AttentionGRU"):
        PlainTranslator(_model(lambda: AttentionGRU(DIM, DIM, units=4)))
    with pytest.raises(Absent, match="rows of a table"):
        PlainTranslator(_model(classifier=Drill))


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("encoder", [_encoder, lambda: AttentionGRU(DIM, DIM, units=4)])
def test_both_searches_find_the_same(encoder: Callable[[], SourceEncoder], beam: int) -> None:
    model = _model(encoder, tables=3).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    source_BS = torch.tensor([[5, 6, 7, 8, 0], [4, 0, PAD, PAD, PAD], [9, 9, 2, 0, PAD]])
    settings = SearchSettings(beam=beam)
    ours = [best for best, *_ in beam_search(model, source_BS, 0, settings)]
    plain = search_without_cache(model, source_BS, 0, settings)
    assert [(each.ids, each.finished) for each in plain] == [(each.ids, each.finished) for each in ours]
    assert [each.score for each in plain] == pytest.approx([each.score for each in ours], rel=1e-5)


def test_the_plain_loop_trains_on_pieces() -> None:
    """The gradients of an update do not depend on how it is cut."""
    found = []
    for pieces in (1, 2):
        settings: Any = {"batch": 2, "steps": 4, "epochs": 1, "accumulate": pieces, "batching": "pairs"}
        settings |= {"optimiser": {"kind": "adam", "learning_rate": 1.0}, "schedule": {"kind": "constant"}}
        plain = PlainTranslator(_model())
        _take(plain, _model())
        training = PlainTraining(plain, TrainingSettings.model_validate(settings), torch.device("cpu"))
        before = [each.clone() for each in training.parameters]
        training(*_window(), 6)
        torch.testing.assert_close(before, [each.detach() for each in training.parameters])  # at a rate of nothing
        found.append([each.grad for each in training.parameters])
    torch.testing.assert_close(found[0], found[1])


def _jobs(monkeypatch: pytest.MonkeyPatch, *rows: str) -> list[Job]:
    """Rows of a recipe whose corpus is not here, of sizes that a test has time for."""
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    monkeypatch.setattr(translation, "RANDOM_PAIRS", 40)
    small = ["encoder.layers=1", "encoder.heads=2", "encoder.ffn_dim=8", "tables.words.dim=8", "tables.source.dim=8"]
    small += ["vocabulary.bpe.merges=50", "training.batch=2", "training.accumulate=1", "training.precision=float32"]
    recipe = load_recipe("pappas2019/table5", small, rows)
    return [job_of(recipe, recipe.row(row), None) for row in rows]


def _measured(jobs: list[Job]) -> list[Row]:
    return [row for rows in measure_all(jobs, "cpu", 0.0, lambda text: None) for row in rows]


def test_every_way_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = _jobs(monkeypatch, "Transformer (base) (Vaswani et al. 2017)")
    assert job.description == "wmt14-en-de not found: random pairs of 50 types"
    rows = _measured([job])
    assert [(row.what, row.mode, row.note) for row in rows] == [
        ("training", "nn.Transformer", ""),
        ("training", "eager", ""),
        ("decoding", "whole prefix", ""),
        ("decoding", "cached", ""),
    ]
    assert all(row.ms and row.tokens_per_second and row.memory_bytes is None for row in rows)
    assert [row.over_baseline for row in rows][::2] == [1.0, 1.0]
    assert [row.same for row in rows] == [None, None, 1.0, 1.0]
    json.dumps([row.record() for row in rows], allow_nan=False)


def test_translations_are_as_long_as_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = _jobs(monkeypatch, "Transformer (base) (Vaswani et al. 2017)")
    x_BU, y_BT, _ = job.windows("cpu")[0]
    with translation._search(job, translation.CACHED, torch.device("cpu")) as work:
        work.run()
        sources = (x_BU[: translation.SENTENCES["cpu"], : -y_BT.shape[1]] != PAD).sum()
        assert work.tokens() == int(sources)


def test_a_row_without_a_plain_form_is_measured_without(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, eager, *_ = _measured(_jobs(monkeypatch, "Transformer-DRILL (base)"))
    assert plain.ms is None
    assert "rows of a table" in plain.note
    assert eager.ms is not None
    assert eager.over_baseline is None


def test_random_pairs_are_zipf_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "RANDOM_PAIRS", 500)
    source, target = random_pairs(100)
    assert len(source) == len(target) == 500
    assert (source.ids[source.bounds[1:] - 1] == 0).all()
    assert (source.ids == 0).sum() == 500
    ones, twos = ((source.ids == word).sum() for word in (1, 2))
    assert 1.7 < ones / twos < 2.3
    assert source.ids.max() == 99


def test_a_language_model_is_measured_elsewhere() -> None:
    recipe = load_recipe("press2017/table6")
    with pytest.raises(SettingsError, match='row "Small model" trains a language model; use reefknot bench steps'):
        job_of(recipe, recipe.row("Small model"), None)
