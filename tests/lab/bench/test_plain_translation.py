"""Translators against nn.Transformer, and beam search against a search without a KV cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.bench import translation
from reefknot.lab.bench.measure import Unavailable
from reefknot.lab.bench.plain_translation import PlainTraining, PlainTranslator, search_without_cache
from reefknot.lab.bench.translation import Job, ModeMeasurement, build_job, measure_all, sample_pairs
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
SELF_NAMES = {
    "attention_in.": "self_attn.in_proj_",
    "attention_out.": "self_attn.out_proj.",
    "attention_norm.": "norm1.",
}
SELF_NAMES |= {"ffn_in.": "linear1.", "ffn_out.": "linear2."}
TORCH_NAMES = {
    "encoder": SELF_NAMES | {"ffn_norm.": "norm2."},
    "decoder": SELF_NAMES | {"cross_out.": "multihead_attn.out_proj.", "cross_norm.": "norm2.", "ffn_norm.": "norm3."},
}


def _encoder(norm: str = "pre") -> SourceEncoder:
    return EncoderDecoder(DIM, DIM, layers=LAYERS, heads=2, ffn_dim=12, dropout=0.0, norm=norm)  # type: ignore[arg-type]


def _model(encoder: Callable[[], SourceEncoder] = _encoder, tables: int = 1, classifier: type = Plain) -> Translator:
    torch.manual_seed(0)
    word_tables = [WordTable(WORDS, DIM) for _ in range(tables)]
    output = Softmax(classifier(word_tables[-1]), smoothing=0.1)
    return Translator(Lookup(word_tables[0], scale=2.0), Lookup(word_tables[tables // 3], scale=2.0), encoder(), output)


def _copy_weights(plain: PlainTranslator, model: Translator) -> None:
    """Copy our weights to torch's layers."""
    encoder = model.encoder
    assert isinstance(encoder, EncoderDecoder)
    copied: dict[str, Tensor] = {}
    for stack, blocks in (("encoder", encoder.source_blocks), ("decoder", encoder.target_blocks)):
        for layer, block in enumerate(blocks):
            for name, tensor in block.state_dict().items():
                module, suffix = name.rsplit(".", 1)
                prefix = f"transformer.{stack}.layers.{layer}."
                if module == "cross_in":
                    source_part = getattr(encoder.source_in, suffix).chunk(LAYERS)[layer]
                    copied[f"{prefix}multihead_attn.in_proj_{suffix}"] = torch.cat([tensor, source_part])
                else:
                    copied[prefix + TORCH_NAMES[stack][f"{module}."] + suffix] = tensor
    for stack, norm in (("encoder", encoder.source_norm), ("decoder", encoder.target_norm)):
        copied |= {f"transformer.{stack}.norm.{name}": tensor for name, tensor in norm.state_dict().items()}
    assert isinstance(model.output, Softmax)
    assert model.output.classifier.bias is not None
    copied |= {"source.weight": model.source.tables()[0].weight, "target.weight": model.input.tables()[0].weight}
    copied |= {"generator.weight": model.output.tables()[0].weight, "generator.bias": model.output.classifier.bias}
    assert copied.keys() == plain.state_dict().keys()
    plain.load_state_dict(copied)


def _window() -> tuple[Tensor, Tensor]:
    """Return pairs_BU and targets_BT of two pairs, the second of which is shorter on both sides."""
    pairs_BU = torch.tensor([[5, 6, 7, 0, 0, 9, 8, 7], [4, 0, PAD, PAD, 0, 3, 0, 0]])
    return pairs_BU, torch.tensor([[9, 8, 7, 0], [3, 0, PAD, PAD]])


@pytest.mark.parametrize("tables", [1, 2, 3])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_plain_translator_has_equal_loss_and_gradients(norm: str, tables: int) -> None:
    """Compares the loss and the gradients of the tables, for every kind of tying."""
    model = _model(lambda: _encoder(norm), tables).double()
    plain = PlainTranslator(model).double()
    _copy_weights(plain, model)
    count = sum(parameter.numel() for parameter in plain.parameters())
    assert count == sum(parameter.numel() for parameter in model.parameters())
    pairs_BU, targets_BT = _window()
    parts = model.loss(pairs_BU, targets_BT).parts
    loss = torch.stack([part.weight * part.sum for part in parts.values()]).sum()
    plain_loss = plain.loss(pairs_BU, targets_BT)
    torch.testing.assert_close(plain_loss, loss)
    gradients = torch.autograd.grad(loss, [model.source.tables()[0].weight, model.output.tables()[0].weight])
    torch.testing.assert_close(
        torch.autograd.grad(plain_loss, [plain.source.weight, plain.generator.weight]), gradients
    )


def test_plain_translator_has_the_same_dropout() -> None:
    def encoder() -> SourceEncoder:
        return EncoderDecoder(DIM, DIM, 1, 2, 12, dropout=0.3, dropout_attention=0.2, dropout_relu=0.1)

    plain = PlainTranslator(_model(encoder))
    for layer in (plain.transformer.encoder.layers[0], plain.transformer.decoder.layers[0]):
        assert layer.dropout.p == 0.1
        assert layer.self_attn.dropout == 0.2
        assert layer.dropout1.p == layer.dropout2.p == 0.3
    assert plain.transformer.decoder.layers[0].multihead_attn.dropout == 0.2
    assert plain.dropout == 0.3


