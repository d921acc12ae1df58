"""Build the table of results, with our scores next to the paper's, and print it or write it as Markdown.

`build_table` turns rows (one per experiment of a recipe, see `rows.py`) into a `Table` of strings. `print_table` and
`to_markdown` write it; `page.html` shows the same `Table` in the HTML report. The columns are defined in `cells.py`.

    rows = join_runs(rows_from_recipe(recipe_file.rows, "demo"), collect_runs(["runs/demo"]))
    print_table(rows, open_console())

The split of a corpus that ranks the rows is `test`, or `valid` if there are no test scores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.recipes.file import Row, find_recipe, list_shipped_recipes, read_recipe_file
from reefknot.lab.reports.cells import (
    AUTHORS_TITLE,
    BLEU_TITLES,
    COLUMNS,
    CORPUS_TITLE,
    ENDS,
    NOT_RECORDED,
    PROTOCOL_TITLE,
    SPEEDUP_TITLE,
    STEP_SECONDS_TITLE,
    UNKNOWN_TITLE,
    format_percent,
)
from reefknot.lab.reports.footnotes import add_footnotes
from reefknot.lab.reports.rows import (
    TableRow,
    add_recipe_names,
    group_rankable,
    has_only_similarity,
    has_only_times,
    join_runs,
    ranking_metric,
    time_ratios,
)
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.definition import MAX_UNKNOWN_SHARE
from reefknot.lab.runs.loading import Result
from reefknot.lab.runs.scores import BLEU, PERPLEXITY

PERPLEXITY_GROUPS = ("training", "validation", "test", UNKNOWN_TITLE)
"""Groups of perplexity columns, one for each split, and the share of unknown words."""
_GROUPS = ("size", "pace", "ratio", *BLEU_TITLES.values(), *PERPLEXITY_GROUPS, *PRESS, "time", "cost")
"""The order of the groups of columns."""
_MAX_LISTED_CHANGES = 4
"""A note lists at most this many changed settings, and counts the others."""


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
    the column with the title `ranking_column`, among the rows that can be compared with it.
    """

    names: tuple[str, ...]
    """The names of the rows."""
    columns: tuple[Column, ...]
    best: frozenset[int] = frozenset()
    ranking_column: str = "test"
    notes: tuple[str, ...] = ()
    """Notes that a reader needs in order to interpret the scores."""

    @property
    def groups(self) -> list[tuple[str, list[Column]]]:
        """The columns by group, in their order."""
        return [(group, list(columns)) for group, columns in groupby(self.columns, lambda column: column.group)]

    def without_columns(self, titles: Collection[str]) -> Table:
        """Return the table without the columns of these titles."""
        return replace(self, columns=tuple(column for column in self.columns if column.title not in titles))

    def select_rows(self, selected: Sequence[bool]) -> Table:
        """Return the table with only the rows for which `selected` is true."""
        indices = [index for index, is_selected in enumerate(selected) if is_selected]
        names = tuple(self.names[index] for index in indices)
        columns = []
        for column in self.columns:
            cells = tuple(column.cells[index] for index in indices)
            columns.append(replace(column, cells=cells))
        best = frozenset(indices.index(index) for index in self.best if index in indices)
        return replace(self, names=names, columns=tuple(columns), best=best)

    def is_best(self, column: Column, row: int) -> bool:
        """Return whether a cell is a best score, which is printed in bold."""
        return row in self.best and column.title == self.ranking_column


def rows_from_recipe(rows: Iterable[Row], recipe: str = "") -> list[TableRow]:
    """Return the rows of a recipe as rows of a table, without runs."""
    rows = list(rows)
    by_name = {row.name: row for row in rows}
    table_rows = []
    for row in rows:
        trained_row = by_name.get(row.of or row.name, row)  # an evaluation row has the model of another row
        table_rows.append(
            TableRow(
                row.name,
                paper=dict(row.paper),
                expected_parameters=trained_row.parameters,
                quoted=row.quoted,
                recipe=recipe,
                source_row=row.of,
                mode=row.by,
                start=row.start,
                corpus=trained_row.corpus,
                paper_similarity=row.paper_similarity,
                paper_curve=row.curve,
                paper_epoch=row.paper_epoch,
            )
        )
    return table_rows


