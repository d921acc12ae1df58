"""The choice of an implementation: `using`, environment variables, and installations without triton."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import reefknot
from reefknot.errors import ArgumentError
from reefknot.kernels import choice
from reefknot.kernels.choice import Choice, current_choice, resolve_impl, using

PACKAGE = Path(reefknot.__file__).parent
CPU = torch.device("cpu")

LOSS = """
import sys
import torch
from reefknot.errors import ArgumentError
from reefknot.kernels.choice import using
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.kernels.losses import row_losses, summed_loss

hidden, weight = torch.ones(3, 4, requires_grad=True), torch.ones(8, 4, requires_grad=True)
targets = torch.tensor([0, 1, 2])
loss = linear_cross_entropy(hidden, weight, targets)
loss.backward()
assert abs(loss.item() - 2.0794415) < 1e-5, loss
assert row_losses(hidden, weight, None, targets, 2.0).nll.isfinite().all()
assert not [name for name in sys.modules if name.split(".")[0] == "triton" and sys.modules[name] is not None]
"""
"""A program that computes losses and checks that nothing has imported triton."""

TRITON_IMPORT_FAILS = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, Blocker())
import reefknot
"""

TRITON_NOT_INSTALLED = """
import sys

sys.modules["triton"] = None
"""

REQUEST_TRITON = """
try:
    with using("triton"):
        summed_loss(hidden, weight, None, targets)
except ArgumentError as error:
    print(error)
"""


def run(program: str, source: Path = PACKAGE.parent) -> str:
    """Return the output of a program that imports the package from a folder."""
    completed = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(source)!r})\n{program}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.fixture
def forget_logged_messages() -> Iterator[None]:
    """Forget which messages have been logged once."""
    choice.log_once.cache_clear()
    yield
    choice.log_once.cache_clear()


# -- using ---------------------------------------------------------------------------------------------------------


def test_using_nests_and_restores() -> None:
    assert current_choice() == Choice("auto", None)
    with using("reference"):
        assert current_choice() == Choice("reference")
        with using(memory=3.0):
            assert current_choice() == Choice("auto", 3.0)
        assert current_choice() == Choice("reference")
    assert current_choice() == Choice()


def test_using_restores_after_an_exception() -> None:
    with pytest.raises(KeyError), using("chunked"), using("reference", 1.0):
        raise KeyError
    assert current_choice() == Choice()


@pytest.mark.parametrize("impl", ["fast", "", "Triton", None])
def test_unknown_implementation_is_rejected(impl: Any) -> None:
    with pytest.raises(ArgumentError, match="reference, chunked, triton") as error, using(impl):
        pass
    assert "\n" not in str(error.value)
    assert current_choice() == Choice()


@pytest.mark.parametrize("memory", [0, -1.0, float("nan")])
def test_memory_budget_must_be_positive(memory: float) -> None:
    with pytest.raises(ArgumentError, match="MiB above 0"), using(memory=memory):
        pass


def test_memory_budget_is_converted_to_bytes() -> None:
    assert Choice(memory=1.5).budget(CPU) == 3 * 2**19
    assert Choice().budget(CPU) < Choice().budget(torch.device("cuda"))


def test_infinite_memory_budget_is_accepted() -> None:
    hidden = torch.randn(3, 4)
    with using(memory=float("inf")):
        loss = reefknot.linear_cross_entropy(hidden, torch.randn(9, 4), torch.tensor([0, 1, 2]))
    assert loss.isfinite()


# -- resolve_impl --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_auto_chooses_chunked_on_a_cpu(dtype: torch.dtype) -> None:
    assert resolve_impl(Choice(), CPU, dtype) == "chunked"


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_requested_implementation_is_used(impl: choice.Impl) -> None:
    assert resolve_impl(Choice(impl), CPU, torch.float32) == impl


@pytest.mark.usefixtures("forget_logged_messages")
def test_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="reefknot.kernels"):
        for _ in range(3):
            resolve_impl(Choice(), CPU, torch.float32)
        assert [record.getMessage() for record in caplog.records] == ["cross-entropy on cpu in float32: chunked"]
        resolve_impl(Choice(), CPU, torch.bfloat16)
        resolve_impl(Choice("reference"), CPU, torch.float32)
    assert len(caplog.records) == 3


# -- without triton ------------------------------------------------------------------------------------------------


def test_losses_on_a_cpu_do_not_import_triton() -> None:
    assert run(LOSS) == ""


def test_losses_work_without_triton() -> None:
    assert run(TRITON_IMPORT_FAILS + LOSS) == ""


def test_triton_is_rejected_if_not_installed() -> None:
    message = run(TRITON_NOT_INSTALLED + LOSS + REQUEST_TRITON)
    assert "not installed" in message
    assert "use impl = 'auto'" in message


def test_losses_work_without_the_triton_kernel_files(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "reefknot", ignore=shutil.ignore_patterns("triton_*.py", "__pycache__"))
    output = run(LOSS + REQUEST_TRITON + "import reefknot; print(reefknot.__file__)", tmp_path).splitlines()
    assert output[0].startswith("impl = 'triton' needs triton")
    assert output[1:] == [str(tmp_path / "reefknot" / "__init__.py")]


def test_triton_is_rejected_on_a_cpu() -> None:
    pytest.importorskip("triton")
    message = run(LOSS + REQUEST_TRITON)
    assert "not on cpu" in message
    assert "use impl = 'auto'" in message


def test_environment_variables_set_the_default_choice() -> None:
    command = [sys.executable, "-c", "from reefknot.kernels.choice import current_choice; print(current_choice())"]
    variables = {"REEFKNOT_KERNELS": "reference", "REEFKNOT_KERNEL_MEMORY": "48"}
    completed = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert completed.stdout == "Choice(impl='reference', memory=48.0)\n", completed.stderr


@pytest.mark.parametrize(
    ("name", "value", "chosen"),
    [("REEFKNOT_KERNELS", "reference", Choice("reference")), ("REEFKNOT_KERNEL_MEMORY", "48", Choice(memory=48.0))],
)
def test_each_environment_variable_works_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, chosen: Choice
) -> None:
    monkeypatch.setenv(name, value)
    assert choice._read_environment() == chosen


@pytest.mark.parametrize(("name", "value"), [("REEFKNOT_KERNELS", "cuda"), ("REEFKNOT_KERNEL_MEMORY", "much")])
def test_invalid_environment_variables_are_rejected(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=r"^REEFKNOT_KERNELS or REEFKNOT_KERNEL_MEMORY: "):
        choice._read_environment()


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ("torch.backends.cuda.matmul.allow_tf32 = True", True),
        ("torch.set_float32_matmul_precision('high')", True),
        ("torch.backends.cuda.matmul.allow_tf32 = False", False),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", True),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", False),
        ("torch.backends.fp32_precision = 'tf32'", True),
    ],
)
def test_tf32_is_detected_from_every_torch_switch(switch: str, expected: bool) -> None:
    if "fp32_precision" in switch and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has only the older switch")
    # In another process, because not all of the newer switches can be reset.
    script = f"import torch; from reefknot.kernels.choice import rounds_to_tf32\n{switch}\nprint(rounds_to_tf32())"
    completed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert completed.stdout.strip() == str(expected)
