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

from reefknot.errors import ArgumentError, describe_type

_PROBE_SCORES = (0.0, 1.0, 0.01, -3.0, 10_000.0)
"""Scores for five tokens: the first, second and last find a linear map, and the others find the slope of a cap. The
last is far larger than any cap of logits."""


class OutputLayer(NamedTuple):
    """What a model computes from its hidden states: cap(scale (W h + b)) + row."""

    layer: nn.Linear
    scale: float
    row: Tensor
    """Numbers that the model adds to its logits, with shape (V,)."""
    softcap: float | None
    """The cap c of c tanh(score / c), or None."""
    is_known: bool = True
    """Whether the model does only this."""


class HiddenStateLayer(nn.Module):
    """Takes the place of the output layer, and keeps the hidden states that it gets.

    A call raises an `ArgumentError` unless the model with the end has called `expect` before.
    """

    bias = None
    """Some models read the bias of a new output layer."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden: Tensor | None = None
        self._is_expected = False
        self.register_buffer("weight", torch.empty(0), persistent=False)  # Mamba reads its type

    def __setattr__(self, name: str, value: Any) -> None:
        """Ignore a weight and a bias, with which transformers 4 ties the output layer of BART."""
        if name not in ("weight", "bias"):
            super().__setattr__(name, value)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the hidden states and return them. The model treats them as its logits, and nobody reads these."""
        if not self._is_expected:
            raise ArgumentError(
                "the output layer of this model is replaced; call the model that replace_head has returned, and not a "
                "part of it (TRL's trainers call a part, so they cannot train this model)"
            )
        self._hidden = hidden
        return hidden

    def expect(self) -> None:
        """Allow calls until `take`."""
        self._is_expected = True

    def take(self) -> Tensor:
        """Return the hidden states of the last call."""
        hidden, self._hidden, self._is_expected = self._hidden, None, False
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

    The layer returns known scores for a few tokens. The logits of the model then show the numbers that it adds, its
    scale, and its cap. An `ArgumentError` is raised if the model cannot do without its layer.

    Args:
        model: The model.
    """
    layer: Any = model.get_output_embeddings()
    calls: list[Tensor] = []

    def return_scores(module: nn.Module, inputs: Any, scores: Tensor) -> Tensor:
        calls.append(scores)
        probes = torch.tensor(_PROBE_SCORES, device=scores.device)
        return probes[:, None].expand(scores.shape)

    num_tokens = len(_PROBE_SCORES)
    tokens = torch.zeros((1, num_tokens), dtype=torch.long, device=layer.weight.device)
    with evaluation_mode(model):
        try:
            with _hooked(layer, return_scores):
                logits_TV = compute_logits(model, tokens).double()
            with _hooked(layer, lambda module, inputs, scores: inputs[0]), _without_added_rows(model):
                compute_logits(model, tokens)
        except Exception as error:
            raise ArgumentError(
                f"replace_head: {describe_type(model)} cannot compute hidden states from token ids alone, without "
                f"its output layer: {type(error).__name__}: {error}"
            ) from error
    vocab_size = logits_TV.shape[-1]
    if [scores.shape for scores in calls] != [(1, num_tokens, vocab_size)]:
        shapes = ", ".join(str(tuple(scores.shape)) for scores in calls)
        raise ArgumentError(
            f"replace_head: for a text of {num_tokens} tokens, the output layer of {describe_type(model)} must be "
            f"called once and return scores of shape (1, {num_tokens}, {vocab_size}); it is called {len(calls)} times "
            f"({shapes})"
        )
    return _explain_logits(layer, logits_TV)


def _explain_logits(layer: nn.Linear, logits_TV: Tensor) -> OutputLayer:
    """Find the row, scale and cap with which a model computes these logits from `_PROBE_SCORES`.

    Args:
        layer: The output layer.
        logits_TV: Logits of the scores, in float64. The model may have computed them in float32 or less.
    """
    row_V = logits_TV[0]
    scores_T1 = logits_TV.new_tensor(_PROBE_SCORES)[:, None]
    added_TV = logits_TV - row_V
    scale_V = added_TV[1]
    scale = float(f"{scale_V.mean():.7g}")
    if torch.allclose(scale_V, scale_V.mean()) and torch.allclose(added_TV, scores_T1 * scale_V, atol=1e-5):
        return OutputLayer(layer, scale, row_V, None)
    if not row_V.any():
        softcap = float(f"{added_TV[-1].mean():.6g}")
        # For a small score, tanh is almost linear, so that rounding matters little.
        scale = float(f"{softcap * torch.atanh(added_TV[2].mean() / softcap) / _PROBE_SCORES[2]:.6g}")
        if softcap > 0 and torch.allclose(added_TV, softcap * torch.tanh(scale * scores_T1 / softcap), rtol=1e-4):
            return OutputLayer(layer, scale, row_V, softcap)
    return OutputLayer(layer, 1.0, row_V, None, is_known=False)


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
    model._reefknot_layer = name
