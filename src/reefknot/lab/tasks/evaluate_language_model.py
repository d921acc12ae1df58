"""Evaluation of a language model: perplexity with its definition, in one of several modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, get_args

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.grid import Grid, Progress, beginning
from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.evaluation.protocols import protocol, score_by_protocol
from reefknot.lab.evaluation.saved import save
from reefknot.lab.evaluation.search import tails_opened
from reefknot.lab.runs.definition import format_perplexity
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.modes import describe_windows_in_full
from reefknot.lab.runs.result import Protocol, ProtocolName, TailsOpened
from reefknot.lab.runs.scores import TextScore
from reefknot.lab.tasks.evaluation_modes import MODES, ModeChooser, check_modes, check_windows, requested_modes
from reefknot.lab.tasks.requests import EvaluationRequest, option
from reefknot.lab.training.generators import set_determinism
from reefknot.storage.progress import Notify

if TYPE_CHECKING:
    from reefknot.lab.tasks.language_model import LanguageModelTask, TrainedLanguageModel
    from reefknot.lab.text.dataset import Dataset, Split


@dataclass(frozen=True)
class TextEvaluation:
    """The score of one text, its definition, and related scores of the same text."""

    split: str
    score: Score
    tokens: int
    """Number of tokens of the text that was scored."""
    whole: int
    """Number of tokens of the whole text. It is larger than `tokens` if `--limit` is used."""
    tails: TailsOpened | None = None
    protocol: Protocol | None = None
    """The same weights scored as the program of a paper scores them."""
    recorded: TextScore | None = None
    """The score in result.json, if training read the text in other windows or streams."""

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        record = {"split": self.split, **self.score.summary().record()}
        if self.tokens < self.whole:
            record["limit"] = self.tokens
        if self.tails is not None:
            record["tails_opened"] = self.tails.record()
        if self.protocol is not None:
            record["protocol"] = self.protocol.record()
        if self.recorded is not None:
            record["recorded"] = self.recorded.model_dump(include={"perplexity", "streams", "windows"})
        return record

    def lines(self) -> list[str]:
        """Return the scores and their definitions in lines for people."""
        summary = self.score.summary()
        lines = [
            f"{self.split} perplexity {format_perplexity(summary.perplexity)}  "
            f"word perplexity {format_perplexity(summary.per_word)}  "
            f"bits per byte {summary.bits_per_byte:.4f}",
            summary.definition,
        ]
        if self.tokens < self.whole:
            lines.append(
                f"limit: only the first {self.tokens:,} of {self.whole:,} tokens; the number of bytes is estimated"
            )
        if self.tails is not None:
            lines.append(str(self.tails))
        if self.protocol is not None:
            counted = self.protocol.valid if self.split == "valid" else self.protocol.test
            assert counted is not None  # `_by_protocol` scores this split
            lines += [
                f"counted as {self.protocol.name}: {self.split} perplexity {format_perplexity(counted.perplexity)}",
                self.protocol.definition,
            ]
        if self.recorded is not None:
            lines.append(
                f"training recorded {format_perplexity(self.recorded.perplexity)}, in {_reading(self.recorded)}"
            )
        return lines


@dataclass(frozen=True)
class TextEvaluations:
    """The evaluation of one run on one or two texts."""

    run: str
    texts: list[TextEvaluation]
    grid: Grid | None
    """The search that chose the settings."""

    def record(self) -> Any:
        """Return the record of the text, or a list of records if there are two texts."""
        search = {} if self.grid is None else {"search": self.grid.summary().record()}
        records = [{"run": self.run, **text.record(), **search} for text in self.texts]
        return records[0] if len(records) == 1 else records

    def text(self) -> str:
        """Return a table of the search, and the scores of every text with their definitions."""
        search = [] if self.grid is None else [self.grid.table()]
        return "\n".join([*search, *(line for text in self.texts for line in text.lines())])


def evaluate_language_model(
    task: LanguageModelTask, run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: Progress
) -> TextEvaluations:
    """Score texts with the best weights of a run."""
    _check(request)
    trained = cast("TrainedLanguageModel", task.open_run(run, request.device))
    set_determinism(task.experiment.training.determinism)
    request.check_finished(run)
    dataset = trained.dataset(request.data)
    request.check_split(dataset.splits)
    texts = {name: beginning(dataset.splits[name], request.limit, trained.vocabulary) for name in request.splits}
    _check_streams(request.streams, texts)
    chooser = ModeChooser(trained, dataset, request, progress)
    mode = chooser.choose()
    scores = {name: mode.score(text) for name, text in texts.items()}
    windows = chooser.windows
    # Other scores of the same text are comparable only with a plain score of the whole text.
    plain = not requested_modes(request) and request.limit is None
    evaluations = [
        TextEvaluation(
            name,
            scores[name],
            tokens=text.tokens,
            whole=dataset.splits[name].tokens,
            tails=tails_opened(trained.model, text, trained.vocabulary, windows),
            protocol=_by_protocol(trained, dataset, name, request.protocol) if plain else None,
            recorded=_recorded(run, name, windows.name if windows else None, request.streams or 1) if plain else None,
        )
        for name, text in texts.items()
    ]
    if request.save:
        notify(save(run, mode.kind, mode.settings, mode.grid, scores))
    return TextEvaluations(str(run.path), evaluations, mode.grid)


def _check(request: EvaluationRequest) -> None:
    """Raise an error if options contradict each other, before anything is opened."""
    check_modes(request)
    check_windows(request)
    if request.protocol is not None:
        _check_protocol(request.protocol, request)
    if request.save and not (
        requested_modes(request) or {"context", "stride", "windows"} & set(request.given_options())
    ):
        needed = ", ".join(map(option, (*MODES, "context", "stride")))
        raise SettingsError(f"--save needs {needed} or --windows, because training has saved the plain scores")
    request.check_saved_texts()


def _check_protocol(name: str, request: EvaluationRequest) -> None:
    known = get_args(ProtocolName)
    if name not in known:
        raise SettingsError(f"--protocol {name}: must be one of {', '.join(known)}")
    conflicts = [option(mode) for mode in requested_modes(request)]
    conflicts += ["--limit"] * (request.limit is not None) + ["--split train"] * (request.split == "train")
    if conflicts:
        raise SettingsError(
            f"--protocol: the programs of papers score the whole valid or test text; leave {conflicts[0]} out"
        )


def _check_streams(streams: int | None, texts: Mapping[str, Split]) -> None:
    for name, text in texts.items():
        if streams is not None and streams > text.tokens:
            raise SettingsError(
                f"--streams {streams:,}: the {name} text has only {text.tokens:,} tokens; use fewer streams"
            )


def _by_protocol(trained: TrainedLanguageModel, dataset: Dataset, split: str, requested: str | None) -> Protocol | None:
    """Score a text as the program of a paper does, if the request or the settings of the run name one."""
    settings = trained.experiment
    name = cast(ProtocolName, requested or settings.evaluation.protocol)
    countings = protocol(name, settings.training.batch, settings.training.steps) or {}
    if split not in countings:
        return None
    return score_by_protocol(
        name, trained.model, dataset.splits, {split: countings[split]}, settings.training.precision
    )


def _recorded(run: RunFolder, split: str, windows: str | None, streams: int) -> TextScore | None:
    """Return the score in result.json, or None if it was computed in the same windows or streams."""
    score = run.result.score(split) if run.result else None
    return None if score is None or (score.windows, score.streams) == (windows, streams) else score


def _reading(score: TextScore) -> str:
    """Return a description of the windows or streams in which a text was read."""
    if score.windows:
        return describe_windows_in_full(score.windows)
    return "1 stream" if score.streams == 1 else f"{score.streams} streams, each of which begins without context"
