"""transformers' Trainer, data-parallel training and PEFT work with `logits_free`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import reefknot as rk
from hf.models import V, loss_and_gradients, make_batch, make_model


class LossRecorder(transformers.Trainer):
    """Records the loss of every micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(*args, **kwargs)
        self.losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
        return result


def train(model: Any, folder: Path, **settings: Any) -> list[float]:
    """Train for 20 steps of 4 micro-batches, and return the losses."""
    batches = [make_batch(seed, rows=2) for seed in range(40)]
    examples = [{key: value[row] for key, value in batch.items()} for batch in batches for row in range(2)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=20, per_device_train_batch_size=2, gradient_accumulation_steps=4,
        learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, seed=5, **settings,
    )  # fmt: skip
    trainer = LossRecorder(model=model, args=arguments, train_dataset=examples, eval_dataset=examples[:4])
    trainer.train()
    trainer.losses.append(trainer.evaluate()["eval_loss"])
    return trainer.losses


def resize(model: Any) -> Any:
    model.resize_token_embeddings(V + 6)
    return model


def add_adapters(model: Any, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(model, config)


Change = Callable[[Any], Any]
CHANGES: dict[str, Change] = {
    "plain": lambda model: model,
    "LoRA": lambda model: add_adapters(model, target_modules=["q_proj", "lm_head"]),
    "modules_to_save": lambda model: add_adapters(model, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "resized": resize,
}
ARGUMENTS = {"checkpointing": {"gradient_checkpointing": True}, "smoothing": {"label_smoothing_factor": 0.1}}


@pytest.mark.parametrize("name", [*CHANGES, *ARGUMENTS])
def test_training_with_accumulation_has_the_same_losses(tmp_path: Path, name: str) -> None:
    change, settings = CHANGES.get(name, CHANGES["plain"]), ARGUMENTS.get(name, {})
    expected = train(change(make_model("Llama")), tmp_path, **settings)
    model = change(make_model("Llama"))
    patch = rk.hf.logits_free(model, min_logits=0)
    losses = train(model, tmp_path, **settings)
    assert len(losses) > 80
    assert losses == pytest.approx(expected, abs=1e-5 if "smoothing" in name else 1e-6, rel=1e-6)
    assert min(losses) < losses[0]
    assert patch.paths[0].startswith("loss without logits")
    assert not [path for path in patch.paths if "real" in path]


def test_training_in_bfloat16_is_as_close_to_float32_as_that_of_transformers(tmp_path: Path) -> None:
    exact = torch.tensor(train(make_model("Llama"), tmp_path))
    theirs = torch.tensor(train(make_model("Llama").bfloat16(), tmp_path))
    model = make_model("Llama").bfloat16()
    rk.hf.logits_free(model, min_logits=0)
    ours = torch.tensor(train(model, tmp_path))
    assert 0 < (ours - exact).abs().mean() <= 1.1 * (theirs - exact).abs().mean()


def test_data_parallel_model_has_the_same_gradients(tmp_path: Path) -> None:
    model, batch = make_model("Llama"), make_batch()
    expected = copy.deepcopy(loss_and_gradients(model, batch))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for find_unused_parameters in (False, True):
            parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
            with rk.hf.logits_free(parallel, min_logits=0) as patch:
                loss, gradients = loss_and_gradients(parallel, batch)
            torch.testing.assert_close(loss, expected[0], atol=1e-6, rtol=1e-6)
            for name, gradient in expected[1].items():
                torch.testing.assert_close(gradients[f"module.{name}"], gradient, atol=1e-6, rtol=1e-6)
            assert patch.paths == ("loss without logits (loss_function)",)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["q_proj"]}, {"target_modules": ["q_proj", "lm_head"]},
     {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
    ids=["q_proj", "lm_head", "modules_to_save"],
)  # fmt: skip
def test_adapters_have_the_same_gradients(settings: dict[str, Any]) -> None:
    model, batch = add_adapters(make_model("Llama"), **settings), make_batch()
    expected = copy.deepcopy(loss_and_gradients(model, batch))
    patch = rk.hf.logits_free(model, min_logits=0)
    loss, gradients = loss_and_gradients(model, batch)
    torch.testing.assert_close(loss, expected[0], atol=1e-6, rtol=1e-6)
    assert gradients.keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-6)
    assert patch.paths == ("loss without logits (loss_function)",)


class WeightCopies(TorchDispatchMode):
    """Records the operations that return a new tensor of at least the size of the output layer's weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.makers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in torch.utils._pytree.tree_leaves(results):
            if type(result) is Tensor and not result.is_meta and result._base is None and result.numel() >= self.size:
                self.makers.append(str(func))
        return results


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["frozen", "LoRA"])
def test_weight_of_a_frozen_output_layer_is_not_copied(targets: list[str]) -> None:
    model, batch = add_adapters(make_model("Llama"), target_modules=targets), make_batch(rows=1)
    patch = rk.hf.logits_free(model, min_logits=0)
    with rk.using(memory=1e-6), WeightCopies(V * 16) as copies:
        model(**batch).loss.backward()
    assert copies.makers == []
    assert patch.paths == ("loss without logits (loss_function)",)
