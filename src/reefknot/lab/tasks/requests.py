"""Requests that subcommands of `reefknot` pass to tasks, and the answers that they print.

`reefknot evaluate RUN --dynamic --dynamic-rate 0.1` passes this request to the task of the run, such as language
modelling:

    EvaluationRequest(dynamic=True, dynamic_rate=0.1)

The fields of a request are named after the options on the command line. A field with its default value is an option
that the user did not give. So `Request.reject_unused` can reject every option that has no effect on a run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from reefknot.errors import SettingsError

if TYPE_CHECKING:
    from reefknot.lab.runs.folder import RunFolder


@dataclass(frozen=True)
class Request:
    """Base class of requests."""

    options_of_all_tasks: ClassVar[frozenset[str]]
    """Fields that every task uses. A task declares which of the other fields it uses."""

    def given_options(self, prefix: str = "") -> list[str]:
        """Return the names of the fields that were set, in the order of the fields.

        Args:
            prefix: Return only names that start with this prefix.
        """
        given_names = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return [name for name in given_names if name.startswith(prefix)]

    def given_values(self, prefix: str) -> dict[str, Any]:
        """Return the values of the fields that were set and start with a prefix, by name without the prefix."""
        return {name.removeprefix(prefix): getattr(self, name) for name in self.given_options(prefix)}

    def check_other_text(self) -> None:
        """Raise an error if options of `--text` are given without it, or options that it replaces are given with it."""
        given_names = self.given_options()
        if "text" not in given_names:
            for name in ("field", "encoding"):
                if name in given_names:
                    option = format_option(name)
                    raise SettingsError(f"{option} has no effect without --text; add --text or leave {option} out")
        elif "split" in given_names:
            raise SettingsError("--split and --text both name the text; leave one of them out")

    def reject_unused(self, used_options: Collection[str], subject: str, *, for_all_tasks: bool = True) -> None:
        """Raise an error if an option was given that has no effect.

        Args:
            used_options: Fields that the task uses, in addition to the fields that every task uses.
            subject: What the option has no effect on, for the message.
            for_all_tasks: Whether the fields that every task uses are used.
        """
        always_used = self.options_of_all_tasks if for_all_tasks else frozenset()
        for name in self.given_options():
            if name not in always_used and name not in used_options:
                option = format_option(name)
                raise SettingsError(f"{option} has no effect on {subject}; leave {option} out")


def format_option(name: str) -> str:
    """Return the option on the command line that sets a field of a request: `--dynamic-rate` for `dynamic_rate`."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class EvaluationRequest(Request):
    """A request to evaluate a run. The settings of the modes are explained in `evaluation_modes.py`."""

    options_of_all_tasks: ClassVar[frozenset[str]] = frozenset({"split", "limit", "save", "data", "device"})

    split: str | None = None
    """The text to score. None stands for test, or for valid and test if the scores are saved."""
    limit: int | None = None
    """Number of tokens, or of pairs of sentences, to score."""
    save: bool = False
    """Whether to save the scores in the run folder."""
    data: Path | None = None
    """Folder of the corpora."""
    device: str = "auto"

    text: str | None = None
    """Another text to score, instead of a split: a file, a folder, a pattern, or - for standard input."""
    field: str | None = None
    """The field of JSON lines, or the column of Parquet, that holds the other text."""
    encoding: str | None = None
    """The encoding of the other text."""

    # How a language model reads the text: in independent windows, or in streams that carry the recurrent state.
    context: int | None = None
    """Number of tokens that each window reads before the tokens that it scores."""
    stride: int | None = None
    """Number of tokens that each window scores."""
    windows: str | None = None
    """Name of the windows, such as "lines"."""
    streams: int | None = None
    """Number of contiguous parts of the text that are scored in parallel."""
    protocol: str | None = None
    """Name of a paper's program. The text is also scored as this program scores it."""

    # Modes of a language model. The options of a mode start with its name.
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
    """Whether to tune the settings of the mode on the validation text."""
    search_tokens: int | None = None
    """Number of tokens of the validation text to tune on."""

    # The beam search of a translator.
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
        if not self.save:
            return
        conflict = None
        if self.limit is not None:
            conflict = "--limit"
        elif self.split == "train":
            conflict = "--split train"
        if conflict:
            raise SettingsError(f"--save stores scores of the whole valid and test texts; leave {conflict} out")

    def check_finished(self, run: RunFolder) -> None:
        """Raise an error if scores are to be saved for a run that has no result of training."""
        if not self.save or run.result is not None:
            return
        if run.imported:
            remedy = "this run was imported; leave --save out"
        else:
            remedy = "train this run to its end first"
        raise SettingsError(f"--save stores scores next to the result of training; {remedy}")


@dataclass(frozen=True)
class ComparisonRequest(Request):
    """A request to compare systems (see `System`)."""

    options_of_all_tasks: ClassVar[frozenset[str]] = frozenset({"split", "data"})

    split: str = "test"
    data: Path | None = None
    """Folder of the corpora."""
    text: str | None = None
    """Another text to compare on, instead of a split. All systems score it now."""
    field: str | None = None
    """The field of JSON lines, or the column of Parquet, that holds the other text."""
    encoding: str | None = None
    """The encoding of the other text."""
    device: str = "auto"
    """The device that scores the other text."""
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
    """One model in a comparison, trained with one or more seeds: the runs below a path, which differ only in seeds."""

    path: Path
    runs: list[RunFolder]
    """The finished runs."""
    seeds: int
    """Number of seeds, including seeds whose training is not finished."""

    def __str__(self) -> str:
        summary = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        if len(self.runs) != self.seeds:
            summary = f"{len(self.runs)} of {summary} finished"
        return f"{self.path} ({summary})"


class Answer(Protocol):
    """The answer of a task to a request, which a subcommand prints."""

    def record(self) -> Any:
        """Return the answer for programs, as JSON values."""

    def text(self) -> str:
        """Return the answer as readable text."""


class ComparisonAnswer(Answer, Protocol):
    """The answer to a comparison of systems."""

    @property
    def description(self) -> str:
        """The text that the systems were compared on, such as "test text: 1,000 sentences"."""
