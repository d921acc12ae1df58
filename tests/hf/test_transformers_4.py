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
LOGITS_FREE = (
    "test_loss_and_gradients_are_those_of_the_model or test_no_tensor_has_the_size_of_the_logits"
    " or test_generation_is_the_same or test_undo_restores_the_model"
)
REPLACE_HEAD = (
    "test_end_is_saved_and_loaded or test_models_that_scale or test_both_ends_are_resized or test_generation"
    " or test_copies_stay_tied"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "names", "num_tests"),
    [
        ("test_logits_free", LOGITS_FREE, 30),
        ("test_replace_head", REPLACE_HEAD, 45),
        ("test_replace_other_heads", "not trainer and not rejects", 35),
        ("test_replace_capped_heads", "test", 14),
    ],
)
@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} does not exist; run: script/setup dev")
def test_models_with_transformers_4(file: str, names: str, num_tests: int) -> None:
    paths = [str(FOLDER), str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, "-p", "no:cacheprovider", "-p", "no:xdist", "-k", names,
         str(TESTS / f"hf/{file}.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-2000:]
    assert completed.stdout.count(".") >= num_tests  # one dot per test
