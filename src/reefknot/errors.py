"""The exceptions a user sees. Each says what is wrong, where, and what to do, and carries its exit code."""

from __future__ import annotations


class ReefknotError(Exception):
    """Something a user can mend. The command line prints it as one sentence, without a traceback."""

    exit_code = 1


class SettingsError(ReefknotError):
    """A recipe, an override or an option is wrong."""

    exit_code = 2


class ArgumentError(ReefknotError, ValueError):
    """The arguments of a library call do not fit together."""

    exit_code = 2


class DataError(ReefknotError):
    """A corpus, a vocabulary or a checkpoint cannot be used as it is."""

    exit_code = 3


class CorpusNotFound(DataError):
    """A known corpus is not on this machine. The recipe that names it may still be right."""


class NonFiniteError(ReefknotError):
    """The loss or a gradient is not a finite number; the weights are those of the step before."""

    exit_code = 4


class ResourceError(ReefknotError):
    """The disk or the memory is full, or the output closed."""

    exit_code = 5


class Stopped(ReefknotError):
    """Stopped on request, saved, and resumable by the same command."""

    exit_code = 75


def shortened(text: str, length: int = 100) -> str:
    """Text of a stranger, fit for a terminal."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= length else f"{text[:length]}..."
