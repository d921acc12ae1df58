"""Our output ends work as heads of masked language models and of encoder-decoder models of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from torch import Tensor

import reefknot as rk
from hf.models import V, loss_and_gradients, make_batch, make_model
from hf.test_replace_head import COUNTS, D, stored_tensors, tied_parameters

MASKED = ("BERT", "RoBERTa", "ESM, with an added bias")
SEQ2SEQ = ("T5", "T5 v1.1", "BART", "Marian")
MODEL_TYPES = {"MaskedLM": "reefknot_head_masked_lm", "Seq2SeqLM": "reefknot_head_seq2seq"}
BATCH = make_batch()
BOTH = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def kind_of(architecture: str) -> str:
    return "MaskedLM" if architecture in MASKED else "Seq2SeqLM"


def replace(architecture: str, tied: bool = True, drill: bool = False, **settings: Any) -> Any:
    model = make_model(architecture)
    embedding = model.get_input_embeddings()
    if tied and "start" in settings and model.get_output_embeddings().weight is not embedding.weight:
        pytest.skip("in transformers 4, T5 v1.1 is not tied")
    table = rk.WordTable.from_embedding(embedding) if tied else rk.WordTable(V, D)
    classifier = rk.Drill(table, depth=2) if drill else rk.Plain(table)
    return rk.hf.replace_head(model, rk.Softmax(classifier), **settings)


def save_and_load(model: Any, folder: Path, architecture: str) -> Any:
    model.save_pretrained(folder)
    return getattr(transformers, f"AutoModelFor{kind_of(architecture)}").from_pretrained(folder)


def log_probs(model: Any) -> Tensor:
    with torch.no_grad():
        inputs = {**BATCH, "return_logits": True} if hasattr(model, "end") else BATCH
        logits: Tensor = model(**inputs).logits
    return logits.log_softmax(-1)


@BOTH
@pytest.mark.parametrize("architecture", MASKED + SEQ2SEQ)
def test_loss_logits_and_gradients_start_the_same(architecture: str, tied: bool) -> None:
    original = make_model(architecture)
    expected_loss, expected = loss_and_gradients(original, BATCH)
    model = replace(architecture, tied, start="same")
    loss, gradients = loss_and_gradients(model, BATCH)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    expected_log_probs = log_probs(original)
    largest = float(expected_log_probs.abs().max())  # float32 rounds every log-probability relative to the largest
    torch.testing.assert_close(log_probs(model), expected_log_probs, rtol=0, atol=1e-6 * largest)

    layer = original.get_output_embeddings()
    weight_name = next(name for name, parameter in original.named_parameters() if parameter is layer.weight)
    bias_names = [name for name, gradient in expected.items() if gradient.shape == (V,)]
    bias_gradient = gradients.pop("end.classifier.bias")
    for bias_name in bias_names:  # the new end has a bias in any case
        gradients[f"language_model.{bias_name}"] = bias_gradient
    if not tied:  # the original is tied, except T5 v1.1 in transformers 4
        gradient = gradients.pop("end.classifier.table.weight")
        gradients[f"language_model.{weight_name}"] = gradients.get(f"language_model.{weight_name}", 0) + gradient
    own_gradients = {name.removeprefix("language_model."): gradient for name, gradient in gradients.items()}
    torch.testing.assert_close(own_gradients, expected, rtol=1e-6, atol=1e-6)


@BOTH
@pytest.mark.parametrize("architecture", MASKED + SEQ2SEQ)
def test_model_is_saved_and_loaded(architecture: str, tied: bool, tmp_path: Path) -> None:
    model = replace(architecture, tied, drill=True)
    loaded = save_and_load(model, tmp_path, architecture)
    torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=0)
    assert torch.equal(loaded(**BATCH).loss, model(**BATCH).loss)
    assert tied_parameters(loaded) == tied_parameters(model)
    assert bool(tied_parameters(model)) == tied
    # No tensor is in the file twice, and every parameter learns that learned before.
    sizes = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    assert sum(tensor.numel() for tensor in stored_tensors(tmp_path).values()) <= sum(sizes.values())
    trained = loss_and_gradients(model, BATCH)[1]
    original = make_model(architecture)
    untrained = {name for name, _ in original.named_parameters()} - set(loss_and_gradients(original, BATCH)[1])
    still_untrained = {name for name, _ in model.named_parameters()} - set(trained)
    assert still_untrained == {f"language_model.{name}" for name in untrained}


def test_transformers_alone_rejects_saved_models(tmp_path: Path) -> None:
    for architecture in ("BERT", "BART"):
        folder = tmp_path / kind_of(architecture)
        replace(architecture).save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["model_type"] == MODEL_TYPES[folder.name]
    program = f"""
