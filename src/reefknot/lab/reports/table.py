"""The table of rows, with our scores next to the paper's: one data structure for terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from reefknot.lab.evaluation.benchmarks import PRESS
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
"""Groups of perplexity columns, one for each split."""
_GROUPS = ("size", "pace", "ratio", *BLEU_TITLES.values(), *PERPLEXITY_GROUPS, *PRESS, "time", "cost")
_LISTED = 4  # a note lists at most this many changed settings, and counts the others


@dataclass(frozen=True)
class Column:
    """A column with one cell per row. Columns that belong together have the same `group`."""

    group: str
    title: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of text: row names, columns, notes and the indices of the best rows.

    If a row has a footnote, its name ends with the sign of the footnote. A row is in `best` if it has the best score in
    the column with the title `decides`, among the rows that can be compared with it.
    """

    names: tuple[str, ...]
    columns: tuple[Column, ...]
    best: frozenset[int] = frozenset()
    decides: str = "test"
    notes: tuple[str, ...] = ()
    """Notes that a reader needs in order to interpret the scores."""

    @property
    def groups(self) -> list[tuple[str, list[Column]]]:
        """The columns by group, in their order."""
        return [(name, list(columns)) for name, columns in groupby(self.columns, lambda column: column.group)]

    def without(self, titles: Collection[str]) -> Table:
        """Return the table without the columns of these titles."""
        return replace(self, columns=tuple(column for column in self.columns if column.title not in titles))

    def only(self, selected: Sequence[bool]) -> Table:
        """Return the table with only the rows for which `selected` is true."""
        indices = [n for n, is_selected in enumerate(selected) if is_selected]
        columns = (replace(column, cells=tuple(column.cells[n] for n in indices)) for column in self.columns)
        best = frozenset(indices.index(n) for n in self.best if n in indices)
        return replace(self, names=tuple(self.names[n] for n in indices), columns=tuple(columns), best=best)

    def is_best(self, column: Column, row: int) -> bool:
        """Return whether a cell is a best score, which is printed in bold."""
        return row in self.best and column.title == self.decides


def from_recipe(rows: Iterable[Row], recipe: str = "") -> list[TableRow]:
    """Return the rows of a recipe as rows of a table, without runs."""
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
    """Build the table of the rows, without columns that are empty for all of them."""
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
    """Return the indices of the best rows, one for each corpus and evaluation mode with at least two scores."""
    metric, best = judged_by(rows), set()
    for family in competing(rows, split) if not judged_by_time(rows) else []:
        scores = {
            rows.index(row): metric.sign * score.mean for row in family if (score := row.mean_score(metric, split))
        }
        if len(scores) > 1:
            best.add(min(scores, key=scores.__getitem__))
    return frozenset(best)


def _columns(rows: Sequence[TableRow]) -> tuple[Column, ...]:
    """Return the columns to show.

    If the paper reports only seconds, there are no perplexity columns. A row without scores shows its state in the
    column that ranks the rows.
    """
    timed = any("seconds" in row.paper for row in rows)
    hidden = set() if timed else {"pace", "ratio"}
    if judged_by_time(rows) or judged_by_similarity(rows):
        hidden |= set(PERPLEXITY_GROUPS)
    if not any(row.mean_score(PERPLEXITY, "train") for row in rows):
        hidden.add("training")  # without a score of ours, the paper's score is not useful
    by_bleu = judged_by(rows) == BLEU
    decides = BLEU_TITLES["test"] if by_bleu else PRESS[0] if judged_by_similarity(rows) else "test"
    with_state = {("pace", "s/epoch"), (decides, decides)}
    columns = [
        Column(group, title, tuple(cell(row) or (row.state if (group, title) in with_state else "") for row in rows))
        for group, title, cell in COLUMNS
    ]
    columns += _ratios(rows)
    columns = [column for column in columns if column.group not in hidden]
    # A group with only the paper's scores keeps an empty column for ours.
    filled = {column.group for column in columns if any(column.cells)}
    titles = {
        ("validation", "valid"),
        ("ratio", "times first"),
        *((name, name) for name in (BLEU_TITLES["valid"], *PRESS)),
    }
    shown = [
        column
        for column in columns
        if any(column.cells) or ((column.group, column.title) in titles and column.group in filled)
    ]
    # A table of seconds already has a column of seconds per epoch, and a run that is limited by updates has no epochs.
    redundant = {"s/epoch", ALONE} if timed else {ALONE} if any(row.updates for row in rows) else set()
    unique = [column for column in shown if column.group != "time" or column.title not in redundant]
    return tuple(sorted(unique, key=lambda column: _GROUPS.index(column.group)))


def _ratios(rows: Sequence[TableRow]) -> list[Column]:
    ours, papers = zip(*(times_first(rows, row) for row in rows), strict=True) if rows else ((), ())
    return [
        Column("ratio", title, tuple(f"{ratio:.2f}" if ratio else "" for ratio in ratios))
        for title, ratios in (("times first", ours), ("paper", papers))
    ]


def deciding(rows: Sequence[TableRow]) -> str:
    """Return the split whose scores rank the rows: `valid` if test scores are withheld, as in a sweep."""
    valid, test = (any(row.mean_score(PERPLEXITY, split) for row in rows) for split in ("valid", "test"))
    return "valid" if valid and not test else "test"


