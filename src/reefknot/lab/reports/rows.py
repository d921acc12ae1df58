"""The rows of a table: runs that differ in nothing but the seed, joined with what a recipe says of them.

Also which rows can be compared with each other, and a sign for those that cannot be read like the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

from reefknot.lab.evaluation.similarity import PRESS
from reefknot.lab.reports.results import Result, Spread, differing, distinguishing, flatten
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.comparability import Difference, difference, in_table
from reefknot.lab.runs.modes import MODES, in_words
from reefknot.lab.runs.result import Judgement, RunResult, SavedEvaluation, Translated
from reefknot.lab.runs.scores import BLEU, PERPLEXITY, Metric, TextScore

SIGNS = "†‡§¶"


class Steps(NamedTuple):
    """Whole training steps of a row, measured alone (`measured_steps.py`)."""

    epoch_seconds: float
    """Of our fastest, for as many as an epoch has."""
    times_plain: float
    """How many times as long they take in plain torch."""


@dataclass(frozen=True)
class TableRow:
    """A row of a recipe with its runs.

    A `quoted` row only cites another system and is never run. One that is `of` another row has no runs either: its
    figures are those of that row's `models`, scored in the way that `by` names.
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
    """The row whose weights it begins with, as the recipe says."""
    corpus: str | None = None
    """Its text, where the recipe says so: None is that of the recipe's base."""
    paper_similarity: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The paper's rho by end and benchmark."""
    steps: Steps | None = None
    """Its training steps, where they were measured alone."""
    variant: str = ""
    """The end of its name that tells it from rows of the same name with other settings."""

    @property
    def records(self) -> list[RunResult]:
        """The finished runs."""
        return [result.record for result in self.results if result.record]

    @property
    def evaluations(self) -> list[SavedEvaluation]:
        """The saved evaluations of another row's models that this row shows."""
        return [result.evaluations[self.by] for result in self.models if self.by]

    @property
    def manner(self) -> str | None:
        """The way it was scored in, if perplexities by that way are a kind of their own. Windows are not: how much
        context helps is seen by comparing them."""
        return self.by if self.by in MODES else None

    @property
    def ran(self) -> bool:
        """Whether there are figures of ours."""
        return bool(self.records or self.models)

    @property
    def own_name(self) -> str:
        """As its runs call it: runs of one row with different settings are several rows, named after both."""
        return self.results[0].row if self.results else self.name

    @property
    def begins_with(self) -> str | None:
        """The row whose best weights this one begins with."""
        if not self.results:
            return self.start
        start = flatten(self.results[0].settings).get("training.start.row")
        return start if isinstance(start, str) else None

    @property
    def changed(self) -> tuple[Change, ...]:
        """Settings that are not the recipe's, in any of the runs that its figures are from."""
        records = [result.record for result in (*self.results, *self.models) if result.record]
        return tuple(dict.fromkeys(change for record in records for change in record.changed))

    @property
    def text(self) -> str:
        """The name of the text that the figures are from."""
        return next((result.record.corpus.name for result in (*self.results, *self.models) if result.record), "")

    @property
    def score(self) -> TextScore | None:
        """What the figures were counted over, in the test text where there are any: the same in every run."""
        return next(iter(self.scores("test") or self.scores("valid")), None)

    @property
    def per_word(self) -> bool:
        """Whether the tokens are pieces, so that perplexity per word is another figure than per token."""
        return self.score is not None and self.score.tokens_per_word != 1

    def scores(self, split: str) -> list[TextScore]:
        """Of the finished runs, or of the evaluations."""
        found = (each.score(split) for each in (*self.records, *self.evaluations))
        return [score for score in found if score]

    def figure(self, metric: Metric, split: str) -> Spread | None:
        """Return the mean of a metric over the finished runs, or over the evaluations."""
        found = (score for each in (*self.records, *self.evaluations) for score in each.scores(split))
        return Spread.of(score.value for score in found if score.metric == metric)

    def by_protocol(self, split: str) -> Spread | None:
        """As the paper scores, over the runs that were scored so too."""
        protocols = (record.protocol for record in self.records)
        scores = (getattr(protocol, split, None) for protocol in protocols)
        return Spread.of(score.perplexity for score in scores if score)

    def compared(self, split: str) -> Spread | None:
        """What is held against the paper's figure: scored as the paper scores where that was done."""
        return self.by_protocol(split) or self.figure(PERPLEXITY, split)

    def difference(self, split: str) -> float | None:
        """Ours over the paper's, as a signed fraction; none where our settings are not the recipe's."""
        ours, paper = self.compared(split), self.paper.get(split)
        return ours.mean / paper - 1 if ours and paper and not self.changed else None

    def translated(self, split: str) -> list[Translated]:
        """Of the finished runs that translate, or of the evaluations."""
        found = (each.translated(split) for each in (*self.records, *self.evaluations))
        return [each for each in found if each]

    def bleu_difference(self, split: str) -> float | None:
        """Ours less the paper's, in points; none where our settings are not the recipe's."""
        ours, paper = self.figure(BLEU, split), self.paper.get(f"bleu_{split}")
        return ours.mean - paper if ours and paper and not self.changed else None

    def rho(self, end: str, benchmark: str) -> Spread | None:
        """Of the vectors of an end with people's judgements, over the finished runs."""
        scores = (record.similarity_scores(end).get(benchmark) for record in self.records)
        return Spread.of(score.value for score in scores if score)

    def mean_rho(self, end: str) -> Spread | None:
        """The same over all benchmarks of Press & Wolf, of the runs that were held against each of them."""
        runs = [record.similarity_scores(end) for record in self.records]
        return Spread.of(fmean(run[name].value for name in PRESS) for run in runs if run.keys() >= set(PRESS))

    def judgements(self, end: str, benchmark: str) -> list[Judgement]:
        """Of each finished run that was held against the benchmark."""
        judged = (each for record in self.records for each in record.similarity.get(end, ()))
        return [each for each in judged if each.name == benchmark]

    @property
    def epochs(self) -> list[float]:
        """Epochs run, of each finished run that was trained for epochs."""
        return [result.epochs for result in self.results if result.record and not result.by_updates]

    @property
    def updates(self) -> list[int]:
        """Updates made, of each finished run that was trained for updates."""
        return [result.record.training.steps for result in self.results if result.record and result.by_updates]

    @property
    def recipe_epochs(self) -> float:
        """Epochs that the recipe asks for: as many as were asked of the runs, but for an override."""
        record = self.records[0]
        asked = (change.old for change in record.changed if change.key == "training.epochs")
        return float(next(asked, record.training.epochs) or 0)

    @property
    def seconds_per_epoch(self) -> float | None:
        """Of training alone, by the fastest of the finished runs: company on the device only ever slows one down."""
        return min((found for result in self.results if (found := result.seconds_per_epoch)), default=None)

    @property
    def pace(self) -> float | None:
        """Seconds of an epoch: of its runs, else by its steps alone."""
        return self.seconds_per_epoch or (self.steps and self.steps.epoch_seconds)

    @property
    def size(self) -> int | None:
        """Parameters: counted in the run, or what the recipe expects."""
        return next((record.parameters.total for record in self.records), self.parameters)

    @property
    def state(self) -> str:
        """One word for a row without a figure of ours, empty otherwise."""
        if self.ran or self.quoted:
            return ""
        return "unfinished" if self.results else "not run"


