"""The output layer of a transformers model: what the model does with its logits, and how to take the layer out.

`probe_output_layer` finds out what a model computes from the output of its layer, without a list of model names.
`remove_output_layer` puts a `HiddenStateLayer` in its place, for `head_model`.

Shapes: T tokens, D dimensions of the hidden state, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from reefknot.errors import ArgumentError

_PROBE_SCORE = 1000.0
"""A score that is larger than any cap of logits."""


class OutputLayer(NamedTuple):
    """What a model computes from its hidden states: scale (W h + b) + row, and a cap."""

    layer: nn.Linear
    scale: float
    row: Tensor
    """Numbers that the model adds to its logits, with shape (V,)."""
    is_capped: bool


class HiddenStateLayer(nn.Module):
    """Takes the place of the output layer, and keeps the hidden states that it gets."""

    bias = None
    """Some models read the bias of a new output layer."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden: Tensor | None = None
        self.register_buffer("weight", torch.empty(0), persistent=False)  # Mamba reads its type

    def __setattr__(self, name: str, value: Any) -> None:
        """Ignore a weight and a bias, with which transformers 4 ties the output layer of BART."""
        if name not in ("weight", "bias"):
            super().__setattr__(name, value)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the hidden states and return them. The model treats them as its logits, and nobody reads these."""
        self._hidden = hidden
        return hidden

    def take(self) -> Tensor:
        """Return the hidden states of the last call."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return hidden


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off inside the `with` block.

    Args:
        model: The model.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def compute_logits(model: PreTrainedModel, ids_1T: Tensor) -> Tensor:
    """Return the logits of a text, with shape (T, V). An encoder-decoder model reads it as source and as target.

    Args:
        model: The model, in evaluation mode.
        ids_1T: Token ids, with shape (1, T).
    """
    inputs = {"input_ids": ids_1T}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids_1T
    logits: Tensor = model(**inputs).logits
    return logits[0]


def probe_output_layer(model: PreTrainedModel) -> OutputLayer:
    """Find out what a model does to its logits after the output layer.

    The layer returns the scores 0, 1 and a large number for three tokens. The logits of the model then show the numbers
    that it adds, its scale, and whether it caps large logits. An `ArgumentError` is raised if the model cannot do
    without its layer.

    Args:
        model: The model.
    """
    layer: Any = model.get_output_embeddings()
    calls: list[Tensor] = []

    def return_scores(module: nn.Module, inputs: Any, scores: Tensor) -> Tensor:
        calls.append(scores)
        steps = torch.tensor([0.0, 1.0, _PROBE_SCORE], device=scores.device)
        return steps[:, None].expand(scores.shape)

    tokens = torch.zeros((1, 3), dtype=torch.long, device=layer.weight.device)
    with evaluation_mode(model):
        try:
            with _hooked(layer, return_scores):
                row, at_one, at_large = compute_logits(model, tokens).double()
            with _hooked(layer, lambda module, inputs, scores: inputs[0]), _without_added_rows(model):
                compute_logits(model, tokens)
        except Exception as error:
            raise ArgumentError(
                f"replace_head: a {type(model).__name__} cannot compute hidden states from token ids alone, without "
                f"its output layer: {type(error).__name__}: {error}"
            ) from error
    if [scores.shape for scores in calls] != [(1, 3, len(row))]:
        shapes = ", ".join(str(tuple(scores.shape)) for scores in calls)
        raise ArgumentError(
            f"replace_head: for a text of 3 tokens, the output layer of a {type(model).__name__} must be called once "
            f"and return scores of shape (1, 3, {len(row)}); it is called {len(calls)} times ({shapes})"
        )
    scale_V = at_one - row
    scale = float(f"{scale_V.mean():.7g}")  # the logits may be in float32
    is_linear = torch.allclose(scale_V, scale_V.mean()) and torch.allclose(at_large - row, _PROBE_SCORE * scale_V)
    return OutputLayer(layer, scale if is_linear else 1.0, row, not is_linear)


