"""Turn runs into the rows of a results table.

A row is one experiment of a recipe. Its runs differ only in the random seed, so their scores are averaged. Start
reading at `TableRow`; `join_runs` creates the rows of a table. The other functions decide which rows can be compared
with each other and ranked. `footnotes.py` adds remarks to rows.

There are three kinds of rows:

    trained       has runs of its own
    quoted        cites a score of another system, and is never trained
    evaluation    shows the runs of another row in another evaluation mode, such as dynamic evaluation
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.comparability import Difference, find_difference
from reefknot.lab.runs.loading import Result, Spread, differing_keys, distinguishing_settings, flatten
from reefknot.lab.runs.modes import MODES, describe_mode
from reefknot.lab.runs.result import Judgement, RunResult, SavedEvaluation, TranslationScores
from reefknot.lab.runs.scores import BLEU, PERPLEXITY, Metric, TextScore


class StepTimes(NamedTuple):
    """The time of a row's training steps, measured by `reefknot bench steps` (see `papers/measured_steps.py`).

    A step is one update of the weights.
    """

    epoch_seconds: float
    """Seconds of our fastest step, times the number of steps in an epoch."""
    speedup: float
    """Time of a step in plain PyTorch, divided by the time of our fastest step."""


@dataclass(frozen=True)
class TableRow:
    """A row of a recipe with its runs.

    A quoted row has no runs. An evaluation row has none of its own: it shows the runs of `source_row`, evaluated in
    `mode`. In a recipe, these two settings are called `of` and `by`.

    The fields come from the recipe, except `results`, `source_runs` and `step_times`. The properties are computed from
    the runs; `records` and `mean_score` are the ones to read first.
    """

    name: str
    paper: Mapping[str, float] = field(default_factory=dict)
    """The paper's scores by name, such as `valid`, `test`, `bleu_test` or `seconds`."""
    expected_parameters: int | None = None
    """The number of parameters that the recipe expects."""
    quoted: bool = False
    """Whether the row cites a score of another system, and is never trained."""
    recipe: str = ""
    """The name of the recipe."""
    results: tuple[Result, ...] = ()
    """The runs of the row, one per seed, finished or not."""
    source_row: str | None = None
    """The row whose runs an evaluation row scores; None for other rows."""
    mode: str | None = None
    """The evaluation mode of an evaluation row, such as `dynamic`; None for other rows."""
    source_runs: tuple[Result, ...] = ()
    """The runs of `source_row` that were evaluated in this mode."""
    start: str | None = None
    """The row to start from, according to the recipe: training starts with its weights."""
    corpus: str | None = None
    """Name of the corpus if the recipe sets it for this row; None if the row uses the corpus of the recipe's base."""
    paper_similarity: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The paper's rank correlations, by end (`input`, `output` or `tied`) and benchmark."""
    paper_curve: tuple[float, ...] = ()
    """The authors' validation perplexity after each epoch; empty if they published none."""
    paper_epoch: str = "best"
    """The epoch that the paper's scores are from, `best` or `last`."""
    step_times: StepTimes | None = None
    """The measured time of its training steps; None if it was not measured."""
    variant: str = ""
    """The suffix of the name that distinguishes the row from rows with the same name and other settings."""

    # -- the runs behind the row ---------------------------------------------------------------------------------------

    @property
    def records(self) -> list[RunResult]:
        """The results of the finished runs."""
        return [result.record for result in self.results if result.record]

    @property
    def finished_runs(self) -> list[tuple[Result, RunResult]]:
        """The finished runs behind the scores, with their results: runs of the row, or the runs that it evaluates."""
        return [(result, result.record) for result in (*self.results, *self.source_runs) if result.record]

    @property
    def evaluations(self) -> list[SavedEvaluation]:
        """The saved evaluations that an evaluation row shows."""
        return [result.evaluations[self.mode] for result in self.source_runs if self.mode]

    @property
    def special_mode(self) -> str | None:
        """The evaluation mode, if its perplexities must not be compared with perplexities of plain evaluation.

        It is None for windows, because comparing perplexities in different windows shows how much context helps.
        """
        return self.mode if self.mode in MODES else None

    @property
    def has_scores(self) -> bool:
        """Whether we have scores for the row."""
        return bool(self.records or self.source_runs)

    @property
    def base_name(self) -> str:
        """The name of the row in its runs, without the settings that distinguish it from rows of the same name."""
        return self.results[0].row if self.results else self.name

    @property
    def starting_row(self) -> str | None:
        """The row whose best weights training started from."""
        if not self.results:
            return self.start
        starting_row = flatten(self.results[0].settings).get("training.start.row")
        return starting_row if isinstance(starting_row, str) else None

    @property
    def changes(self) -> tuple[Change, ...]:
        """Settings that differ from the recipe in any of the runs behind the row's scores."""
        return tuple(dict.fromkeys(change for _, record in self.finished_runs for change in record.changed))

    @property
    def scored_corpus(self) -> str:
        """The name of the corpus that the scores were measured on; empty if there are no scores."""
        return next((record.corpus.name for _, record in self.finished_runs), "")

    # -- scores --------------------------------------------------------------------------------------------------------

    @property
    def score(self) -> TextScore | None:
        """The score of one run, on the test text if there is a test score. All runs of a row score the same tokens."""
        scores = self.scores("test") or self.scores("valid")
        return scores[0] if scores else None

    @property
    def uses_subwords(self) -> bool:
        """Whether the tokens are sub-words, so that perplexity per word differs from perplexity per token."""
        return self.score is not None and self.score.tokens_per_word != 1

    @property
    def has_words(self) -> bool:
        """Whether spaces separate the words of the scored text. If not, perplexity is shown per token."""
        return self.score is None or self.score.has_words

    def scores(self, split: str) -> list[TextScore]:
        """Return the scores on a split, of the finished runs or of the evaluations."""
        scores = (record.score(split) for record in (*self.records, *self.evaluations))
        return [score for score in scores if score]

    def mean_score(self, metric: Metric, split: str) -> Spread | None:
        """Return the mean of a metric over the finished runs, or over the evaluations."""
        scores = (score for record in (*self.records, *self.evaluations) for score in record.scores(split))
        return Spread.from_values(score.value for score in scores if score.metric == metric)

    def protocol_perplexity(self, split: str) -> Spread | None:
        """Return the mean perplexity by the paper's protocol, over the runs that were also scored by it.

        If the paper's scores are from the last epoch, it is None unless all runs have the score of that epoch.
        """
        if self.paper_epoch == "last":
            values = [result.last_epoch_perplexity(split) for result in self.results if result.record]
            return None if None in values else Spread.from_values(values)
        protocols = (record.protocol for record in self.records)
        scores = (getattr(protocol, split, None) for protocol in protocols)
        return Spread.from_values(score.perplexity for score in scores if score)

    def comparison_perplexity(self, split: str) -> Spread | None:
        """Return the perplexity to compare with the paper's perplexity, by the paper's protocol if it is available."""
        perplexity = self.protocol_perplexity(split)
        if perplexity or self.paper_epoch == "last":
            return perplexity
        return self.mean_score(PERPLEXITY, split)

    def relative_difference(self, split: str) -> float | None:
        """Return the relative difference of our perplexity from the paper's, as a signed fraction.

        It is None if our settings differ from the recipe or if our training was shorter than the paper's.
        """
        perplexity = self.comparison_perplexity(split)
        paper_perplexity = self.paper.get(split)
        if perplexity is None or not paper_perplexity or not self.is_faithful:
            return None
        return perplexity.mean / paper_perplexity - 1

    def translation_scores(self, split: str) -> list[TranslationScores]:
        """Return the translation scores on a split, of the finished runs or of the evaluations."""
        scores = (record.translated(split) for record in (*self.records, *self.evaluations))
        return [score for score in scores if score]

    def bleu_difference(self, split: str) -> float | None:
        """Return our BLEU minus the paper's BLEU. It is None in the same cases as `relative_difference`."""
        bleu = self.mean_score(BLEU, split)
        paper_bleu = self.paper.get(f"bleu_{split}")
        if bleu is None or not paper_bleu or not self.is_faithful:
            return None
        return bleu.mean - paper_bleu

    # -- word similarity -----------------------------------------------------------------------------------------------

    def rho(self, end: str, benchmark: str) -> Spread | None:
        """Return the Spearman correlation of an end's vectors with human judgements, over the finished runs."""
        scores = (record.similarity_scores(end).get(benchmark) for record in self.records)
        return Spread.from_values(score.value for score in scores if score)

    def mean_rho(self, end: str) -> Spread | None:
        """Return the mean correlation over Press & Wolf's benchmarks, for the runs that have all five benchmarks."""
        means = []
        for record in self.records:
            scores = record.similarity_scores(end)
            if scores.keys() >= set(PRESS):
                means.append(fmean(scores[benchmark].value for benchmark in PRESS))
        return Spread.from_values(means)

    def judgements(self, end: str, benchmark: str) -> list[Judgement]:
        """Return the scores of an end on a benchmark, one for each finished run that has the benchmark."""
        judgements = (judgement for record in self.records for judgement in record.similarity.get(end, ()))
        return [judgement for judgement in judgements if judgement.name == benchmark]

    # -- training time and size ----------------------------------------------------------------------------------------

    @property
    def epochs(self) -> list[float]:
        """The number of epochs of each finished run that was trained for epochs, or of each evaluated run."""
        return [result.epochs for result, _ in self.finished_runs if not result.is_limited_by_updates]

    @property
    def updates(self) -> list[int]:
        """The number of updates of each finished run that was trained for updates."""
        return [
            result.record.training.steps for result in self.results if result.record and result.is_limited_by_updates
        ]

    @property
    def full_epochs(self) -> float:
        """The number of epochs in the recipe, before any override, or in the paper if it is larger."""
        _, record = self.finished_runs[0]
        epochs = record.training.epochs
        for change in record.changed:
            if change.key == "training.epochs":
                epochs = change.old
                break
        return max(float(epochs or 0), self.paper.get("epochs", 0))

    @property
    def is_shortened(self) -> bool:
        """Whether a run has fewer epochs than the recipe or the paper, and no rule of the recipe ended it early."""
        if not self.epochs or min(self.epochs) >= self.full_epochs:
            return False
        return any(not record.training.stopped or "epochs" in self.paper for _, record in self.finished_runs)

    @property
    def is_faithful(self) -> bool:
        """Whether our scores can be compared with the paper's: the recipe's settings and the whole training."""
        return not self.changes and not self.is_shortened

    @property
    def authors_perplexity(self) -> float | None:
        """The authors' validation perplexity at the epoch of our scored weights, as a mean over our runs."""
        epochs = []
        for result in self.results:
            if result.record:
                epochs.append(result.epochs if result.best_epoch is None else result.best_epoch)
        if not epochs or not all(1 <= epoch <= len(self.paper_curve) for epoch in epochs):
            return None
        return fmean(self.paper_curve[int(epoch) - 1] for epoch in epochs)

    @property
    def mean_curve_difference(self) -> float | None:
        """The relative difference of our validation perplexity from the authors', as a mean over epochs and runs."""
        lines = [line for result in self.results if result.record for line in result.metrics if line.kind == "valid"]
        differences = []
        for line in lines:
            if line.perplexity and line.epoch.is_integer() and 1 <= line.epoch <= len(self.paper_curve):
                differences.append(line.perplexity / self.paper_curve[int(line.epoch) - 1] - 1)
        return fmean(differences) if differences else None

    @property
    def seconds_per_epoch(self) -> float | None:
        """Seconds of training per epoch in the fastest run, because other processes can only slow a run down."""
        times = [result.seconds_per_epoch for result in self.results]
        return min((seconds for seconds in times if seconds), default=None)

    @property
    def epoch_seconds(self) -> float | None:
        """Seconds per epoch, from the runs, or from the measured steps if there are no runs."""
        if self.seconds_per_epoch:
            return self.seconds_per_epoch
        return self.step_times.epoch_seconds if self.step_times else None

    @property
    def parameter_count(self) -> int | None:
        """The number of parameters, counted in a run, or expected by the recipe if there is no run."""
        if self.records:
            return self.records[0].parameters.total
        return self.expected_parameters

    @property
    def state(self) -> str:
        """`unfinished` or `not run` for a row without scores of ours; empty for other rows."""
        if self.has_scores or self.quoted:
            return ""
        return "unfinished" if self.results else "not run"