def join(rows: Iterable[TableRow], results: Iterable[Result]) -> list[TableRow]:
    """A recipe's rows with their runs, then the runs of no listed row. Rows that have runs keep them."""
    rows = list(rows)
    taken = {result.folder for row in rows for result in row.results}
    groups = _groups(result for result in results if result.folder not in taken)
    joined: list[TableRow] = []
    for row in rows:
        mine = [each for each in groups if not row.of and _belongs(row, each.results[0])]
        if row.results or not mine:
            joined.append(row)
            continue
        for each in mine:
            name = row.name if len(mine) == 1 else each.name
            joined.append(replace(row, name=name, variant=each.variant, results=each.results))
            groups.remove(each)
    return _with_evaluations(joined + [_row_of(each) for each in groups])


def name_recipes(rows: Iterable[TableRow]) -> list[TableRow]:
    """Rows of several recipes with the recipe before the name, as names may come up in more than one."""
    rows = list(rows)
    if len({row.recipe for row in rows}) < 2:
        return rows
    before = (f"{row.recipe}: " for row in rows)
    return [replace(row, name=each + row.name.removeprefix(each)) for row, each in zip(rows, before, strict=True)]


def _with_evaluations(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows that score another row's models with those models; and a row for each saved evaluation none lists."""
    listed = {(row.recipe, row.of, row.by) for row in rows if row.by}
    found: list[TableRow] = []
    for row in rows:
        if row.by:
            found += [row] if row.models else _scoring(row, rows)
            continue
        found.append(row)
        for by in dict.fromkeys(kind for result in row.results for kind in result.evaluations):
            if (row.recipe, row.own_name, by) not in listed:
                name = f"{row.name} + {in_words(by)}"
                found += _scoring(TableRow(name, recipe=row.recipe, of=row.own_name, by=by), [row])
    return found


def _scoring(row: TableRow, rows: Sequence[TableRow]) -> list[TableRow]:
    """The row with the models it scores: once for each set of settings they were trained with, as it is without any."""
    trained = {
        each.name: (each, models)
        for each in rows
        if not each.by and (each.recipe, each.own_name) == (row.recipe, row.of)
        if (models := tuple(result for result in each.results if row.by in result.evaluations))
    }
    several = len(trained) > 1
    return [
        replace(
            row,
            name=row.name + each.variant * several,
            parameters=each.size,
            models=models,
            corpus=each.corpus,
        )
        for each, models in trained.values()
    ] or [row]


def group(results: Iterable[Result]) -> dict[str, tuple[Result, ...]]:
    """Runs that differ in nothing but the seed, under the name of their row.

    The name says more when it must: the recipe when there are several, and the settings that differ when
    runs of one row were made with different ones, so that only true repetitions are ever averaged.
    """
    return {each.name: each.results for each in _groups(results)}


class _Group(NamedTuple):
    """Runs that differ in nothing but the seed."""

    row: str
    variant: str
    """The settings that tell them from other runs of their row, in brackets."""
    results: tuple[Result, ...]

    @property
    def name(self) -> str:
        return self.row + self.variant


def _groups(results: Iterable[Result]) -> list[_Group]:
    alike: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        settings = json.dumps(distinguishing(result.settings), sort_keys=True)
        alike.setdefault((result.recipe, result.row, settings), []).append(result)
    several = len({recipe for recipe, _, _ in alike}) > 1
    groups = []
    for (recipe, row, _), members in alike.items():
        twins = [other[0] for key, other in alike.items() if key[:2] == (recipe, row)]
        variant = ""
        if len(twins) > 1:
            changed = differing([distinguishing(twin.settings) for twin in twins])
            own = flatten(members[0].settings)
            variant = " (" + ", ".join(f"{key}={_plain(own.get(key))}" for key in changed) + ")"
        by_seed = tuple(sorted(members, key=lambda result: result.seed))
        groups.append(_Group(f"{recipe}: {row}" if several else row, variant, by_seed))
    return groups


def families(rows: Sequence[TableRow]) -> list[list[TableRow]]:
    """The rows whose perplexities can be compared, by text and by the way they were scored.

    Of each the largest such group, of equal ones the first.
    """
    kin: dict[tuple[str, str | None], list[TableRow]] = {}
    for row in rows:
        if row.score:
            kin.setdefault((row.text, row.manner), []).append(row)
    alike = ([[row for row in family if not _obstacle(row, first)] for first in family] for family in kin.values())
    return [max(groups, key=len) for groups in alike]


def comparable(rows: Sequence[TableRow]) -> list[TableRow]:
    """The largest of the families: what one picture can show."""
    return max(families(rows), key=len, default=[])


def judged_by(rows: Sequence[TableRow]) -> Metric:
    """The metric that decides between rows: BLEU if the paper's figures or the runs have it, else perplexity."""
    by_paper = any({"bleu_valid", "bleu_test"} & row.paper.keys() for row in rows)
    return BLEU if by_paper or any(record.translation for row in rows for record in row.records) else PERPLEXITY


def judged_by_similarity(rows: Sequence[TableRow]) -> bool:
    """Whether word vectors are all that there is to judge: the paper and the runs have no other figures."""
    judged = any(row.paper_similarity for row in rows) or any(each.similarity for row in rows for each in row.records)
    return judged and not any(row.paper or row.score for row in rows)


def rivals(rows: Sequence[TableRow], split: str) -> list[list[TableRow]]:
    """The rows whose BLEU can be compared: of one text, counted in one way."""
    kin: dict[tuple[str, str], list[TableRow]] = {}
    for row in rows:
        if found := row.translated(split):
            kin.setdefault((row.text, found[0].bleu_signature), []).append(row)
    return list(kin.values())


def contenders(rows: Sequence[TableRow]) -> list[list[TableRow]]:
    """The families without rows that another one begins with: these are not finished models of their recipe."""
    begun = {(row.recipe, row.begins_with) for row in rows}
    return [[row for row in family if (row.recipe, row.own_name) not in begun] for family in families(rows)]


def competing(rows: Sequence[TableRow], split: str) -> list[list[TableRow]]:
    """Groups of rows in which one may be called the best, by the metric that decides between these rows."""
    return rivals(rows, split) if judged_by(rows) == BLEU else contenders(rows)


def judged_by_time(rows: Sequence[TableRow]) -> bool:
    """Whether the paper gives seconds of these rows and no perplexity."""
    return {name for row in rows for name in row.paper} == {"seconds"}


def times_first(rows: Sequence[TableRow], row: TableRow) -> tuple[float | None, float | None]:
    """How many times as long as the first row on its text a row takes for an epoch: ours, and the paper's."""
    first = next((each for each in rows if each.corpus == row.corpus and not each.quoted), row)
    theirs, papers = row.paper.get("seconds"), first.paper.get("seconds")
    return _times(row, first), theirs / papers if theirs and papers else None


def _times(row: TableRow, first: TableRow) -> float | None:
    """By runs of both or by steps of both: runs may have had company on their device, and steps had none."""
    ours, least = row.seconds_per_epoch, first.seconds_per_epoch
    if ours and least:
        return ours / least
    return row.steps.epoch_seconds / first.steps.epoch_seconds if row.steps and first.steps else None


def mark(rows: Sequence[TableRow]) -> tuple[list[TableRow], tuple[str, ...]]:
    """The rows, a sign after the name of each whose figures must not be read like the others'; and the footnotes."""
    signs: dict[str, str] = {}
    marked = []
    usual = {(family[0].text, family[0].manner): family[0] for family in families(rows)}
    for row in rows:
        text = _remark(row, usual.get((row.text, row.manner)))
        sign = signs.setdefault(text, SIGNS[len(signs) % 4] * (1 + len(signs) // 4)) if text else ""
        marked.append(replace(row, name=f"{row.name} {sign}") if sign else row)
    return marked, tuple(f"{sign} {text}" for text, sign in signs.items())


def _remark(row: TableRow, usual: TableRow | None) -> str:
    remarks = _course(row)
    if row.score and row.per_word:
        mean = f"{row.score.tokens_per_word:.1f} on average"
        remarks.append(f"per word: a word's probability is the product over its pieces, {mean}")
    if usual and (found := _between(row, usual)):
        what = "perplexity not comparable" if row.translated("test") else "not comparable"
        remarks.append(f"{what}: " * found.prevents + in_table(found, usual.name))
    return "; ".join(remarks)


def _course(row: TableRow) -> list[str]:
    """What set the training of a row apart from a plain number of epochs."""
    remarks = []
    if row.results and row.begins_with:
        remarks.append(f"began with the best weights of {row.begins_with}{_unbettered(row.results)}")
    if any(result.record and result.epochs < (result.record.training.epochs or 0) for result in row.results):
        rule = flatten(row.results[0].settings).get("training.stop.rule")
        remarks.append("stopped early" + (f", by the {rule} rule" if rule else ""))
    return remarks


def _unbettered(results: Sequence[Result]) -> str:
    """Whether second sessions ended with the weights that they had begun with."""
    count = sum(result.best_epoch == 0 for result in results)
    if not count:
        return ""
    seeds = "" if count == len(results) else f" with {count} of {len(results)} seeds"
    return f", which no epoch bettered{seeds}, so that the figures are theirs"


def _between(row: TableRow, other: TableRow) -> Difference | None:
    return difference(row.score, other.score) if row.score and other.score else None


def _obstacle(row: TableRow, other: TableRow) -> bool:
    found = _between(row, other)
    return found is not None and found.prevents


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
