"""The examples of docs/replace_head.md run."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pages import Page, code

PAGE = Page("docs/replace_head.md")


def test_examples_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    blocks = [block for heading in PAGE.sections for block in PAGE.snippets(heading, "python")]
    assert len(blocks) > 6
    (command,) = (shlex.split(line)[1:] for block in code(PAGE.text, "sh") for line in block.splitlines())
    for program in (["-c", "".join(blocks)], ["-m", "reefknot", *command]):
        completed = subprocess.run(
            [sys.executable, *program], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert completed.returncode == 0, completed.stderr
    assert "2,999 tokens" in completed.stdout
    assert "ratio B/A" in completed.stdout
