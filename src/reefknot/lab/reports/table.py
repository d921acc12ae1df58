"""The table of rows, ours beside the paper's: one data structure for terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from reefknot.lab.evaluation.similarity import PRESS
from reefknot.lab.recipes.file import Row
from reefknot.lab.reports.cells import ALONE, AS_PAPER, BLEU_TITLES, COLUMNS, ENDS, TIMES_PLAIN
from reefknot.lab.reports.rows import (
    TableRow,
    competing,
    judged_by,
    judged_by_similarity,
    judged_by_time,
    mark,
    times_first,
)
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.scores import BLEU, PERPLEXITY

PERPLEXITY_GROUPS = ("training", "validation", "test")
"""Groups of columns, one for each text."""
_GROUPS = ("size", "pace", "ratio", *BLEU_TITLES.values(), *PERPLEXITY_GROUPS, *PRESS, "time", "cost")
_SHOWN = 4  # changed settings that a note lists before it counts the rest


@dataclass(frozen=True)
class Column:
    """One column's cells, a string per row; `group` names the columns that belong together."""

    group: str
    title: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Names down the side, columns of text, and the indices of the rows with the lowest perplexity or highest BLEU.

    A name ends with the sign of its footnote, if it has one; each of the `best` is among rows that can be compared, by
    the column that `decides`.
    """

    names: tuple[str, ...]
    columns: tuple[Column, ...]
    best: frozenset[int] = frozenset()
    decides: str = "test"
    notes: tuple[str, ...] = ()
    """What a reader must know to take the figures rightly."""

    @property
    def groups(self) -> list[tuple[str, list[Column]]]:
        return [(name, list(columns)) for name, columns in groupby(self.columns, lambda column: column.group)]

    def without(self, titles: Collection[str]) -> Table:
        """The table without some of its columns."""
        return replace(self, columns=tuple(column for column in self.columns if column.title not in titles))

    def only(self, kept: Sequence[bool]) -> Table:
        """The table without some of its rows."""
        places = [n for n, keep in enumerate(kept) if keep]
        columns = (replace(each, cells=tuple(each.cells[n] for n in places)) for each in self.columns)
        best = frozenset(places.index(n) for n in self.best if n in places)
        return replace(self, names=tuple(self.names[n] for n in places), columns=tuple(columns), best=best)

    def is_best(self, column: Column, row: int) -> bool:
        """Whether a cell is the figure to print in bold."""
        return row in self.best and column.title == self.decides


def from_recipe(rows: Iterable[Row], recipe: str = "") -> list[TableRow]:
    """A recipe's rows, not yet joined with any run."""
    rows = list(rows)
    trained = {row.name: row for row in rows}
    return [
        TableRow(
            row.name,
            dict(row.paper),
            trained.get(row.of or row.name, row).parameters,
            row.quoted,
            recipe,
            of=row.of,
            by=row.by,
            start=row.start,
            corpus=trained.get(row.of or row.name, row).corpus,
            paper_similarity=row.paper_similarity,
        )
        for row in rows
    ]


def build(rows: Sequence[TableRow]) -> Table:
    """Lay the rows out; a column that is empty for all of them is left away."""
    split = deciding(rows)
    decides = BLEU_TITLES[split] if judged_by(rows) == BLEU else split
    best = _best(rows, split)
    rows, footnotes = mark(rows)
    columns = _columns(rows)
    return Table(
        tuple(row.name for row in rows),
        columns,
        best,
        decides,
        (*footnotes, *_explained(rows, columns), *changed_settings(rows), *_cut_short(rows)),
    )


def _best(rows: Sequence[TableRow], split: str) -> frozenset[int]:
    """The row with the best figure of each text and way of scoring, where it has beaten another one."""
    metric, best = judged_by(rows), set()
    for family in competing(rows, split) if not judged_by_time(rows) else []:
        figures = {rows.index(row): metric.sign * found.mean for row in family if (found := row.figure(metric, split))}
        if len(figures) > 1:
            best.add(min(figures, key=figures.__getitem__))
    return frozenset(best)


