"""What the README says of the tree and of the commands is true."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import typer

from reefknot.cli.main import app
from reefknot.kernels.choice import DEFAULT_MEMORY, Impl
from reefknot.recipes import shipped

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


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


def test_every_recipe_that_is_named_exists() -> None:
    named = re.findall(r"reefknot (?:table|train) ([\w/]+)", README)
    assert named
    assert set(named) <= set(shipped())


def test_every_command_is_understood() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.partition("#")[0] for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line.partition("reefknot ")[2]) for line in lines if "reefknot " in line]
    assert len(commands) >= 8
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for verb, *words in commands:
        verbs[verb].make_context(verb, words)  # a word that the verb does not know raises here


def test_the_python_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
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
