"""The rows of a table: runs that differ only in the seed, joined with the rows of a recipe.

This module also decides which rows can be compared with each other, and marks the others with footnotes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.reports.results import Result, Spread, differing, distinguishing, flatten
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.comparability import Difference, explain_in_table, find_difference
from reefknot.lab.runs.modes import MODES, describe_mode
from reefknot.lab.runs.result import Judgement, RunResult, SavedEvaluation, TranslationScores
from reefknot.lab.runs.scores import BLEU, PERPLEXITY, Metric, TextScore

SIGNS = "†‡§¶"


class Steps(NamedTuple):
    """The time of a row's training steps, measured by `reefknot bench steps` (see `measured_steps.py`)."""

    epoch_seconds: float
    """Seconds of our fastest step, times the number of steps in an epoch."""
    times_plain: float
    """Time of a step in plain PyTorch, divided by the time of our fastest step."""


@dataclass(frozen=True)
class TableRow:
    """A row of a recipe with its runs.

    A `quoted` row cites another system and is never run. An evaluation row has no runs either: it shows the scores of
    another row's runs in another evaluation mode. As in recipes, `of` is the name of the other row and `by` is the
    name of the mode. `models` are the runs of the other row.
    """

    name: str
    paper: Mapping[str, float] = field(default_factory=dict)
    parameters: int | None = None
    quoted: bool = False
    recipe: str = ""
    results: tuple[Result, ...] = ()
    of: str | None = None
    by: str | None = None
    models: tuple[Result, ...] = ()
    start: str | None = None
    """The row whose weights training starts from, according to the recipe."""
    corpus: str | None = None
    """Name of the corpus if the recipe sets it for this row; None if the row uses the corpus of the recipe's base."""
    paper_similarity: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The paper's rank correlations, by end and benchmark."""
    steps: Steps | None = None
    """The measured time of its training steps; None if it was not measured."""
    variant: str = ""
    """The suffix of the name that distinguishes the row from rows with the same name and other settings."""

    @property
    def records(self) -> list[RunResult]:
        """The results of the finished runs."""
        return [result.record for result in self.results if result.record]

    @property
    def evaluations(self) -> list[SavedEvaluation]:
        """The saved evaluations that an evaluation row shows."""
        return [result.evaluations[self.by] for result in self.models if self.by]

    @property
    def special_mode(self) -> str | None:
        """The evaluation mode, if its perplexities must not be compared with perplexities of plain evaluation.

        It is None for windows, because comparing perplexities in different windows shows how much context helps.
        """
        return self.by if self.by in MODES else None

    @property
    def ran(self) -> bool:
        """Whether we have scores for the row."""
        return bool(self.records or self.models)

    @property
    def own_name(self) -> str:
        """The name of the row in its runs, without the settings that distinguish it from rows of the same name."""
        return self.results[0].row if self.results else self.name

    @property
    def begins_with(self) -> str | None:
        """The row whose best weights training started from."""
        if not self.results:
            return self.start
        start = flatten(self.results[0].settings).get("training.start.row")
        return start if isinstance(start, str) else None

    @property
    def changed(self) -> tuple[Change, ...]:
        """Settings that differ from the recipe in any of the runs behind the row's scores."""
        records = [result.record for result in (*self.results, *self.models) if result.record]
        return tuple(dict.fromkeys(change for record in records for change in record.changed))

    @property
    def text(self) -> str:
        """The name of the corpus that the scores were measured on."""
        return next((result.record.corpus.name for result in (*self.results, *self.models) if result.record), "")

    @property
    def score(self) -> TextScore | None:
        """The score of one run, on the test text if there is a test score. All runs of a row score the same tokens."""
        return next(iter(self.scores("test") or self.scores("valid")), None)

    @property
    def per_word(self) -> bool:
        """Whether the tokens are sub-words, so that perplexity per word differs from perplexity per token."""
        return self.score is not None and self.score.tokens_per_word != 1

    def scores(self, split: str) -> list[TextScore]:
        """Return the scores on a split, of the finished runs or of the evaluations."""
        scores = (scored.score(split) for scored in (*self.records, *self.evaluations))
        return [score for score in scores if score]

    def mean_score(self, metric: Metric, split: str) -> Spread | None:
        """Return the mean of a metric over the finished runs, or over the evaluations."""
        scores = (score for scored in (*self.records, *self.evaluations) for score in scored.scores(split))
        return Spread.of(score.value for score in scores if score.metric == metric)

    def by_protocol(self, split: str) -> Spread | None:
        """Return the mean perplexity by the paper's protocol, over the runs that were also scored by it."""
        protocols = (record.protocol for record in self.records)
        scores = (getattr(protocol, split, None) for protocol in protocols)
        return Spread.of(score.perplexity for score in scores if score)

    def compared(self, split: str) -> Spread | None:
        """Return the perplexity to compare with the paper's perplexity, by the paper's protocol if it is available."""
        return self.by_protocol(split) or self.mean_score(PERPLEXITY, split)

    def difference(self, split: str) -> float | None:
        """Return the relative difference of our perplexity from the paper's, as a signed fraction.

        It is None if our settings differ from the recipe.
        """
        ours, paper = self.compared(split), self.paper.get(split)
        return ours.mean / paper - 1 if ours and paper and not self.changed else None

    def translated(self, split: str) -> list[TranslationScores]:
        """Return the translation scores on a split, of the finished runs or of the evaluations."""
        translated = (scored.translated(split) for scored in (*self.records, *self.evaluations))
        return [scores for scores in translated if scores]

    def bleu_difference(self, split: str) -> float | None:
        """Return our BLEU minus the paper's, in points; None if our settings differ from the recipe."""
        ours, paper = self.mean_score(BLEU, split), self.paper.get(f"bleu_{split}")
        return ours.mean - paper if ours and paper and not self.changed else None

    def rho(self, end: str, benchmark: str) -> Spread | None:
        """Return the Spearman correlation of an end's vectors with human judgements, over the finished runs."""
        scores = (record.similarity_scores(end).get(benchmark) for record in self.records)
        return Spread.of(score.value for score in scores if score)

    def mean_rho(self, end: str) -> Spread | None:
        """Return the mean correlation over Press & Wolf's benchmarks, for the runs that have all five benchmarks."""
        runs = [record.similarity_scores(end) for record in self.records]
        return Spread.of(fmean(run[name].value for name in PRESS) for run in runs if run.keys() >= set(PRESS))

    def judgements(self, end: str, benchmark: str) -> list[Judgement]:
        """Return the scores of an end on a benchmark, one for each finished run that has the benchmark."""
        judgements = (judgement for record in self.records for judgement in record.similarity.get(end, ()))
        return [judgement for judgement in judgements if judgement.name == benchmark]

    @property
    def epochs(self) -> list[float]:
        """The number of epochs of each finished run that was trained for epochs."""
        return [result.epochs for result in self.results if result.record and not result.by_updates]

    @property
    def updates(self) -> list[int]:
        """The number of updates of each finished run that was trained for updates."""
        return [result.record.training.steps for result in self.results if result.record and result.by_updates]

    @property
    def recipe_epochs(self) -> float:
        """The number of epochs in the recipe, before any override."""
        record = self.records[0]
        overridden = (change.old for change in record.changed if change.key == "training.epochs")
        return float(next(overridden, record.training.epochs) or 0)

    @property
    def seconds_per_epoch(self) -> float | None:
        """Seconds of training per epoch in the fastest run, because other processes can only slow a run down."""
        return min((seconds for result in self.results if (seconds := result.seconds_per_epoch)), default=None)

    @property
    def pace(self) -> float | None:
        """Seconds per epoch, from the runs, or from the measured steps if there are no runs."""
        return self.seconds_per_epoch or (self.steps and self.steps.epoch_seconds)

    @property
    def size(self) -> int | None:
        """The number of parameters, counted in a run, or expected by the recipe if there is no run."""
        return next((record.parameters.total for record in self.records), self.parameters)

    @property
    def state(self) -> str:
        """`unfinished` or `not run` for a row without scores of ours; empty for other rows."""
        if self.ran or self.quoted:
            return ""
        return "unfinished" if self.results else "not run"