def rows_in_recipe_order(results: Sequence[Result]) -> list[TableRow]:
    """Return the rows of some runs, in the order of their recipes. Rows of a recipe without runs are left out."""
    recipe_names = {result.recipe for result in results}
    recipe_rows: list[TableRow] = []
    for name in list_shipped_recipes():
        if name in recipe_names:
            path, _ = find_recipe(name)
            recipe_rows += rows_from_recipe(read_recipe_file(path, name).rows, name)
    return add_recipe_names(row for row in join_runs(recipe_rows, results) if row.results)


def build_table(rows: Sequence[TableRow]) -> Table:
    """Build the table of the rows, without columns that are empty for all of them."""
    split = ranking_split(rows)
    ranking_column = BLEU_TITLES[split] if ranking_metric(rows) == BLEU else split
    best = _find_best(rows, split)
    marked_rows, footnotes = add_footnotes(rows)
    columns = _build_columns(marked_rows)
    notes = [
        *footnotes,
        *_explain_columns(marked_rows, columns),
        *changed_settings(marked_rows),
        *_shortened_notes(marked_rows),
        *_averaging_notes(marked_rows),
        *_search_notes(marked_rows),
    ]
    return Table(tuple(row.name for row in marked_rows), columns, best, ranking_column, tuple(notes))


def _find_best(rows: Sequence[TableRow], split: str) -> frozenset[int]:
    """Return the indices of the best rows, one for each corpus and evaluation mode with at least two scores."""
    if has_only_times(rows):
        return frozenset()
    metric = ranking_metric(rows)
    best_indices = set()
    for comparable_rows in group_rankable(rows, split):
        scores_by_index = {}
        for row in comparable_rows:
            score = row.mean_score(metric, split)
            if score:
                scores_by_index[rows.index(row)] = metric.sign * score.mean  # the sign makes lower better
        if len(scores_by_index) > 1:
            best_indices.add(min(scores_by_index, key=scores_by_index.__getitem__))
    return frozenset(best_indices)


def _build_columns(rows: Sequence[TableRow]) -> tuple[Column, ...]:
    """Return the columns to show, in the order of `_GROUPS`.

    If the paper reports only seconds, there are no perplexity columns. A row without scores shows its state in the
    column that ranks the rows.
    """
    # Format the cells of all columns.
    state_title = _state_column(rows)
    columns_with_state = {("pace", "s/epoch"), (state_title, state_title)}  # group and title
    columns = []
    for group, title, format_cell in COLUMNS:
        cells = [format_cell(row) for row in rows]
        if (group, title) in columns_with_state:
            cells = [cell or row.state for cell, row in zip(cells, rows, strict=True)]
        columns.append(Column(group, title, tuple(cells)))
    columns += _ratio_columns(rows)

    # Leave out columns that are hidden, empty or redundant.
    hidden_groups = _hidden_groups(rows)
    columns = [column for column in columns if column.group not in hidden_groups]
    if not _needs_corpus(rows):
        columns = [column for column in columns if column.title != CORPUS_TITLE]
    columns = _drop_empty_columns(columns)
    redundant_titles = _redundant_time_titles(rows)
    columns = [column for column in columns if column.group != "time" or column.title not in redundant_titles]
    return tuple(sorted(columns, key=lambda column: _GROUPS.index(column.group)))


def _hidden_groups(rows: Sequence[TableRow]) -> set[str]:
    """Return the groups of columns that are not useful for these rows."""
    hidden = set()
    if not any("seconds" in row.paper for row in rows):
        hidden |= {"pace", "ratio"}
    if has_only_times(rows) or has_only_similarity(rows):
        hidden |= set(PERPLEXITY_GROUPS)
    if not any(row.mean_score(PERPLEXITY, "train") for row in rows):
        hidden.add("training")  # without a score of ours, the paper's score is not useful
    return hidden


def _needs_corpus(rows: Sequence[TableRow]) -> bool:
    """Return whether recipes with different corpora are in one table. In one recipe, the names of rows tell them."""
    has_several_recipes = len({row.recipe for row in rows}) > 1
    return has_several_recipes and len({row.scored_corpus for row in rows if row.scored_corpus}) > 1


def _state_column(rows: Sequence[TableRow]) -> str:
    """Return the title (and group) of the column that shows `not run` or `unfinished` for rows without scores."""
    if ranking_metric(rows) == BLEU:
        return BLEU_TITLES["test"]
    if has_only_similarity(rows):
        return PRESS[0]
    return "test"