def join_runs(rows: Iterable[TableRow], results: Iterable[Result]) -> list[TableRow]:
    """Return the rows of a recipe with their runs, followed by rows for the runs that belong to none of them.

    Rows that already have runs keep them. A row is split if its runs have different settings, because only runs that
    differ in the seed are averaged.
    """
    rows = list(rows)
    assigned_folders = {result.folder for row in rows for result in row.results}
    unassigned_groups = _group_runs(result for result in results if result.folder not in assigned_folders)

    joined_rows: list[TableRow] = []
    for row in rows:
        matches = [group for group in unassigned_groups if not row.source_row and _belongs(row, group.results[0])]
        if row.results or not matches:
            joined_rows.append(row)
            continue
        for group in matches:
            name = row.name if len(matches) == 1 else group.name
            joined_rows.append(replace(row, name=name, variant=group.variant, results=group.results))
            unassigned_groups.remove(group)

    unlisted_rows = [_row_from_runs(group) for group in unassigned_groups]
    return _add_evaluations(joined_rows + unlisted_rows)


def add_recipe_names(rows: Iterable[TableRow]) -> list[TableRow]:
    """Prefix the name of each row with its recipe if there are several recipes, because names may be equal."""
    rows = list(rows)
    if len({row.recipe for row in rows}) < 2:
        return rows
    prefixed = []
    for row in rows:
        prefix = f"{row.recipe}: "
        prefixed.append(replace(row, name=prefix + row.name.removeprefix(prefix)))
    return prefixed


