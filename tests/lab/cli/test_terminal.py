"""Control characters in a stranger's words are escaped on a terminal, and left unchanged in pipes and files."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from reefknot.lab.cli.main import main
from reefknot.lab.training.display import open_console, open_display
from reefknot.storage.terminal import escape_control_characters
from reefknot.vectors.files import write_vectors
from reefknot.vectors.word_vectors import WordVectors

from .conftest import Outcome

Cli = Callable[..., Outcome]
CLIPBOARD = "\x1b]52;c;ZWNobw==\x07"
C1_CLIPBOARD = "\x9d52;c;ZWNobw==\x9c"
CONTROL_CHARACTERS = {*map(chr, range(32)), *map(chr, range(127, 160))} - {"\n", "\t"}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_on_terminal(*words: object) -> Outcome:
    """Run a command whose standard output and error are terminals."""
    out, err = Terminal(), Terminal()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["reefknot", *map(str, words)])
        with pytest.raises(SystemExit) as exit_info:
            main()
    assert isinstance(exit_info.value.code, int)
    return Outcome(exit_info.value.code, out.getvalue(), err.getvalue())


@pytest.fixture
def vector_file(tmp_path: Path) -> Path:
    rows = np.array([[1, 0], [3, 1], [2, 1]], np.float32)
    words = ("king", f"queen{CLIPBOARD}", f"pear{C1_CLIPBOARD}")
    path = tmp_path / "stranger.vec"
    write_vectors(WordVectors(words, rows), path, "word2vec")
    return path


def test_words_of_a_vector_file_are_escaped_on_a_terminal_only(cli: Cli, vector_file: Path) -> None:
    outcome = run_on_terminal("vectors", "neighbors", vector_file, "king")
    assert outcome.code == 0, outcome.err
    assert not CONTROL_CHARACTERS & set(outcome.out)
    assert r"queen\u001b]52;c;ZWNobw==\u0007" in outcome.out
    assert r"pear\u009d52;c;ZWNobw==\u009c" in outcome.out

    piped = cli("vectors", "neighbors", vector_file, "king")
    assert f"queen{CLIPBOARD}" in piped.out
    assert f"pear{C1_CLIPBOARD}" in piped.out


def test_json_on_a_terminal_has_the_same_words_as_in_a_pipe(cli: Cli, vector_file: Path) -> None:
    on_terminal = run_on_terminal("vectors", "neighbors", vector_file, "king", "--json")
    piped = cli("vectors", "neighbors", vector_file, "king", "--json")
    assert not CONTROL_CHARACTERS & set(on_terminal.out)
    assert json.loads(on_terminal.out) == piped.json()


def test_errors_and_usage_errors_are_escaped(tmp_path: Path) -> None:
    (tmp_path / f"run{CLIPBOARD}").mkdir()
    error = run_on_terminal("evaluate", tmp_path / f"run{CLIPBOARD}")
    usage_error = run_on_terminal("ls", f"nothing{CLIPBOARD}")
    for outcome in (error, usage_error):
        assert outcome.code in (2, 3)
        assert r"\u001b]52" in outcome.err
        assert not CONTROL_CHARACTERS & set(outcome.err)


def test_settings_of_a_recipe_are_escaped_by_validate(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('title = "Mine"\n[base]\n"a\\u001b]52;c;ZWNobw==\\u0007" = 1\n')
    outcome = run_on_terminal("validate", tmp_path / "mine.toml")
    assert outcome.code == 2
    assert not CONTROL_CHARACTERS & set(outcome.err)


@pytest.mark.parametrize("printed", [CLIPBOARD, C1_CLIPBOARD])
def test_live_display_escapes_what_it_prints(printed: str) -> None:
    terminal = Terminal()
    with redirect_stdout(terminal):
        display = open_display()
        display.print(f"printed {printed}")
        display.update(f"updated {printed}")
        print(f"by another library {printed}")
        display.close()
    output = terminal.getvalue()
    assert f"printed {escape_control_characters(printed)}" in output
    assert "by another library" in output  # old versions of rich remove control characters
    assert "\x1b]" not in output
    assert not set("\x07\x9c\x9d") & set(output)


def test_tables_on_a_terminal_keep_their_style_and_escape_their_cells() -> None:
    from rich.table import Table

    terminal = Terminal()
    with redirect_stdout(terminal), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        table = Table("row")
        table.add_row(f"[bold]name[/bold]{CLIPBOARD}")
        open_console().print(table)
    output = terminal.getvalue()
    assert "\x1b[1mname" in output
    assert r"\u001b]52" in output
    assert "\x1b]" not in output


def test_console_in_a_pipe_leaves_control_characters() -> None:
    pipe = io.StringIO()
    with redirect_stdout(pipe):
        open_console().print("name\x9d", markup=False)
    assert pipe.getvalue() == "name\x9d\n"


def test_real_terminal_receives_no_control_character(vector_file: Path) -> None:
    main_end, terminal_end = pty.openpty()
    command = [sys.executable, "-m", "reefknot", "vectors", "neighbors", str(vector_file), "king"]
    subprocess.run(command, stdout=terminal_end, stderr=terminal_end, check=True)
    os.close(terminal_end)
    output = os.read(main_end, 10_000).decode()
    os.close(main_end)
    assert r"queen\u001b]52;c;ZWNobw==\u0007" in output
    assert not (CONTROL_CHARACTERS - {"\r"}) & set(output)  # the terminal driver itself writes \r before \n