def print_table(rows: Sequence[TableRow], console: Console, *, leave_out: Collection[str] = ()) -> None:
    """Print the table. Groups of columns that do not fit side by side are printed below each other."""
    table = build(rows).without(leave_out)
    name_width = min(max([len("row"), *map(len, table.names)]), max(12, console.width // 3))
    gap = 2
    parts: list[list[Column]] = []
    free_width = -1
    for _, columns in table.groups:
        width = sum(max(len(text) for text in (column.title, *column.cells)) + gap for column in columns)
        if free_width < width:
            parts.append([])
            free_width = console.width - name_width - gap
        parts[-1] += columns
        free_width -= width
    for n, part in enumerate(parts):
        if n:
            console.print()
        console.print(_rich(table, part, name_width))
    for note in table.notes:
        console.print(note, markup=False, highlight=False)


def to_markdown(rows: Sequence[TableRow]) -> str:
    """Return the table and its notes as Markdown, with the best scores in bold.

    The cost columns are epochs and seconds per epoch, or updates and tokens per second.
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
    """Return notes on columns whose titles are not self-explanatory."""
    titles = {column.title for column in columns}
    notes = []
    if AS_PAPER in titles:
        names = dict.fromkeys(record.protocol.name for row in rows for record in row.records if record.protocol)
        compared = "; diff compares this score with the paper's" if "diff" in titles else ""
        notes.append(f"{AS_PAPER}: our score, computed as the paper's program does ({', '.join(names)}){compared}")
    if any(column.title == "diff" and column.group in BLEU_TITLES.values() for column in columns):
        notes.append("BLEU: higher is better; diff is our score minus the paper's, in points")
    if titles & set(PRESS):
        notes += _coverage(rows)
    if "times first" in titles:
        notes.append(
            "times first: s/epoch divided by the s/epoch of the first row on the same corpus, for our times and the "
            "paper's"
        )
    if any(column.group == "pace" for column in columns) and any(row.steps and not row.ran for row in rows):
        notes.append(
            "s/epoch: for a row that was not trained, the time of our fastest training step, measured by reefknot "
            "bench steps, times the number of steps in an epoch"
        )
    if ALONE in titles:
        notes.append(
            f"{ALONE}: the time of our fastest training step with nothing else on the device, measured by reefknot "
            "bench steps, times the number of steps in an epoch"
        )
    if TIMES_PLAIN in titles:
        notes.append(
            f"{TIMES_PLAIN}: the time of a training step in plain PyTorch (a recurrent encoder as a loop, attention "
            "with stored logits) divided by the time of our fastest step, both measured in one run of reefknot bench "
            "steps with the settings of the row's runs (docs/performance.md)"
        )
    return notes


def _coverage(rows: Sequence[TableRow]) -> list[str]:
    """Return a note on word similarity, with the number of known pairs of each benchmark."""
    coverage = []
    for name in PRESS:
        judgements = [judgement for row in rows for end in ENDS for judgement in row.judgements(end, name)]
        if judgements:
            low, high = (choose(judgement.pairs for judgement in judgements) for choose in (min, max))
            coverage.append(f"{name} {low:,}{f'–{high:,}' * (low < high)} of {judgements[0].of:,}")
    covered = f"; pairs whose words are known: {', '.join(coverage)}" if coverage else ""
    return [
        "word similarity: Spearman's rho between cosines and human judgements, for the input / output vectors, or one "
        f"value for the table that both ends share{covered}"
    ]


def changed_settings(rows: Sequence[TableRow]) -> list[str]:
    """Return notes on settings that differ from the recipe, each with the names of its rows or `Every row`."""
    holders: dict[tuple[Change, ...], list[str]] = {}
    ran = [row for row in rows if row.records]
    for row in ran:
        if row.changed:
            holders.setdefault(row.changed, []).append(row.name)
    return [
        f"{_names_or_every_row(names, ran)}: settings differ from the recipe ({_listed(changed)})"
        for changed, names in holders.items()
    ]


def _cut_short(rows: Sequence[TableRow]) -> list[str]:
    """Return notes on averaging that did not begin or did not help, and on searches whose best value is at the edge."""
    ran = [row for row in rows if row.records]
    waiting = [row.name for row in ran if all(result.awaits_averaging for result in row.results)]
    notes = [f"{_names_or_every_row(waiting, ran)}: averaging had not begun when training ended"] if waiting else []
    before = [row.name for row in ran if any(result.best_before_averaging for result in row.results)]
    notes += [f"{_names_or_every_row(before, ran)}: the best epoch was before averaging began"] if before else []
    edges = {
        row.name: dict.fromkeys(edge for saved in row.evaluations if saved.search for edge in saved.search.edges)
        for row in rows
    }
    at_edge = [f"{name} ({', '.join(keys)})" for name, keys in edges.items() if keys]
    return notes + [f"best value at the edge of the search grid: {', '.join(at_edge)}"] * bool(at_edge)


def _names_or_every_row(names: Sequence[str], rows: Sequence[TableRow]) -> str:
    return ", ".join(names) if len(names) < max(len(rows), 2) else "Every row"


def _listed(changed: Sequence[Change]) -> str:
    more = len(changed) - _LISTED
    texts = [change.describe(null="not set") for change in changed[:_LISTED]]
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
    """Escape characters that Markdown or HTML would interpret."""
    for sign in "\\`*_[]|<>":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