def test_model_without_a_plain_form_is_reported() -> None:
    with pytest.raises(Unavailable, match="cannot express the encoder AttentionGRU"):
        PlainTranslator(_model(lambda: AttentionGRU(DIM, DIM, units=4)))
    with pytest.raises(Unavailable, match="rows of a table"):
        PlainTranslator(_model(classifier=Drill))


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("encoder", [_encoder, lambda: AttentionGRU(DIM, DIM, units=4)])
def test_search_with_and_without_cache_finds_the_same(encoder: Callable[[], SourceEncoder], beam: int) -> None:
    model = _model(encoder, tables=3).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    source_BS = torch.tensor([[5, 6, 7, 8, 0], [4, 0, PAD, PAD, PAD], [9, 9, 2, 0, PAD]])
    settings = SearchSettings(beam=beam)
    cached = [best for best, *_ in beam_search(model, source_BS, 0, settings)]
    uncached = search_without_cache(model, source_BS, 0, settings)
    assert [(hypothesis.ids, hypothesis.finished) for hypothesis in uncached] == [
        (hypothesis.ids, hypothesis.finished) for hypothesis in cached
    ]
    assert [hypothesis.score for hypothesis in uncached] == pytest.approx(
        [hypothesis.score for hypothesis in cached], rel=1e-5
    )


def test_plain_training_is_independent_of_accumulation() -> None:
    """The gradients of an update do not depend on the number of micro-batches."""
    gradients = []
    for micro_batches in (1, 2):
        settings: Any = {"batch": 2, "steps": 4, "epochs": 1, "accumulate": micro_batches, "batching": "pairs"}
        settings |= {"optimiser": {"kind": "adam", "learning_rate": 1.0}, "schedule": {"kind": "constant"}}
        plain = PlainTranslator(_model())
        _copy_weights(plain, _model())
        training = PlainTraining(plain, TrainingSettings.model_validate(settings), torch.device("cpu"))
        before = [parameter.clone() for parameter in training.parameters]
        training(*_window(), 6)
        torch.testing.assert_close(
            before, [parameter.detach() for parameter in training.parameters]
        )  # the learning rate is still zero
        gradients.append([parameter.grad for parameter in training.parameters])
    torch.testing.assert_close(gradients[0], gradients[1])


def _jobs(monkeypatch: pytest.MonkeyPatch, *rows: str) -> list[Job]:
    """Return small jobs for rows of a recipe whose corpus is missing."""
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    monkeypatch.setattr(translation, "NUM_RANDOM_PAIRS", 40)
    small = ["encoder.layers=1", "encoder.heads=2", "encoder.ffn_dim=8", "tables.words.dim=8", "tables.source.dim=8"]
    small += ["vocabulary.bpe.merges=50", "training.batch=2", "training.accumulate=1", "training.precision=float32"]
    recipe = load_recipe("pappas2019/table5", small, rows)
    return [build_job(recipe, recipe.row(row), None) for row in rows]


def _measure(jobs: list[Job]) -> list[ModeMeasurement]:
    return [row for rows in measure_all(jobs, "cpu", 0.0, lambda text: None) for row in rows]


def test_every_mode_is_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = _jobs(monkeypatch, "Transformer (base) (Vaswani et al. 2017)")
    assert job.description == "wmt14-en-de not found: random pairs of 50 types"
    rows = _measure([job])
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


def test_measured_translations_are_as_long_as_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = _jobs(monkeypatch, "Transformer (base) (Vaswani et al. 2017)")
    pairs_BU, targets_BT, _ = job.windows("cpu")[0]
    with translation._prepare_decoding(job, translation.CACHED, torch.device("cpu")) as workload:
        workload.run()
        sources = (pairs_BU[: translation.NUM_SOURCES["cpu"], : -targets_BT.shape[1]] != PAD).sum()
        assert workload.count_tokens() == int(sources)


def test_row_without_a_plain_form_has_no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, eager, *_ = _measure(_jobs(monkeypatch, "Transformer-DRILL (base)"))
    assert plain.ms is None
    assert "rows of a table" in plain.note
    assert eager.ms is not None
    assert eager.over_baseline is None


def test_random_pairs_follow_zipf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "NUM_RANDOM_PAIRS", 500)
    source, target = sample_pairs(100)
    assert len(source) == len(target) == 500
    assert (source.ids[source.bounds[1:] - 1] == 0).all()
    assert (source.ids == 0).sum() == 500
    rank_one, rank_two = ((source.ids == word).sum() for word in (1, 2))
    assert 1.7 < rank_one / rank_two < 2.3
    assert source.ids.max() == 99


def test_language_model_row_is_rejected() -> None:
    recipe = load_recipe("press2017/table6")
    with pytest.raises(SettingsError, match='row "Small model" trains a language model; use reefknot bench steps'):
        build_job(recipe, recipe.row("Small model"), None)
