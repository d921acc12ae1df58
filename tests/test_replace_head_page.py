"""The examples of docs/replace_head.md run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pages import Page

PAGE = Page("docs/replace_head.md")


def test_examples_run() -> None:
    pytest.importorskip("transformers")
    blocks = [block for heading in PAGE.sections for block in PAGE.snippets(heading, "python")]
    assert len(blocks) > 5
    program = "".join(blocks)
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
