"""A short plain reading of a table of rows: only what the figures themselves say, and how far they carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reefknot.reports.results import Spread, differing, without_seed
from reefknot.reports.rows import TableRow, comparable
from reefknot.reports.table import deciding, number, percent, spread


def read(rows: Sequence[TableRow]) -> list[str]:
    """Sentences for people, in the order of interest; empty when nothing has been run."""
    split = deciding(rows)
    done = [row for row in rows if row.perplexity(split)]
    fair = comparable(done)
    sentences = [*_lowest(fair, split), *_sharing(done), *_paper(done, fair), *_sizes(done), *_seeds(done)]
    for names, text in (
        ([row.name for row in done if row not in fair], "Not compared, as scored in another way"),
        ([row.name for row in rows if row.state == "unfinished"], "Not finished, shown with the last metrics"),
        ([row.name for row in rows if row.state == "not run"], "Not run"),
    ):
        if names:
            sentences.append(f"{text}: {', '.join(names)}.")
    return [_unbroken(sentence) for sentence in sentences]


def _unbroken(sentence: str) -> str:
    """No line may break inside a figure."""
    return sentence.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")


def _lowest(done: Sequence[TableRow], split: str) -> list[str]:
    if not done:
        return []
    what = "validation perplexity" if split == "valid" else "test perplexity"
    ordered = sorted(done, key=lambda row: _mean(row.perplexity(split)))
    best, worst = ordered[0], ordered[-1]
    figure = spread(best.perplexity(split))
    size = f" with {best.size:,} parameters" if best.size else ""
    if len(done) == 1:
        return [f"{best.name} reaches a {what} of {figure}{size}."]
    return [
        f"{best.name} has the lowest {what}, {figure}{size}; "
        f"{worst.name} has the highest, {spread(worst.perplexity(split))}."
    ]


def _mean(figure: Spread | None) -> float:
    assert figure is not None
    return figure.mean


def _sharing(done: Sequence[TableRow]) -> list[str]:
    """What one table for both ends saves, where two rows differ in nothing else."""
    for apart in done:
        for shared in done:
            if _differ_in_a_table(apart, shared) and apart.size and shared.size and apart.size > shared.size:
                saved = apart.size - shared.size
                return [
                    f"Sharing one table between the two ends saves {saved:,} parameters "
                    f"({100 * saved / apart.size:.0f} %): {apart.size:,} in {apart.name}, "
                    f"{shared.size:,} in {shared.name}, which differ in nothing else."
                ]
    return []


def _differ_in_a_table(apart: TableRow, shared: TableRow) -> bool:
    """Whether the first row has one table more, which its ends use where those of the second use another."""
    one, other = (without_seed(row.results[0].settings) for row in (apart, shared))
    spare = _tables(one) - _tables(other)
    if len(spare) != 1:
        return False
    (name,) = spare
    return all(
        key.startswith(f"tables.{name}.") or (key.endswith(".table") and one.get(key) == name)
        for key in differing([one, other])
    )


def _tables(settings: Mapping[str, Any]) -> set[str]:
    return {key.split(".")[1] for key in settings if key.startswith("tables.")}


def _paper(done: Sequence[TableRow], fair: Sequence[TableRow]) -> list[str]:
    compared = [(row, gap) for row in done if (gap := row.difference("test")) is not None]
    if not compared:
        return []
    row, gap = max(compared, key=lambda pair: abs(pair[1]))
    if len(compared) == 1:
        return [f"Against the paper's test figure, {row.name} differs by {percent(gap)}."]
    both = [row for row, _ in compared if row in fair]
    swapped = [a for a in both for b in both if a.paper["test"] < b.paper["test"] and _above(a, b)]
    order = "is not the paper's" if swapped else "is the paper's"
    return [
        f"The largest difference to the paper's test figures is {percent(gap)} ({row.name}: "
        f"{number(_mean(row.compared('test')))} against {number(row.paper['test'])}). The order of the rows {order}."
    ]


def _above(a: TableRow, b: TableRow) -> bool:
    """Whether row a is worse than row b by more than their seeds spread."""
    spreads = [score.sd or 0.0 for row in (a, b) if (score := row.compared("test"))]
    return _mean(a.compared("test")) - _mean(b.compared("test")) > max(spreads)


def _sizes(done: Sequence[TableRow]) -> list[str]:
    return [
        f"{row.name} has {row.size:,} parameters where {row.parameters:,} were expected."
        for row in done
        if row.size and row.parameters and row.size != row.parameters
    ]


def _seeds(done: Sequence[TableRow]) -> list[str]:
    if not done:
        return []
    counts = {len(row.records) for row in done}
    if counts == {1}:
        return [] if len(done) == 1 else ["One seed for each row: differences between rows may be noise."]
    sentence = "± is the standard deviation over seeds."
    if 1 in counts:
        sentence += " Rows with one seed have none: their differences may be noise."
    return [sentence]