def _drop_empty_columns(columns: Sequence[Column]) -> list[Column]:
    """Remove empty columns. A group with only the paper's scores keeps an empty column for ours."""
    filled_groups = {column.group for column in columns if any(column.cells)}
    own_score_columns = {("validation", "valid"), ("ratio", "times first")}
    own_score_columns |= {(name, name) for name in (BLEU_TITLES["valid"], *PRESS)}

    def is_kept(column: Column) -> bool:
        is_own_score = (column.group, column.title) in own_score_columns
        return any(column.cells) or (is_own_score and column.group in filled_groups)

    return [column for column in columns if is_kept(column)]


def _redundant_time_titles(rows: Sequence[TableRow]) -> set[str]:
    """Return the titles of the time columns that these rows do not need."""
    if any("seconds" in row.paper for row in rows):
        return {"s/epoch", STEP_SECONDS_TITLE}  # the table already has a column of seconds per epoch
    if any(row.updates for row in rows):
        return {STEP_SECONDS_TITLE}  # a run that is limited by updates has no epochs
    return set()


def _ratio_columns(rows: Sequence[TableRow]) -> list[Column]:
    """Return our times and the paper's times, relative to the first row."""
    our_cells = []
    paper_cells = []
    for row in rows:
        ratio, paper_ratio = time_ratios(rows, row)
        our_cells.append(f"{ratio:.2f}" if ratio else "")
        paper_cells.append(f"{paper_ratio:.2f}" if paper_ratio else "")
    return [Column("ratio", "times first", tuple(our_cells)), Column("ratio", "paper", tuple(paper_cells))]


def ranking_split(rows: Sequence[TableRow]) -> str:
    """Return the split whose scores rank the rows: `valid` if test scores are withheld, as in a sweep."""
    has_valid = any(row.mean_score(PERPLEXITY, "valid") for row in rows)
    has_test = any(row.mean_score(PERPLEXITY, "test") for row in rows)
    return "valid" if has_valid and not has_test else "test"