def _add_evaluations(rows: Sequence[TableRow]) -> list[TableRow]:
    """Add to each evaluation row the runs that it scores, and add a row for each saved evaluation that no row shows."""
    listed_evaluations = {(row.recipe, row.source_row, row.mode) for row in rows if row.mode}
    complete_rows: list[TableRow] = []
    for row in rows:
        # An evaluation row of the recipe gets its runs.
        if row.mode:
            complete_rows += [row] if row.source_runs else _add_source_runs(row, rows)
            continue

        # A trained row is followed by its saved evaluations that the recipe does not list.
        complete_rows.append(row)
        modes = dict.fromkeys(mode for result in row.results for mode in result.evaluations)
        for mode in modes:
            if (row.recipe, row.base_name, mode) not in listed_evaluations:
                name = f"{row.name} + {describe_mode(mode)}"
                evaluation_row = TableRow(name, recipe=row.recipe, source_row=row.base_name, mode=mode)
                complete_rows += _add_source_runs(evaluation_row, [row])
    return complete_rows


def _add_source_runs(row: TableRow, rows: Sequence[TableRow]) -> list[TableRow]:
    """Return an evaluation row with the runs that it scores, or unchanged if there are none.

    If these runs were trained with different settings, return one row for each set of settings.
    """
    sources: dict[str, tuple[TableRow, tuple[Result, ...]]] = {}  # trained rows with their evaluated runs, by name
    for candidate in rows:
        is_source = not candidate.mode and (candidate.recipe, candidate.base_name) == (row.recipe, row.source_row)
        if is_source:
            evaluated_runs = tuple(result for result in candidate.results if row.mode in result.evaluations)
            if evaluated_runs:
                sources[candidate.name] = (candidate, evaluated_runs)
    if not sources:
        return [row]

    evaluation_rows = []
    for source, evaluated_runs in sources.values():
        name = row.name + source.variant if len(sources) > 1 else row.name
        paper_epochs = {"epochs": source.paper["epochs"]} if "epochs" in source.paper else {}
        evaluation_rows.append(
            replace(
                row,
                name=name,
                paper=paper_epochs | dict(row.paper),
                expected_parameters=source.parameter_count,
                source_runs=evaluated_runs,
                corpus=source.corpus,
            )
        )
    return evaluation_rows


