"""The tests of all architectures also pass with transformers 4.57, in its own folder (`script/setup dev`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix, "transformers-4.57")
TESTS = Path(__file__).parent.parent
PROGRAM = """
import sys, pytest, transformers
assert transformers.__version__.startswith("4.57."), transformers.__version__
sys.exit(pytest.main(sys.argv[1:]))
"""
NAMES = (
    "test_loss_and_gradients_are_those_of_the_model or test_no_tensor_has_the_size_of_the_logits"
    " or test_generation_is_the_same or test_undo_restores_the_model"
)


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} does not exist; run: script/setup dev")
def test_architectures_with_transformers_4() -> None:
    paths = [str(FOLDER), str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, "-p", "no:cacheprovider", "-p", "no:xdist", "-k", NAMES,
         str(TESTS / "hf/test_logits_free.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-2000:]
    assert completed.stdout.count(".") >= 30  # one dot per test
