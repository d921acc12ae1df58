"""The command line, `reefknot VERB`: find the subcommand (verb), run it, and report its errors.

`main` is the entry point. `VERBS` lists the verbs. `load_verb` imports the module of one verb, so that every verb and
`reefknot --help` start fast. `_report_errors` wraps each verb, so that errors become messages and exit codes:

     0  success
     2  bad settings
     3  bad data
     4  non-finite numbers
     5  out of disk space or memory, or standard output is closed
    75  stopped; the same command resumes
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
from reefknot.errors import DataError, ReefknotError, ResourceError, SettingsError, find_similar_name
from reefknot.lab.config.upgrade import RENAMED_OPTIONS
from reefknot.lab.runs.threads import configure_threads
from reefknot.storage.terminal import escape_terminal_output

EXAMPLES = """\b
Examples:
  reefknot train --text docs/             # train on any text, without a recipe
  reefknot table demo                     # train every row of a recipe, print a table, write a report
  reefknot train press2017/table6 --row "Small + WT" --data DIR
  reefknot generate runs/demo/tied/seed0 --prompt "this function"
"""

HELP = """The two ends of a language model: how words go in, how words come out, and how to tie them.

A recipe is a TOML file with experiments, which are called rows. Training a row with one seed writes a run folder: the
settings, the weights and the scores. Most other commands read run folders. The ends are the input embeddings and the
output classifier. Each end reads its word vectors from a word table; tied ends share one.
"""

VERBS = (
    "train",
    "new",
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
    "export",
    "import",
)
"""Every verb, in the order of the help page.

The verb `train` is the function `train` in `lab/cli/train.py`, and `EXAMPLES` in that module ends its help page. A word
that Python reserves gets an underscore: `import_`. A group of verbs is a package: `lab/cli/bench/__init__.py` defines
`HELP`, `EXAMPLES` and `VERBS`, and the verb `bench heads` is the function `heads` in `lab/cli/bench/heads.py`.
"""

MOVED = {
    "neighbors": "vectors neighbors",
    "analogy": "vectors analogy",
    "similarity": "vectors similarity",
}
"""Verbs that have moved into a group. The old name raises an error that names the new one."""

PROCESS_OPTIONS = {"--gpu", "--gpus", "--devices", "--nproc", "--nproc-per-node"}
"""Options with which other programs train on several GPUs. torchrun does this for `reefknot train`."""
TORCHRUN_HINT = (
    "it trains in one process; to train on several GPUs, use torchrun --nproc-per-node=GPUS -m reefknot train ..."
)

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

SUMMARY_LENGTH = 1000
"""Maximum number of characters of a summary: more than any verb has, so that typer does not cut summaries off."""


class Verb(TyperCommand):
    """A command whose help page lists its options by `rich_help_panel`.

    Without rich, typer prints all options in one list. Here, options without a panel come first, under "Options". The
    panels follow as separate sections, in the order in which the verb defines them.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        # A section has pairs (option, help text).
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            option_and_help = parameter.get_help_record(ctx)
            if option_and_help is not None:
                default_title = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = getattr(parameter, "rich_help_panel", None) or default_title
                sections.setdefault(title, []).append(option_and_help)

        for title, options_and_help in sections.items():
            if options_and_help:
                with formatter.section(title):
                    formatter.write_dl(options_and_help)


