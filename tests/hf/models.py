"""Tiny transformers models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

V = 331
_SIZES = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_DECODER = {**_SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "pad_token_id": 0}
_GEMMA = {**_DECODER, "head_dim": 8, "tie_word_embeddings": True}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
_T5 = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_BART = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
         (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))}  # fmt: skip

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHead", {"vocab_size": V, "n_embd": 16, "n_layer": 1, "n_head": 2}),
    "Llama": ("LlamaForCausalLM", _DECODER),
    "Llama, tied": ("LlamaForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 8}),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        {**_DECODER, **_EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8},
    ),
    "Gemma 2": ("Gemma2ForCausalLM", {**_GEMMA, "final_logit_softcapping": 0.5}),
    "Gemma 3": ("Gemma3ForCausalLM", {**_GEMMA, "final_logit_softcapping": 0.5}),
    "Cohere": ("CohereForCausalLM", {**_DECODER, "logit_scale": 0.25}),
    "Granite": ("GraniteForCausalLM", {**_DECODER, "logits_scaling": 4.0}),
    "Phi": ("PhiForCausalLM", _DECODER),
    "Mixtral": ("MixtralForCausalLM", {**_DECODER, **_EXPERTS, "num_local_experts": 4}),
    "T5": ("T5ForConditionalGeneration", {**_T5, "tie_word_embeddings": True}),
    "T5 v1.1": (
        "T5ForConditionalGeneration",
        {**_T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
    ),
    "BART": ("BartForConditionalGeneration", {"vocab_size": V, "d_model": 16, **_BART, "max_position_embeddings": 64}),
    "BERT": ("BertForMaskedLM", {**_SIZES, "intermediate_size": 24}),
}


MORE_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "RoBERTa": ("RobertaForMaskedLM", {**_SIZES, "intermediate_size": 24, "pad_token_id": 1}),
    "Mamba": (
        "MambaForCausalLM", {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    ),
    "Falcon-H1": (
        "FalconH1ForCausalLM",
        {**_DECODER, "head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4,
         "mamba_n_groups": 1, "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9]},
    ),
    "BART decoder": ("BartForCausalLM", {"vocab_size": V, "d_model": 16, **_BART, "max_position_embeddings": 64}),
    "ESM, with an added bias": (
        "EsmForMaskedLM",
        {**_SIZES, "intermediate_size": 24, "pad_token_id": 1, "mask_token_id": 2, "max_position_embeddings": 32},
    ),
    "Marian": (
        "MarianMTModel",
        {"vocab_size": V, "decoder_vocab_size": V, "d_model": 16, **_BART, "pad_token_id": 0,
         "decoder_start_token_id": 0, "max_position_embeddings": 64},
    ),
    "MobileBERT": ("MobileBertForMaskedLM", {**_SIZES, "intermediate_size": 24, "embedding_size": 8}),
    "Marian, two vocabularies": (
        "MarianMTModel",
        {"vocab_size": V, "decoder_vocab_size": V, "d_model": 16, **_BART, "pad_token_id": 0,
         "decoder_start_token_id": 0, "share_encoder_decoder_embeddings": False, "max_position_embeddings": 64},
    ),
}  # fmt: skip
"""Architectures that only some tests use."""


def make_model(name: str) -> Any:
    """Build an architecture, with the same weights at every call, without dropout."""
    kind, settings = (ARCHITECTURES | MORE_ARCHITECTURES)[name]
    model_class = getattr(transformers, kind.replace("GPT2LMHead", "GPT2LMHeadModel"))
    torch.manual_seed(1)
    model = model_class(model_class.config_class(**settings))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)  # biases start at zero
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    return model.eval()  # eval() switches dropout off


def make_batch(seed: int = 2, rows: int = 3, steps: int = 11) -> dict[str, Tensor]:
    """Return ids and labels of different lengths. The last row has only one label."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, V, (rows, steps), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, steps - 4 * row :] = -100
    labels[-1, 2:] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and the gradients of all parameters that have one."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def evaluate_with_trainer(model: Any, folder: Path, ids_BT: Tensor, smoothing: float = 0.0) -> float:
    """Return the loss that transformers' Trainer computes."""
    examples = [{"input_ids": row, "labels": row} for row in ids_BT]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=len(ids_BT), label_smoothing_factor=smoothing, report_to=[],
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    loss: float = transformers.Trainer(model=model, args=arguments, eval_dataset=examples).evaluate()["eval_loss"]
    return loss


@torch.no_grad()
def smoothed_loss(model: Any, ids_BT: Tensor, smoothing: float) -> float:
    """Return the loss of the next tokens with label smoothing."""
    log_probs_BTV = model(input_ids=ids_BT).logits[:, :-1].log_softmax(-1)
    target_log_probs = log_probs_BTV.gather(-1, ids_BT[:, 1:, None])
    return -float((1 - smoothing) * target_log_probs.mean() + smoothing * log_probs_BTV.mean())
