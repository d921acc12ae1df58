"""Check the Triton kernels on GPUs on which they have not been tested, before they are used.

`works` decides for `impl = "auto"`: on a GPU that is not in `TESTED_GPUS`, the first call per device and dtype runs the
kernels on a small problem and compares outputs and gradients with plain torch in float64 on the CPU. If a kernel does
not compile, or computes other numbers, one warning is logged and plain torch is used from then on. `require` raises an
error instead, for `impl = "triton"`. `choice` calls both.

The check runs in a new thread, because that has none of the caller's settings: autocast, inference mode, `torch.func`,
the CUDA stream and so on. It draws its numbers from a generator of its own, so torch's random state stays as it is. It
does not compute gradients by autograd on the GPU, whose thread may be the caller and wait for the check.

A new kernel needs a line in `_check_losses`, or a check of its own in `_CHECKS`.

Shapes: N rows, D dimensions, V classes; L layers, T steps, B rows of the batch, H units, G = 4H gates.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from torch import Tensor

from reefknot.errors import ArgumentError

if TYPE_CHECKING:
    from reefknot.kernels.scores import ScoreTransform, SummaryRequest

Kernels = Literal["losses", "LSTMs"]
"""The kernels that are checked together."""

TESTED_GPUS = {(9, 0): "NVIDIA H200"}
"""The GPUs on which all tests of the kernels passed, by compute capability. GPUs of the same capability run the same
compiled kernels, so they are not checked. docs/losses.md lists them too."""

_LOG = logging.getLogger("reefknot.kernels")
_LOCK = threading.Lock()
_FAILURES: dict[tuple[Kernels, str, int | None, torch.dtype], str | None] = {}
"""Why the kernels failed the check, by device and dtype. None if they passed."""
_UNCHECKED = "they have not been checked yet, and cannot be while a CUDA graph is captured or a model is compiled"


class _Mismatch(Exception):
    """A kernel computed other numbers than the reference."""


def works(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels pass the check on a device. The first failure logs a warning.

    While a CUDA graph is captured or a model is compiled, the check cannot run. Then the result is that of an earlier
    check, and False if the kernels have not been checked.
    """
    failure = _find_failure(kernels, device, dtype)
    if failure is not None and failure != _UNCHECKED and not torch.compiler.is_compiling():  # a graph cannot log
        _warn_once(kernels, device, dtype, failure)
    return failure is None


