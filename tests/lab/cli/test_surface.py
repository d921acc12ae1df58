"""The command line as people meet it: help, start-up, and a frozen list of verbs and options."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.lab.cli.main import VERBS, load_verb

from .conftest import Outcome

Cli = Callable[..., Outcome]
COMMANDS = {verb: load_verb(verb) for verb in VERBS}


@pytest.mark.parametrize("verb", [(), *((verb,) for verb in VERBS)], ids=lambda verb: " ".join(verb) or "reefknot")
def test_help_shows_examples(cli: Cli, verb: tuple[str, ...]) -> None:
    outcome = cli(*verb, "--help")
    assert outcome.code == 0
    _, _, examples = outcome.out.partition("Examples:\n")
    assert " ".join(["reefknot", *verb]) in examples
    assert cli(*verb, "-h").out == outcome.out


def test_no_verb_shows_the_help(cli: Cli) -> None:
    outcome = cli()
    assert outcome.code == 2
    assert all(verb in outcome.out + outcome.err for verb in VERBS)


def test_every_option_is_explained() -> None:
    for verb, command in COMMANDS.items():
        for parameter in command.params:
            assert parameter.help, f"{verb} {parameter.name}"


def test_verbs_and_options_are_frozen(frozen: Callable[[Path, dict[str, Any]], dict[str, Any]]) -> None:
    """People's scripts depend on them: `pytest tests/cli --freeze` writes the list anew."""
    now = {
        verb: {
            "arguments": [p.name for p in command.params if p.param_type_name == "argument"],
            "options": sorted(name for p in command.params if p.param_type_name == "option" for name in p.opts),
        }
        for verb, command in COMMANDS.items()
    }
    assert now == frozen(Path(__file__).with_name("surface.json"), now)


@pytest.mark.parametrize("words", [["--help"], ["ls"], ["evaluate"], ["nonsense"]], ids=" ".join)
def test_nothing_heavy_is_imported_before_it_is_needed(words: list[str]) -> None:
    script = (
        "import sys; from reefknot.lab.cli.main import main\n"
        f"sys.argv = ['reefknot', *{words!r}]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('HEAVY', {'torch', 'matplotlib', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "HEAVY set()" in done.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "reefknot", "ls"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (0, "")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "reefknot", "ls", "nope"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("reefknot: no family 'nope'; there are: recipes")
    assert done.stdout == ""
