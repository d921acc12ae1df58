"""`reefknot VERB`: finds the verb, turns errors into sentences and exit codes.

Exit codes: 0 done, 2 bad settings, 3 bad data, 4 non-finite, 5 out of disk or memory, or no output to write to,
75 stopped and resumable.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from reefknot import __version__
from reefknot.errors import DataError, ReefknotError, ResourceError, SettingsError
from reefknot.lab.config.upgrade import RENAMED_OPTIONS

EXAMPLES = """\b
Examples:
  reefknot table demo                     train every row of a recipe, compare, report
  reefknot train press2017/table6 --row "Small + WT" --data DIR
  reefknot generate runs/demo/tied/seed0 --prompt "this function"
"""

VERBS = (
    "train",
    "table",
    "sweep",
    "evaluate",
    "compare",
    "report",
    "figure",
    "generate",
    "translate",
    "score",
    "predict",
    "neighbors",
    "analogy",
    "similarity",
    "rank",
    "params",
    "tokens",
    "validate",
    "ls",
    "advise",
    "bench",
    "import",
    "export",
)
"""Every verb, in the order of the help page. The verb `x` is the function `x` in `lab/cli/x.py`, with an underscore
after a word that Python reserves; `EXAMPLES` of that module ends its help page."""

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class LazyVerbs(TyperGroup):
    """A command group that imports the module of a verb when the verb is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_verb(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb and its words, unless an option among them has a new name."""
        verb, command, words = super().resolve_command(ctx, args)
        renamed = RENAMED_OPTIONS.get(str(verb), {})
        for word in words:
            option = word.partition("=")[0]
            if option in renamed:
                error = SettingsError(f"`reefknot {verb} {option}` is now `reefknot {verb} {renamed[option]}`")
                raise typer.Exit(_complain(error))
        return verb, command, words


@cache
def load_verb(name: str) -> Any:
    """Return the command of a verb."""
    attribute = f"{name}_" if iskeyword(name) else name
    module = import_module(f"reefknot.lab.cli.{attribute}")
    verb = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=HELP_OPTIONS)
    verb.command(name, epilog=module.EXAMPLES)(_guarded(getattr(module, attribute)))
    return typer.main.get_command(verb)


app = typer.Typer(
    name="reefknot",
    cls=LazyVerbs,
    help="The two ends of a language model: how words go in, how words come out, and how to tie them.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"reefknot {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before the verb."""


def _guarded(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with its errors told as sentences. A mistyped command line is typer's to tell."""

    @wraps(verb)
    def run(*args: Any, **options: Any) -> None:
        code = 0
        try:
            _check_output()
            verb(*args, **options)
        except ReefknotError as error:
            code = _complain(error)
        except BrokenPipeError:
            # The reader of our output has left, as `| head` does; nothing more can be said to it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (MemoryError, OSError, RuntimeError) as error:
            code = _complain(_refusal(error))
        raise typer.Exit(code)

    return run


def main() -> None:
    """Run one command and leave with its exit code."""
    warnings.showwarning = _show_warning
    app()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings are one line; those of libraries keep Python's form."""
    ours = category.__module__.startswith("reefknot")
    text = f"reefknot: {message}\n" if ours else warnings.formatwarning(message, category, filename, lineno, line)
    print(text, end="", file=file or sys.stderr)


def _check_output() -> None:
    """Python drops what is written to a closed output without a word, so that a long run would end in nothing."""
    if sys.stdout is None:
        raise ResourceError("standard output is closed; send it to a file, or to /dev/null")


def _complain(error: ReefknotError) -> int:
    print(f"reefknot: {error}", file=sys.stderr)
    return error.exit_code


def _refusal(error: MemoryError | OSError | RuntimeError) -> ReefknotError:
    """What the machine refuses, as a sentence; anything else is a bug of ours and keeps its traceback."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"the disk is full ({error.filename or 'while writing'}); make room and run the same command"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return DataError(f"{error.filename}: {error.strerror}")
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return ResourceError(
            "out of memory; try a larger training.accumulate, a smaller training.batch or training.steps, "
            "or a smaller vocabulary (vocabulary.max_size)"
        )
    raise error
