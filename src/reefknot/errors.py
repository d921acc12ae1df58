"""Exceptions that users see, and the exit codes that the command line returns for them.

All exceptions derive from `ReefknotError`. A message says what is wrong, where, and what to do:

    raise DataError(f"{path} is empty; download it again")
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ReefknotError(Exception):
    """An error that the user can fix. The command line prints its message without a traceback."""

    exit_code = 1


class SettingsError(ReefknotError):
    """A recipe, an override or a command-line option is invalid."""

    exit_code = 2


class ArgumentError(ReefknotError, ValueError):
    """The arguments of a library call are inconsistent."""

    exit_code = 2


class DataError(ReefknotError):
    """A file cannot be used: a corpus, a vocabulary, a checkpoint or word vectors, for example."""

    exit_code = 3


class CorpusNotFound(DataError):
    """The files of a known corpus are missing on this machine. A recipe that names the corpus may still be valid."""


class NonFiniteError(ReefknotError):
    """The loss or a gradient is NaN or infinite. The weights are those of the previous step."""

    exit_code = 4


class ResourceError(ReefknotError):
    """The disk or the memory is full, or the output stream was closed."""

    exit_code = 5


class Stopped(ReefknotError):
    """Training was stopped on request. Its state is saved. The same command resumes it."""

    exit_code = 75


def find_similar_name(name: str, known_names: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a wrong name, for a message, or None if no name is similar."""
    # The search is slow for long names.
    similar_names = get_close_matches(name[:100], list(known_names), n=1)
    return similar_names[0] if similar_names else None


def describe_type(value: object) -> str:
    """Return the name of a value's type with its article, for a message, such as `an AdaptiveSoftmax`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' or name.startswith('LSTM') else 'a'} {name}"


def shorten(text: str, max_length: int = 100) -> str:
    """Return a user's text for use in a message: cut to `max_length`, with a `?` for each unprintable character."""
    printable_text = "".join(character if character.isprintable() else "?" for character in text)
    if len(printable_text) <= max_length:
        return printable_text
    return f"{printable_text[:max_length]}..."