def group_by_row(results: Iterable[Result]) -> dict[str, tuple[Result, ...]]:
    """Group runs that differ only in the seed, by the name of their row.

    If there are several recipes, the name includes the recipe. If runs of one row have different settings, the name
    includes the settings that differ, so that only repetitions are averaged.

    Example:
        `{"Small": (seed 0, seed 1), "Small + WT (training.epochs=3)": (seed 0,), ...}`
    """
    return {group.name: group.results for group in _group_runs(results)}


class _RunGroup(NamedTuple):
    """Runs that differ only in the seed."""

    row: str
    """The name of the row, with the recipe if there are several recipes."""
    variant: str
    """The settings that distinguish the runs from other runs of their row, in parentheses; usually empty."""
    results: tuple[Result, ...]

    @property
    def name(self) -> str:
        return self.row + self.variant


def _group_runs(results: Iterable[Result]) -> list[_RunGroup]:
    """Group runs by recipe, row and settings. The runs of a group are sorted by seed."""
    runs_by_settings: dict[tuple[str, str, str], list[Result]] = {}  # by recipe, row and settings as JSON
    for result in results:
        settings_json = json.dumps(distinguishing_settings(result.settings), sort_keys=True)
        runs_by_settings.setdefault((result.recipe, result.row, settings_json), []).append(result)

    has_several_recipes = len({recipe for recipe, _, _ in runs_by_settings}) > 1
    groups = []
    for (recipe, row, _), runs in runs_by_settings.items():
        # If the row was trained with several settings, name the settings that differ.
        first_runs = [
            other_runs[0] for key, other_runs in runs_by_settings.items() if key[:2] == (recipe, row)
        ]  # one run for each combination of settings
        variant = ""
        if len(first_runs) > 1:
            keys = differing_keys([distinguishing_settings(run.settings) for run in first_runs])
            settings = flatten(runs[0].settings)
            variant = " (" + ", ".join(f"{key}={_format_value(settings.get(key))}" for key in keys) + ")"

        row_name = f"{recipe}: {row}" if has_several_recipes else row
        sorted_runs = tuple(sorted(runs, key=lambda run: run.seed))
        groups.append(_RunGroup(row_name, variant, sorted_runs))
    return groups


