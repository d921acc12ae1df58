"""The examples of docs/your_model.md run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from pages import Page

PAGE = Page("docs/your_model.md")
LOOP = "A plain training loop"
LIBRARIES = {"Accelerate": "accelerate", "Lightning": "lightning", "Hugging Face": "transformers"}
"""Sections whose example needs another library, and the library."""
BASIC = [heading for heading in PAGE.sections if PAGE.snippets(heading, "python") and heading not in LIBRARIES]


def run(program: str) -> None:
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def program_of(*headings: str) -> str:
    return "".join(block for heading in headings for block in PAGE.snippets(heading, "python"))


def test_examples_without_other_libraries_run() -> None:
    assert {LOOP, "Gradient accumulation", "Predictions", "Save and load"} == set(BASIC)
    run(program_of(*BASIC))


@pytest.mark.parametrize("heading", LIBRARIES)
def test_example_with_another_library_runs(heading: str) -> None:
    """Without the library, the example must at least be valid Python."""
    program = program_of(LOOP, "Gradient accumulation", heading)
    compile(program, PAGE.path.name, "exec")
    library = LIBRARIES[heading]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run(program)