def shifts_labels(model: PreTrainedModel) -> bool:
    """Return whether a causal model compares its logits with the labels of the next position, as most models do.

    Args:
        model: The model. `BartForCausalLM` and its relatives expect labels that are shifted already.
    """
    layer: Any = model.get_output_embeddings()
    ids_1T = torch.arange(min(8, layer.out_features), device=layer.weight.device)[None]
    with evaluation_mode(model):
        try:
            outputs = model(input_ids=ids_1T, labels=ids_1T)
        except Exception:  # some models of images and text have no loss without images
            return True
    logits_TV, ids_T = outputs.logits[0].float(), ids_1T[0]
    shifted, unshifted = F.cross_entropy(logits_TV[:-1], ids_T[1:]), F.cross_entropy(logits_TV, ids_T)
    return bool((outputs.loss - shifted).abs() <= (outputs.loss - unshifted).abs())


@contextmanager
def _hooked(layer: nn.Module, hook: Any) -> Iterator[None]:
    """Change what a layer returns inside the `with` block."""
    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _find_holder(model: nn.Module, layer: nn.Module) -> tuple[Any, str]:
    """Return the module that has a layer as an attribute, and the name of the layer in the model."""
    name = next(name for name, module in model.named_modules() if module is layer)
    return model.get_submodule(name.rpartition(".")[0]), name


def _find_added_rows(holder: nn.Module, layer: nn.Linear) -> list[tuple[dict[str, Any], str]]:
    """Return where the holder of a layer has a row of V numbers, such as `final_logits_bias` of BART."""
    return [
        (tensors, name)
        for tensors in (holder._parameters, holder._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.numel() == tensor.shape[-1] == layer.out_features
    ]


@contextmanager
def _without_added_rows(model: PreTrainedModel) -> Iterator[None]:
    """Let a model add nothing to its logits inside the `with` block."""
    layer: Any = model.get_output_embeddings()
    holder, _ = _find_holder(model, layer)
    rows = [(tensors, name, tensors[name]) for tensors, name in _find_added_rows(holder, layer)]
    for tensors, name, row in rows:
        tensors[name] = row.new_zeros((1,) * row.dim())
    try:
        yield
    finally:
        for tensors, name, row in rows:
            tensors[name] = row


def no_output_layer() -> None:
    """Stand for `get_output_embeddings` of a transformers model without its output layer."""


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for a method that would change the output layer."""


def _replace_by_zero(module: nn.Module, tensors: dict[str, Any], name: str) -> None:
    """Replace a parameter or buffer by the number 0, which is not saved. It can be added on any device."""
    del tensors[name]
    setattr(module, name, torch.zeros((), device="cpu"))


def remove_output_layer(model: PreTrainedModel) -> None:
    """Put a `HiddenStateLayer` in the place of the output layer of a transformers model.

    Args:
        model: The transformers model. It is changed.
    """
    output_layer: Any = model.get_output_embeddings()
    holder, name = _find_holder(model, output_layer)
    ties = getattr(model, "_tied_weights_keys", None)
    pairs = ties.items() if isinstance(ties, dict) else ()
    second_names = {other for pair in pairs if f"{name}.bias" in pair for other in pair}
    for parameter_name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter is output_layer.bias or parameter_name in second_names:  # in BERT, the bias has a second name
            module_name, _, parameter_leaf = parameter_name.rpartition(".")
            module = model.get_submodule(module_name)
            _replace_by_zero(module, module._parameters, parameter_leaf)

    layer = HiddenStateLayer()
    setattr(holder, name.rpartition(".")[2], layer)
    # transformers would tie or resize the weight of the output layer, which is gone.
    model.get_output_embeddings = no_output_layer
    if hasattr(holder, "_tie_weights") and holder is not model:
        holder._tie_weights = _do_nothing
    for tensors, row_name in _find_added_rows(holder, output_layer):
        _replace_by_zero(holder, tensors, row_name)
    if hasattr(model, "_resize_final_logits_bias"):
        model._resize_final_logits_bias = _do_nothing
    for attribute in ("_tied_weights_keys", "all_tied_weights_keys"):
        tied = getattr(model, attribute, None)
        if isinstance(tied, dict):
            kept = {
                key: value for key, value in tied.items() if not any(n.startswith(f"{name}.") for n in (key, value))
            }
            setattr(model, attribute, kept)
        elif tied is not None:
            setattr(model, attribute, [key for key in tied if not key.startswith(f"{name}.")])
    object.__setattr__(model, "_reefknot_layer", layer)  # the layer is registered under its own name