def _columns(rows: Sequence[TableRow]) -> tuple[Column, ...]:
    """What there is to show: of a table of seconds the seconds first, and no perplexity if the paper has none.

    A row without figures says why in the column that rows are judged by.
    """
    timed = any("seconds" in row.paper for row in rows)
    hidden = set() if timed else {"pace", "ratio"}
    if judged_by_time(rows) or judged_by_similarity(rows):
        hidden |= set(PERPLEXITY_GROUPS)
    if not any(row.figure(PERPLEXITY, "train") for row in rows):
        hidden.add("training")  # the paper's figure alone says nothing
    by_bleu = judged_by(rows) == BLEU
    decides = BLEU_TITLES["test"] if by_bleu else PRESS[0] if judged_by_similarity(rows) else "test"
    excused = {("pace", "s/epoch"), (decides, decides)}
    columns = [
        Column(group, title, tuple(cell(row) or (row.state if (group, title) in excused else "") for row in rows))
        for group, title, cell in COLUMNS
    ]
    columns += _ratios(rows)
    columns = [each for each in columns if each.group not in hidden]
    # Figures of a paper wait for ours, under its title.
    told = {each.group for each in columns if any(each.cells)}
    titles = {
        ("validation", "valid"),
        ("ratio", "times first"),
        *((each, each) for each in (BLEU_TITLES["valid"], *PRESS)),
    }
    kept = [each for each in columns if any(each.cells) or ((each.group, each.title) in titles and each.group in told)]
    # A table of seconds has them already, and one of updates has no epochs.
    idle = {"s/epoch", ALONE} if timed else {ALONE} if any(row.updates for row in rows) else set()
    once = [each for each in kept if each.group != "time" or each.title not in idle]
    return tuple(sorted(once, key=lambda each: _GROUPS.index(each.group)))


def _ratios(rows: Sequence[TableRow]) -> list[Column]:
    ours, papers = zip(*(times_first(rows, row) for row in rows), strict=True) if rows else ((), ())
    return [
        Column("ratio", title, tuple(f"{ratio:.2f}" if ratio else "" for ratio in ratios))
        for title, ratios in (("times first", ours), ("paper", papers))
    ]


def deciding(rows: Sequence[TableRow]) -> str:
    """The split that rows are judged by: validation where test figures are withheld, as in a sweep."""
    valid, test = (any(row.figure(PERPLEXITY, split) for row in rows) for split in ("valid", "test"))
    return "valid" if valid and not test else "test"


