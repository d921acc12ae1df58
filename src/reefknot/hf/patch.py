"""`logits_free`: make a transformers model compute its loss without the logits.

    patch = rk.hf.logits_free(model)
    ...
    patch.paths       # what happened: ("loss without logits (loss_function)",)
    patch.undo()

The output layer of the model, from `get_output_embeddings()`, returns deferred logits, and the `loss_function` of the
model takes them. Models that compute their loss themselves need nothing else, because deferred logits handle
`cross_entropy` and what models do before it (`operations`).

Shapes: (..., D) hidden states, (V, D) weight, N rows.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from reefknot.errors import ArgumentError, describe_type
from reefknot.hf import operations as operations  # registers the operations on deferred logits
from reefknot.hf.deferred import DeferredLogits
from reefknot.hf.loss import LogitsFreeLoss
from reefknot.hf.scores import Scores
from reefknot.hf.traced import TracedLogits, add_methods, defer_outputs
from reefknot.kernels.arguments import check_integer, check_number
from reefknot.nn.outputs.contract import OutputEnd

MIN_LOGITS = 2**24
"""The default of `min_logits`: 64 MiB of logits in float32."""
_FUNCTION = "logits_free"
_BYPASSED = "loss of another library (the output layer is not called; TRL's trainers use only its weight)"
_LOG = logging.getLogger("reefknot.hf")

add_methods()


class LogitsFree:
    """The change that `logits_free` made to a model."""

    def __init__(self, model: PreTrainedModel, head: nn.Module, linears: list[nn.Linear], min_logits: int) -> None:
        self._model = model
        self._head = head
        self._is_copy = False
        self._own_loss = vars(model).get("_loss_function")
        self._loss = LogitsFreeLoss(model.loss_function)
        self._log = PathLog(type(model).__name__)
        model.loss_function = self._loss
        self._own_forward = vars(model).get("forward")
        _replace_forward(model, _forward_of_model, self)
        self._forward = model.forward
        own_method = types.MethodType(type(model).forward, model)  # transformers looks at its signature
        functools.update_wrapper(self._forward, own_method, ("__name__", "__doc__"), ())
        self._settings = HeadSettings(min_logits, self._log)
        self._hooks = []
        if model.base_model is not model:
            self._hooks.append(model.base_model.register_forward_hook(self._settings.note_encoder_call))
        vars(model)["_reefknot"] = self
        _change_layers(linears, self._settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Note that this is the patch of a copied or loaded model, which nobody has a reference to."""
        vars(self).update(state)
        self._is_copy = True

    @property
    def paths(self) -> tuple[str, ...]:
        """How the model has used its logits so far, as logged."""
        return tuple(self._log.paths)

    def call_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the model or of a replica, with deferred logits also if it is compiled."""
        if model is self._model:
            self._follow_output_layer()
        own_forward = self._own_forward
        outputs = type(model).forward(model, *args, **kwargs) if own_forward is None else own_forward(*args, **kwargs)
        return defer_outputs(outputs)

    def _follow_output_layer(self) -> None:
        """Change the output layer of the model if it is a new one, as after `resize_token_embeddings`."""
        head = self._model.get_output_embeddings()
        if head is self._head or not self._is_active:  # another library may still call the patch after `undo`
            return
        _restore_layers(self._head)
        self._head = head
        try:
            _change_layers(_linear_layers(self._model, head), self._settings)
        except ArgumentError:
            self._log.add(f"logits as usual (the output layer now has the type {_name_type(head)})", logging.WARNING)

    @property
    def _is_active(self) -> bool:
        """Whether the model is still patched."""
        return vars(self._model).get("_reefknot") is self

    def undo(self) -> None:
        """Give the model its own output layer and loss function again. Logits that are deferred already still work."""
        if not self._is_active:
            return
        del vars(self._model)["_reefknot"]
        _restore_layers(self._head)
        _restore_layers(self._model.get_output_embeddings())
        for hook in self._hooks:
            hook.remove()
        if vars(self._model).get("forward") is self._forward:  # another library may have replaced it since
            _restore_forward(self._model)
            if self._own_forward is not None:
                self._model.forward = self._own_forward
        if vars(self._model).get("_loss_function") is self._loss:
            del self._model._loss_function
            if self._own_loss is not None:
                self._model.loss_function = self._own_loss

    def __enter__(self) -> LogitsFree:
        """Return the patch. The model is restored at the end of the `with` block."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore the model."""
        self.undo()


