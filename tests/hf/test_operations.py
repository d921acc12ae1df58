"""Operations on deferred logits give the results and gradients of real logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
from torch import Tensor, nn

import reefknot as rk
from hf.models import make_model
from reefknot.hf.deferred import DeferredLogits

B, T, D, V = 3, 5, 8, 41
TARGETS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
ROW = torch.randn(V, generator=torch.Generator().manual_seed(2))
MASK = torch.arange(B * T).view(B, T) % 3 > 0
IDS = TARGETS[..., None]

Operation = Callable[[Any], Any]

WITHOUT_LOGITS: dict[str, Operation] = {
    "view": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1)),
    "flatten": lambda x: F.cross_entropy(x.flatten(0, 1), TARGETS.flatten()),
    "reshape": lambda x: F.cross_entropy(torch.reshape(x, (B * T, V)), TARGETS.reshape(-1)),
    "keyword": lambda x: F.cross_entropy(input=x.view(-1, V), target=TARGETS.view(-1)),
    "module": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")(x.view(-1, V), TARGETS.view(-1)),
    "class weights": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1), weight=ROW.abs()),
    "reduction none": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1), reduction="none"),
    "ignore_index": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1), ignore_index=int(TARGETS[0, 0])),
    "shift": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), TARGETS[:, 1:].flatten()),
    "mask": lambda x: F.cross_entropy(x[MASK], TARGETS[MASK]),
    "index": lambda x: F.cross_entropy(x[:, 2], TARGETS[:, 2]) + F.cross_entropy(x[0, :2], TARGETS[0, :2]),
    "new dimension": lambda x: F.cross_entropy(x[None, 1].squeeze(0), TARGETS[1]),
    "fewer classes": lambda x: F.cross_entropy(x[..., :30].view(-1, 30), TARGETS.view(-1) % 30),
    "select": lambda x: F.cross_entropy(x.select(1, 2), TARGETS[:, 2]),
    "narrow": lambda x: F.cross_entropy(x.narrow(1, 1, 2).flatten(0, 1), TARGETS[:, 1:3].flatten()),
    "transpose": lambda x: F.cross_entropy(x.transpose(0, 1).reshape(-1, V), TARGETS.T.reshape(-1)),
    "split": lambda x: sum(
        F.cross_entropy(p.flatten(0, 1), t.flatten()) for p, t in zip(x.split(2, 1), TARGETS.split(2, 1), strict=True)
    ),
    "unbind": lambda x: sum(F.cross_entropy(p, t) for p, t in zip(x.unbind(1), TARGETS.unbind(1), strict=True)),
    "iterate": lambda x: torch.stack([torch.logsumexp(row, dim=-1) for row in x]),
    "float": lambda x: x.float().to(torch.float32).to(x.device).logsumexp(-1),
    "scale": lambda x: (2 * x * 0.5 / 3).logsumexp(-1, keepdim=True),
    "negative": lambda x: (-x).logsumexp(-1),
    "in-place": lambda x: x.clone().div_(3.0).mul_(2).logsumexp(-1),
    "cap": lambda x: (torch.tanh(x / 1.5) * 1.5 / 0.7).logsumexp(-1),
    "negative cap": lambda x: (torch.tanh(x) * -2).logsumexp(-1),
    "row": lambda x: (x + ROW).logsumexp(-1),
    "row after scale": lambda x: (x * 0.3 + ROW.view(1, 1, V)).argmax(-1),
    "log_softmax, gather": lambda x: x.log_softmax(-1).gather(-1, IDS).squeeze(-1),
    "log_softmax, gather two": lambda x: F.log_softmax(x / 2, dim=-1).gather(-1, torch.cat([IDS, 40 - IDS], -1)),
    "log_softmax, nll_loss": lambda x: F.nll_loss(F.log_softmax(x[0], -1), TARGETS[0]),
    "label smoother": lambda x: (-F.log_softmax(x, dim=-1)).sum(dim=-1, keepdim=True, dtype=torch.float32),
    "gather": lambda x: torch.gather(torch.tanh(x + ROW) * 3, dim=-1, index=IDS),
    "argmax": lambda x: x.argmax(dim=-1, keepdim=True),
    "detach": lambda x: x.detach().logsumexp(-1) + x.logsumexp(-1),
}
WITH_LOGITS: dict[str, Operation] = {
    "softmax": lambda x: x.softmax(-1),
    "topk": lambda x: x.topk(3).values,
    "one class": lambda x: x[..., 4],
    "classes by id": lambda x: x[..., torch.tensor([1, 5])],
    "row after cap": lambda x: torch.tanh(x) + ROW,
    "matrix": lambda x: x * ROW,
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS),
    "probabilities": lambda x: F.cross_entropy(x[0], ROW.softmax(-1).expand(T, V)),
    "double": lambda x: x.double().logsumexp(-1),
    "mask in place": lambda x: x.clone().masked_fill_(ROW > 0, -1e4).logsumexp(-1),
    "relu in place": lambda x: torch.relu_(x.clone()).sum(),
    "cat": lambda x: torch.cat([x, x], 0).sum(),
    "sum": lambda x: x.sum(-1),
}


def make_head() -> tuple[Any, Tensor]:
    """Return the output layer of a patched model, and hidden states."""
    model = make_model("Llama")
    torch.manual_seed(3)
    model.lm_head = nn.Linear(D, V)
    return model, torch.randn(B, T, D, requires_grad=True)


def results_of(operation: Operation, logits: Tensor, hidden: Tensor, head: nn.Linear) -> list[Tensor]:
    result = operation(logits)
    results = [result.detach()]
    if result.requires_grad:
        weights = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view(result.shape)
        results += torch.autograd.grad((result * weights).sum(), [hidden, head.weight, head.bias])
    return results


@pytest.mark.parametrize("name", [*WITHOUT_LOGITS, *WITH_LOGITS])
def test_results_and_gradients_are_those_of_real_logits(name: str) -> None:
    operation = (WITHOUT_LOGITS | WITH_LOGITS)[name]
    model, hidden = make_head()
    expected = results_of(operation, model.lm_head(hidden), hidden, model.lm_head)
    patch = rk.hf.logits_free(model, min_logits=0)
    actual = results_of(operation, model.lm_head(hidden), hidden, model.lm_head)
    assert [type(result) for result in actual] == [Tensor] * len(expected)
    for result, real_result in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, real_result, atol=1e-5, rtol=1e-5)
    assert any("real" in path for path in patch.paths) == (name in WITH_LOGITS)


def test_in_place_operation_on_logits_with_a_view_is_rejected() -> None:
    model, hidden = make_head()
    rk.hf.logits_free(model, min_logits=0)
    logits = model.lm_head(hidden)
    rows = logits[0]
    with pytest.raises(rk.ArgumentError, match="in-place operation div_ on deferred logits would change views"):
        logits.div_(2)
    del rows
    torch.testing.assert_close(
        logits.div_(2).softmax(-1), F.linear(hidden, *model.lm_head.parameters()).div(2).softmax(-1)
    )


def test_assignment_changes_the_logits() -> None:
    model, hidden = make_head()
    expected = model.lm_head(hidden)
    expected[..., 3] = -9.0
    rk.hf.logits_free(model, min_logits=0)
    logits = model.lm_head(hidden)
    logits[..., 3] = -9.0
    torch.testing.assert_close(F.cross_entropy(logits.view(-1, V), TARGETS.view(-1)),
                               F.cross_entropy(expected.view(-1, V), TARGETS.view(-1)))  # fmt: skip


WITHOUT_GRADIENTS: dict[str, Operation] = {
    **{name: WITHOUT_LOGITS[name] for name in ("view", "float", "cap", "log_softmax, gather", "argmax", "detach")},
    **{name: WITH_LOGITS[name] for name in ("softmax", "double", "cat", "mask in place")},
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "numpy of cpu": lambda x: torch.from_numpy(x.cpu().numpy()),
    "array": lambda x: torch.from_numpy(np.asarray(x)),
    "numpy of cat": lambda x: torch.from_numpy(torch.cat([x, x]).numpy()),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_logits_made_without_gradients_never_get_them(name: str, mode: Callable[[], Any]) -> None:
    model, hidden = make_head()
    patch = rk.hf.logits_free(model, min_logits=0)
    with mode():
        logits = model.lm_head(hidden * 1)
    result = WITHOUT_GRADIENTS[name](logits)
    assert type(logits) is DeferredLogits
    assert not result.requires_grad
    patch.undo()
    with mode():
        logits = model.lm_head(hidden * 1)
    torch.testing.assert_close(result, WITHOUT_GRADIENTS[name](logits), atol=1e-5, rtol=1e-5)


def test_views_made_without_gradients_never_get_them() -> None:
    model, hidden = make_head()
    rk.hf.logits_free(model, min_logits=0)
    logits = model.lm_head(hidden)
    with torch.no_grad():
        rows = logits[0].float() * 2
    assert logits.softmax(-1).requires_grad
    assert not rows.softmax(-1).requires_grad
    assert not rows.logsumexp(-1).requires_grad


class _Square(torch.autograd.Function):
    """Someone else's autograd function, whose arguments torch does not show to tensor subclasses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def test_other_autograd_functions_get_gradients() -> None:
    model, hidden = make_head()

    def operation(logits: Tensor) -> Tensor:
        return _Square.apply(logits / 2)  # type: ignore[no-any-return, no-untyped-call]

    expected = results_of(operation, model.lm_head(hidden), hidden, model.lm_head)
    rk.hf.logits_free(model, min_logits=0)
    for result, real_result in zip(
        results_of(operation, model.lm_head(hidden), hidden, model.lm_head), expected, strict=True
    ):
        torch.testing.assert_close(result, real_result, atol=1e-5, rtol=1e-5)


def test_describing_the_logits_does_not_compute_them() -> None:
    model, hidden = make_head()
    patch = rk.hf.logits_free(model, min_logits=0)
    logits = model.lm_head(hidden)
    assert repr(logits) == "DeferredLogits(shape=(3, 5, 41), dtype=torch.float32, device='cpu')"
    assert (logits.shape, logits.size(-1), len(logits), logits.requires_grad) == ((B, T, V), V, B, True)
    assert isinstance(logits, DeferredLogits)
    assert patch.paths == ()
