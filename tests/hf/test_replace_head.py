"""Our output ends work as heads of transformers models, are saved and loaded, and can start with the same outputs."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from safetensors import safe_open
from torch import Tensor, nn

import reefknot as rk
from hf.models import V, evaluate_with_trainer, make_batch, make_model, smoothed_loss

D = 16
COUNTS = torch.rand(V, generator=torch.Generator().manual_seed(3))
MakeEnd = Callable[[Any], Any]
"""Makes an end for a table."""

ENDS: dict[str, MakeEnd] = {
    "plain": lambda table: rk.Softmax(rk.Plain(table)),
    "smoothing": lambda table: rk.Softmax(rk.Plain(table, bias=False), smoothing=0.1),
    "projected": lambda table: rk.Softmax(rk.Projected(table, D)),
    "bilinear": lambda table: rk.Softmax(rk.Bilinear(table, D)),
    "bilinear residual": lambda table: rk.Softmax(rk.Bilinear(table, D, residual=True, dropout=0.5)),
    "dual": lambda table: rk.Softmax(rk.Dual(table, D, joint_dim=6)),
    "drill sigmoid": lambda table: rk.Softmax(rk.Drill(table, depth=2)),
    "drill relu": lambda table: rk.Softmax(rk.Drill(table, depth=3, activation="relu", dropout=0.3)),
    "drill tanh": lambda table: rk.Softmax(rk.Drill(table, depth=1, activation="tanh", layer_bias=False)),
    "augmented": lambda table: rk.Augmented(rk.Plain(table), table, tau=2.0, gamma=0.5),
    "augmented drill": lambda table: rk.Augmented(rk.Drill(table, depth=1), table, beta=0.3),
    "mixture": lambda table: rk.MixtureOfSoftmaxes(rk.Plain(table), D, experts=3),
    "sampled": lambda table: rk.SampledSoftmax(rk.Plain(table), samples=40),
    "adaptive": lambda table: rk.AdaptiveSoftmax(table, rk.BandProjections(table, D, head=False)),
}
SAME = [name for name in ENDS if name not in ("dual", "mixture", "adaptive")]
"""Ends that can start with the outputs of the old head."""
BATCH = make_batch()
TOKENS = BATCH["input_ids"]


def input_table(model: Any) -> Any:
    return rk.WordTable.from_embedding(model.get_input_embeddings())


def replace(name: str, architecture: str = "Llama, tied", tied: bool = True, **settings: Any) -> Any:
    """Build a model and replace its head by one of `ENDS`."""
    model = make_model(architecture)
    if name == "adaptive":
        if tied:
            table: Any = rk.hf.EmbeddingBands(model.get_input_embeddings(), COUNTS, sizes=[40, 100])
        else:
            table = rk.BandedTable(V, D, sizes=[40, 100], factor=2)
            settings["token_counts"] = COUNTS
    else:
        table = input_table(model) if tied else rk.WordTable(V, D)
    return rk.hf.replace_head(model, ENDS[name](table), **settings)


def log_probs(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=TOKENS).logits
    return logits.log_softmax(-1)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def save_and_load(model: Any, folder: Path, **settings: Any) -> Any:
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **settings)


def tied_parameters(model: Any) -> list[str]:
    """Return the names of parameters of the end that are the input embedding's weight."""
    weight = model.get_input_embeddings().weight
    return [name for name, parameter in model.end.named_parameters(remove_duplicate=False) if parameter is weight]


# -- every end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ENDS)
def test_end_is_saved_and_loaded(name: str, tied: bool, tmp_path: Path) -> None:
    model = replace(name, tied=tied)
    loss = model(**BATCH).loss
    loss.backward()
    assert [parameter for parameter, value in model.named_parameters() if value.grad is None] == []
    assert bool(tied_parameters(model)) == tied

    loaded = save_and_load(model, tmp_path)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=1e-6)
    torch.testing.assert_close(loaded(**BATCH).loss, loss, rtol=0, atol=1e-6)
    assert tied_parameters(loaded) == tied_parameters(model)
    assert log_probs(model).exp().sum(-1).allclose(torch.ones(TOKENS.shape))
    # Every parameter and buffer is in the file exactly once.
    unique_sizes = [tensor.numel() for tensor in model.parameters()]
    if name == "adaptive":
        unique_sizes.append(V)  # the order of the tokens
    assert sum(tensor.numel() for tensor in stored_tensors(tmp_path).values()) == sum(unique_sizes)


