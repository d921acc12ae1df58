"""`score_tokens`: the loss of every token of a text under a transformers model, for `reefknot compare`.

    rk.hf.score_tokens(model, tokens, file="scores/drill.safetensors")

Windows slide over the text: each reads up to `context` tokens and then scores the next `stride` tokens.

Shapes: T tokens of the text, S scored tokens of a window, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils.logging import tqdm

from reefknot.errors import ArgumentError, describe_type
from reefknot.hf.head_model import ReefknotHeadForMaskedLM
from reefknot.storage.token_scores import SUFFIX, TokenScores, write_token_scores


@torch.no_grad()
def score_tokens(
    model: PreTrainedModel, tokens: Tensor, *, context: int = 512, stride: int = 256, file: Path | str | None = None
) -> Tensor:
    """Return the negative log-likelihood of every token of a text except the first, with shape (T - 1,).

    `exp` of its mean is the perplexity per token. The model is used in evaluation mode.

    Args:
        model: Any causal language model of transformers, with its own head or one of ours.
        tokens: The ids of the text, with shape (T,).
        context: Number of tokens that a window reads before the tokens that it scores. `context + stride` must not be
            more than the positions of the model.
        stride: Number of tokens that a window scores.
        file: Also write the scores to this new file, whose name ends in `.safetensors`. `reefknot compare` reads it.
    """
    _check_model(model)
    _check_arguments(tokens, context, stride, file)
    _check_ids(tokens, model.config.get_text_config().vocab_size)
    _check_window(model, min(context + stride, len(tokens) - 1))
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        window_scores = []
        for start in tqdm(range(0, len(tokens) - 1, stride), desc="windows", disable=None):
            first_read = max(start - context, 0)
            targets_S = tokens[start + 1 : start + stride + 1].to(device)
            inputs = tokens[first_read : start + len(targets_S)].to(device)
            window_scores.append(_score_window(model, inputs, targets_S))
    finally:
        model.train(was_training)
    nll = torch.cat(window_scores)
    if file is not None:
        targets = tokens[1:].detach().cpu().long().contiguous().clone()
        write_token_scores(Path(file), TokenScores(nll, targets, torch.tensor([context, stride])))
    return nll


def _score_window(model: Any, inputs: Tensor, targets_S: Tensor) -> Tensor:
    """Return the negative log-likelihood of the targets, which follow the last inputs."""
    num_targets = len(targets_S)
    options = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = num_targets
    logits_SV = model(input_ids=inputs[None], use_cache=False, **options).logits[0, -num_targets:]
    log_probs_SV: Tensor = logits_SV.float().log_softmax(-1)
    return -log_probs_SV.gather(1, targets_S.to(log_probs_SV.device)[:, None])[:, 0].cpu()


def _check_model(model: Any) -> None:
    """Raise an `ArgumentError` if the model does not predict the next token of one text."""
    name = type(model).__name__
    is_masked = name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() or isinstance(model, ReefknotHeadForMaskedLM)
    config = getattr(model, "config", None)
    if is_masked or getattr(config, "is_encoder_decoder", False):
        raise ArgumentError(
            f"score_tokens: {describe_type(model)} is not a causal language model, such as LlamaForCausalLM"
        )


def _check_ids(tokens: Tensor, vocab_size: int) -> None:
    """Raise an `ArgumentError` unless all tokens are in the vocabulary of the model."""
    is_wrong = (tokens < 0) | (tokens >= vocab_size)
    if bool(is_wrong.any()):
        position = int(is_wrong.int().argmax())
        raise ArgumentError(
            f"score_tokens: token {int(tokens[position])} at position {position} is not an id of the model, which has "
            f"{vocab_size} tokens; use the tokenizer of the model"
        )


def _check_window(model: Any, length: int) -> None:
    """Raise an `ArgumentError` if the windows are longer than the texts that the model can read."""
    max_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(max_length, int) and 0 < max_length < length:
        raise ArgumentError(
            f"score_tokens: windows have {length} tokens (context + stride), but {describe_type(model)} has only "
            f"{max_length} positions (max_position_embeddings); pass a smaller context or stride"
        )


def _check_arguments(tokens: Any, context: Any, stride: Any, file: Any) -> None:
    """Raise an `ArgumentError` unless the arguments of `score_tokens` are valid."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 1 or len(tokens) < 2 or tokens.is_floating_point():
        shape = f"{tuple(tokens.shape)} and {tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ArgumentError(
            f"score_tokens: tokens is {shape}; pass the ids of one text, (T,), with at least two tokens"
        )
    if not isinstance(context, int) or context < 0 or not isinstance(stride, int) or stride < 1:
        raise ArgumentError(
            f"score_tokens: context = {context!r}, stride = {stride!r}: must be integers of at least 0 and 1"
        )
    if file is not None and Path(file).suffix != SUFFIX:
        raise ArgumentError(f"score_tokens: file = {str(file)!r}: its name must end in {SUFFIX}")
    if file is not None and Path(file).exists():
        raise ArgumentError(f"score_tokens: {file} exists already; choose another file, or remove it first")