class VerbGroup(TyperGroup):
    """A group of verbs that imports the module of a verb when the verb is used."""

    package = "reefknot.lab.cli"
    """The package that has one module per verb."""
    verbs: tuple[str, ...] = ()
    """The names of the verbs, in the order of the help page."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.verbs:
            return None
        return load_verb(cmd_name, self.package)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Parse `args`. Return the name of the verb, its command and the remaining arguments.

        typer suggests similar names only for commands that are imported already.
        """
        if args[0] not in self.verbs and (similar_verb := find_similar_name(args[0], self.verbs)):
            ctx.fail(f"No such command {args[0]!r}; did you mean {similar_verb}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs with the first sentence of their help. typer's implementation cuts long sentences off."""
        names_and_summaries = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            names_and_summaries.append((name, command.get_short_help_str(SUMMARY_LENGTH)))
        with formatter.section("Commands"):
            formatter.write_dl(names_and_summaries)


class Reefknot(VerbGroup):
    """The group of all verbs. It also explains verbs and options that have new names."""

    verbs = VERBS

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Parse `args`. Exit with a message if the verb or an option has a new name, or if torchrun has the option."""
        if args[0] in MOVED:
            raise typer.Exit(_print_renamed(args[0], MOVED[args[0]]))
        verb, command, arguments = super().resolve_command(ctx, args)
        new_names = RENAMED_OPTIONS.get(str(verb), {})
        for argument in arguments:
            option = argument.partition("=")[0]
            if option in new_names:
                raise typer.Exit(_print_renamed(f"{verb} {option}", f"{verb} {new_names[option]}"))
            if verb == "train" and option in PROCESS_OPTIONS:
                raise typer.Exit(_print_error(SettingsError(f"`reefknot train` has no {option}: {TORCHRUN_HINT}")))
        return verb, command, arguments


@cache
def load_verb(name: str, package: str = VerbGroup.package) -> Any:
    """Import the module of a verb or of a group, and return its command."""
    python_name = name.replace("-", "_")
    if iskeyword(python_name):
        python_name += "_"
    module = import_module(f"{package}.{python_name}")
    if hasattr(module, "VERBS"):
        return _load_group(name, module)

    verb_function = getattr(module, python_name)
    verb_app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=HELP_OPTIONS)
    add_command = verb_app.command(name, cls=Verb, epilog=module.EXAMPLES)
    add_command(_report_errors(verb_function))
    return typer.main.get_command(verb_app)


def _load_group(name: str, module: Any) -> Any:
    """Return the command of a group of verbs, whose module is a package such as `lab/cli/bench`."""

    class Group(VerbGroup):
        package = module.__name__
        verbs = module.VERBS

    group_app = typer.Typer(
        name=name,
        cls=Group,
        help=module.HELP,
        epilog=module.EXAMPLES,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings=HELP_OPTIONS,
    )
    group_app.callback()(lambda: None)  # without a callback, typer would not make it a group
    return typer.main.get_command(group_app)


def iter_verbs() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every verb as the words that name it, such as ("bench", "heads"), and its command."""
    for name in VERBS:
        command = load_verb(name)
        if isinstance(command, VerbGroup):
            for verb in command.verbs:
                yield (name, verb), command.get_command(None, verb)
        else:
            yield (name,), command


app = typer.Typer(
    name="reefknot",
    cls=Reefknot,
    help=HELP,
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


def main() -> None:
    """Run one command and exit with its code."""
    configure_threads()
    escape_terminal_output()
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
    """Print reefknot's own warnings on one line, and warnings of other libraries in Python's usual format."""
    if category.__module__.startswith("reefknot"):
        formatted = f"reefknot: {message}\n"
    else:
        formatted = warnings.formatwarning(message, category, filename, lineno, line)
    print(formatted, end="", file=file or sys.stderr)


def _report_errors(verb_function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a verb so that its errors become messages and exit codes. typer itself reports invalid command lines."""

    @wraps(verb_function)
    def run_verb(*args: Any, **options: Any) -> None:
        exit_code = 0
        try:
            _forget_unverified()
            _check_output()
            _check_arguments()
            verb_function(*args, **options)
        except ReefknotError as error:
            exit_code = _print_error(error)
        except BrokenPipeError:
            # The reader of our output has closed it, as `| head` does, so there is no one to print a message to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (MemoryError, OSError, RuntimeError) as error:
            exit_code = _print_error(_convert_system_error(error))
        finally:
            _print_unverified()
        raise typer.Exit(exit_code)

    return run_verb


def _check_output() -> None:
    """Raise an error if standard output is closed.

    Python silently discards what is written to a closed output. A long run would then end without a result.
    """
    if sys.stdout is None:
        raise ResourceError("standard output is closed; send it to a file, or to /dev/null")


def _check_arguments() -> None:
    """Raise an error if an argument has bytes that are not UTF-8, because files and messages could not contain it."""
    for argument in sys.argv[1:]:
        shown_argument = os.fsencode(argument).decode(errors="backslashreplace")
        if shown_argument != argument:
            raise SettingsError(f"the argument '{shown_argument}' has bytes that are not UTF-8; use a name in UTF-8")


def _forget_unverified() -> None:
    """Forget the runs that an earlier command of this process has opened."""
    runs = sys.modules.get("reefknot.lab.runs.folder")
    if runs:
        runs.describe_unverified()


def _print_unverified() -> None:
    """Print which runs could not be verified, on stderr."""
    runs = sys.modules.get("reefknot.lab.runs.folder")  # a verb that opens no run does not import it
    message = runs.describe_unverified() if runs else None
    if message:
        print(f"reefknot: {message}", file=sys.stderr)


def _print_renamed(old_name: str, new_name: str) -> int:
    """Print an error about a verb or option that has a new name, and return its exit code."""
    return _print_error(SettingsError(f"`reefknot {old_name}` is now `reefknot {new_name}`"))


def _print_error(error: ReefknotError) -> int:
    """Print the message of an error and return its exit code."""
    print(f"reefknot: {error}", file=sys.stderr)
    return error.exit_code


def _convert_system_error(error: MemoryError | OSError | RuntimeError) -> ReefknotError:
    """Convert the system's error for a full disk, an unreadable file or too little memory to a `ReefknotError`.

    Any other error is a bug in reefknot. It is raised again and keeps its traceback.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"the disk is full ({error.filename or 'while writing'}); free some space and run the same command again"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return DataError(f"{error.filename}: {error.strerror}")
    message = str(error)
    if isinstance(error, MemoryError) or "out of memory" in message or "can't allocate memory" in message:
        return ResourceError(
            "out of memory; try a larger training.accumulate, a smaller training.batch or training.steps, "
            "or a smaller vocabulary (vocabulary.max_size)"
        )
    raise error
