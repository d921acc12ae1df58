"""`replace_head`: one of our output ends as the head of a transformers model.

    table = rk.WordTable.from_embedding(model.get_input_embeddings())
    model = rk.hf.replace_head(model, rk.Softmax(rk.Drill(table, depth=2)), start="same")

`head_model` has the models that this returns, `output_layer` finds out what a model does with its logits, and `start`
has the initial values of `start="same"`.

Shapes: T tokens, D dimensions of the hidden state, V tokens of the vocabulary.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from reefknot.errors import ArgumentError, describe_type
from reefknot.hf.bands import EmbeddingBand, TokenOrder
from reefknot.hf.description import describe_end
from reefknot.hf.head_model import (
    ReefknotHeadForCausalLM,
    ReefknotHeadForMaskedLM,
    ReefknotHeadForSeq2SeqLM,
    ReefknotHeadModel,
)
from reefknot.hf.output_layer import (
    OutputLayer,
    compute_logits,
    evaluation_mode,
    probe_output_layer,
    remove_output_layer,
    shifts_labels,
)
from reefknot.hf.start import start_same
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import EmbeddingTable

_LOG = logging.getLogger("reefknot.hf")
Start = Literal["new", "same"]


def replace_head(
    model: PreTrainedModel, end: OutputEnd, *, start: Start = "new", token_counts: Tensor | None = None
) -> ReefknotHeadModel:
    """Replace the output layer of a language model by one of our output ends.

        table = rk.WordTable.from_embedding(model.get_input_embeddings())       # tied to the input
        model = rk.hf.replace_head(model, rk.Softmax(rk.Drill(table, depth=2)))

    The result is a transformers model of the same kind, causal, masked or encoder-decoder. It works in `Trainer`, has
    `generate` if the model has it, and is saved by `save_pretrained`. After `import reefknot.hf`,
    `AutoModelForCausalLM`, `AutoModelForMaskedLM` or `AutoModelForSeq2SeqLM` loads it. The given model becomes a part
    of it, so do not use the given model any more.

    Args:
        model: A language model of transformers, such as a `LlamaForCausalLM`, `BertForMaskedLM` or
            `T5ForConditionalGeneration`.
        end: The output end. It is tied if its table holds the input embedding of the model. It is moved to the device
            and type of the model. If the model caps its logits, a `Softmax` without a cap gets the same cap.
        start: `new` keeps the parameters of the end. `same` sets them so that the outputs of the model do not change,
            or raises an error if the end cannot do this.
        token_counts: For an adaptive end with a table of its own: the number of occurrences of each token in a text,
            with shape (V,). If token ids are sorted by frequency already: `torch.arange(V, 0, -1)`.
    """
    model_class = _check_model(model)
    if "_reefknot" in vars(model):
        vars(model)["_reefknot"].undo()  # an end computes its loss without the logits, too
    embedding, layer = model.get_input_embeddings(), model.get_output_embeddings()
    _check_end(end, layer)
    if start not in get_args(Start):
        raise ArgumentError(f"replace_head: start = {start!r}: must be one of {', '.join(get_args(Start))}")
    token_order = _find_token_order(end, token_counts)
    _hold_input_embedding(end, embedding)
    _check_ties(model, end)
    head = probe_output_layer(model)
    _carry_cap(model, end, head, start)
    end.to(device=layer.weight.device, dtype=layer.weight.dtype)
    if start == "same":
        _start_same(model, end, head)

    is_tied = any(parameter is embedding.weight for parameter in end.parameters())
    text_config = model.config
    text_config.architectures = [type(model).__name__]
    config = model_class.config_class(
        text_config=text_config,
        head=describe_end(end, embedding),
        hidden_scale=head.scale,
        shift_labels=model_class is ReefknotHeadForCausalLM and shifts_labels(model),
        tie_word_embeddings=is_tied,
        dtype=layer.weight.dtype,
    )
    remove_output_layer(model)
    if token_order is not None:
        token_order.to(layer.weight.device)
    replaced: ReefknotHeadModel = model_class(config, model, end, token_order)
    if replaced.can_generate():
        replaced.generation_config = model.generation_config
    replaced.train(model.training)
    return replaced


def _check_model(model: Any) -> Any:
    """Return the class of the new model, or raise an `ArgumentError` if the head of the model cannot be replaced."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(
            f"replace_head: model is {describe_type(model)}; pass a language model of transformers, before PEFT or "
            "torch.compile wraps it"
        )
    if isinstance(model, ReefknotHeadModel):
        raise ArgumentError("replace_head: the head of this model is replaced already; start from the original model")
    if hasattr(model, "_reefknot_layer"):
        raise ArgumentError(
            f"replace_head: this {name} is a part of another model, because its head is replaced already; load the "
            "original model again"
        )
    model_class: Any = None
    if model.config.is_encoder_decoder:
        if name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values():
            model_class = ReefknotHeadForSeq2SeqLM
    elif name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():  # XLM is in both lists
        model_class = ReefknotHeadForMaskedLM
    elif name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        model_class = ReefknotHeadForCausalLM
    if model_class is None:
        raise ArgumentError(
            f"replace_head: {describe_type(model)} is not a causal, masked or encoder-decoder language model of "
            "transformers, such as LlamaForCausalLM, BertForMaskedLM or T5ForConditionalGeneration"
        )
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ArgumentError(f"replace_head: the output layer of the {name} must be an nn.Linear")
    if model.get_output_embeddings().weight.is_meta:
        raise ArgumentError("replace_head: the model has no weights yet (meta device); load them first")
    return model_class


