"""The rows of a table: runs that differ in nothing but the seed, joined with what a recipe says of them.

Also which rows can be compared with each other, and a sign for those that cannot be read like the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reefknot.reports.results import Record, Result, Score, Spread, differing, flatten, without_seed
from reefknot.reports.scoring import obstacle, pieces


@dataclass(frozen=True)
class TableRow:
    """A row of a recipe with its runs; a `quoted` row only cites another system and is never run."""

    name: str
    paper: Mapping[str, float] = field(default_factory=dict)
    parameters: int | None = None
    quoted: bool = False
    recipe: str = ""
    results: tuple[Result, ...] = ()

    @property
    def records(self) -> list[Record]:
        """The finished runs."""
        return [result.record for result in self.results if result.record]

    @property
    def score(self) -> Score | None:
        """What the figures were counted over, in the test text where there are any: the same in every run."""
        return next((score for record in self.records if (score := record.test or record.valid)), None)

    @property
    def per_word(self) -> bool:
        """Whether the tokens are pieces, so that perplexity per word is another figure than per token."""
        return self.score is not None and pieces(self.score) != 1

    def perplexity(self, split: str) -> Spread | None:
        """Per word, over the finished runs."""
        scores = (getattr(record, split) for record in self.records)
        return Spread.of(score.per_word for score in scores if score)

    def by_protocol(self, split: str) -> Spread | None:
        """As the paper scores, over the runs that were scored so too."""
        protocols = (record.protocol for record in self.records)
        scores = (getattr(protocol, split, None) for protocol in protocols)
        return Spread.of(score.perplexity for score in scores if score)

    def compared(self, split: str) -> Spread | None:
        """What is held against the paper's figure: scored as the paper scores where that was done."""
        return self.by_protocol(split) or self.perplexity(split)

    def difference(self, split: str) -> float | None:
        """Ours over the paper's, as a signed fraction."""
        ours, paper = self.compared(split), self.paper.get(split)
        return ours.mean / paper - 1 if ours and paper else None

    @property
    def epochs(self) -> list[float]:
        """Epochs run, of each finished run."""
        return [result.epochs for result in self.results if result.record]

    @property
    def recipe_epochs(self) -> float:
        """Epochs that the recipe asks for: as many as were asked of the runs, but for an override."""
        record = self.records[0]
        told = (re.match(r"training\.epochs: (\d+) -> ", text) for text in record.changed)
        return next((float(found[1]) for found in told if found), record.training.epochs)

    @property
    def size(self) -> int | None:
        """Parameters: counted in the run, or what the recipe expects."""
        return next((record.parameters.total for record in self.records), self.parameters)

    @property
    def state(self) -> str:
        """One word for a row without a figure of ours, empty otherwise."""
        if self.records or self.quoted:
            return ""
        return "unfinished" if self.results else "not run"


def join(rows: Iterable[TableRow], results: Iterable[Result]) -> list[TableRow]:
    """A recipe's rows with their runs, then the runs of no listed row. Rows that have runs keep them."""
    rows = list(rows)
    taken = {result.folder for row in rows for result in row.results}
    groups = group(result for result in results if result.folder not in taken)
    joined: list[TableRow] = []
    for row in rows:
        mine = [name for name, members in groups.items() if _belongs(row, members[0])]
        if row.results or not mine:
            joined.append(row)
            continue
        for name in mine:
            joined.append(replace(row, name=row.name if len(mine) == 1 else name, results=groups.pop(name)))
    return joined + [_row_of(name, members) for name, members in groups.items()]


def group(results: Iterable[Result]) -> dict[str, tuple[Result, ...]]:
    """Runs that differ in nothing but the seed, under the name of their row.

    The name says more when it must: the recipe when there are several, and the settings that differ when
    runs of one row were made with different ones, so that only true repetitions are ever averaged.
    """
    alike: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        settings = json.dumps(without_seed(result.settings), sort_keys=True)
        alike.setdefault((result.recipe, result.row, settings), []).append(result)
    several = len({recipe for recipe, _, _ in alike}) > 1
    named: dict[str, tuple[Result, ...]] = {}
    for (recipe, row, _), members in alike.items():
        name = f"{recipe}: {row}" if several else row
        twins = [other[0] for key, other in alike.items() if key[:2] == (recipe, row)]
        if len(twins) > 1:
            changed = differing([without_seed(twin.settings) for twin in twins])
            own = flatten(members[0].settings)
            name += " (" + ", ".join(f"{key}={_plain(own.get(key))}" for key in changed) + ")"
        named[name] = tuple(sorted(members, key=lambda result: result.seed))
    return named


def comparable(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows whose perplexities can be compared: the largest such group, of equal ones the first."""
    scored = [row for row in rows if row.score]
    groups = [[row for row in scored if not _between(row, first)] for first in scored]
    return max(groups, key=len, default=[])


def mark(rows: Sequence[TableRow]) -> tuple[list[TableRow], tuple[str, ...]]:
    """The rows, a sign after the name of each whose figures must not be read like the others'; and the footnotes."""
    signs: dict[str, str] = {}
    marked = []
    usual = next(iter(comparable(rows)), None)
    for row in rows:
        text = _remark(row, usual)
        sign = signs.setdefault(text, "†‡§¶"[len(signs) % 4] * (1 + len(signs) // 4)) if text else ""
        marked.append(replace(row, name=f"{row.name} {sign}") if sign else row)
    return marked, tuple(f"{sign} {text}" for text, sign in signs.items())


def _remark(row: TableRow, usual: TableRow | None) -> str:
    remarks = _course(row)
    if row.score and row.per_word:
        mean = f"{pieces(row.score):.1f} on average"
        remarks.append(f"per word: a word's probability is the product over its pieces, {mean}")
    if usual and (found := _between(row, usual)):
        remarks.append(f"not comparable: {found}")
    return "; ".join(remarks)


def _course(row: TableRow) -> list[str]:
    """What set the training of a row apart from a plain number of epochs."""
    settings = flatten(row.results[0].settings) if row.results else {}
    remarks = []
    if start := settings.get("training.start.row"):
        remarks.append(f"began with the best weights of {start}")
    if any(result.record and result.epochs < result.record.training.epochs for result in row.results):
        rule = settings.get("training.stop.rule")
        remarks.append("stopped early" + (f", by the {rule} rule" if rule else ""))
    return remarks


def _between(row: TableRow, other: TableRow) -> str | None:
    return obstacle(row.score, other.score, other.name) if row.score and other.score else None


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _belongs(row: TableRow, result: Result) -> bool:
    return result.row == row.name and row.recipe in ("", result.recipe)


def _row_of(name: str, results: tuple[Result, ...]) -> TableRow:
    record = next((result.record for result in results if result.record), None)
    paper = record.paper if record else {}
    expected = record.parameters.expected if record else None
    return TableRow(name, paper, expected, recipe=results[0].recipe, results=results)