class PathLog:
    """Logs once how a model uses its logits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.paths: list[str] = []
        self.key = id(self)
        _LOGS[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> PathLog:
        """Share the log with copies of the model."""
        return self

    def __reduce__(self) -> Any:
        """Give a loaded model a new log."""
        return PathLog, (self.name,)

    def __call__(self, operation: str, is_real: bool) -> None:
        """Log an operation, and whether it makes real logits."""
        kind = "real logits" if is_real else "loss without logits"
        self.add(f"{kind} ({operation})", logging.WARNING if is_real else logging.INFO)

    def add(self, path: str, level: int) -> None:
        """Log a path, the first time only."""
        _add_path(self.key, path, level)


_LOGS: weakref.WeakValueDictionary[int, PathLog] = weakref.WeakValueDictionary()


# torch.compile calls this function when it traces a graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _add_path(key: int, path: str, level: int) -> None:
    log = _LOGS[key]
    if path not in log.paths:
        log.paths.append(path)
        _LOG.log(level, "%s: %s", log.name, path)


class HeadSettings:
    """What a patched output layer needs to know."""

    def __init__(self, min_logits: int, log: PathLog) -> None:
        self.min_logits = min_logits
        self.log = log
        self._is_waiting = False
        """Whether the encoder has been called since the last call of the output layer."""

    def note_encoder_call(self, encoder: nn.Module, *_: Any) -> None:
        """Report that the output layer is not called. A forward hook of the encoder."""
        if torch.compiler.is_compiling() or getattr(encoder, "_is_replica", False):  # replicas run in threads
            return
        if self._is_waiting:
            self.log.add(_BYPASSED, logging.WARNING)
        self._is_waiting = True

    def note_head_call(self) -> None:
        """Note that the output layer is called."""
        if not torch.compiler.is_compiling():
            self._is_waiting = False


def logits_free(model: nn.Module, *, min_logits: int = MIN_LOGITS) -> LogitsFree:
    """Make a transformers model compute its loss without storing its logits. The loss stays the same.

        rk.hf.logits_free(model)
        trainer = transformers.Trainer(model, ...)

    The `logits` of the model's output are then deferred. They are computed only if an operation needs all of them, and
    the log names this operation once. Use them before the next optimiser step, because they depend on the weights.

    Copies of the model (`copy.deepcopy`, `torch.save`) are logits-free too. To restore a copy, call `logits_free` on it
    and `undo()` of what it returns.

    Args:
        model: A transformers model with an output layer: `...ForCausalLM`, `...ForConditionalGeneration`,
            `...ForMaskedLM` and so on. It may be wrapped by PEFT, `torch.compile` or `DistributedDataParallel`.
        min_logits: Number of logits (rows times classes) from which a call defers them. Smaller logits are computed as
            usual, because that is faster.

    Returns:
        An object with `undo()`. It can also be used in a `with` statement.
    """
    check_integer(_FUNCTION, "min_logits", min_logits)
    check_number(_FUNCTION, "min_logits", min_logits, 0)
    inner = _unwrap_model(model)
    patch = vars(inner).get("_reefknot")
    if patch is not None and patch._is_copy:
        patch.undo()  # the caller gets a patch that it can undo
    head = inner.get_output_embeddings()
    if isinstance(getattr(inner, "end", None), OutputEnd):
        raise ArgumentError(f"{_FUNCTION}: the head of this model is replaced; its end needs no logits for the loss")
    if head is None:
        raise ArgumentError(
            f"{_FUNCTION}: {type(inner).__name__} has no output layer (get_output_embeddings() is None); load it with "
            "a class that has one, such as AutoModelForCausalLM"
        )
    linears = _linear_layers(inner, head)
    if "_reefknot" in vars(inner) or any("_reefknot" in vars(linear) for linear in linears):
        name = type(inner).__name__
        raise ArgumentError(f"{_FUNCTION}: {name} is logits-free already; call undo() first to change min_logits")
    return LogitsFree(inner, head, linears, min_logits)


def _unwrap_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside of PEFT, torch.compile or DistributedDataParallel."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        else:
            raise ArgumentError(f"{_FUNCTION}: model is {describe_type(model)}; pass a transformers model")
    return inner


def _linear_layers(model: PreTrainedModel, head: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that compute the logits: the output layer, or those that a PEFT layer wraps."""
    linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
    num_classes = max((linear.out_features for linear in linears), default=0)
    linears = [linear for linear in linears if linear.out_features == num_classes]
    name = type(model).__name__
    if not linears or any(type(linear).forward is not nn.Linear.forward for linear in linears):
        raise ArgumentError(
            f"{_FUNCTION}: the output layer of {name} has the type {_name_type(head)}; it must be an nn.Linear, or "
            "PEFT's LoRA layer around one"
        )
    if any("forward" in vars(linear) and "_reefknot" not in vars(linear) for linear in linears):
        raise ArgumentError(
            f"{_FUNCTION}: the forward method of the output layer of {name} was replaced, for example by accelerate "
            "for a model on several devices; call logits_free before that"
        )
    return linears


