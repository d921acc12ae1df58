"""TRL's trainers give the same losses with `logits_free`, which reports that they do not call the output layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
import datasets
import tokenizers
import transformers
import trl

import reefknot as rk
from hf.models import V, make_model

BYPASSED = "loss of another library (the output layer is not called; TRL's trainers use only its weight)"
SETTINGS: dict[str, Any] = {
    "max_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": [], "save_strategy": "no",
    "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per word."""
    words = {f"w{i}": i for i in range(V)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", unk_token="w1", eos_token="w2"
    )


def text(start: int, length: int) -> str:
    return " ".join(f"w{3 + (start * 7 + i * i) % 300}" for i in range(length))


def make_trainer(kind: str, model: Any, folder: Path) -> Any:
    common = {**SETTINGS, "output_dir": str(folder)}
    tokenizer = make_tokenizer()
    if kind.startswith("SFT"):
        smoothing = 0.1 if "smoothing" in kind else 0.0
        config = trl.SFTConfig(**common, loss_type="nll", max_length=16, label_smoothing_factor=smoothing)
        data = datasets.Dataset.from_dict({"text": [text(i, 9) for i in range(10)]})
        return trl.SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer)
    if kind == "DPO":
        rows = {"prompt": 3, "chosen": 5, "rejected": 6}
        data = datasets.Dataset.from_dict({key: [text(i + n, n) for i in range(10)] for key, n in rows.items()})
        config = trl.DPOConfig(**common, max_length=16)
        return trl.DPOTrainer(model, make_model("Llama"), args=config, train_dataset=data, processing_class=tokenizer)
    data = datasets.Dataset.from_dict({"prompt": [text(i, 4) for i in range(10)]})
    config = trl.GRPOConfig(**common, max_completion_length=5, num_generations=2)

    def count_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion))) for completion in completions]

    return trl.GRPOTrainer(model, count_words, args=config, train_dataset=data, processing_class=tokenizer)


def losses(trainer: Any) -> list[float]:
    transformers.set_seed(3)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ["SFT", "SFT, label smoothing", "DPO", "GRPO"])
def test_losses_are_the_same(kind: str, tmp_path: Path) -> None:
    expected = losses(make_trainer(kind, make_model("Llama"), tmp_path))
    model = make_model("Llama")
    patch = rk.hf.logits_free(model, min_logits=0)
    actual = losses(make_trainer(kind, model, tmp_path))
    assert len(actual) == 5
    assert actual == pytest.approx(expected, abs=1e-5)
    if "smoothing" in kind:  # needs the logits in TRL
        assert any("without logits" in path for path in patch.paths)
    else:
        assert BYPASSED in patch.paths
    patch.undo()


def test_other_heads_are_rejected(tmp_path: Path) -> None:
    model = make_model("Llama")
    table = rk.WordTable.from_embedding(model.get_input_embeddings())
    model = rk.hf.replace_head(model, rk.Softmax(rk.Plain(table)))
    with pytest.raises(rk.ArgumentError, match="TRL's trainers call a part, so they cannot train this model"):
        make_trainer("SFT", model, tmp_path).train()
