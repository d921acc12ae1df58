"""`reefknot VERB`: find the verb, run it, and turn its errors into messages and exit codes.

Exit codes: 0 success, 2 bad settings, 3 bad data, 4 non-finite numbers, 5 out of disk or memory or standard output is
closed, 75 stopped and resumable.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache, wraps
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from reefknot import __version__
from reefknot.errors import DataError, ReefknotError, ResourceError, SettingsError
from reefknot.lab.config.upgrade import RENAMED_OPTIONS

EXAMPLES = """\b
Examples:
  reefknot table demo                     # train every row of a recipe, compare, report
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
    "vectors",
    "rank",
    "params",
    "tokens",
    "validate",
    "ls",
    "advise",
    "bench",
    "import",
)
"""Every verb, in the order of the help page.

The verb `x` is the function `x` in `lab/cli/x.py`, with an underscore after a word that Python reserves. `EXAMPLES` of
that module ends its help page. A group of verbs is a package: `lab/cli/x/__init__.py` defines `HELP`, `EXAMPLES` and
`VERBS`, and the verb `x y` is the function `y` in `lab/cli/x/y.py`.
"""

MOVED = {
    "neighbors": "vectors neighbors",
    "analogy": "vectors analogy",
    "similarity": "vectors similarity",
    "export": "vectors export",
}
"""Verbs that have moved into a group. The old name is an error whose message has the new name."""

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

WHOLE_SENTENCE = 1000
"""More characters than the summary of any verb has, so that no summary is cut off."""


class Verb(TyperCommand):
    """A command whose help page lists its options by `rich_help_panel`.

    Without rich, typer prints all options in one list. Here, options without a panel come first, under "Options". The
    panels follow as separate sections, in the order in which the verb defines them.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = getattr(parameter, "rich_help_panel", None) or default
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class VerbGroup(TyperGroup):
    """A group of verbs that imports the module of a verb when the verb is used."""

    package = "reefknot.lab.cli"
    verbs: tuple[str, ...] = ()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_verb(cmd_name, self.package) if cmd_name in self.verbs else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs with the first sentence of their help. typer's implementation cuts long sentences off."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(WHOLE_SENTENCE)) for name, verb in verbs])


class Reefknot(VerbGroup):
    """All verbs, and messages about verbs that have moved."""

    verbs = VERBS

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb and its arguments; exit with a message if the verb or one of its options has a new name."""
        if args[0] in MOVED:
            raise typer.Exit(_print_renamed(args[0], MOVED[args[0]]))
        verb, command, words = super().resolve_command(ctx, args)
        renamed = RENAMED_OPTIONS.get(str(verb), {})
        for word in words:
            option = word.partition("=")[0]
            if option in renamed:
                raise typer.Exit(_print_renamed(f"{verb} {option}", f"{verb} {renamed[option]}"))
        return verb, command, words


@cache
def load_verb(name: str, package: str = VerbGroup.package) -> Any:
    """Return the command of a verb, or the group of that name."""
    attribute = name.replace("-", "_") + "_" * iskeyword(name)
    module = import_module(f"{package}.{attribute}")
    if hasattr(module, "VERBS"):
        return _load_group(name, module)
    verb = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=HELP_OPTIONS)
    verb.command(name, cls=Verb, epilog=module.EXAMPLES)(_guarded(getattr(module, attribute)))
    return typer.main.get_command(verb)


def _load_group(name: str, module: Any) -> Any:
    class Group(VerbGroup):
        package = module.__name__
        verbs = module.VERBS

    group = typer.Typer(
        name=name,
        cls=Group,
        help=module.HELP,
        epilog=module.EXAMPLES,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings=HELP_OPTIONS,
    )
    group.callback()(lambda: None)  # typer makes a group only of an app with a callback
    return typer.main.get_command(group)


def every_verb() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every verb as the words that name it, such as ("bench", "heads"), and its command."""
    for name in VERBS:
        command = load_verb(name)
        if isinstance(command, VerbGroup):
            yield from (((name, verb), command.get_command(None, verb)) for verb in command.verbs)
        else:
            yield (name,), command


app = typer.Typer(
    name="reefknot",
    cls=Reefknot,
    help="The two ends of a language model: how words go in, how words come out, and how to tie them.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"reefknot {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handle the options that come before the verb."""


def _guarded(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a verb so that its errors become messages and exit codes. typer itself reports invalid command lines."""

    @wraps(verb)
    def run(*args: Any, **options: Any) -> None:
        code = 0
        try:
            _check_output()
            verb(*args, **options)
        except ReefknotError as error:
            code = _print_error(error)
        except BrokenPipeError:
            # The reader of our output has closed it, as `| head` does, so there is no one to print a message to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (MemoryError, OSError, RuntimeError) as error:
            code = _print_error(_machine_error(error))
        raise typer.Exit(code)

    return run


def main() -> None:
    """Run one command and exit with its code."""
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
    """Print a warning of reefknot in one line, and the warning of a library as Python does."""
    ours = category.__module__.startswith("reefknot")
    text = f"reefknot: {message}\n" if ours else warnings.formatwarning(message, category, filename, lineno, line)
    print(text, end="", file=file or sys.stderr)


def _check_output() -> None:
    """Raise an error if standard output is closed.

    Python silently discards what is written to a closed output. A long run would then end without a result.
    """
    if sys.stdout is None:
        raise ResourceError("standard output is closed; send it to a file, or to /dev/null")


def _print_renamed(old: str, new: str) -> int:
    return _print_error(SettingsError(f"`reefknot {old}` is now `reefknot {new}`"))


def _print_error(error: ReefknotError) -> int:
    """Print the message of an error and return its exit code."""
    print(f"reefknot: {error}", file=sys.stderr)
    return error.exit_code


def _machine_error(error: MemoryError | OSError | RuntimeError) -> ReefknotError:
    """Convert a full disk, an unreadable file or a lack of memory to an error of reefknot.

    Any other error is a bug in reefknot. It is raised again and keeps its traceback.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"the disk is full ({error.filename or 'while writing'}); free some space and run the same command again"
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
