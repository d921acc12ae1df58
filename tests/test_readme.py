"""What the README says of the tree is true, and its examples run."""

import re
import subprocess
import sys
from typing import get_args

from pages import ROOT, VERBS, Page
from reefknot.kernels.choice import DEFAULT_MEMORY, Impl

README = Page("README.md").text


def _tree() -> list[tuple[str, str]]:
    """(path, phrase) of every line of the tree."""
    block = README.partition("## The tree")[2].split("```")[1]
    found: list[tuple[str, str]] = []
    folders: list[str] = []
    for line in block.strip("\n").splitlines():
        name, _, phrase = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name.rstrip("/")]
        found.append(("/".join(folders), phrase.strip()))
    return found


def test_every_path_of_the_tree_exists_and_has_a_phrase() -> None:
    wrong = [path for path, phrase in _tree() if not (ROOT / path).exists()]
    bare = [path for path, phrase in _tree() if not phrase and path.endswith(".py")]
    assert not wrong
    assert not bare


def test_every_source_file_is_in_the_tree() -> None:
    listed = {path for path, _ in _tree()}
    files = [path for path in (ROOT / "src/reefknot").rglob("*") if path.suffix in (".py", ".html", ".css")]
    names = [path.relative_to(ROOT).as_posix() for path in files if not path.name.startswith("__")]
    missing = [name for name in names if name not in listed]
    assert not missing


def test_every_verb_is_named() -> None:
    section = README.partition("## On the command line")[2].partition("\n## ")[0]
    assert [verb for verb in VERBS if not re.search(rf"\breefknot {verb}\b|`{verb}`", section)] == []


def test_the_python_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 5
    code = "".join(blocks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_implementations_and_their_memory_are_those_of_the_code() -> None:
    section = README.partition("## In your own model")[2].partition("\n## ")[0]
    _, *named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert {"auto", *named} == set(get_args(Impl))
    assert f"{DEFAULT_MEMORY['cuda']} on a GPU and {DEFAULT_MEMORY['cpu']} on a CPU" in section


def test_papers_and_readme_are_generated_from_results() -> None:
    done = subprocess.run(
        [sys.executable, "script/papers", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