def _name_type(layer: nn.Module | None) -> str:
    """Return the name of a layer's type. Other libraries have layers of the name `Linear` that are not `nn.Linear`."""
    kind = type(layer)
    return kind.__name__ if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}.{kind.__name__}"


def _change_layers(linears: list[nn.Linear], settings: HeadSettings) -> None:
    """Make linear layers return deferred logits."""
    for linear in linears:
        vars(linear)["_reefknot"] = settings
        _replace_forward(linear, _forward)


def _restore_layers(head: nn.Module | None) -> None:
    """Make the linear layers in an output layer return logits again."""
    for module in () if head is None else head.modules():
        is_changed = vars(module).pop("_reefknot", None) is not None
        if is_changed and getattr(vars(module).get("forward"), "func", None) is _forward:
            _restore_forward(module)  # another library may have replaced it since


def _replace_forward(module: nn.Module, function: Callable[..., Any], *first_arguments: Any) -> None:
    """Replace the forward method of a module. Copies and pickles of the module get a function of their own.

    Args:
        module: The module.
        function: Takes the module, the first arguments, and the arguments of `forward`.
        first_arguments: Other arguments of the function.
    """
    vars(module)["forward"] = functools.partial(function, module, *first_arguments)
    vars(module)["_replicate_for_data_parallel"] = functools.partial(_replicate, module)


def _restore_forward(module: nn.Module) -> None:
    """Give a module the forward method of its class again."""
    del vars(module)["forward"], vars(module)["_replicate_for_data_parallel"]


def _replicate(module: nn.Module) -> nn.Module:
    """Return the copy of a module for another device. `nn.DataParallel` calls this."""
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
    forward = vars(module).get("forward")
    if isinstance(forward, functools.partial):
        vars(replica)["forward"] = functools.partial(forward.func, replica, *forward.args[1:])
    return replica


# torch.compile traces only the forward pass in this function.
@functools.partial(
    torch._dynamo.disable,
    recursive=False,
    reason="logits_free returns deferred logits; do not use fullgraph=True",
)
def _forward_of_model(model: Any, patch: LogitsFree, *args: Any, **kwargs: Any) -> Any:
    """Run the forward pass of a patched model. Replaces its `forward`."""
    if args and isinstance(args[0], PreTrainedModel):
        model, *args = args  # type: ignore[assignment]  # accelerate's unwrap_model makes a method of the function
    return patch.call_model(model, *args, **kwargs)


def _forward(self: Any, input: Tensor) -> Any:
    """Return deferred logits if they are large, and otherwise logits. Replaces `forward` of the output layer."""
    weight, bias = self.weight, self.bias
    settings: HeadSettings | None = getattr(self, "_reefknot", None)
    if settings is None:  # another library still calls the function after `undo`
        return F.linear(input, weight, bias)
    settings.note_head_call()
    reason = _reason_not_to_defer(input, weight, bias, settings.min_logits)
    if reason is not None:
        settings.log.add(f"logits as usual ({reason})", logging.INFO)
        return F.linear(input, weight, bias)
    if hasattr(self, "set_reshard_after_forward"):
        # The layer is a unit of FSDP2. The loss needs the weight after the forward pass of the layer.
        self.set_reshard_after_forward(False, recurse=False)
    device = input.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    scores = Scores(input, weight, bias, autocast or input.dtype, autocast, settings.log)
    if torch.compiler.is_compiling():
        return TracedLogits(scores)
    return DeferredLogits.defer(scores.stamped())


def _reason_not_to_defer(hidden: Tensor, weight: Tensor, bias: Tensor | None, min_logits: int) -> str | None:
    """Return why the logits are computed at once, or None if they are deferred."""
    if hidden.shape[:-1].numel() * weight.shape[0] < max(min_logits, 1):
        return "they are smaller than min_logits"
    if not torch.is_grad_enabled() and hidden.dim() > 2 and hidden.shape[-2] == 1:
        return "generation needs them"
    tensors = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return "the weight or the hidden state is not a plain tensor"
    if torch.compiler.is_compiling():
        is_special = any(tensor.is_meta for tensor in tensors)
    else:
        is_special = any(t.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)
    if is_special:
        return "torch.func or the meta device needs them"
    device = hidden.device.type
    if len({tensor.device for tensor in tensors}) > 1:
        return "the output layer is on another device"
    if len({tensor.dtype for tensor in tensors}) > 1 and not torch.is_autocast_enabled(device):
        return "the hidden state and the weight have different types"
    return None