@pytest.mark.parametrize("name", ["plain", "adaptive"])
@pytest.mark.parametrize("architecture", ["GPT-2", "Llama", "Qwen3", "Gemma 2", "Mixtral"])
def test_architectures_are_saved_loaded_and_generate(architecture: str, name: str, tmp_path: Path) -> None:
    model = replace(name, architecture)
    loaded = save_and_load(model, tmp_path)
    torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=0)
    assert tied_parameters(loaded)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "reefknot_head"
    assert config["text_config"]["model_type"] == model.language_model.config.model_type
    with torch.no_grad():
        best = loaded(input_ids=TOKENS[:, :4]).logits[:, -1].argmax(-1)
    settings = {"max_new_tokens": 3, "do_sample": False, "output_router_logits": False, "pad_token_id": 0}
    if architecture != "Mixtral":
        settings.pop("output_router_logits")
    generated = loaded.generate(TOKENS[:, :4], attention_mask=torch.ones(3, 4), **settings)
    assert torch.equal(generated[:, 4], best)


def test_transformers_alone_rejects_a_saved_model(tmp_path: Path) -> None:
    replace("drill relu").save_pretrained(tmp_path)
    program = f"""
import transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
except ValueError as error:
    assert "reefknot_head" in str(error), error
    import reefknot.hf
    print(type(transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)
"""
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert completed.stdout == "ReefknotHeadForCausalLM\n", completed.stderr