def group_comparable(rows: Sequence[TableRow]) -> list[list[TableRow]]:
    """Return groups of rows whose perplexities can be compared, one group for each corpus and evaluation mode.

    If not all rows of a corpus and mode are comparable, each row is tried as the reference. The group is then the
    largest set of rows that are comparable with their reference (the first such set if there are several), and the
    other rows are left out.
    """
    rows_by_corpus: dict[tuple[str, str | None], list[TableRow]] = {}  # by corpus and evaluation mode
    for row in rows:
        if row.score:
            rows_by_corpus.setdefault((row.scored_corpus, row.special_mode), []).append(row)

    groups = []
    for candidates in rows_by_corpus.values():
        subsets = []
        for reference in candidates:
            subsets.append([row for row in candidates if _can_compare(row, reference)])
        groups.append(max(subsets, key=len))
    return groups


def largest_comparable_group(rows: Sequence[TableRow]) -> list[TableRow]:
    """Return the largest group of rows whose perplexities can be compared, for example to show them in one plot."""
    return max(group_comparable(rows), key=len, default=[])


def ranking_metric(rows: Sequence[TableRow]) -> Metric:
    """Return the metric that ranks rows: BLEU if the paper or the runs have BLEU scores, otherwise perplexity."""
    paper_has_bleu = any({"bleu_valid", "bleu_test"} & row.paper.keys() for row in rows)
    runs_have_bleu = any(record.translation for row in rows for record in row.records)
    return BLEU if paper_has_bleu or runs_have_bleu else PERPLEXITY


