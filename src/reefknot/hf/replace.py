"""`replace_head`: one of our output ends as the head of a transformers model.

    table = rk.WordTable.from_embedding(model.get_input_embeddings())
    model = rk.hf.replace_head(model, rk.Softmax(rk.Drill(table, depth=2)), start="same")

`head_model` has the model that this returns, and `start` the initial values of `start="same"`.

Shapes: T tokens, D dimensions of the hidden state, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from reefknot.errors import ArgumentError
from reefknot.hf.bands import EmbeddingBand, TokenOrder
from reefknot.hf.description import describe_end
from reefknot.hf.head_model import ReefknotHeadConfig, ReefknotHeadForCausalLM, remove_output_layer
from reefknot.hf.start import start_same
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.tables import EmbeddingTable

Start = Literal["new", "same"]

_PROBE_SCORE = 1000.0
"""A score that is larger than any cap of logits."""


class Head(NamedTuple):
    """What a model computes from its hidden states: scale (W h + b) + row, and a cap."""

    layer: nn.Linear
    scale: float
    row: Tensor
    """Numbers that the model adds to its logits, with shape (V,)."""
    is_capped: bool


def replace_head(
    model: PreTrainedModel, end: OutputEnd, *, start: Start = "new", token_counts: Tensor | None = None
) -> ReefknotHeadForCausalLM:
    """Replace the output layer of a causal language model by one of our output ends.

        table = rk.WordTable.from_embedding(model.get_input_embeddings())       # tied to the input
        model = rk.hf.replace_head(model, rk.Softmax(rk.Drill(table, depth=2)))

    The result is a transformers model: it has `generate`, works in `Trainer`, and is saved by `save_pretrained`. After
    `import reefknot.hf`, `AutoModelForCausalLM.from_pretrained` loads it. The given model becomes a part of it, so do
    not use the given model any more.

    Args:
        model: A causal language model of transformers, such as a `LlamaForCausalLM`.
        end: The output end. It is tied if its table holds the input embedding of the model. It is moved to the device
            and type of the model.
        start: `new` keeps the parameters of the end. `same` sets them so that the outputs of the model do not change,
            or raises an error if the end cannot do this.
        token_counts: For an adaptive end with a table of its own: the number of occurrences of each token in a text,
            with shape (V,). If token ids are sorted by frequency already: `torch.arange(V, 0, -1)`.
    """
    _check_model(model)
    embedding, layer = model.get_input_embeddings(), model.get_output_embeddings()
    _check_end(end, layer)
    if start not in get_args(Start):
        raise ArgumentError(f"replace_head: start = {start!r}: must be one of {', '.join(get_args(Start))}")
    token_order = _find_token_order(end, token_counts)
    _hold_input_embedding(end, embedding)
    head = _probe_head(model, layer)
    end.to(device=layer.weight.device, dtype=layer.weight.dtype)
    if start == "same":
        _start_same(model, end, head)

    is_tied = any(parameter is embedding.weight for parameter in end.parameters())
    text_config = model.config
    text_config.architectures = [type(model).__name__]
    config = ReefknotHeadConfig(
        text_config=text_config,
        head=describe_end(end, embedding),
        hidden_scale=head.scale,
        tie_word_embeddings=is_tied,
        dtype=layer.weight.dtype,
    )
    remove_output_layer(model)
    if token_order is not None:
        token_order.to(layer.weight.device)
    replaced = ReefknotHeadForCausalLM(config, model, end, token_order)
    replaced.generation_config = model.generation_config
    replaced.train(model.training)
    return replaced


def _check_model(model: Any) -> None:
    """Raise an `ArgumentError` unless the head of the model can be replaced."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(
            f"replace_head: model is a {name}; pass a causal language model of transformers, before PEFT or "
            "torch.compile wraps it"
        )
    if isinstance(model, ReefknotHeadForCausalLM):
        raise ArgumentError("replace_head: the head of this model is replaced already; start from the original model")
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or model.config.is_encoder_decoder:
        raise ArgumentError(
            f"replace_head: a {name} is not a causal language model of transformers, such as LlamaForCausalLM"
        )
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ArgumentError(f"replace_head: the output layer of the {name} must be an nn.Linear")
    if model.get_output_embeddings().weight.is_meta:
        raise ArgumentError("replace_head: the model has no weights yet (meta device); load them first")


