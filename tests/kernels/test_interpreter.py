"""The Triton kernels pass their tests in Triton's interpreter, on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .interpreter import BROKEN, INTERPRETED

pytest.importorskip("triton", reason="triton is not installed")

FILES = sorted(
    str(path)
    for path in Path(__file__).parent.glob("test_*.py")
    if re.search(r"^@(gpu_or_interpreter|interpreter_only)$", path.read_text(encoding="utf-8"), re.MULTILINE)
)
"""Files with tests that run in the interpreter."""


@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
@pytest.mark.skipif(BROKEN, reason="triton's interpreter before 3.7 does not work with numpy 2.4 or newer")
@pytest.mark.slow
def test_kernels_pass_in_the_interpreter() -> None:
    """One child process, which sees no GPU, runs the tests of all files."""
    assert len(FILES) >= 6
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "-m", "interpreted"]
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