def join(rows: Iterable[TableRow], results: Iterable[Result]) -> list[TableRow]:
    """Return the rows of a recipe with their runs, followed by rows for the runs that belong to none of them.

    Rows that already have runs keep them.
    """
    rows = list(rows)
    taken = {result.folder for row in rows for result in row.results}
    groups = _groups(result for result in results if result.folder not in taken)
    joined: list[TableRow] = []
    for row in rows:
        matches = [group for group in groups if not row.of and _belongs(row, group.results[0])]
        if row.results or not matches:
            joined.append(row)
            continue
        for match in matches:
            name = row.name if len(matches) == 1 else match.name
            joined.append(replace(row, name=name, variant=match.variant, results=match.results))
            groups.remove(match)
    return _with_evaluations(joined + [_row_of(group) for group in groups])


def name_recipes(rows: Iterable[TableRow]) -> list[TableRow]:
    """Prefix the name of each row with its recipe if there are several recipes, because names may be equal."""
    rows = list(rows)
    if len({row.recipe for row in rows}) < 2:
        return rows
    prefixes = (f"{row.recipe}: " for row in rows)
    return [
        replace(row, name=prefix + row.name.removeprefix(prefix)) for row, prefix in zip(rows, prefixes, strict=True)
    ]


def _with_evaluations(rows: Sequence[TableRow]) -> list[TableRow]:
    """Add their models to the evaluation rows, and add a row for each saved evaluation that no row shows."""
    listed = {(row.recipe, row.of, row.by) for row in rows if row.by}
    complete: list[TableRow] = []
    for row in rows:
        if row.by:
            complete += [row] if row.models else _scoring(row, rows)
            continue
        complete.append(row)
        for by in dict.fromkeys(kind for result in row.results for kind in result.evaluations):
            if (row.recipe, row.own_name, by) not in listed:
                name = f"{row.name} + {describe_mode(by)}"
                complete += _scoring(TableRow(name, recipe=row.recipe, of=row.own_name, by=by), [row])
    return complete


