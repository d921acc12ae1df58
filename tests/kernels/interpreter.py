"""Where the tests of the triton kernels run: in triton's interpreter on the CPU, or compiled on a GPU.

Triton decides at import time whether it interprets, so the interpreted tests run in a child process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _release(package: str) -> tuple[int, ...]:
    """Major and minor version of an installed package; empty if it is not installed."""
    try:
        return tuple(int(part) for part in version(package).split(".")[:2])
    except PackageNotFoundError:
        return ()


BROKEN = () < _release("triton") < (3, 7) and _release("numpy") >= (2, 4)
"""Triton's interpreter up to 3.6 calls int() on arrays of one element, which numpy rejects from 2.4 on."""

interpreter_only = pytest.mark.skipif(not INTERPRETED, reason="runs in triton's interpreter")


def gpu_only(test: Any) -> Any:
    """Mark a test that needs a compiled kernel."""
    return pytest.mark.skip(reason="runs compiled, on a GPU")(test) if INTERPRETED else pytest.mark.gpu(test)


def gpu_or_interpreter(test: Any) -> Any:
    """Mark a test that runs in the interpreter, and compiled if there is a GPU."""
    return test if INTERPRETED else pytest.mark.gpu(test)


def starts_the_interpreter(test: Any) -> Any:
    """Mark the test that runs its file's interpreted tests."""
    broken = pytest.mark.skipif(BROKEN, reason="triton's interpreter before 3.7 does not work with numpy 2.4 or newer")
    return broken(pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")(test))


def run_in_interpreter(file: str) -> None:
    """Run a file's tests in triton's interpreter, in a child process that sees no GPU."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", file]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
