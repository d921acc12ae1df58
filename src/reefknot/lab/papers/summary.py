"""The summary at the beginning of PAPERS.md: what is reproduced, what is not, what was not run, and why.

`format_summary` computes it from the rows of the recipes (each recipe is a table of a paper) and from the recorded
figures. Only the reasons in `NOTES` are written by hand. A row counts if the paper has a score of it and if it is
trained or evaluated here; quoted rows and our own additions do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations

from reefknot.errors import DataError
from reefknot.lab.papers.measured_figures import RecordedFigure
from reefknot.lab.reports.cells import format_percent
from reefknot.lab.reports.rows import TableRow, has_only_times

TOLERANCE = 0.02
"""A score is reproduced if it differs from the paper's score by at most this fraction."""
TREND_SHARE = 0.8
"""A trend is reproduced if at least this share of the pairs of rows has the paper's order."""
_VERDICTS = ("confirmed", "contradicted", "undecided")


@dataclass(frozen=True)
class TableNote:
    """What the records of a table do not say."""

    reason: str = ""
    """Why rows were not run."""
    beyond: tuple[str, ...] = ()
    """Patterns of the names of rows that need more hardware or other texts than we have; * matches anything."""
    tried: str = ""
    """What was tried for the rows whose scores differ from the paper's."""


_WIKITEXT_103 = TableNote("WikiText-103: the paper's training takes 30 to 70 hours on several GPUs", beyond=("*",))
_BILLION_WORD = TableNote("Billion Word: the paper's training takes 34 to 145 hours on several GPUs", beyond=("*",))
_WMT = TableNote("WMT: the training of a row takes days on one GPU", beyond=("*",))
_NO_TIME = "they fit one GPU, but GPU time went to other rows so far"

NOTES: Mapping[str, TableNote] = {
    "baevski2019/table1": _BILLION_WORD,
    "baevski2019/table2": _WIKITEXT_103,
    "baevski2019/table3": _WIKITEXT_103,
    "baevski2019/table4": _BILLION_WORD,
    "baevski2019/table5": _WIKITEXT_103,
    "baevski2019/table6": _WIKITEXT_103,
    "baevski2019/table7": _WIKITEXT_103,
    "baevski2019/table8": _WIKITEXT_103,
    "inan2017/table1": TableNote(
        _NO_TIME,
        tried="for the augmented loss, small model, one seed each: gamma 0.65, 4 and 13 at tau 20, gamma 0.65 and 3 at "
        "tau 5, tau 2, a wider start of the word table, no output bias, input dropout. The best validation perplexity "
        "is 90.1 (gamma 0.65, tau 5; paper 86.3). Medium model: gamma 3 gives 79.1 (paper 77.4). These trials were not "
        "recorded",
    ),
    "inan2017/table2": TableNote(_NO_TIME),
    "inan2017/table3": TableNote(_NO_TIME),
    "pappas2019/table1": TableNote(_NO_TIME),
    "pappas2019/table2": TableNote(_NO_TIME),
    "pappas2019/table4": TableNote(_NO_TIME),
    "pappas2019/table5": _WMT,
    "press2017/table2": TableNote("text8 is not available here", beyond=("*",)),
    "press2017/table3": TableNote("text8 is not available here", beyond=("*text8",)),
    "press2017/table5": TableNote(_NO_TIME),
    "press2017/table7": TableNote(f"IMDB and BBC: {_NO_TIME}; text8 is not available here", beyond=("*text8",)),
    "press2017/table8": _WMT,
}


@dataclass(frozen=True)
class TableSummary:
    """The rows of a table that count, by their state."""

    name: str
    rows: Sequence[TableRow]
    """All rows that count."""
    note: TableNote

    @property
    def run(self) -> list[TableRow]:
        """Rows with scores of ours, or with measured times if the paper reports only times."""
        if has_only_times(self.rows):
            return [row for row in self.rows if row.epoch_seconds]
        return [row for row in self.rows if row.has_scores]

    @property
    def shortened(self) -> list[TableRow]:
        """Rows that were run for fewer epochs than in the recipe or the paper."""
        return [row for row in self.run if row.is_shortened]

    @property
    def fitting(self) -> list[TableRow]:
        """Rows that fit our hardware and texts."""
        return [row for row in self.rows if not any(fnmatchcase(row.name, pattern) for pattern in self.note.beyond)]

    @property
    def within(self) -> list[TableRow]:
        """Rows whose validation and test scores are within the tolerance."""
        return [row for row in self.run if _is_within(row)]

    @property
    def outside(self) -> list[TableRow]:
        """Rows with a comparable score that is not within the tolerance."""
        return [row for row in self.run if _differences(row) and not _is_within(row)]

    @property
    def order(self) -> tuple[int, int]:
        """The number of pairs of rows with the paper's order, and the number of pairs that the paper tells apart."""
        agreements = []
        for row, other in combinations(self.run, 2):
            if (row.scored_corpus, row.special_mode) != (other.scored_corpus, other.special_mode):
                continue
            gap, paper_gap = _relative_gap(row, other)
            if paper_gap is not None and abs(paper_gap) > TOLERANCE and gap is not None:
                agreements.append(gap * paper_gap > 0)
        return sum(agreements), len(agreements)

    @property
    def has_trend(self) -> bool:
        """Whether most pairs of rows have the paper's order."""
        same_order, pairs = self.order
        return pairs > 0 and same_order >= TREND_SHARE * pairs