def _scoring(row: TableRow, rows: Sequence[TableRow]) -> list[TableRow]:
    """Return an evaluation row with its models, or several rows if the models were trained with different settings.

    A row without models is returned unchanged.
    """
    trained = {
        candidate.name: (candidate, models)
        for candidate in rows
        if not candidate.by and (candidate.recipe, candidate.own_name) == (row.recipe, row.of)
        if (models := tuple(result for result in candidate.results if row.by in result.evaluations))
    }
    several = len(trained) > 1
    return [
        replace(
            row,
            name=row.name + source.variant * several,
            parameters=source.size,
            models=models,
            corpus=source.corpus,
        )
        for source, models in trained.values()
    ] or [row]


def group(results: Iterable[Result]) -> dict[str, tuple[Result, ...]]:
    """Group runs that differ only in the seed, by the name of their row.

    If there are several recipes, the name includes the recipe. If runs of one row have different settings, the name
    includes the settings that differ, so that only repetitions are averaged.
    """
    return {runs.name: runs.results for runs in _groups(results)}


class _Group(NamedTuple):
    """Runs that differ only in the seed."""

    row: str
    variant: str
    """The settings that distinguish the runs from other runs of their row, in parentheses."""
    results: tuple[Result, ...]

    @property
    def name(self) -> str:
        return self.row + self.variant


def _groups(results: Iterable[Result]) -> list[_Group]:
    alike: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        key = json.dumps(distinguishing(result.settings), sort_keys=True)
        alike.setdefault((result.recipe, result.row, key), []).append(result)
    several = len({recipe for recipe, _, _ in alike}) > 1
    groups = []
    for (recipe, row, _), members in alike.items():
        variants = [runs[0] for key, runs in alike.items() if key[:2] == (recipe, row)]
        variant = ""
        if len(variants) > 1:
            changed = differing([distinguishing(result.settings) for result in variants])
            settings = flatten(members[0].settings)
            variant = " (" + ", ".join(f"{key}={_plain(settings.get(key))}" for key in changed) + ")"
        by_seed = tuple(sorted(members, key=lambda result: result.seed))
        groups.append(_Group(f"{recipe}: {row}" if several else row, variant, by_seed))
    return groups


def families(rows: Sequence[TableRow]) -> list[list[TableRow]]:
    """Return groups of rows whose perplexities can be compared, one group for each corpus and evaluation mode.

    If the rows of a corpus and mode cannot all be compared, their group is the largest set of rows that can be compared
    with one of them. If several sets are equally large, it is the first.
    """
    by_text: dict[tuple[str, str | None], list[TableRow]] = {}
    for row in rows:
        if row.score:
            by_text.setdefault((row.text, row.special_mode), []).append(row)
    alike = ([[row for row in family if not _obstacle(row, first)] for first in family] for family in by_text.values())
    return [max(groups, key=len) for groups in alike]


def comparable(rows: Sequence[TableRow]) -> list[TableRow]:
    """Return the largest of the families. Its rows can be shown in one plot."""
    return max(families(rows), key=len, default=[])


def judged_by(rows: Sequence[TableRow]) -> Metric:
    """Return the metric that ranks rows: BLEU if the paper or the runs have BLEU scores, otherwise perplexity."""
    by_paper = any({"bleu_valid", "bleu_test"} & row.paper.keys() for row in rows)
    return BLEU if by_paper or any(record.translation for row in rows for record in row.records) else PERPLEXITY


def judged_by_similarity(rows: Sequence[TableRow]) -> bool:
    """Return whether word similarity is the only score that the paper and the runs have."""
    judged = any(row.paper_similarity for row in rows) or any(
        record.similarity for row in rows for record in row.records
    )
    return judged and not any(row.paper or row.score for row in rows)


def rivals(rows: Sequence[TableRow], split: str) -> list[list[TableRow]]:
    """Return groups of rows whose BLEU can be compared: the same corpus and the same sacrebleu signature."""
    by_signature: dict[tuple[str, str], list[TableRow]] = {}
    for row in rows:
        if scores := row.translated(split):
            by_signature.setdefault((row.text, scores[0].bleu_signature), []).append(row)
    return list(by_signature.values())