def print_table(rows: Sequence[TableRow], console: Console, *, leave_out: Collection[str] = ()) -> None:
    """Print for a terminal or a pipe; groups of columns that do not fit side by side go below each other."""
    table = build(rows).without(leave_out)
    name_width = min(max([len("row"), *map(len, table.names)]), max(12, console.width // 3))
    gap = 2
    parts: list[list[Column]] = []
    room = -1
    for _, columns in table.groups:
        width = sum(max(len(text) for text in (column.title, *column.cells)) + gap for column in columns)
        if room < width:
            parts.append([])
            room = console.width - name_width - gap
        parts[-1] += columns
        room -= width
    for n, part in enumerate(parts):
        if n:
            console.print()
        console.print(_rich(table, part, name_width))
    for note in table.notes:
        console.print(note, markup=False, highlight=False)


def to_markdown(rows: Sequence[TableRow]) -> str:
    """A Markdown table, with the lowest test perplexity, or the highest BLEU, in bold.

    Of the costs, epochs and seconds per epoch, or updates and tokens per second.
    """
    by_updates = any(row.updates for row in rows)
    table = build(rows).without(("seconds", "memory") if by_updates else ("seconds", "tokens/s", "memory"))
    lines = ["| " + " | ".join(["row", *(column.title for column in table.columns)]) + " |"]
    lines.append("|---" + "|---:" * len(table.columns) + "|")
    for n, name in enumerate(table.names):
        cells = [f"**{column.cells[n]}**" if table.is_best(column, n) else column.cells[n] for column in table.columns]
        lines.append("| " + " | ".join([_escape(name), *cells]) + " |")
    lines += [line for note in table.notes for line in ("", _escape(note))]
    return "\n".join(lines) + "\n"


def _explained(rows: Sequence[TableRow], columns: Sequence[Column]) -> list[str]:
    """What columns are whose titles do not say it."""
    titles = {column.title for column in columns}
    notes = []
    if AS_PAPER in titles:
        names = dict.fromkeys(record.protocol.name for row in rows for record in row.records if record.protocol)
        compared = "; diff compares this with the paper" if "diff" in titles else ""
        notes.append(f"{AS_PAPER}: by the rules of the paper's program ({', '.join(names)}){compared}")
    if any(column.title == "diff" and column.group in BLEU_TITLES.values() for column in columns):
        notes.append("BLEU, higher is better: diff is in points, ours less the paper's")
    if titles & set(PRESS):
        notes += _coverage(rows)
    if "times first" in titles:
        notes.append("times first: s/epoch over that of the first row on the same text, and the same of the paper's")
    if any(column.group == "pace" for column in columns) and any(row.steps and not row.ran for row in rows):
        notes.append(
            "s/epoch: of a row that was not trained, our fastest training step by reefknot bench steps, as often as an "
            "epoch has it"
        )
    if ALONE in titles:
        notes.append(
            f"{ALONE}: our fastest training step with the device to itself, by reefknot bench steps, as often as an "
            "epoch has it"
        )
    if TIMES_PLAIN in titles:
        notes.append(
            f"{TIMES_PLAIN}: the time of a training step as people write it (a recurrent encoder as a loop, attention "
            "with stored logits) over that of our fastest, both in one run of reefknot bench steps with the "
            "settings of the row's runs (docs/performance.md)"
        )
    return notes


def _coverage(rows: Sequence[TableRow]) -> list[str]:
    """What the figures of word similarity are, and over how many pairs they were taken."""
    told = []
    for name in PRESS:
        judged = [each for row in rows for end in ENDS for each in row.judgements(end, name)]
        if judged:
            low, high = (choose(each.pairs for each in judged) for choose in (min, max))
            told.append(f"{name} {low:,}{f'–{high:,}' * (low < high)} of {judged[0].of:,}")
    covered = f"; pairs whose words are known: {', '.join(told)}" if told else ""
    return [
        "word similarity: Spearman's rho of cosines with people's judgements, of the input / output vectors, or of the "
        f"one table that both ends share{covered}"
    ]


def changed_settings(rows: Sequence[TableRow]) -> list[str]:
    """Settings that are not the recipe's, with the rows that have them; no names where all rows have the same."""
    holders: dict[tuple[Change, ...], list[str]] = {}
    ran = [row for row in rows if row.records]
    for row in ran:
        if row.changed:
            holders.setdefault(row.changed, []).append(row.name)
    return [f"{_of(names, ran)}: not the recipe's settings ({_listed(changed)})" for changed, names in holders.items()]


def _cut_short(rows: Sequence[TableRow]) -> list[str]:
    """Averaging that was to begin by itself and did not, or brought nothing; searches that ended where they had nothing
    more to try."""
    ran = [row for row in rows if row.records]
    waiting = [row.name for row in ran if all(result.awaits_averaging for result in row.results)]
    notes = [f"{_of(waiting, ran)}: averaging had not begun when training ended"] if waiting else []
    before = [row.name for row in ran if any(result.best_before_averaging for result in row.results)]
    notes += [f"{_of(before, ran)}: the best epoch was before averaging began"] if before else []
    edges = {
        row.name: dict.fromkeys(edge for each in row.evaluations if each.search for edge in each.search.edges)
        for row in rows
    }
    found = [f"{name} ({', '.join(each)})" for name, each in edges.items() if each]
    return notes + [f"best at the end of what was tried: {', '.join(found)}"] * bool(found)


def _of(names: Sequence[str], rows: Sequence[TableRow]) -> str:
    return ", ".join(names) if len(names) < max(len(rows), 2) else "Every row"


def _listed(changed: Sequence[Change]) -> str:
    more = len(changed) - _SHOWN
    texts = [change.describe(null="not set") for change in changed[:_SHOWN]]
    return "; ".join([*texts, f"and {more} more"] if more > 0 else texts)


def _rich(table: Table, columns: Sequence[Column], name_width: int) -> RichTable:
    grid = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("row", width=name_width, overflow="fold")
    for column in columns:
        grid.add_column(column.title, justify="right", no_wrap=True)
    for n, name in enumerate(table.names):
        cells = (Text(c.cells[n], style="bold" if table.is_best(c, n) else "") for c in columns)
        grid.add_row(Text(name), *cells)
    return grid


def _escape(text: str) -> str:
    """A row's name is the only free text in the table: keep it from being read as Markdown or HTML."""
    for sign in "\\`*_[]|<>":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