def _check_end(end: Any, layer: nn.Linear) -> None:
    """Raise an `ArgumentError` unless the end reads the hidden states of the layer and has its classes."""
    if not isinstance(end, OutputEnd):
        raise ArgumentError(
            f"replace_head: end is a {type(end).__name__}; pass an output end, such as rk.Softmax(rk.Plain(table))"
        )
    vocab_size, dim = layer.weight.shape
    if (end.vocab_size, end.context_dim) != (vocab_size, dim):
        raise ArgumentError(
            f"replace_head: the end has {end.vocab_size} classes and reads hidden states of {end.context_dim} numbers, "
            f"but the model has {vocab_size} tokens and {dim} numbers"
        )


def _find_token_order(end: OutputEnd, token_counts: Tensor | None) -> TokenOrder | None:
    """Return the order of the tokens for an adaptive end."""
    if end.bands == 1:
        if token_counts is not None:
            raise ArgumentError(f"replace_head: token_counts has no effect on a {type(end).__name__}; leave it out")
        return None
    first_table = end.tables()[0]
    if isinstance(first_table, EmbeddingBand):
        if token_counts is not None:
            raise ArgumentError("replace_head: the table has token counts already; leave token_counts out")
        return first_table.order
    if token_counts is None:
        raise ArgumentError(
            "replace_head: an adaptive end needs the frequencies of the tokens: pass token_counts, the number of "
            "occurrences of each token in a text"
        )
    return TokenOrder.from_counts(token_counts, end.vocab_size)


def _hold_input_embedding(end: OutputEnd, embedding: nn.Embedding) -> None:
    """Let tables that hold an output layer with the weight of the input embedding hold the input embedding itself."""
    for module in end.modules():
        if isinstance(module, EmbeddingTable) and module.weight is embedding.weight:
            module.layer = embedding


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off inside the `with` block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _probe_head(model: PreTrainedModel, layer: nn.Linear) -> Head:
    """Find out what a model does to its logits after the output layer, without a list of model names.

    The layer returns the scores 0, 1 and a large number for three tokens. The logits of the model then show the numbers
    that it adds, its scale, and whether it caps large logits.
    """

    def return_scores(module: nn.Module, inputs: Any, scores: Tensor) -> Tensor:
        steps = torch.tensor([0.0, 1.0, _PROBE_SCORE], device=scores.device)
        return steps[:, None].expand(scores.shape)

    tokens = torch.zeros((1, 3), dtype=torch.long, device=layer.weight.device)
    handle = layer.register_forward_hook(return_scores)
    try:
        with _evaluation_mode(model):
            row, at_one, at_large = model(input_ids=tokens).logits[0].double()
    finally:
        handle.remove()
    scale_V = at_one - row
    scale = float(f"{scale_V.mean():.7g}")  # the logits may be in float32
    is_linear = torch.allclose(scale_V, scale_V.mean()) and torch.allclose(at_large - row, _PROBE_SCORE * scale_V)
    return Head(layer, scale if is_linear else 1.0, row, not is_linear)


def _start_same(model: PreTrainedModel, end: OutputEnd, head: Head) -> None:
    """Set the parameters of the end, and check that the outputs of the model stay the same."""
    if head.is_capped:
        raise ArgumentError(
            'replace_head: start = "same" is not possible: the model caps its logits, and the ends do not; '
            'use start="new"'
        )
    bias = cast("Tensor | None", head.layer.bias)
    start_same(end, head.layer.weight, head.row if bias is None else head.scale * bias + head.row)
    tokens = torch.arange(8, device=head.layer.weight.device)[None] % end.vocab_size
    hidden_states: list[Tensor] = []
    handle = head.layer.register_forward_pre_hook(lambda _, inputs: hidden_states.append(inputs[0]))
    try:
        with _evaluation_mode(model):
            expected = model(input_ids=tokens).logits.float().log_softmax(-1)
    finally:
        handle.remove()
    with _evaluation_mode(end):
        log_probs = end.log_probs(hidden_states[-1] * head.scale).float()
    difference = float((log_probs - expected).abs().max())
    tolerance = 1e-4 if head.layer.weight.dtype in (torch.float32, torch.float64) else 0.1
    if not difference <= tolerance:
        raise ArgumentError(
            f'replace_head: start = "same" is not possible: log-probabilities would change by up to {difference:.2g}, '
            "for example because class vectors are rounded to half precision; use a float32 model or another end"
        )