import transformers
for kind, model_type in {MODEL_TYPES!r}.items():
    try:
        getattr(transformers, "AutoModelFor" + kind).from_pretrained({str(tmp_path)!r} + "/" + kind)
    except ValueError as error:
        assert model_type in str(error), error
        print("rejected")
"""
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert completed.stdout == "rejected\nrejected\n", completed.stderr


@pytest.mark.parametrize("architecture", SEQ2SEQ)
def test_generation_is_that_of_the_model(architecture: str, tmp_path: Path) -> None:
    sources, mask = BATCH["input_ids"], torch.ones_like(BATCH["input_ids"])
    mask[0, 7:] = 0
    original = make_model(architecture)
    model = save_and_load(replace(architecture, architecture != "T5 v1.1", start="same"), tmp_path, architecture)
    for settings in ({"do_sample": False}, {"num_beams": 3}, {"do_sample": False, "use_cache": False}):
        options = {"attention_mask": mask, "max_new_tokens": 6, **settings}
        assert torch.equal(model.generate(sources, **options), original.generate(sources, **options))


@pytest.mark.parametrize("architecture", ["BERT", "T5"])
def test_adaptive_end_reads_the_order_of_the_tokens(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture)
    table = rk.hf.EmbeddingBands(model.get_input_embeddings(), COUNTS, sizes=[40, 100])
    model = rk.hf.replace_head(model, rk.AdaptiveSoftmax(table, rk.BandProjections(table, D, head=False)))
    labels = BATCH["labels"]
    outputs = model(**BATCH, return_logits=True)
    nll = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(outputs.loss, nll)
    torch.testing.assert_close(log_probs(save_and_load(model, tmp_path, architecture)), log_probs(model))


@pytest.mark.parametrize("architecture", ["BERT", "BART"])
def test_losses_of_micro_batches_add_up(architecture: str) -> None:
    model = replace(architecture, drill=True)
    count = int((BATCH["labels"] != -100).sum())
    whole = model(**BATCH).loss
    parts = [{key: value[row : row + 1] for key, value in BATCH.items()} for row in range(3)]
    losses = [model(**part, num_items_in_batch=torch.tensor(count)).loss for part in parts]
    torch.testing.assert_close(torch.stack(losses).sum(), whole)


@pytest.mark.parametrize("size", [V + 9, V - 30])
@BOTH
@pytest.mark.parametrize("architecture", ["RoBERTa", "T5", "BART"])
def test_both_ends_are_resized(architecture: str, tied: bool, size: int, tmp_path: Path) -> None:
    model = replace(architecture, tied, start="same")
    common = min(size, V)
    tokens = torch.tensor([[4, 5, 6, 7]])
    before = model(input_ids=tokens, labels=tokens, return_logits=True).logits[..., :common].detach()
    model(input_ids=tokens, labels=tokens).loss.backward()
    model.resize_token_embeddings(size)
    assert model.get_input_embeddings().weight.shape == (size, D)
    assert (model.end.vocab_size, model.config.vocab_size) == (size, size)
    after = model(input_ids=tokens, labels=tokens, return_logits=True).logits[..., :common]
    torch.testing.assert_close(after - after[..., :1], before - before[..., :1])
    last = torch.tensor([[4, size - 1, 7]])
    model(input_ids=last, labels=last).loss.backward()
    loaded = save_and_load(model, tmp_path, architecture)
    torch.testing.assert_close(loaded(input_ids=last, labels=last).loss, model(input_ids=last, labels=last).loss)
    assert bool(tied_parameters(loaded)) == tied


@pytest.mark.parametrize("architecture", ["BERT", "BART"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_trainer_has_the_losses_of_the_model(architecture: str, smoothing: float, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from hf.test_trainer import LossRecorder

    def train(model: Any) -> list[float]:
        model.config.return_logits = True  # label smoothing reads the logits
        examples = [{key: value[0] for key, value in make_batch(seed, rows=1).items()} for seed in range(6)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=True, label_smoothing_factor=smoothing,
        )  # fmt: skip

        def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            if architecture == "BART":
                batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
            return batch

        trainer = LossRecorder(model=model, args=arguments, train_dataset=examples, data_collator=collate)
        trainer.train()
        return trainer.losses

    expected = train(make_model_without_added_row(architecture))
    model = make_model_without_added_row(architecture)
    table = rk.WordTable.from_embedding(model.get_input_embeddings())
    classifier = rk.Plain(table, bias=model.get_output_embeddings().bias is not None)
    model = rk.hf.replace_head(model, rk.Softmax(classifier), start="same")
    assert train(model) == pytest.approx(expected, abs=1e-6, rel=1e-6)


def make_model_without_added_row(architecture: str) -> Any:
    model = make_model(architecture)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.zero_()  # it is not trained, and a bias of an end is
    return model


def test_added_row_needs_a_bias() -> None:
    model = make_model("BART")
    table = rk.WordTable.from_embedding(model.get_input_embeddings())
    end = rk.Softmax(rk.Plain(table, bias=False))
    with pytest.raises(rk.ArgumentError, match="make it with bias=True"):
        rk.hf.replace_head(model, end, start="same")

    model = make_model_without_added_row("BART")
    end = rk.Softmax(rk.Plain(rk.WordTable.from_embedding(model.get_input_embeddings()), bias=False))
    expected = log_probs(model)
    torch.testing.assert_close(log_probs(rk.hf.replace_head(model, end, start="same")), expected)


def test_causal_model_that_does_not_shift_its_labels_stays_the_same(tmp_path: Path) -> None:
    expected = make_model("BART decoder")(**BATCH).loss
    model = replace("BART decoder", start="same")
    torch.testing.assert_close(model(**BATCH).loss, expected)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**BATCH).loss, expected)


@pytest.mark.parametrize("architecture", ["Mamba", "Falcon-H1"])
def test_causal_models_that_depend_on_more_of_their_layer_and_config(architecture: str, tmp_path: Path) -> None:
    """Mamba reads the type of its output layer. Falcon-H1 computes buffers from its config when it is loaded."""
    model = replace(architecture, tied=False, start="same")
    torch.testing.assert_close(log_probs(model), log_probs(make_model(architecture)), rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=0)


def test_special_tokens_are_those_of_the_model(tmp_path: Path) -> None:
    """`Seq2SeqTrainer` pads generated tokens with the padding token of the config."""
    model = save_and_load(replace("BART"), tmp_path, "BART")
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        assert getattr(model.config, name) == getattr(model.config.text_config, name) is not None


@pytest.mark.parametrize("architecture", ["BERT", "T5"])
def test_only_causal_models_score_a_text(architecture: str) -> None:
    for model in (make_model(architecture), replace(architecture)):
        with pytest.raises(rk.ArgumentError, match="is not a causal language model"):
            rk.hf.score_tokens(model, BATCH["input_ids"][0])


def test_head_of_a_logits_free_model_is_replaced() -> None:
    model = make_model("BERT")
    expected = model(**BATCH).loss
    patch = rk.hf.logits_free(model, min_logits=0)
    end = rk.Softmax(rk.Plain(rk.WordTable.from_embedding(model.get_input_embeddings())))
    replaced = rk.hf.replace_head(model, end, start="same")
    patch.undo()
    torch.testing.assert_close(replaced(**BATCH).loss, expected)
    with pytest.raises(rk.ArgumentError, match="the head of this model is replaced"):
        rk.hf.logits_free(replaced)
