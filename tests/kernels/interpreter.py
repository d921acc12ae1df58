"""Where the tests of the triton kernels run: in triton's interpreter on the CPU, or compiled on a GPU.

Triton decides at import time whether it interprets, so `test_interpreter.py` runs the interpreted tests in a child
process.
"""

from __future__ import annotations

import os
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


def interpreter_only(test: Any) -> Any:
    """Mark a test that runs only in the interpreter."""
    return pytest.mark.interpreted(pytest.mark.skipif(not INTERPRETED, reason="runs in triton's interpreter")(test))


def gpu_only(test: Any) -> Any:
    """Mark a test that needs a compiled kernel."""
    return pytest.mark.skip(reason="runs compiled, on a GPU")(test) if INTERPRETED else pytest.mark.gpu(test)


def gpu_or_interpreter(test: Any) -> Any:
    """Mark a test that runs in the interpreter, and compiled if there is a GPU."""
    return pytest.mark.interpreted(test) if INTERPRETED else pytest.mark.gpu(test)