def require(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """Raise an error unless the kernels pass the check on a device."""
    failure = _find_failure(kernels, device, dtype)
    if failure is None:
        return
    advice = "use impl = 'auto'"
    if failure == _UNCHECKED:
        advice = "run the model once before that"
    raise ArgumentError(
        f"impl = 'triton': the Triton kernels of {kernels} cannot be used on {_describe(device)} in {_name(dtype)}: "
        f"{failure}; {advice}, or set REEFKNOT_KERNELS=triton to skip the check"
    )


def _find_failure(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot be used on a device, or None if they can."""
    if not _is_untested(device):
        return None
    is_compiling = torch.compiler.is_compiling()
    index = cast("int | None", device.index)  # torch's annotation leaves out None
    if index is None and device.type == "cuda" and not is_compiling:
        index = torch.cuda.current_device()
    key = (kernels, device.type, index, dtype)
    if key in _FAILURES:
        return _FAILURES[key]
    if is_compiling or _is_capturing(device):
        return _UNCHECKED
    with _LOCK:
        if key not in _FAILURES:
            _FAILURES[key] = _check_in_thread(kernels, device, dtype)
    return _FAILURES[key]


def _is_untested(device: torch.device) -> bool:
    """Return whether the kernels have never run on GPUs like this one. Tests without a GPU replace this function."""
    return device.type == "cuda" and _capability(device) not in TESTED_GPUS


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _warn_once(kernels: Kernels, device: torch.device, dtype: torch.dtype, failure: str) -> None:
    _LOG.warning(
        "the Triton kernels of %s do not work on %s in %s, so plain torch is used, which is slower: %s",
        kernels,
        _describe(device),
        _name(dtype),
        failure,
    )


def _describe(device: torch.device) -> str:
    """Return the name of a device for a message."""
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} ({device}, compute capability {major}.{minor})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- the check -----------------------------------------------------------------------------------------------------


def _check_in_thread(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str | None:
    """Run the check in a new thread. Return why it failed, or None. Running out of memory raises an error."""
    failures: list[str] = []
    memory_errors: list[Exception] = []

    def check() -> None:
        try:
            with torch.cuda.device(device if device.type == "cuda" else -1):  # -1 stands for no device
                _CHECKS[kernels](device, dtype)
        except torch.OutOfMemoryError as error:  # says nothing about the kernels
            memory_errors.append(error)
        except _Mismatch as error:
            failures.append(str(error))
        except Exception as error:  # compilers and drivers raise errors of many types
            lines = [line for line in str(error).splitlines() if line.strip()]
            failures.append(f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__)

    thread = threading.Thread(target=check, name="reefknot kernel check", daemon=True)
    thread.start()
    thread.join()
    if memory_errors:
        raise memory_errors[0]
    return failures[0] if failures else None


class _Numbers:
    """Random numbers for a check. Torch's random state is neither read nor changed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._generator = np.random.default_rng(0)
        self._dtype = dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed numbers on the CPU. They are float64 numbers that the dtype holds exactly."""
        numbers = torch.from_numpy(scale * self._generator.standard_normal(shape))
        return numbers.to(self._dtype).double()


def _tolerance(dtype: torch.dtype) -> float:
    """Return the largest error that rounding explains, relative to the largest number of a tensor."""
    from reefknot.kernels.choice import rounds_to_tf32

    if dtype == torch.bfloat16:
        return 3e-2
    return 5e-3 if rounds_to_tf32() else 1e-4


def _compare(
    part: str, names: Sequence[str], actual: Sequence[Tensor | None], exact: Sequence[Tensor | None], dtype: torch.dtype
) -> None:
    """Raise an error if one of the tensors differs from its exact values by more than the tolerance."""
    for name, tensor, expected in zip(names, actual, exact, strict=True):
        if tensor is None or expected is None:
            assert tensor is expected
            continue
        difference = tensor.detach().cpu().double() - expected.detach()
        error = float(difference.abs().max() / expected.detach().abs().max())
        if not error <= _tolerance(dtype):  # also if it is NaN
            raise _Mismatch(f"{part}: the {name} differs from plain torch by {error:.1e} of its largest value")


_LOSS_SHAPE = (201, 72, 517)
"""Rows, dimensions and classes of the check of the losses. They are not multiples of a tile."""
_LSTM_SHAPE = (5, 19, 72)
"""Steps, rows and units of the check of LSTMs."""


def _check_losses(device: torch.device, dtype: torch.dtype) -> None:
    """Run every kernel of the losses."""
    from reefknot.kernels.scores import IDENTITY, ScoreTransform, SummaryRequest

    check = _LossCheck(device, dtype)
    check.check_summed_loss()
    transform = ScoreTransform(scale=0.8, softcap=20.0, temperature=0.9)
    check.check_rows("log-probabilities", SummaryRequest(expected=True, total=True, best=True), transform)
    check.check_rows("tempered losses", SummaryRequest(tau=2.0), IDENTITY)
    check.check_soft_targets()


class _LossCheck:
    """A small classifier, whose losses are computed by the kernels and exactly.

    Args:
        device: The GPU.
        dtype: The type of the matrix products.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        from reefknot.kernels.autograd import LossOptions
        from reefknot.kernels.choice import Choice
        from reefknot.kernels.scores import IGNORE, get_backend

        num_rows, dim, num_classes = _LOSS_SHAPE
        self.device, self.dtype = device, dtype
        self.options = LossOptions(dtype, get_backend("triton"), Choice().budget(device))
        self.numbers = _Numbers(dtype)
        # Hidden states, class vectors and biases.
        self.exact = [self.numbers(num_rows, dim), self.numbers(num_classes, dim, scale=dim**-0.5)]
        self.exact.append(self.numbers(num_classes))
        self.targets_N = torch.arange(num_rows) * 31 % num_classes
        self.targets_N[::7] = IGNORE
        for tensor in self.exact:
            tensor.requires_grad_()
        self.rounded = [self._send(tensor) for tensor in self.exact]

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, self.dtype)

    def check_summed_loss(self) -> None:
        """Check the sum of the losses, whose gradients the forward pass computes."""
        from reefknot.kernels.autograd import SummedLoss
        from reefknot.kernels.reference import reference_results
        from reefknot.kernels.scores import IDENTITY, SummaryRequest

        hidden_ND, weight_VD, bias_V = self.exact
        tensors = (hidden_ND, weight_VD, bias_V, self.targets_N, None)
        nll_N = reference_results(*tensors, SummaryRequest(), IDENTITY)[0]
        assert nll_N is not None
        exact_total = 0.5 * nll_N.sum()
        exact_gradients = torch.autograd.grad(exact_total, self.exact)

        hidden_ND, weight_VD, bias_V = self.rounded
        loss = SummedLoss(hidden_ND, weight_VD, bias_V, self.targets_N.to(self.device), None, None, self.options)
        total, gradients = loss.compute_with_gradients((True, True, True, False))
        factor = total.new_tensor(0.5)
        for gradient in gradients[:3]:
            assert gradient is not None
            self.options.backend.scale_in_place(gradient, factor)
        names = ("sum", *_GRADIENTS)
        _compare("summed losses", names, (total * factor, *gradients[:3]), (exact_total, *exact_gradients), self.dtype)

    def check_rows(self, part: str, request: SummaryRequest, transform: ScoreTransform) -> None:
        """Check the losses of the rows and the requested summaries, with gradients."""
        from reefknot.kernels.autograd import RowGrads, compute_row_gradients, compute_row_results
        from reefknot.kernels.reference import linear_scores, reference_results

        hidden_ND, weight_VD, bias_V = self.exact
        class_weight_V = self.numbers(len(bias_V)).abs() if request.total else None
        tensors = (hidden_ND, weight_VD, bias_V, self.targets_N, class_weight_V)
        *exact_results, _ = reference_results(*tensors, request, transform)
        output_grads = [None if result is None else self.numbers(len(hidden_ND)) for result in exact_results]
        exact_gradients = torch.autograd.grad(
            [result for result in exact_results if result is not None],
            self.exact,
            [grad for grad in output_grads if grad is not None],
        )

        options = replace(self.options, transform=transform)
        class_weight_V = None if class_weight_V is None else class_weight_V.to(self.device, torch.float32)
        hidden_ND, weight_VD, bias_V = self.rounded
        inputs = options.loss_inputs(hidden_ND, weight_VD, bias_V, self.targets_N.to(self.device), class_weight_V)
        results = compute_row_results(inputs, request)
        row_grads = RowGrads(*(None if grad is None else grad.to(self.device, torch.float32) for grad in output_grads))
        gradients = compute_row_gradients(
            inputs, request, results.lse, results.lse_tau, results.entropy, row_grads, (True, True, True)
        )
        names = ("loss", "log-sum-exp", "tempered log-sum-exp", "entropy", "sum of scores", *_GRADIENTS)
        _compare(part, names, (*results[:5], *gradients), (*exact_results, *exact_gradients), self.dtype)
        if results.best_class is not None:
            # If two classes have nearly the same score, rounding decides which of them is the best.
            scores_NV = linear_scores(*self.exact)
            best_scores_N = scores_NV.gather(1, results.best_class.cpu()[:, None])[:, 0]
            _compare(part, ("score of the best class",), (best_scores_N,), (scores_NV.amax(-1),), self.dtype)

    def check_soft_targets(self) -> None:
        """Check soft targets, with a dimension that the GPU's copy engine does not support."""
        from reefknot.kernels.reference import reference_soft_targets
        from reefknot.kernels.soft_target import Attention

        num_queries, dim, num_keys, tau = 45, 37, 203, 1.5
        exact = [self.numbers(num_queries, dim), self.numbers(num_keys, dim, scale=dim**-0.5)]
        exact.append(self.numbers(num_keys, dim))
        for tensor in exact:
            tensor.requires_grad_()
        output_grads = [self.numbers(num_queries, dim), self.numbers(num_queries)]
        exact_results = reference_soft_targets(exact[0], exact[1], exact[2], tau)
        exact_gradients = torch.autograd.grad(exact_results, exact, output_grads)

        queries, keys, values = (self._send(tensor) for tensor in exact)
        attention = Attention(queries, keys, values, tau, self.dtype, self.options.backend, self.options.budget)
        results = attention.forward()
        grads = [grad.to(self.device, torch.float32) for grad in output_grads]
        gradients = attention.backward(results, grads, (True, True, True))
        names = ("mean", "entropy", "gradient of the queries", "gradient of the keys", "gradient of the values")
        _compare("soft targets", names, (*results[:2], *gradients), (*exact_results, *exact_gradients), self.dtype)


_GRADIENTS = ("gradient of the hidden states", "gradient of the weight", "gradient of the bias")


def _check_lstms(device: torch.device, dtype: torch.dtype) -> None:
    """Check one layer, and two layers in one launch, with dropout masks."""
    numbers = _Numbers(dtype)
    for num_layers in (1, 2):
        _check_lstm(num_layers, numbers, device, dtype)


def _check_lstm(num_layers: int, numbers: _Numbers, device: torch.device, dtype: torch.dtype) -> None:
    from reefknot.kernels.recurrence import lstm_stack_scan
    from reefknot.kernels.triton_recurrence import run_backward_kernel, run_forward_kernel

    num_steps, num_rows, num_units = _LSTM_SHAPE
    inputs_TBG = numbers(num_steps, num_rows, 4 * num_units)
    hidden_LBH, cell_LBH = (numbers(num_layers, num_rows, num_units) for _ in range(2))
    weights = [numbers(4 * num_units, num_units, scale=num_units**-0.5) for _ in range(2 * num_layers - 1)]
    biases = [numbers(4 * num_units) for _ in range(num_layers - 1)]
    masks_LBH = 1.25 * (numbers(num_layers, num_rows, num_units) > -0.84)
    grad_TBH, grad_LBH = numbers(num_steps, num_rows, num_units), numbers(num_layers, num_rows, num_units)

    exact = [tensor.clone().requires_grad_() for tensor in (inputs_TBG, cell_LBH)]
    # In float64, this is a loop in plain torch.
    exact_h, _, exact_c = lstm_stack_scan(
        exact[0], hidden_LBH, exact[1], weights[:num_layers], weights[num_layers:], biases, masks_LBH
    )
    exact_gradients = torch.autograd.grad((exact_h, exact_c), exact, (grad_TBH, grad_LBH))

    def send(tensor: Tensor, to_dtype: torch.dtype = torch.float32) -> Tensor:
        return tensor.to(device, to_dtype)

    hidden_TBH, _, last_cell_LBH, saved = run_forward_kernel(
        send(inputs_TBG, dtype),
        send(hidden_LBH, dtype),
        send(cell_LBH),
        [send(weight, dtype) for weight in weights],
        [send(bias, dtype) for bias in biases],
        send(masks_LBH),
        dtype,
    )
    grad_gates_LTB4P, grad_cell_LBH = run_backward_kernel(
        send(grad_TBH, dtype), None, send(grad_LBH), send(masks_LBH), saved
    )
    grad_inputs_TBG = grad_gates_LTB4P[0, ..., :num_units].flatten(-2)
    names = ("output", "cell", "gradient of the inputs", "gradient of the cell")
    actual = (hidden_TBH, last_cell_LBH, grad_inputs_TBG, grad_cell_LBH)
    part = "one LSTM layer" if num_layers == 1 else f"{num_layers} LSTM layers"
    _compare(part, names, actual, (exact_h, exact_c, *exact_gradients), dtype)


_CHECKS: dict[Kernels, Callable[[torch.device, torch.dtype], None]] = {"losses": _check_losses, "LSTMs": _check_lstms}