def _differences(row: TableRow) -> dict[str, float]:
    """Return the relative differences from the paper's validation and test scores, as far as they are comparable."""
    differences = {}
    for split in ("valid", "test"):
        difference = row.relative_difference(split)
        points = row.bleu_difference(split)
        if difference is None and points is not None:
            difference = points / row.paper[f"bleu_{split}"]
        if difference is not None:
            differences[split] = difference
    return differences


def _is_within(row: TableRow) -> bool:
    differences = _differences(row)
    return bool(differences) and all(abs(difference) <= TOLERANCE for difference in differences.values())


def _relative_gap(row: TableRow, other: TableRow) -> tuple[float | None, float | None]:
    """Return the relative difference of two rows' perplexities, ours and the paper's, on test or else on valid."""
    for split in ("test", "valid"):
        score = row.comparison_perplexity(split)
        other_score = other.comparison_perplexity(split)
        if score and other_score and split in row.paper and split in other.paper:
            return score.mean / other_score.mean - 1, row.paper[split] / other.paper[split] - 1
    return None, None


def summarise_tables(rows_by_recipe: Mapping[str, Sequence[TableRow]]) -> list[TableSummary]:
    """Return a summary of each table of a paper, without recipes of our own that no paper has scores for."""
    summaries = []
    for name, rows in rows_by_recipe.items():
        counted = [row for row in rows if not row.quoted and _has_paper_score(row)]
        if counted:
            summaries.append(TableSummary(name, counted, NOTES.get(name, TableNote())))
    for name, note in NOTES.items():
        row_names = [row.name for row in rows_by_recipe.get(name, ())]
        for pattern in note.beyond:
            if row_names and not any(fnmatchcase(row_name, pattern) for row_name in row_names):
                raise DataError(f"note on {name}: no row matches '{pattern}'; correct NOTES in summary.py")
    return summaries


def _has_paper_score(row: TableRow) -> bool:
    return bool(row.paper.keys() - {"hours", "epochs"} or row.paper_similarity)


def format_summary(
    rows_by_recipe: Mapping[str, Sequence[TableRow]], figures: Sequence[RecordedFigure] = ()
) -> list[str]:
    """Return the lines of the summary: four lists, the claims of the figures, and the counts of each table."""
    tables = summarise_tables(rows_by_recipe)
    lines = ["## Summary", ""]
    lines += _list(
        "Reproduced",
        "the validation and test scores that can be compared are within 2 % of the paper's",
        _list_reproduced(tables),
    )
    lines += _list(
        "Reproduced in trend",
        "at least 80 % of the pairs of rows are in the paper's order, but some rows are more than 2 % off or were "
        "trained for fewer epochs",
        _list_trends(tables),
    )
    lines += _list(
        "Not reproduced",
        "rows that are more than 2 % off, and tables that were trained for fewer epochs and have fewer pairs in the "
        "paper's order",
        _list_failures(tables),
    )
    lines += _list("Not run", "and why", _list_missing(tables))
    lines += _summarise_figures(figures)
    return [*lines, *_format_counts(tables)]


def _list(title: str, explanation: str, items: Sequence[str]) -> list[str]:
    """Return a titled list, or a line that says that it is empty."""
    heading = f"**{title}** ({explanation}):"
    if not items:
        return [f"{heading} none.", ""]
    return [heading, "", *(f"- {item}" for item in items), ""]


def _list_reproduced(tables: Sequence[TableSummary]) -> list[str]:
    items = []
    for table in tables:
        if table.within:
            remarks = "".join(f"; {remark}" for remark in _describe_gaps(table.within))
            items.append(f"`{table.name}`: {_name_rows(table.within, table.rows)}{remarks}")
    return items


def _describe_gaps(rows: Sequence[TableRow]) -> list[str]:
    """Return what the verdict "reproduced" does not cover: scores without a record, and training perplexities."""
    remarks = []
    for split in ("valid", "test"):
        missing = [row.name for row in rows if split in row.paper and split not in _differences(row)]
        if missing:
            remarks.append(f"no {split} score that can be compared: {', '.join(missing)}")
    training = [(row.name, row.relative_difference("train")) for row in rows]
    outside = [f"{name} {format_percent(gap)}" for name, gap in training if gap is not None and abs(gap) > TOLERANCE]
    if outside:
        remarks.append(f"training perplexity more than 2 % off: {', '.join(outside)}")
    return remarks


