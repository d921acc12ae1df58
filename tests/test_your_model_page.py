"""The examples of docs/your_model.md and docs/training_frameworks.md run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from pages import Page

YOUR_MODEL = Page("docs/your_model.md")
FRAMEWORKS = Page("docs/training_frameworks.md")
LIBRARIES = {
    "Accelerate": "accelerate",
    "Lightning": "lightning",
    "Hugging Face": "transformers",
    "Trainer": "transformers",
    "TRL": "trl",
}
"""Sections whose example needs another library, and the library."""
EXAMPLES = [(page, heading) for page in (YOUR_MODEL, FRAMEWORKS) for heading in page.sections if heading in LIBRARIES]


def run(program: str) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert completed.returncode == 0, completed.stderr


def program_of(page: Page, headings: list[str]) -> str:
    return "".join(block for heading in headings for block in page.snippets(heading, "python"))


def basic_headings(page: Page) -> list[str]:
    """Return the sections whose examples need no other library."""
    return [heading for heading in page.sections if page.snippets(heading, "python") and heading not in LIBRARIES]


@pytest.mark.parametrize("page", [YOUR_MODEL, FRAMEWORKS], ids=lambda page: page.path.stem)
def test_examples_without_other_libraries_run(page: Page) -> None:
    assert basic_headings(page)
    run(program_of(page, basic_headings(page)))


@pytest.mark.parametrize(
    ("page", "heading"), EXAMPLES, ids=[f"{page.path.stem}, {heading}" for page, heading in EXAMPLES]
)
def test_example_with_another_library_runs(page: Page, heading: str) -> None:
    """Without the library, the example must at least be valid Python."""
    program = program_of(page, [*basic_headings(page), heading])
    compile(program, page.path.name, "exec")
    library = LIBRARIES[heading]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run(program)
