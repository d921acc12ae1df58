"""Help pages, start-up, and the frozen list of verbs and options of the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from click.testing import CliRunner

from reefknot.lab.cli.main import VERBS, Verb, iter_verbs, load_verb

from .conftest import Outcome

Cli = Callable[..., Outcome]
COMMANDS = {" ".join(words): command for words, command in iter_verbs()}
GROUPS = ("bench", "vectors")
PAGES = ["", *GROUPS, *COMMANDS]
"""Everything that has a help page, as the words after `reefknot`."""


@pytest.mark.parametrize("verb", PAGES, ids=lambda verb: verb or "reefknot")
def test_every_help_page_ends_with_examples(cli: Cli, verb: str) -> None:
    outcome = cli(*verb.split(), "--help")
    assert outcome.code == 0
    _, _, examples = outcome.out.partition("Examples:\n")
    assert f"reefknot {verb}".strip() in examples
    assert cli(*verb.split(), "-h").out == outcome.out


@pytest.mark.parametrize("verb", ["", *GROUPS], ids=lambda verb: verb or "reefknot")
def test_pages_of_groups_print_whole_sentences(cli: Cli, verb: str) -> None:
    listed = cli(*verb.split(), "--help").out.partition("Commands:\n")[2].partition("Examples:\n")[0]
    text = " ".join(listed.split())
    assert "..." not in text
    names = VERBS if not verb else [name.split()[1] for name in COMMANDS if name.startswith(f"{verb} ")]
    for name in names:
        summary = load_verb(name).help if not verb else COMMANDS[f"{verb} {name}"].help
        summary_line = " ".join(summary.split("\n\n")[0].split())
        assert f"{name} {summary_line.partition('. ')[0]}" in text


@pytest.mark.parametrize("words", [(), ("bench",), ("vectors",)], ids=["reefknot", "bench", "vectors"])
def test_no_verb_prints_the_help_page(cli: Cli, words: tuple[str, ...]) -> None:
    outcome = cli(*words)
    assert outcome.code == 2
    names = VERBS if not words else [name.split()[1] for name in COMMANDS if name.split()[0] == words[0]]
    assert all(name in outcome.out + outcome.err for name in names)


@pytest.mark.parametrize("old", ["neighbors", "analogy", "similarity"])
@pytest.mark.parametrize("words", [(), ("--help",), ("RUN", "word", "--no-such-option")], ids=str)
def test_moved_verb_prints_its_new_name(cli: Cli, old: str, words: tuple[str, ...]) -> None:
    outcome = cli(old, *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"reefknot: `reefknot {old}` is now `reefknot vectors {old}`\n"
    assert f"vectors {old}" in COMMANDS


def test_options_are_listed_by_their_panel() -> None:
    def example(
        split: Annotated[str, typer.Option(help="A common option.")] = "test",
        theta: Annotated[float, typer.Option(help="An option of the cache.", rich_help_panel="Cache")] = 0.3,
        beam: Annotated[int, typer.Option(help="An option of the search.", rich_help_panel="Search")] = 4,
        size: Annotated[int, typer.Option(help="Another of the cache.", rich_help_panel="Cache")] = 9,
    ) -> None:
        """An example."""

    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=Verb)(example)
    lines = CliRunner().invoke(typer.main.get_command(app), ["--help"]).output.splitlines()
    options = [line.split()[0] for line in lines if line.endswith(":") or line.lstrip().startswith("--")]
    assert options == ["Options:", "--split", "--help", "Cache:", "--theta", "--size", "Search:", "--beam"]


def test_every_option_is_explained() -> None:
    for verb, command in COMMANDS.items():
        for parameter in command.params:
            assert parameter.help, f"{verb} {parameter.name}"


def test_verbs_and_options_are_frozen(frozen: Callable[[Path, dict[str, Any]], dict[str, Any]]) -> None:
    """Scripts of users depend on them. `pytest tests/lab/cli/test_surface.py -k frozen --freeze` writes the list."""
    now = {
        verb: {
            "arguments": [p.name for p in command.params if p.param_type_name == "argument"],
            "options": sorted(name for p in command.params if p.param_type_name == "option" for name in p.opts),
        }
        for verb, command in COMMANDS.items()
    }
    assert now == frozen(Path(__file__).with_name("surface.json"), now)


@pytest.mark.parametrize(
    "words",
    [["--help"], ["bench", "--help"], ["bench", "heads", "-h"], ["ls"], ["evaluate"], ["nonsense"]],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    script = (
        "import sys; from reefknot.lab.cli.main import main\n"
        f"sys.argv = ['reefknot', *{words!r}]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('HEAVY', {'torch', 'matplotlib', 'scipy', 'reefknot.lab.bench'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "HEAVY set()" in done.stdout


def test_closed_pipe_is_not_an_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "reefknot", "ls"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    messages = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), messages) == (0, "")


def test_python_m_reefknot_runs_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "reefknot", "ls", "nope"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("reefknot: no family 'nope'; `reefknot ls` lists the families")
    assert done.stdout == ""
