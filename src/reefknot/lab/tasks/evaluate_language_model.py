"""Evaluates a trained language model: perplexity on a text, with the exact definition of the score.

Start with `evaluate_language_model`, which `reefknot evaluate` calls. A text is scored in one of several modes, such as
plain or dynamic evaluation (see `evaluation_modes.py`). It is read in one of these ways:

    one stream         the recurrent state is carried through the whole text
    several streams    contiguous parts of the text are read in parallel, each from an empty state
    windows            parts of the text are scored independently
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, get_args

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.grid import Grid
from reefknot.lab.evaluation.opened_tails import measure_opened_tails
from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.evaluation.protocols import get_protocol, score_by_protocol
from reefknot.lab.evaluation.saved import save_evaluation, save_text_evaluation
from reefknot.lab.runs.definition import describe_unknown_share, format_perplexity, warn_of_unknown_words
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.modes import describe_windows_in_full
from reefknot.lab.runs.result import Protocol, ProtocolName, TailsOpened
from reefknot.lab.runs.scores import TextScore
from reefknot.lab.tasks.evaluation_modes import (
    MODES,
    build_mode,
    check_modes,
    check_windows,
    choose_windows,
    needs_dataset,
    requested_modes,
)
from reefknot.lab.tasks.requests import EvaluationRequest, format_option
from reefknot.lab.text.encoding import shorten_split
from reefknot.lab.text.sources import DEFAULT_FIELD, open_text
from reefknot.lab.training.generators import set_determinism
from reefknot.storage.progress import Notify, ProgressCallback

if TYPE_CHECKING:
    from reefknot.lab.tasks.language_model import LanguageModelTask, TrainedLanguageModel
    from reefknot.lab.text.dataset import Dataset, Split


def evaluate_language_model(
    task: LanguageModelTask, run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: ProgressCallback
) -> TextEvaluations:
    """Score texts with the best weights of a run."""
    _check_options(request)

    # Open the model and its texts.
    trained_run = cast("TrainedLanguageModel", task.open_run(run, request.device))
    set_determinism(task.experiment.training.determinism)
    request.check_finished(run)
    dataset = None
    if request.text is None or needs_dataset(request):
        dataset = trained_run.dataset(request.data)
    if request.text is not None:
        source = open_text(request.text, encoding=request.encoding, field=request.field or DEFAULT_FIELD)
        trained_run, text = trained_run.encode_other_text(source, notify)
        whole_texts = {text.name: text}
    else:
        assert dataset is not None
        request.check_split(dataset.splits)
        whole_texts = {split: dataset.splits[split] for split in request.splits}
    texts = {name: shorten_split(text, request.limit, trained_run.vocabulary) for name, text in whole_texts.items()}
    _check_streams(request.streams, texts)

    # Score the texts in the requested mode.
    mode = build_mode(trained_run, dataset, request, progress)
    scores = {split: mode.score(text) for split, text in texts.items()}

    # Add related scores of the same texts.
    windows = choose_windows(trained_run, request)
    windows_name = windows.name if windows else None
    # Other scores of a text are comparable only with a plain score of the whole text.
    is_plain = not requested_modes(request) and request.limit is None
    evaluations = []
    for split, text in texts.items():
        tails = measure_opened_tails(trained_run.model, text, trained_run.vocabulary, windows)
        protocol = None
        recorded = None
        if is_plain and dataset is not None and request.text is None:
            protocol = _score_by_protocol(trained_run, dataset, split, request.protocol)
            recorded = _find_recorded_score(run, split, windows_name, request.streams or 1)
        evaluation = TextEvaluation(
            split,
            scores[split],
            tokens=text.tokens,
            total_tokens=whole_texts[split].tokens,
            tails=tails,
            protocol=protocol,
            recorded=recorded,
        )
        evaluations.append(evaluation)

    if request.save and request.text is not None:
        (score,) = scores.values()
        notify(save_text_evaluation(run, mode.name, mode.settings, mode.grid, score))
    elif request.save:
        notify(save_evaluation(run, mode.name, mode.settings, mode.grid, scores))
    return TextEvaluations(str(run.path), evaluations, mode.grid)


# -- checks of the options ---------------------------------------------------------------------------------------------


def _check_options(request: EvaluationRequest) -> None:
    """Raise an error if options contradict each other, before anything is opened."""
    request.check_other_text()
    if request.text is not None and request.data is not None and not needs_dataset(request):
        raise SettingsError("--data has no effect with --text, which names the text; leave --data out")
    check_modes(request)
    check_windows(request)
    if request.protocol is not None:
        _check_protocol(request.protocol, request)

    window_options = {"context", "stride", "windows"}
    has_window_option = not window_options.isdisjoint(request.given_options())
    if request.save and request.text is None and not requested_modes(request) and not has_window_option:
        needed_options = ", ".join(format_option(name) for name in (*MODES, "context", "stride"))
        raise SettingsError(f"--save needs {needed_options} or --windows, because training has saved the plain scores")
    request.check_saved_texts()


def _check_protocol(protocol_name: str, request: EvaluationRequest) -> None:
    """Raise an error if `--protocol` names an unknown program, or conflicts with other options."""
    known_names = get_args(ProtocolName)
    if protocol_name not in known_names:
        raise SettingsError(f"--protocol {protocol_name}: must be one of {', '.join(known_names)}")
    conflicts = [format_option(mode) for mode in requested_modes(request)]
    if request.limit is not None:
        conflicts.append("--limit")
    if request.split == "train":
        conflicts.append("--split train")
    if request.text is not None:
        conflicts.append("--text")
    if conflicts:
        raise SettingsError(
            f"--protocol: the programs of papers score the whole valid or test text; leave {conflicts[0]} out"
        )


def _check_streams(streams: int | None, texts: Mapping[str, Split]) -> None:
    """Raise an error if there are more streams than tokens."""
    if streams is None:
        return
    for name, text in texts.items():
        if streams > text.tokens:
            raise SettingsError(
                f"--streams {streams:,}: the {name} text has only {text.tokens:,} tokens; use fewer streams"
            )


# -- related scores of the same text -----------------------------------------------------------------------------------


def _score_by_protocol(
    trained_run: TrainedLanguageModel, dataset: Dataset, split: str, requested_protocol: str | None
) -> Protocol | None:
    """Score a text as the program of a paper does, if the request or the settings of the run name one."""
    experiment = trained_run.experiment
    protocol_name = cast(ProtocolName, requested_protocol or experiment.evaluation.protocol)
    countings = get_protocol(protocol_name, experiment.training.batch, experiment.training.steps)
    if countings is None or split not in countings:
        return None
    split_countings = {split: countings[split]}
    precision = experiment.training.precision
    return score_by_protocol(protocol_name, trained_run.model, dataset.splits, split_countings, precision)


def _find_recorded_score(run: RunFolder, split: str, windows_name: str | None, streams: int) -> TextScore | None:
    """Return the score in result.json, or None if it was computed in the same windows or streams."""
    score = run.result.score(split) if run.result else None
    if score is None:
        return None
    if score.windows == windows_name and score.streams == streams:
        return None
    return score


# -- the answer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextEvaluations:
    """The evaluation of one run on one or two texts."""

    run: str
    """Path of the run folder."""
    texts: list[TextEvaluation]
    grid: Grid | None
    """The grid search that chose the settings of the mode; None if there was no search."""

    def record(self) -> Any:
        """Return the record of the text, or a list of records if there are two texts."""
        search_record = {} if self.grid is None else {"search": self.grid.summary().record()}
        records = [{"run": self.run, **text.record(), **search_record} for text in self.texts]
        return records[0] if len(records) == 1 else records

    def text(self) -> str:
        """Return a table of the search, and the scores of every text with their definitions."""
        lines = [] if self.grid is None else [self.grid.table()]
        for text in self.texts:
            lines += text.lines()
        return "\n".join(lines)


@dataclass(frozen=True)
class TextEvaluation:
    """The score of one text, its definition, and related scores of the same text."""

    split: str
    score: Score
    tokens: int
    """Number of tokens of the text that was scored."""
    total_tokens: int
    """Number of tokens of the whole text. It is larger than `tokens` if `--limit` is used."""
    tails: TailsOpened | None = None
    """For an adaptive softmax, the share of its tails (groups of rare words) that a search for the best words reads."""
    protocol: Protocol | None = None
    """The same weights, scored as the program of a paper scores them."""
    recorded: TextScore | None = None
    """The score in result.json, if training read the text in other windows or streams."""

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        record = {"split": self.split, **self.score.summary().record()}
        if self.tokens < self.total_tokens:
            record["limit"] = self.tokens
        if self.tails is not None:
            record["tails_opened"] = self.tails.record()
        if self.protocol is not None:
            record["protocol"] = self.protocol.record()
        if self.recorded is not None:
            record["recorded"] = self.recorded.model_dump(include={"perplexity", "streams", "windows"})
        return record

    def lines(self) -> list[str]:
        """Return the scores and their definitions as readable lines."""
        summary = self.score.summary()
        lines = [
            f"{self.split} perplexity {format_perplexity(summary.perplexity)}  "
            f"word perplexity {format_perplexity(summary.per_word)}  "
            f"{describe_unknown_share(summary.unknown_share)}  "
            f"bits per byte {summary.bits_per_byte:.4f}",
            summary.definition,
        ]
        warning = warn_of_unknown_words(summary.unknown_share, self.split, subwords=summary.uses_subwords)
        if warning:
            lines.append(warning)
        if self.tokens < self.total_tokens:
            lines.append(
                f"limit: only the first {self.tokens:,} of {self.total_tokens:,} tokens; the number of bytes is "
                "estimated"
            )
        if self.tails is not None:
            lines.append(str(self.tails))
        if self.protocol is not None:
            protocol_score = self.protocol.valid if self.split == "valid" else self.protocol.test
            assert protocol_score is not None  # `_score_by_protocol` scores this split
            perplexity = format_perplexity(protocol_score.perplexity)
            lines.append(f"counted as {self.protocol.name}: {self.split} perplexity {perplexity}")
            lines.append(self.protocol.definition)
        if self.recorded is not None:
            perplexity = format_perplexity(self.recorded.perplexity)
            lines.append(f"training recorded {perplexity}, in {_describe_reading(self.recorded)}")
        return lines


def _describe_reading(score: TextScore) -> str:
    """Return a description of the windows or streams in which a text was read."""
    if score.windows:
        return describe_windows_in_full(score.windows)
    if score.streams == 1:
        return "1 stream"
    return f"{score.streams} streams, each of which begins without context"
