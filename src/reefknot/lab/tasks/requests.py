"""Requests that verbs (subcommands of `reefknot`) pass to tasks, and the answers that they print.

`EvaluationRequest` asks a task to evaluate a run, `ComparisonRequest` to compare systems (models,
each trained with one or more seeds). The fields of a request have
the names of the options on the command line: `dynamic_rate` is `--dynamic-rate`. A field that has its default value was
not set by the user. So one function can reject every option that has no effect on a run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from reefknot.errors import SettingsError

if TYPE_CHECKING:
    from reefknot.lab.runs.folder import RunFolder


def format_option(name: str) -> str:
    """Return the option on the command line that sets a field of a request: `--dynamic-rate` for `dynamic_rate`."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Request:
    """Base class of requests."""

    shared: ClassVar[frozenset[str]]
    """Fields that every task uses. A task declares which of the other fields it uses."""

    def given_options(self, prefix: str = "") -> list[str]:
        """Return the names of the fields that were set, in the order of the fields.

        Args:
            prefix: Return only names that start with this prefix.
        """
        return [
            field.name
            for field in fields(self)
            if field.name.startswith(prefix) and getattr(self, field.name) != field.default
        ]

    def values(self, prefix: str) -> dict[str, Any]:
        """Return the values of the fields that were set and start with a prefix, by name without the prefix."""
        return {name.removeprefix(prefix): getattr(self, name) for name in self.given_options(prefix)}

    def reject_unused(self, used: Collection[str], subject: str) -> None:
        """Raise an error if an option was given that has no effect.

        Args:
            used: Fields that the task uses, in addition to the shared fields.
            subject: What the option has no effect on, for the message.
        """
        for name in self.given_options():
            if name not in self.shared and name not in used:
                option = format_option(name)
                raise SettingsError(f"{option} has no effect on {subject}; leave {option} out")


@dataclass(frozen=True)
class EvaluationRequest(Request):
    """A request to evaluate a run."""

    shared: ClassVar[frozenset[str]] = frozenset({"split", "limit", "save", "data", "device"})

    split: str | None = None
    """The text to score. None stands for test, or for valid and test if the scores are saved."""
    limit: int | None = None
    """Number of tokens, or of pairs of sentences, to score."""
    save: bool = False
    data: Path | None = None
    device: str = "auto"

    context: int | None = None
    stride: int | None = None
    windows: str | None = None
    streams: int | None = None
    protocol: str | None = None

    dynamic: bool = False
    dynamic_rate: float | None = None
    dynamic_decay: float | None = None
    dynamic_epsilon: float | None = None
    dynamic_scale: str | None = None
    dynamic_segment: int | None = None

    cache: bool = False
    cache_weight: float | None = None
    cache_theta: float | None = None
    cache_window: int | None = None
    cache_fill: str | None = None

    monte_carlo: int | None = None
    """Number of passes with dropout."""
    monte_carlo_seed: int | None = None

    search: bool = False
    search_tokens: int | None = None

    beam: int | None = None
    length_penalty: float | None = None

    @property
    def splits(self) -> list[str]:
        """The texts to score."""
        if self.split:
            return [self.split]
        return ["valid", "test"] if self.save else ["test"]

    def check_split(self, splits: Collection[str]) -> None:
        """Raise an error if the requested split is not one of the dataset's splits."""
        if self.split is not None and self.split not in splits:
            raise SettingsError(f"--split {self.split}: must be one of {', '.join(splits)}")

    def check_saved_texts(self) -> None:
        """Raise an error if scores are to be saved that do not cover a whole valid or test text."""
        conflicts = []
        if self.limit is not None:
            conflicts.append("--limit")
        if self.split == "train":
            conflicts.append("--split train")
        if self.save and conflicts:
            raise SettingsError(f"--save stores scores of the whole valid and test texts; leave {conflicts[0]} out")

    def check_finished(self, run: RunFolder) -> None:
        """Raise an error if scores are to be saved for a run that has no result of training."""
        if self.save and run.result is None:
            remedy = "this run was imported; leave --save out" if run.imported else "train this run to its end first"
            raise SettingsError(f"--save stores scores next to the result of training; {remedy}")


@dataclass(frozen=True)
class ComparisonRequest(Request):
    """A request to compare systems."""

    shared: ClassVar[frozenset[str]] = frozenset({"split", "data"})

    split: str = "test"
    data: Path | None = None
    by: str | None = None
    """The unit of resampling: blocks or documents. None stands for blocks."""
    block: int | None = None
    """Number of tokens in a block."""
    bands: bool = False
    """Whether to compare by training frequency too."""
    figure: Path | None = None
    """The file that the comparison by training frequency is drawn into."""


@dataclass(frozen=True)
class System:
    """One side of a comparison: the finished runs below a path, which differ only in their seeds."""

    path: Path
    runs: list[RunFolder]
    seeds: int
    """Number of seeds, including those whose training is not finished."""

    def __str__(self) -> str:
        seeds = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        if len(self.runs) != self.seeds:
            seeds = f"{len(self.runs)} of {seeds} finished"
        return f"{self.path} ({seeds})"


class Answer(Protocol):
    """The answer of a task, which a verb prints."""

    def record(self) -> Any:
        """Return the answer for programs, as JSON values."""

    def text(self) -> str:
        """Return the answer as readable text."""