def has_only_similarity(rows: Sequence[TableRow]) -> bool:
    """Return whether word similarity is the only score that the paper and the runs have."""
    paper_has_similarity = any(row.paper_similarity for row in rows)
    runs_have_similarity = any(record.similarity for row in rows for record in row.records)
    has_other_scores = any(row.paper or row.score for row in rows)
    return (paper_has_similarity or runs_have_similarity) and not has_other_scores


def has_only_times(rows: Sequence[TableRow]) -> bool:
    """Return whether the paper reports only seconds for these rows."""
    return {name for row in rows for name in row.paper} == {"seconds"}


def group_by_bleu(rows: Sequence[TableRow], split: str) -> list[list[TableRow]]:
    """Return groups of rows whose BLEU can be compared: the same corpus and the same sacrebleu signature."""
    rows_by_signature: dict[tuple[str, str], list[TableRow]] = {}  # by corpus and signature
    for row in rows:
        scores = row.translation_scores(split)
        if scores:
            rows_by_signature.setdefault((row.scored_corpus, scores[0].bleu_signature), []).append(row)
    return list(rows_by_signature.values())


def group_rankable(rows: Sequence[TableRow], split: str) -> list[list[TableRow]]:
    """Return groups of rows that can be ranked, by the metric that ranks these rows.

    A row that only provides the starting weights of another row is not ranked by perplexity.
    """
    if ranking_metric(rows) == BLEU:
        return group_by_bleu(rows, split)
    starting_rows = {(row.recipe, row.starting_row) for row in rows}
    groups = []
    for comparable_rows in group_comparable(rows):
        groups.append([row for row in comparable_rows if (row.recipe, row.base_name) not in starting_rows])
    return groups


def time_ratios(rows: Sequence[TableRow], row: TableRow) -> tuple[float | None, float | None]:
    """Return our time and the paper's time of an epoch, both relative to the first row on the same corpus."""
    trained_rows = (candidate for candidate in rows if candidate.corpus == row.corpus and not candidate.quoted)
    first_row = next(trained_rows, row)

    paper_ratio = None
    seconds = row.paper.get("seconds")
    first_seconds = first_row.paper.get("seconds")
    if seconds and first_seconds:
        paper_ratio = seconds / first_seconds
    return _our_time_ratio(row, first_row), paper_ratio


def _our_time_ratio(row: TableRow, first_row: TableRow) -> float | None:
    """Divide our time of a row by our time of the first row.

    Runs are compared with runs and steps with steps, because runs may have shared their device.
    """
    seconds = row.seconds_per_epoch
    first_seconds = first_row.seconds_per_epoch
    if seconds and first_seconds:
        return seconds / first_seconds
    if row.step_times and first_row.step_times:
        return row.step_times.epoch_seconds / first_row.step_times.epoch_seconds
    return None


def score_difference(row: TableRow, other: TableRow) -> Difference | None:
    """Return how the definitions of two rows' scores differ, or None if they do not differ."""
    if row.score is None or other.score is None:
        return None
    return find_difference(row.score, other.score)


def _can_compare(row: TableRow, other: TableRow) -> bool:
    """Return whether the perplexities of two rows can be compared."""
    difference = score_difference(row, other)
    return difference is None or not difference.prevents


def _format_value(value: Any) -> str:
    """Return the value of a setting as JSON, and a string unchanged."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _belongs(row: TableRow, result: Result) -> bool:
    """Return whether a run belongs to a row. A row without a recipe matches runs of all recipes."""
    return result.row == row.name and row.recipe in ("", result.recipe)


def _row_from_runs(group: _RunGroup) -> TableRow:
    """Return a row for runs that belong to no row of a recipe. Its paper scores come from a finished run."""
    row = TableRow(group.name, recipe=group.results[0].recipe, results=group.results, variant=group.variant)
    if not row.records:
        return row
    record = row.records[0]
    return replace(
        row,
        paper=record.paper,
        expected_parameters=record.parameters.expected,
        corpus=record.corpus.name,
        paper_similarity=record.paper_similarity,
    )