def print_table(rows: Sequence[TableRow], console: Console, *, leave_out: Collection[str] = ()) -> None:
    """Print the table. Groups of columns that do not fit side by side are printed one below the other.

    Args:
        rows: The rows.
        console: Where to print. Its width limits the width of the table.
        leave_out: Titles of columns that are not printed.
    """
    table = build_table(rows).without_columns(leave_out)
    longest_name = max([len("row"), *map(len, table.names)])
    name_width = min(longest_name, max(12, console.width // 3))

    # Divide the columns into blocks that fit side by side. A group of columns is never divided.
    gap = 2
    blocks: list[list[Column]] = []
    free_width = -1
    for _, columns in table.groups:
        group_width = sum(max(map(len, (column.title, *column.cells))) + gap for column in columns)
        if free_width < group_width:
            blocks.append([])
            free_width = console.width - name_width - gap
        blocks[-1] += columns
        free_width -= group_width

    for index, block in enumerate(blocks):
        if index:
            console.print()
        console.print(_to_rich(table, block, name_width))
    for note in table.notes:
        console.print(note, markup=False, highlight=False)


def to_markdown(rows: Sequence[TableRow]) -> str:
    """Return the table and its notes as Markdown, with the best scores in bold.

    The cost columns are epochs and seconds per epoch, or updates and tokens per second.
    """
    hidden_titles = ["seconds", "memory"]
    is_limited_by_updates = any(row.updates for row in rows)
    if not is_limited_by_updates:
        hidden_titles.append("tokens/s")
    table = build_table(rows).without_columns(hidden_titles)

    lines = ["| " + " | ".join(["row", *(column.title for column in table.columns)]) + " |"]
    lines.append("|---" + "|---:" * len(table.columns) + "|")
    for index, name in enumerate(table.names):
        cells = []
        for column in table.columns:
            cell = column.cells[index]
            cells.append(f"**{cell}**" if table.is_best(column, index) else cell)
        lines.append("| " + " | ".join([_escape(name), *cells]) + " |")
    for note in table.notes:
        lines += ["", _escape(note)]
    return "\n".join(lines) + "\n"


def _explain_columns(rows: Sequence[TableRow], columns: Sequence[Column]) -> list[str]:
    """Return notes on columns whose titles are not self-explanatory."""
    titles = {column.title for column in columns}
    notes = []
    if CORPUS_TITLE in titles:
        notes.append(
            f"{CORPUS_TITLE}: only rows with the same corpus can be compared; a bold score is the best of its corpus"
        )
    if PROTOCOL_TITLE in titles:
        notes += _explain_protocol(rows, columns)
    if UNKNOWN_TITLE in titles:
        notes += _unknown_word_notes(rows)
    if AUTHORS_TITLE in titles:
        notes.append(
            f"{AUTHORS_TITLE}: the validation perplexity of the authors' own run, from their published log, after as "
            "many epochs as our scored weights"
        )
    if any(column.title == "diff" and column.group in BLEU_TITLES.values() for column in columns):
        notes.append("BLEU: higher is better; diff is our score minus the paper's, in points")
    if titles & set(PRESS):
        notes += _similarity_notes(rows)
    return notes + _explain_time_columns(rows, columns)


def _unknown_word_notes(rows: Sequence[TableRow]) -> list[str]:
    """Return a warning if many words are unknown."""
    scored_rows = [row for row in rows if row.score]
    warned_rows = [row for row in scored_rows if row.score and (row.score.unknown_share or 0.0) > MAX_UNKNOWN_SHARE]
    if not warned_rows:
        return []
    subject = _names_or_every_row([row.name for row in warned_rows], scored_rows)
    return [
        f"warning: {subject}: more than {MAX_UNKNOWN_SHARE:.0%} of the words are unknown and scored as <unk>; compare "
        "these perplexities only with models that have the same unknown words"
    ]


def _explain_protocol(rows: Sequence[TableRow], columns: Sequence[Column]) -> list[str]:
    """Return notes on the columns of perplexities by the paper's protocol."""
    protocols = dict.fromkeys(record.protocol.name for row in rows for record in row.records if record.protocol)
    names = f" ({', '.join(protocols)})" if protocols else ""
    comparison = "; diff compares this score with the paper's" if any(c.title == "diff" for c in columns) else ""
    notes = [f"{PROTOCOL_TITLE}: our score, computed as the paper's program does{names}{comparison}"]

    if any(row.paper_epoch == "last" and row.records for row in rows):
        notes.append(
            f"{PROTOCOL_TITLE}: the paper's program scores after the last epoch, and its training perplexity is the "
            "running perplexity of that epoch, computed while the weights change and with dropout. If another epoch "
            "was better on the validation text, our validation perplexity after the last epoch comes from the log of "
            "the training, which scores every token"
        )
    protocol_columns = [column for column in columns if column.title == PROTOCOL_TITLE]
    if any(cell == NOT_RECORDED for column in protocol_columns for cell in column.cells):
        notes.append(
            f"{NOT_RECORDED}: the runs scored the test text only with the weights of the best epoch, which is not the "
            "last; the column on its left has that score"
        )
    return notes


def _shortened_notes(rows: Sequence[TableRow]) -> list[str]:
    """Return notes on rows that were trained for fewer epochs than planned, and on the authors' curves."""
    shortened = [row for row in rows if row.records and row.is_shortened]
    if not shortened:
        return []
    notes = []
    with_curve = [row for row in shortened if row.mean_curve_difference is not None]
    without_curve = [row.name for row in shortened if row not in with_curve and {"valid", "test"} & row.paper.keys()]
    if with_curve:
        differences = []
        for row in with_curve:
            difference = format_percent(row.mean_curve_difference or 0.0)
            differences.append(f"{row.name} {difference} over {max(row.epochs):g} epochs")
        notes.append(f"mean difference from the authors' learning curve: {', '.join(differences)}")
    if without_curve:
        subject = _names_or_every_row(without_curve, [row for row in rows if row.records])
        notes.append(
            f"{subject}: trained for fewer epochs than in the recipe or the paper, so not comparable with the paper's "
            "scores; there is no learning curve of the authors to compare with"
        )
    return notes


def _explain_time_columns(rows: Sequence[TableRow], columns: Sequence[Column]) -> list[str]:
    """Return notes on the columns that show the time of an epoch or of a training step."""
    titles = {column.title for column in columns}
    notes = []
    if "times first" in titles:
        notes.append(
            "times first: s/epoch divided by the s/epoch of the first row on the same corpus, for our times and the "
            "paper's"
        )
    has_pace_column = any(column.group == "pace" for column in columns)
    has_row_with_only_steps = any(row.step_times and not row.has_scores for row in rows)
    if has_pace_column and has_row_with_only_steps:
        notes.append(
            "s/epoch: for a row that was not trained, the time of our fastest training step, measured by reefknot "
            "bench steps, times the number of steps in an epoch"
        )
    if STEP_SECONDS_TITLE in titles:
        notes.append(
            f"{STEP_SECONDS_TITLE}: the time of our fastest training step with nothing else on the device, measured by "
            "reefknot bench steps, times the number of steps in an epoch"
        )
    if SPEEDUP_TITLE in titles:
        notes.append(
            f"{SPEEDUP_TITLE}: the time of a training step in plain PyTorch (a recurrent encoder as a loop, attention "
            "with stored logits) divided by the time of our fastest step, both measured in one run of reefknot bench "
            "steps with the settings of the row's runs (docs/performance.md)"
        )
    return notes


def _similarity_notes(rows: Sequence[TableRow]) -> list[str]:
    """Return a note on word similarity, with the number of known pairs of each benchmark."""
    coverage = []
    for benchmark in PRESS:
        judgements = [judgement for row in rows for end in ENDS for judgement in row.judgements(end, benchmark)]
        if judgements:
            fewest = min(judgement.pairs for judgement in judgements)
            most = max(judgement.pairs for judgement in judgements)
            pairs = f"{fewest:,}–{most:,}" if fewest < most else f"{fewest:,}"
            coverage.append(f"{benchmark} {pairs} of {judgements[0].of:,}")

    note = (
        "word similarity: Spearman's rho between cosines and human judgements, given as input / output vectors, "
        "or as a single value if both ends share one table"
    )
    if coverage:
        note += f"; pairs whose words are known: {', '.join(coverage)}"
    return [note]


def changed_settings(rows: Sequence[TableRow]) -> list[str]:
    """Return notes on settings that differ from the recipe, each with the names of its rows or `Every row`."""
    finished = [row for row in rows if row.records]
    names_by_changes: dict[tuple[Change, ...], list[str]] = {}
    for row in finished:
        if row.changes:
            names_by_changes.setdefault(row.changes, []).append(row.name)

    notes = []
    for changes, names in names_by_changes.items():
        subject = _names_or_every_row(names, finished)
        notes.append(f"{subject}: settings differ from the recipe ({_format_changes(changes)})")
    return notes


def _averaging_notes(rows: Sequence[TableRow]) -> list[str]:
    """Return notes on averaging that did not begin or did not help."""
    notes = []
    finished = [row for row in rows if row.records]
    waiting = [row.name for row in finished if all(result.awaits_averaging for result in row.results)]
    if waiting:
        notes.append(f"{_names_or_every_row(waiting, finished)}: averaging had not begun when training ended")
    too_early = [row.name for row in finished if any(result.best_precedes_averaging for result in row.results)]
    if too_early:
        notes.append(f"{_names_or_every_row(too_early, finished)}: the best epoch was before averaging began")
    return notes


def _search_notes(rows: Sequence[TableRow]) -> list[str]:
    """Return a note on searches whose best value is at the edge of the grid."""
    at_edge = []
    for row in rows:
        searches = [evaluation.search for evaluation in row.evaluations if evaluation.search]
        edges = dict.fromkeys(edge for search in searches for edge in search.edges)
        if edges:
            at_edge.append(f"{row.name} ({', '.join(edges)})")
    if not at_edge:
        return []
    return [f"best value at the edge of the search grid: {', '.join(at_edge)}"]


def _names_or_every_row(names: Sequence[str], rows: Sequence[TableRow]) -> str:
    """Return the names, or "Every row" if there are several rows and all of them are named."""
    if len(names) < max(len(rows), 2):
        return ", ".join(names)
    return "Every row"


def _format_changes(changes: Sequence[Change]) -> str:
    """Describe the first few changes, and count the others."""
    descriptions = [change.describe(null="not set") for change in changes[:_MAX_LISTED_CHANGES]]
    remaining = len(changes) - _MAX_LISTED_CHANGES
    if remaining > 0:
        descriptions.append(f"and {remaining} more")
    return "; ".join(descriptions)


def _to_rich(table: Table, columns: Sequence[Column], name_width: int) -> RichTable:
    grid = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("row", width=name_width, overflow="fold")
    for column in columns:
        grid.add_column(column.title, justify="right", no_wrap=True)
    for index, name in enumerate(table.names):
        cells = [Text(column.cells[index], style="bold" if table.is_best(column, index) else "") for column in columns]
        grid.add_row(Text(name), *cells)
    return grid


def _escape(text: str) -> str:
    """Escape characters that Markdown or HTML would interpret, and replace line breaks by spaces."""
    for character in "\\`*_[]|<>":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
