"""Score a text that is not part of a run's corpus with all runs of a comparison: `reefknot compare A B --text FILE`.

Start with `score_other_text`. The text is read again for every run and encoded with its vocabulary. It is scored like
the validation and test texts of the run, in the windows or streams of its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.perplexity import score, word_losses
from reefknot.lab.runs.comparability import Difference, explain_in_comparison, find_difference, have_same_tokens
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.scores import TextScore
from reefknot.lab.tasks.language_model import open_language_model
from reefknot.lab.tasks.requests import ComparisonRequest, System
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.sources import DEFAULT_FIELD, STANDARD_INPUT, TextSource, open_text
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.training.generators import set_determinism
from reefknot.storage.progress import Notify

Losses = NDArray[Any]
"""The loss of every token, or of every word, of a text."""


class TokenText(NamedTuple):
    """A text as tokens of a vocabulary."""

    split: Split
    vocabulary: Vocabulary


@dataclass(frozen=True)
class SystemLosses:
    """The losses of all systems on the same text."""

    name: str
    """Name of the text."""
    loss_unit: str
    """What one loss belongs to: `token` or `word`."""
    by_system: list[list[Losses]]
    """For each system, the losses of its runs, one array per run."""
    score: TextScore | None
    """The score of the baseline's first run; None if it was not recorded."""
    open_text: Callable[[], TokenText]
    """Returns the text as tokens of the baseline's first run."""


class _ScoredRun(NamedTuple):
    run: RunFolder
    text: TokenText
    nll: Losses
    score: TextScore


def score_other_text(systems: Sequence[System], request: ComparisonRequest, notify: Notify) -> SystemLosses:
    """Score the text of a request with the best weights of all runs; raise an error if they cannot be compared."""
    assert request.text is not None
    if request.text == STANDARD_INPUT:
        raise SettingsError("--text -: compare reads the text once per run, but standard input only once; use a file")
    source = open_text(request.text, encoding=request.encoding, field=request.field or DEFAULT_FIELD)
    scored_systems = []
    for system in systems:
        scored_systems.append([_score_run(run, source, request.device, notify) for run in system.runs])

    # Compare the losses by tokens if all runs have the same tokens, and otherwise by words.
    all_runs = [scored for scored_runs in scored_systems for scored in scored_runs]
    first, *others = all_runs
    for other in others:
        difference = find_difference(first.score, other.score, paired=True)
        if difference:
            notify(describe_difference(difference, first.run, other.run, source.name))
    same_tokens = all(have_same_tokens(first.score, other.score) for other in others)
    losses = []
    for scored_runs in scored_systems:
        if same_tokens:
            losses.append([scored.nll for scored in scored_runs])
        else:
            losses.append([word_losses(scored.nll, *scored.text) for scored in scored_runs])
    return SystemLosses(source.name, "token" if same_tokens else "word", losses, first.score, lambda: first.text)


def _score_run(run: RunFolder, source: TextSource, device: str, notify: Notify) -> _ScoredRun:
    trained = open_language_model(run.path, device)
    training = trained.experiment.training
    set_determinism(training.determinism)
    notify(f"{run.path}: scoring {source.name}")
    trained, split = trained.encode_other_text(source, notify)
    windows = trained.experiment.windows
    streams = trained.experiment.evaluation.streams if windows is None else 1
    result = score(
        trained.model, split, trained.vocabulary, streams=streams, windows=windows, precision=training.precision
    )
    return _ScoredRun(run, TokenText(split, trained.vocabulary), result.nll, result.summary())


def describe_difference(difference: Difference, first: RunFolder, other: RunFolder, text_name: str) -> str:
    """Return a note on how the scores of two runs differ; raise an error if they must not be compared."""
    run_paths = f"{first.path} and {other.path}"
    reason = explain_in_comparison(difference, text_name)
    if difference.prevents:
        raise SettingsError(f"{run_paths}: no fair comparison: {reason}")
    return f"note: {run_paths}: {reason}"