def _check_end(end: Any, layer: nn.Linear) -> None:
    """Raise an `ArgumentError` unless the end reads the hidden states of the layer and has its classes."""
    if not isinstance(end, OutputEnd):
        raise ArgumentError(
            f"replace_head: end is {describe_type(end)}; pass an output end, such as rk.Softmax(rk.Plain(table))"
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
            raise ArgumentError(f"replace_head: token_counts has no effect on {describe_type(end)}; leave it out")
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


def _check_ties(model: PreTrainedModel, end: OutputEnd) -> None:
    """Raise an `ArgumentError` if the end holds a weight of the model other than its input embedding.

    A saved model names only ties to the input embedding. The output layer is taken out of the model, so its weight
    belongs to the end alone.
    """
    embedding, output_layer = model.get_input_embeddings(), model.get_output_embeddings()
    own = {id(parameter) for parameter in embedding.parameters()}
    names = {
        id(parameter): f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        if module is not output_layer
        for name, parameter in module.named_parameters(recurse=False)
    }
    for parameter in end.parameters():
        if id(parameter) not in own and id(parameter) in names:
            raise ArgumentError(
                f"replace_head: the end holds {names[id(parameter)]}, which is not the input embedding of the model; a "
                "table can be tied to the input embedding only, so pass a WordTable of its own"
            )


def _carry_cap(model: PreTrainedModel, end: OutputEnd, head: OutputLayer, start: Start) -> None:
    """Give the cap of the model's logits to an end that has none of its own.

    An end that cannot cap its scores raises an `ArgumentError` if its outputs must stay the same. Otherwise, a warning
    is logged.
    """
    kind = type(end).__name__
    arguments = end.constructor_arguments
    own_cap = getattr(end, "softcap", None)
    if head.is_known and own_cap is None and "softcap" in arguments:
        cast(Softmax, end).softcap = arguments["softcap"] = head.softcap  # the config of the model has the arguments
        return
    problem = None
    if not head.is_known:
        problem = f"the {type(model).__name__} changes its logits in a way that no end does"
    elif own_cap != head.softcap:
        own = "does not" if own_cap is None else f"caps them at {own_cap:g}"
        theirs = "does not cap its logits" if head.softcap is None else f"caps its logits at {head.softcap:g}"
        problem = f"the {type(model).__name__} {theirs}, and the {kind} {own}"
    if problem is None:
        return
    if start == "same":
        raise ArgumentError(f'replace_head: start = "same" is not possible: {problem}; use start="new"')
    if own_cap is None:  # a cap that the user has chosen needs no warning
        advice = "; a Softmax keeps the cap" if head.is_known else ""
        _LOG.warning("replace_head: %s%s", problem, advice)


def _start_same(model: PreTrainedModel, end: OutputEnd, head: OutputLayer) -> None:
    """Set the parameters of the end, and check that the outputs of the model stay the same."""
    bias = cast("Tensor | None", head.layer.bias)
    start_same(end, head.layer.weight, head.row if bias is None else head.scale * bias + head.row)
    tokens = torch.arange(8, device=head.layer.weight.device)[None] % end.vocab_size
    hidden_states: list[Tensor] = []
    handle = head.layer.register_forward_pre_hook(lambda _, inputs: hidden_states.append(inputs[0]))
    try:
        with evaluation_mode(model):
            expected = compute_logits(model, tokens).float().log_softmax(-1)
    finally:
        handle.remove()
    with evaluation_mode(end):
        log_probs = end.log_probs(hidden_states[-1][0] * head.scale).float()
    difference = float((log_probs - expected).abs().max())
    tolerance = 1e-4 if head.layer.weight.dtype in (torch.float32, torch.float64) else 0.1
    if not difference <= tolerance:
        raise ArgumentError(
            f'replace_head: start = "same" is not possible: log-probabilities would change by up to {difference:.2g}, '
            "for example because class vectors are rounded to half precision; use a float32 model or another end"
        )