def contenders(rows: Sequence[TableRow]) -> list[list[TableRow]]:
    """Return the families without rows that only provide the starting weights of another row."""
    existing_run = {(row.recipe, row.begins_with) for row in rows}
    return [[row for row in family if (row.recipe, row.own_name) not in existing_run] for family in families(rows)]


def competing(rows: Sequence[TableRow], split: str) -> list[list[TableRow]]:
    """Return groups of rows that can be ranked, by the metric that ranks these rows."""
    return rivals(rows, split) if judged_by(rows) == BLEU else contenders(rows)


def judged_by_time(rows: Sequence[TableRow]) -> bool:
    """Return whether the paper reports only seconds for these rows."""
    return {name for row in rows for name in row.paper} == {"seconds"}


def times_first(rows: Sequence[TableRow], row: TableRow) -> tuple[float | None, float | None]:
    """Return our time and the paper's time of an epoch, both relative to the first row on the same corpus."""
    first = next((candidate for candidate in rows if candidate.corpus == row.corpus and not candidate.quoted), row)
    seconds, reference = row.paper.get("seconds"), first.paper.get("seconds")
    return _times(row, first), seconds / reference if seconds and reference else None


def _times(row: TableRow, first: TableRow) -> float | None:
    """Divide the time of a row by the time of the first row.

    Runs are compared with runs and steps with steps, because runs may have shared their device.
    """
    seconds, reference = row.seconds_per_epoch, first.seconds_per_epoch
    if seconds and reference:
        return seconds / reference
    return row.steps.epoch_seconds / first.steps.epoch_seconds if row.steps and first.steps else None


def mark(rows: Sequence[TableRow]) -> tuple[list[TableRow], tuple[str, ...]]:
    """Add a footnote sign to the name of each row that needs a remark, and return the rows and the footnotes."""
    signs: dict[str, str] = {}
    marked = []
    usual = {(family[0].text, family[0].special_mode): family[0] for family in families(rows)}
    for row in rows:
        text = _remark(row, usual.get((row.text, row.special_mode)))
        sign = signs.setdefault(text, SIGNS[len(signs) % 4] * (1 + len(signs) // 4)) if text else ""
        marked.append(replace(row, name=f"{row.name} {sign}") if sign else row)
    return marked, tuple(f"{sign} {text}" for text, sign in signs.items())


def _remark(row: TableRow, usual: TableRow | None) -> str:
    remarks = _training_remarks(row)
    if row.score and row.per_word:
        mean = f"{row.score.tokens_per_word:.1f} on average"
        remarks.append(f"perplexity per word: the probability of a word is the product over its sub-words ({mean})")
    if usual and (gap := _between(row, usual)):
        what = "perplexity not comparable" if row.translated("test") else "not comparable"
        remarks.append(f"{what}: " * gap.prevents + explain_in_table(gap, usual.name))
    return "; ".join(remarks)


def _training_remarks(row: TableRow) -> list[str]:
    """Return remarks on the starting weights and on early stopping."""
    remarks = []
    if row.results and row.begins_with:
        remarks.append(f"began with the best weights of {row.begins_with}{_not_improved(row.results)}")
    if any(result.record and result.epochs < (result.record.training.epochs or 0) for result in row.results):
        rule = flatten(row.results[0].settings).get("training.stop.rule")
        remarks.append("stopped early" + (f", by the {rule} rule" if rule else ""))
    return remarks


def _not_improved(results: Sequence[Result]) -> str:
    """Return a remark if runs did not improve on the weights that they started from."""
    count = sum(result.best_epoch == 0 for result in results)
    if not count:
        return ""
    seeds = "" if count == len(results) else f" with {count} of {len(results)} seeds"
    return f"; no epoch improved on them{seeds}, so their scores are shown"


def _between(row: TableRow, other: TableRow) -> Difference | None:
    return find_difference(row.score, other.score) if row.score and other.score else None


def _obstacle(row: TableRow, other: TableRow) -> bool:
    gap = _between(row, other)
    return gap is not None and gap.prevents


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _belongs(row: TableRow, result: Result) -> bool:
    return result.row == row.name and row.recipe in ("", result.recipe)


def _row_of(group: _Group) -> TableRow:
    record = next((result.record for result in group.results if result.record), None)
    paper = record.paper if record else {}
    expected = record.parameters.expected if record else None
    corpus = record.corpus.name if record else None
    similarity = record.paper_similarity if record else {}
    return TableRow(
        group.name,
        paper,
        expected,
        recipe=group.results[0].recipe,
        results=group.results,
        corpus=corpus,
        paper_similarity=similarity,
        variant=group.variant,
    )