def _list_trends(tables: Sequence[TableSummary]) -> list[str]:
    items = []
    for table in tables:
        if len(table.within) < len(table.run) and table.has_trend:
            same_order, pairs = table.order
            epochs = f"; {_describe_lengths(table.shortened)}" if table.shortened else ""
            items.append(f"`{table.name}`: {same_order} of {pairs} pairs in the paper's order{epochs}")
    return items


def _list_failures(tables: Sequence[TableSummary]) -> list[str]:
    """Describe rows that are off, and shortened tables without the paper's order."""
    items = []
    for table in tables:
        tried = f". Tried: {table.note.tried}" if table.note.tried else ""
        rows = []
        for row in table.outside:
            differences = [f"{split} {format_percent(value)}" for split, value in _differences(row).items()]
            rows.append(f"{row.name} ({', '.join(differences)})")
        same_order, pairs = table.order
        if rows:
            items.append(f"`{table.name}`: {'; '.join(rows)}{tried}")
        elif table.shortened and not table.has_trend:
            lengths = _describe_lengths(table.shortened)
            order = f"{same_order} of {pairs} pairs in the paper's order" if pairs else "no pair of rows to compare"
            items.append(f"`{table.name}`: {order}; {lengths}{tried}")
    return items


def _list_missing(tables: Sequence[TableSummary]) -> list[str]:
    """Group the tables with rows that were not run by the reason."""
    tables_by_reason: dict[str, list[str]] = {}
    for table in tables:
        missing = len(table.rows) - len(table.run)
        if missing:
            count = f"{missing} of {len(table.rows)} rows"
            reason = table.note.reason or "no reason recorded"
            tables_by_reason.setdefault(reason, []).append(f"`{table.name}` ({count})")
    return [f"{', '.join(names)}: {reason}" for reason, names in tables_by_reason.items()]


def _name_rows(rows: Sequence[TableRow], all_rows: Sequence[TableRow]) -> str:
    """Return the names of rows, or their number if they are all rows of the table."""
    return f"all {len(rows)} rows" if len(rows) == len(all_rows) else "; ".join(row.name for row in rows)


def _describe_lengths(rows: Sequence[TableRow]) -> str:
    """Return how long rows were trained: "4 rows trained for 12 to 36 of 1000 epochs"."""
    epochs = [count for row in rows for count in row.epochs]
    fewest, most = min(epochs), max(epochs)
    trained = f"{fewest:g}" if fewest == most else f"{fewest:g} to {most:g}"
    full = " or ".join(f"{count:g}" for count in sorted({row.full_epochs for row in rows}))
    return f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} trained for {trained} of {full} epochs"


def _summarise_figures(figures: Sequence[RecordedFigure]) -> list[str]:
    """Return how many of the papers' claims the recorded figures confirm."""
    counts = {
        verdict: sum(f": {verdict}," in line for figure in figures for line in figure.lines) for verdict in _VERDICTS
    }
    if not any(counts.values()):
        return []
    contradicted = [figure for figure in figures if any(": contradicted," in line for line in figure.lines)]
    links = ", ".join(f"[{figure.record['figure']}]({figure.anchor})" for figure in contradicted)
    where = f" (in {links})" if links else ""
    return [
        f"**Figures**: of the papers' claims that our figures test with intervals, {counts['confirmed']} are "
        f"confirmed, {counts['contradicted']} contradicted{where} and {counts['undecided']} undecided.",
        "",
    ]


def _format_counts(tables: Sequence[TableSummary]) -> list[str]:
    """Return the counts of each table as Markdown."""
    lines = [
        "| table | rows run | of these, for fewer epochs | rows that can be run here | rows in the paper | "
        "within 2 % | pairs in the paper's order |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for table in tables:
        same_order, pairs = table.order
        can_compare = any(_differences(row) for row in table.run)
        cells = [
            f"`{table.name}`",
            str(len(table.run)),
            str(len(table.shortened) or ""),
            str(len(table.fitting)),
            str(len(table.rows)),
            str(len(table.within)) if can_compare else "",
            f"{same_order} of {pairs}" if pairs else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "Rows count if the paper has a score of them and does not quote it from another paper. Rows can be run here if "
        "we have their text, and if one NVIDIA H200 trains them in a few hours. Within 2 % is empty if no score can be "
        "compared: rows that were trained for fewer epochs than in the recipe or the paper, and rows for which the "
        "paper only gives times or correlations. The order is that of test perplexity, for pairs that differ by more "
        'than 2 % in the paper. Tables titled "Ours, after ..." are smaller experiments of ours, which no paper has '
        "scores for.",
        "",
    ]
