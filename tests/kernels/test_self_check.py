"""On a GPU on which they have not been tested, the Triton kernels are used only if they pass a check.

TRITON_INTERPRET=1 pytest tests/kernels/test_self_check.py      runs the check with the kernels in triton's interpreter

Most tests treat the CPU as such a GPU. There, compiling a Triton kernel fails, or `TorchBackend` takes the place of the
kernels.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels import choice, scores, self_check
from reefknot.kernels.choice import Choice, Impl, resolve_impl, should_use_triton, using
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.kernels.scores import TorchBackend

from .interpreter import INTERPRETED, gpu_only, interpreter_only

pytest.importorskip("triton", reason="triton is not installed")

CPU = torch.device("cpu")
AUTO, TRITON = Choice("auto"), Choice("triton")

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="needs kernels that cannot be compiled")


@pytest.fixture(autouse=True)
def forget_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget earlier checks, before and after a test."""
    monkeypatch.setattr(self_check, "_FAILURES", {})
    self_check._warn_once.cache_clear()


@pytest.fixture
def untested_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a GPU that the kernels are written for, but on which they have not been tested."""
    monkeypatch.setattr(choice, "_is_written_for", lambda device: True)
    monkeypatch.setattr(choice, "_is_interpreted", lambda: True)  # explicit requests then reach the check
    monkeypatch.setattr(self_check, "_is_untested", lambda device: True)


@pytest.fixture
def working_kernels(monkeypatch: pytest.MonkeyPatch, untested_device: None) -> None:
    """Compute everything that the kernels compute in plain torch."""
    monkeypatch.setattr(scores, "get_backend", lambda impl: TorchBackend())


class WrongGradient(TorchBackend):
    """Scales gradients wrongly. Losses are correct."""

    def scale_in_place(self, x: Tensor, factor: Tensor) -> None:
        x.mul_(1.1 * factor)


class WrongSummary(TorchBackend):
    """Returns log-sum-exps that are NaN."""

    def summarise(self, *arguments: Any, **options: Any) -> Any:
        summary = super().summarise(*arguments, **options)
        return summary._replace(lse=None if summary.lse is None else summary.lse * torch.nan)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# -- failures ------------------------------------------------------------------------------------------------------


@not_interpreted
@dtypes
def test_auto_falls_back_if_a_kernel_does_not_compile(
    untested_device: None, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    for _ in range(3):
        assert resolve_impl(AUTO, CPU, dtype) == "chunked"
    (warning,) = warnings_of(caplog)
    name = str(dtype).removeprefix("torch.")
    assert warning.startswith(f"the Triton kernels of losses do not work on cpu in {name}, so plain torch is used")
    assert "RuntimeError" in warning
    assert "\n" not in warning


@not_interpreted
def test_loss_is_correct_after_the_fallback(untested_device: None) -> None:
    hidden, weight, target = torch.randn(5, 8), torch.randn(11, 8, requires_grad=True), torch.arange(5)
    loss = linear_cross_entropy(hidden, weight, target)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, target)
    assert torch.allclose(loss, expected)
    assert torch.allclose(torch.autograd.grad(loss, weight)[0], torch.autograd.grad(expected, weight)[0], atol=1e-6)


@not_interpreted
def test_lstms_fall_back_too(untested_device: None, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert not should_use_triton(CPU, torch.float32, "LSTMs")
    (warning,) = warnings_of(caplog)
    assert warning.startswith("the Triton kernels of LSTMs do not work on cpu in float32")
    with using("triton"), pytest.raises(ArgumentError, match=r"^impl = 'triton': the Triton kernels of LSTMs cannot"):
        should_use_triton(CPU, torch.float32, "LSTMs")


@dtypes
@pytest.mark.parametrize(
    ("backend", "failure"),
    [
        (WrongGradient, "summed losses: the gradient of the hidden states differs from plain torch by "),
        (WrongSummary, "log-probabilities: the loss differs from plain torch by nan"),
    ],
)
def test_auto_falls_back_if_numbers_are_wrong(
    untested_device: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype,
    backend: type[TorchBackend],
    failure: str,
) -> None:
    monkeypatch.setattr(scores, "get_backend", lambda impl: backend())
    assert resolve_impl(AUTO, CPU, dtype) == "chunked"
    assert resolve_impl(AUTO, CPU, dtype) == "chunked"
    (warning,) = warnings_of(caplog)
    assert failure in warning


@not_interpreted
def test_explicit_triton_raises_an_error_instead(untested_device: None, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with pytest.raises(ArgumentError) as error:
            resolve_impl(TRITON, CPU, torch.float32)
    message = str(error.value)
    assert message.startswith(
        "impl = 'triton': the Triton kernels of losses cannot be used on cpu in float32: RuntimeError: "
    )
    assert message.endswith("; use impl = 'auto', or set REEFKNOT_KERNELS=triton to skip the check")
    assert "\n" not in message
    assert not warnings_of(caplog)
    # A fallback after the error still logs its warning.
    assert resolve_impl(AUTO, CPU, torch.float32) == "chunked"
    assert len(warnings_of(caplog)) == 1


def test_devices_and_types_are_checked_separately(working_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setitem(self_check._CHECKS, "losses", lambda *device_and_dtype: checked.append(device_and_dtype))
    other = torch.device("cpu", 0)
    for device, dtype in [(CPU, torch.float32), (CPU, torch.bfloat16), (other, torch.float32), (CPU, torch.float32)]:
        assert resolve_impl(AUTO, device, dtype) == "triton"
    assert checked == [(CPU, torch.float32), (CPU, torch.bfloat16), (other, torch.float32)]


def test_lack_of_memory_is_not_a_failure(
    working_kernels: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run_out_of_memory(device: torch.device, dtype: torch.dtype) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as context:
        context.setitem(self_check._CHECKS, "losses", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            resolve_impl(AUTO, CPU, torch.float32)
    assert resolve_impl(AUTO, CPU, torch.float32) == "triton"
    assert not warnings_of(caplog)


# -- success -------------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_working_kernels_are_used(
    working_kernels: None, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, impl: Impl
) -> None:
    assert resolve_impl(Choice(impl), CPU, dtype) == "triton"
    assert not warnings_of(caplog)


@interpreter_only
@pytest.mark.parametrize("kernels", ["losses", "LSTMs"])
def test_interpreted_kernels_pass_the_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernels: self_check.Kernels
) -> None:
    monkeypatch.setattr(self_check, "_is_untested", lambda device: True)
    monkeypatch.setattr(self_check, "_LOSS_SHAPE", (33, 24, 67))  # the interpreter is slow
    monkeypatch.setattr(self_check, "_LSTM_SHAPE", (2, 3, 20))
    assert self_check.works(kernels, CPU, torch.float32)
    assert not warnings_of(caplog)


@gpu_only
@dtypes
@pytest.mark.parametrize("kernels", ["losses", "LSTMs"])
def test_compiled_kernels_pass_the_check(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype,
    kernels: self_check.Kernels,
) -> None:
    monkeypatch.setattr(self_check, "TESTED_GPUS", {})
    self_check.require(kernels, torch.device("cuda"), dtype)
    assert list(self_check._FAILURES.values()) == [None]
    assert not warnings_of(caplog)


# -- when the check runs -------------------------------------------------------------------------------------------


def forbid_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("the check ran")

    monkeypatch.setattr(self_check, "_check_in_thread", fail)


def test_tested_gpus_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_is_written_for", lambda device: True)
    monkeypatch.setattr(self_check, "_capability", lambda device: (9, 0))
    forbid_check(monkeypatch)
    assert resolve_impl(AUTO, torch.device("cuda", 0), torch.bfloat16) == "triton"


def test_environment_variable_skips_the_check(untested_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_check(monkeypatch)
    monkeypatch.setattr(choice, "_DEFAULT", TRITON)  # as REEFKNOT_KERNELS=triton sets it
    assert resolve_impl(choice.current_choice(), CPU, torch.float32) == "triton"
    assert resolve_impl(AUTO, CPU, torch.float32) == "triton"
    assert should_use_triton(CPU, torch.float32, "LSTMs")


def test_environment_variable_is_read() -> None:
    script = "from reefknot.kernels import choice; print(choice._skips_check())"
    for value, expected in (("triton", "True"), ("auto", "False")):
        environment = os.environ | {"REEFKNOT_KERNELS": value}
        command = [sys.executable, "-c", script]
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert completed.stdout.strip() == expected


def test_capture_uses_an_earlier_check(
    working_kernels: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as context:
        context.setattr(self_check, "_is_capturing", lambda device: True)
        assert resolve_impl(AUTO, CPU, torch.float32) == "chunked"
        with pytest.raises(ArgumentError, match=r"have not been checked yet.*; run the model once before that, or set"):
            resolve_impl(TRITON, CPU, torch.float32)
    assert not warnings_of(caplog)
    assert resolve_impl(AUTO, CPU, torch.float32) == "triton"
    with monkeypatch.context() as context:
        context.setattr(self_check, "_is_capturing", lambda device: True)
        forbid_check(context)
        assert resolve_impl(AUTO, CPU, torch.float32) == "triton"
        assert resolve_impl(TRITON, CPU, torch.float32) == "triton"


@not_interpreted
def test_compiled_graph_uses_an_earlier_check(untested_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def double_if_used(x: Tensor) -> Tensor:
        return 2 * x if should_use_triton(x.device, x.dtype, "LSTMs") else x

    with monkeypatch.context() as context:
        forbid_check(context)
        assert double_if_used(torch.ones(())) == 1
    monkeypatch.setitem(self_check._CHECKS, "LSTMs", lambda device, dtype: None)
    assert should_use_triton(CPU, torch.float32, "LSTMs")
    assert double_if_used(torch.ones(())) == 2


# -- the caller's settings -----------------------------------------------------------------------------------------


def test_random_state_does_not_change(working_kernels: None) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert resolve_impl(AUTO, CPU, torch.float32) == "triton"
    assert torch.equal(torch.get_rng_state(), before)


def in_inference_mode(check: Callable[[], None]) -> None:
    with torch.inference_mode():
        check()


def in_autocast(check: Callable[[], None]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check()


def in_using(check: Callable[[], None]) -> None:
    with using("reference", memory=1e-6):
        check()


def in_grad_and_vmap(check: Callable[[], None]) -> None:
    def loss(x: Tensor) -> Tensor:
        check()
        return x.sum()

    torch.vmap(torch.func.grad(loss))(torch.ones(2, 3))


def in_backward(check: Callable[[], None]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda gradient: check())
    y.sum().backward()


@pytest.mark.parametrize("context", [in_inference_mode, in_autocast, in_using, in_grad_and_vmap, in_backward])
def test_check_works_in_any_context(working_kernels: None, context: Callable[[Callable[[], None]], None]) -> None:
    results = []
    context(lambda: results.append(resolve_impl(AUTO, CPU, torch.float32)))
    assert results == ["triton"]