def test_half_precision_and_frozen_tables_are_kept(tmp_path: Path) -> None:
    model = make_model("Llama").to(torch.bfloat16)
    table = rk.WordTable(V, D, frozen=True)
    model = rk.hf.replace_head(model, rk.Softmax(rk.Plain(table)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    loaded = save_and_load(model, tmp_path, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert not loaded.end.classifier.table.weight.requires_grad
    torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=0.02)


def test_missing_weight_of_the_end_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    replace("projected").save_pretrained(tmp_path)
    tensors = stored_tensors(tmp_path)
    del tensors["end.classifier.projection.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(rk.DataError, match=r"end\.classifier\.projection\.weight"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_copies_stay_tied() -> None:
    for name in ("drill relu", "adaptive"):
        model = replace(name)
        copied = copy.deepcopy(model).to(torch.float64)
        assert tied_parameters(copied) == tied_parameters(model) != []
        torch.testing.assert_close(log_probs(copied).float(), log_probs(model))


class Doubled(rk.Plain):
    """A classifier outside of Reefknot."""

    def encode(self, ids: Tensor | None = None) -> Tensor:
        return 2 * super().encode(ids)


def test_own_classifier_is_saved_and_loaded(tmp_path: Path) -> None:
    model = make_model("Llama")
    model = rk.hf.replace_head(model, rk.Softmax(Doubled(input_table(model))))
    torch.testing.assert_close(log_probs(save_and_load(model, tmp_path)), log_probs(model), rtol=0, atol=0)


# -- the same outputs in the first step ------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", SAME)
def test_outputs_start_the_same(name: str, tied: bool) -> None:
    expected = log_probs(make_model("Llama, tied"))
    model = replace(name, tied=tied, start="same")
    torch.testing.assert_close(log_probs(model), expected, rtol=0, atol=5e-6)
    # The new parameters learn.
    before = {key: value.detach().clone() for key, value in model.end.named_parameters()}
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        optimiser.zero_grad()
        model(**BATCH).loss.backward()
        optimiser.step()
    unchanged = [key for key, value in model.end.named_parameters() if torch.equal(value, before[key])]
    # With relu, some layers before the last may be inactive for all words, but weights always change.
    assert unchanged == []


@pytest.mark.parametrize(
    "architecture", ["GPT-2", "Llama", "Qwen3", "Cohere", "Granite", "Phi", "Mixtral", "Qwen3-MoE"]
)
def test_models_that_scale_or_shift_their_logits_start_the_same(architecture: str) -> None:
    original = make_model(architecture)
    expected = log_probs(original)
    batch = {**BATCH, "num_items_in_batch": torch.tensor(37)}
    with torch.no_grad():
        expected_loss = original(**batch).loss
    model = make_model(architecture)
    model = rk.hf.replace_head(model, rk.Softmax(rk.Drill(rk.WordTable(V, D), depth=2)), start="same")
    torch.testing.assert_close(log_probs(model), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(model(**batch).loss, expected_loss, rtol=0, atol=1e-5)


def test_old_output_layer_can_be_the_table(tmp_path: Path) -> None:
    expected = log_probs(make_model("Llama"))
    model = make_model("Llama")
    table = rk.WordTable.from_embedding(model.get_output_embeddings())
    model = rk.hf.replace_head(model, rk.Softmax(rk.Plain(table, bias=False)), start="same")
    torch.testing.assert_close(log_probs(model), expected)
    assert tied_parameters(model) == []
    torch.testing.assert_close(log_probs(save_and_load(model, tmp_path)), expected)

    tied = make_model("Llama, tied")
    table = rk.WordTable.from_embedding(tied.get_output_embeddings())
    assert tied_parameters(rk.hf.replace_head(tied, rk.Softmax(rk.Plain(table)))) == ["classifier.table.layer.weight"]


IMPOSSIBLE: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "mixture": ("Llama", lambda m: ENDS["mixture"](input_table(m)), "a MixtureOfSoftmaxes cannot compute"),
    "dual": ("Llama, tied", lambda m: ENDS["dual"](input_table(m)), "a Dual classifier cannot compute"),
    "adaptive": (
        "Llama",
        lambda m: ENDS["adaptive"](rk.hf.EmbeddingBands(m.get_input_embeddings(), COUNTS, cutoffs=[50])),
        "an? AdaptiveSoftmax cannot compute",
    ),
    "cap": (
        "Gemma 2",
        lambda m: ENDS["augmented"](input_table(m)),
        "at 0.5, and the Augmented does not",
    ),
    "other weight": ("Llama", lambda m: ENDS["plain"](input_table(m)), r"from_embedding\(model.get_output_embeddings"),
    "unit norm": ("Llama", lambda m: ENDS["plain"](rk.WordTable(V, D, unit_norm=True)), "length 1"),
    "dimension": ("Llama", lambda m: rk.Softmax(rk.Projected(rk.WordTable(V, 8), D)), r"\(331, 8\)"),
    "bias": ("Phi", lambda m: rk.Softmax(rk.Plain(rk.WordTable(V, D), bias=False)), "bias=True"),
    "no residual": ("Llama", lambda m: rk.Softmax(rk.Drill(rk.WordTable(V, D), residual=False)), "residual=True"),
    "residuals": ("Llama", lambda m: rk.Softmax(rk.Drill(rk.WordTable(V, D), layer_residual=True)), "more than once"),
    "relu": (
        "Llama",
        lambda m: rk.Softmax(rk.Drill(rk.WordTable(V, D), activation="relu", layer_bias=False)),
        "layer_bias=True",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_end_that_cannot_start_the_same_is_an_error(case: str) -> None:
    architecture, make_end, message = IMPOSSIBLE[case]
    model = make_model(architecture)
    expected = log_probs(model)
    with pytest.raises(rk.ArgumentError, match=message):
        rk.hf.replace_head(model, make_end(model), start="same")
    torch.testing.assert_close(log_probs(model), expected, rtol=0, atol=0)  # the model is unchanged


# -- loss, logits, generation and training ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["projected", "augmented", "adaptive"])
def test_losses_of_micro_batches_add_up(name: str) -> None:
    model = replace(name)
    count = int((BATCH["labels"][:, 1:] != -100).sum())
    whole = model(**BATCH).loss
    parts = [{key: value[row : row + 1] for key, value in BATCH.items()} for row in range(3)]
    losses = [model(**part, num_items_in_batch=torch.tensor(count)).loss for part in parts]
    torch.testing.assert_close(torch.stack(losses).sum(), whole)
    shifted = nn.functional.pad(BATCH["labels"], (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(input_ids=TOKENS, shift_labels=shifted).loss, whole)


def test_loss_has_penalties_and_logits_have_not() -> None:
    model = replace("projected")
    outputs = model(**BATCH, return_logits=True)
    labels = BATCH["labels"][:, 1:]
    nll = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels.flatten())
    count = int((labels != -100).sum())
    penalty = model.end.penalties()["projection"] / count
    torch.testing.assert_close(outputs.loss, nll + penalty)
    assert model(**BATCH).logits is None
    assert model(input_ids=TOKENS, logits_to_keep=2).logits.shape == (3, 2, V)
    assert model(**BATCH, return_dict=False)[0] == outputs.loss
    model.config.return_logits = True
    assert model(**BATCH).logits is not None


def test_no_labels_give_no_loss() -> None:
    ignored = {**BATCH, "labels": torch.full_like(TOKENS, -100)}
    for extra in ({}, {"num_items_in_batch": 0}):
        model = replace("plain")
        loss = model(**ignored, **extra).loss
        loss.backward()
        assert loss == 0


def test_classes_of_an_adaptive_end_are_sorted_by_frequency() -> None:
    model = replace("adaptive", tied=False)
    frequent = COUNTS.argsort(descending=True)
    assert torch.equal(model.token_order.ids_by_rank(), frequent)
    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits
        hidden = model.language_model.model(input_ids=TOKENS).last_hidden_state
    torch.testing.assert_close(logits[..., frequent], model.end.log_probs(hidden))


def test_generation_is_that_of_the_model() -> None:
    prompts = TOKENS[:, :5]
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    original, model = make_model("Llama, tied"), replace("drill relu", start="same")
    for settings in ({"do_sample": False}, {"num_beams": 3}):
        options = {"attention_mask": mask, "max_new_tokens": 6, **settings}
        assert torch.equal(model.generate(prompts, **options), original.generate(prompts, **options))
    with pytest.raises(ValueError, match="not used by the model"):
        model.generate(prompts, no_such_option=1)


def test_gradient_checkpointing_has_the_same_gradients() -> None:
    model = replace("drill relu", start="same").train()
    model.end.eval()  # without dropout
    model(**BATCH).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(**BATCH, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


def test_trainer_has_the_losses_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from hf.test_trainer import train

    expected = train(make_model("Llama"), tmp_path)
    model = make_model("Llama")
    table = rk.WordTable.from_embedding(model.get_output_embeddings())
    model = rk.hf.replace_head(model, rk.Softmax(rk.Plain(table, bias=False)), start="same")
    losses = train(model, tmp_path)
    assert len(losses) > 80
    assert losses == pytest.approx(expected, abs=1e-6, rel=1e-6)


def test_trainer_shifts_labels_that_it_smooths(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, ids_BT = replace("drill relu"), make_batch()["input_ids"]
    loss = evaluate_with_trainer(model, tmp_path, ids_BT, smoothing=0.1)
    assert loss == pytest.approx(smoothed_loss(model, ids_BT, 0.1), rel=1e-5)


def test_trainer_saves_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    examples = [{key: value[0] for key, value in make_batch(seed, rows=2).items()} for seed in range(8)]
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2, "report_to": [], "save_steps": 2, "disable_tqdm": True, "use_cpu": True, "seed": 5,
    }  # fmt: skip

    def make_trainer(steps: int) -> transformers.Trainer:
        arguments = transformers.TrainingArguments(**settings, max_steps=steps)
        return transformers.Trainer(model=replace("augmented"), args=arguments, train_dataset=examples)

    trainer = make_trainer(4)
    trainer.train()
    resumed = make_trainer(4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    torch.testing.assert_close(log_probs(resumed.model), log_probs(trainer.model))
    assert tied_parameters(resumed.model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    torch.testing.assert_close(log_probs(loaded), log_probs(trainer.model))


def test_adapters_train_the_new_model() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        replace("drill relu"), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    model(**BATCH).loss.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained
    assert all("lora" in name for name in trained)


@pytest.mark.parametrize("name", ["plain", "drill relu", "augmented", "adaptive"])
def test_end_that_peft_trains_is_saved_after_merging(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["end"], task_type="CAUSAL_LM")
    with_adapters = peft.get_peft_model(replace(name), config)
    optimiser = torch.optim.SGD(with_adapters.parameters(), lr=0.1)
    with_adapters(**BATCH).loss.backward()
    optimiser.step()
    model = with_adapters.eval().merge_and_unload()
    assert tied_parameters(model) == []  # PEFT has trained a copy of the end
    if name == "adaptive":
        with pytest.raises(rk.ArgumentError, match="bands of the output end are no longer rows of the input embedding"):
            model.save_pretrained(tmp_path)
    else:
        loaded = save_and_load(model, tmp_path)
        torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=1e-6)
        assert tied_parameters(loaded) == []
        assert not loaded.config.tie_word_embeddings


@pytest.mark.parametrize("architecture", ["Llama, tied", "Gemma 2"])
def test_use_cache_of_the_config_has_an_effect(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = replace("plain", architecture)
    assert model.config.use_cache
    assert model(**BATCH).past_key_values is not None
    transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    model.config.use_cache = False  # transformers 5 does this in Trainer
    assert model(**BATCH).past_key_values is None
    assert model(**BATCH, use_cache=True).past_key_values is not None
    loaded = save_and_load(model, tmp_path)
    assert loaded(**BATCH).past_key_values is None
    prompts = TOKENS[:, :4]
    assert torch.equal(loaded.generate(prompts, max_new_tokens=3), model.generate(prompts, max_new_tokens=3))


def test_replicas_of_data_parallel_models_use_their_own_weights() -> None:
    from hf.test_logits_free import make_replica

    model = replace("drill relu").eval()
    expected = model(**BATCH).loss
    replica = make_replica(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    torch.testing.assert_close(replica(**BATCH).loss, expected)


# -- resizing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [V + 9, V - 30])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["augmented drill", "mixture", "projected"])
def test_both_ends_are_resized(name: str, tied: bool, size: int, tmp_path: Path) -> None:
    model = replace(name, tied=tied)
    hidden = torch.randn(5, D)
    with torch.no_grad():
        model.end.classifier.bias.normal_()
        before = model.end.log_probs(hidden)
    model.resize_token_embeddings(size)
    assert model.get_input_embeddings().weight.shape == (size, D)
    assert (model.end.vocab_size, model.config.vocab_size) == (size, size)
    assert bool(tied_parameters(model)) == tied
    common = min(size, V)
    with torch.no_grad():
        after = model.end.log_probs(hidden)
    old_scores, new_scores = before[:, :common], after[:, :common]
    if name == "mixture":  # the experts are normalised one by one
        assert after.shape == (5, size)
    else:
        torch.testing.assert_close(new_scores - new_scores[:, :1], old_scores - old_scores[:, :1])
    tokens = torch.tensor([[1, size - 1, 7]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    loaded = save_and_load(model, tmp_path)
    torch.testing.assert_close(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_end_is_built_while_torch_export_has_proxies(tmp_path: Path) -> None:
    """While `torch.export` traces a module, its class has a subclass of the same name with other arguments."""
    proxy = type("Plain", (rk.Plain,), {"__init__": lambda self, base, path: None})
    model = replace("plain")
    torch.testing.assert_close(log_probs(save_and_load(model, tmp_path)), log_probs(model))
    del proxy


def test_bands_cannot_be_resized() -> None:
    model = replace("adaptive")
    with pytest.raises(rk.ArgumentError, match="bands"):
        model.resize_token_embeddings(V + 1)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert replace("plain").resize_token_embeddings(pad_to_multiple_of=64).num_embeddings == math.ceil(V / 64) * 64


# -- wrong arguments -------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, Callable[[Any], tuple[Any, Any, dict[str, Any]]], str]] = {
    "module": ("Llama", lambda m: (m.model.layers, ENDS["plain"](input_table(m)), {}), "is a ModuleList"),
    "base model": ("Llama", lambda m: (m.model, ENDS["plain"](input_table(m)), {}), "LlamaModel is not a causal"),
    "output layer is not called": (
        "MobileBERT",
        lambda m: (m, ENDS["plain"](rk.WordTable(V, m.get_output_embeddings().in_features)), {}),
        "it is called 0 times",
    ),
    "embedding of the target": (
        "Marian, two vocabularies",
        lambda m: (m, ENDS["plain"](rk.WordTable.from_embedding(m.get_output_embeddings())), {}),
        r"decoder\.embed_tokens\.weight, which is not the input embedding",
    ),
    "table": ("Llama", lambda m: (m, input_table(m), {}), "end is an EmbeddingTable"),
    "classes": ("Llama", lambda m: (m, ENDS["plain"](rk.WordTable(7, D)), {}), "7 classes"),
    "dimension": ("Llama", lambda m: (m, ENDS["plain"](rk.WordTable(V, 5)), {}), "hidden states of 5 numbers"),
    "start": ("Llama", lambda m: (m, ENDS["plain"](input_table(m)), {"start": "zero"}), "one of new, same"),
    "no counts": ("Llama", lambda m: (m, ENDS["adaptive"](rk.BandedTable(V, D, sizes=[9])), {}), "token_counts"),
    "counts without bands": (
        "Llama", lambda m: (m, ENDS["plain"](input_table(m)), {"token_counts": COUNTS}), "has no effect"
    ),
    "wrong counts": (
        "Llama",
        lambda m: (m, ENDS["adaptive"](rk.BandedTable(V, D, sizes=[9])), {"token_counts": COUNTS[:5]}),
        r"\(5,\); it must be a tensor with one count per token, \(331,\)",
    ),
    "counts twice": (
        "Llama",
        lambda m: (
            m,
            ENDS["adaptive"](rk.hf.EmbeddingBands(m.get_input_embeddings(), COUNTS, sizes=[9])),
            {"token_counts": COUNTS},
        ),
        "leave token_counts out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_is_an_error(case: str) -> None:
    architecture, make_arguments, message = WRONG[case]
    model, end, settings = make_arguments(make_model(architecture))
    with pytest.raises(rk.ArgumentError, match=message):
        rk.hf.replace_head(model, end, **settings)


def test_head_is_replaced_once() -> None:
    model = replace("plain")
    with pytest.raises(rk.ArgumentError, match="replaced already"):
        rk.hf.replace_head(model, ENDS["plain"](input_table(model)))
    with pytest.raises(rk.ArgumentError, match="replace it before"):
        model.set_input_embeddings(nn.Embedding(V, D))
    old = model.language_model
    with pytest.raises(rk.ArgumentError, match="LlamaForCausalLM is a part of another model"):
        rk.hf.replace_head(old, ENDS["plain"](input_table(old)))
    model(**BATCH)
    for batch in (BATCH, {"input_ids": TOKENS}):
        with pytest.raises(rk.ArgumentError, match="call the model that replace_head has returned"):
            old(**batch)


def test_invalid_label_is_an_error() -> None:
    for name in ("plain", "adaptive"):
        with pytest.raises(rk.ArgumentError, match=f"target {V} is not a class"):
            replace(name)(input_ids=TOKENS, labels=torch.full_like(TOKENS, V))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_wrong_counts_of_bands_are_an_error(wrong: float) -> None:
    counts = COUNTS.clone()
    counts[5] = wrong
    with pytest.raises(rk.ArgumentError, match=f"the count of token 5 is {wrong}"):
        rk.hf.EmbeddingBands(make_model("Llama").get_input_embeddings(), counts, sizes=[9])


def test_bands_need_an_embedding() -> None:
    with pytest.raises(rk.ArgumentError, match=r"is a LlamaForCausalLM; pass the input embedding of the model"):
        rk.hf.EmbeddingBands(make_model("Llama"), COUNTS, sizes=[9])
