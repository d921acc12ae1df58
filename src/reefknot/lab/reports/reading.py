"""A short summary of a table of rows in sentences: what the scores show, and how reliable they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from scipy import stats

from reefknot.lab.reports.cells import number, papers_points, percent, points, shown, signed
from reefknot.lab.reports.results import Spread, differing, distinguishing
from reefknot.lab.reports.rows import (
    TableRow,
    competing,
    families,
    judged_by,
    judged_by_time,
    times_first,
)
from reefknot.lab.reports.table import deciding
from reefknot.lab.runs.modes import in_words
from reefknot.lab.runs.scores import BLEU, PERPLEXITY, Metric


def read(rows: Sequence[TableRow]) -> list[str]:
    """Return sentences that summarise the rows, most interesting first; empty if nothing has been run."""
    split = deciding(rows)
    done = [row for row in rows if row.figure(PERPLEXITY, split)]
    fair = families(done)
    odd: list[str] = []
    if judged_by_time(rows):
        figures = _pace(rows)
    elif judged_by(rows) == BLEU:
        figures = [*_best(rows, split), *_ties(done, split), *_papers_bleu(done)]
    else:
        figures = [*_best(rows, split), *_sharing(done), *_paper(done, fair)]
        odd = [row.name for row in done if not any(row in family for family in fair)]
    sentences = [*figures, *_sizes(done), *_seeds(done)]
    for names, text in (
        (odd, "Not compared, as scored in another way"),
        ([row.name for row in rows if row.state == "unfinished"], "Not finished, shown with the last metrics"),
        ([row.name for row in rows if row.state == "not run"], "Not run"),
    ):
        if names:
            sentences.append(f"{text}: {', '.join(names)}.")
    return [_unbroken(sentence) for sentence in sentences]


def _unbroken(sentence: str) -> str:
    """Use no-break spaces, so that no line breaks inside a number."""
    return sentence.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")


def _pace(rows: Sequence[TableRow]) -> list[str]:
    """Compare the time of an epoch, in one sentence for each corpus."""
    by_corpus: dict[str | None, list[str]] = {}
    for row in rows:
        ours, papers = times_first(rows, row)
        texts = by_corpus.setdefault(row.corpus, [])
        if ours and papers:
            texts.append(f"{ours:.2f} times as long in {row.name} (paper {papers:.2f})" if texts else row.name)
    return [f"Against {first}, an epoch takes {', '.join(others)}." for first, *others in by_corpus.values() if others]


def _best(rows: Sequence[TableRow], split: str) -> list[str]:
    """Name the best and the worst row of each corpus and evaluation mode."""
    metric = judged_by(rows)
    families = [[row for row in family if row.figure(metric, split)] for family in competing(rows, split)]
    several = len({row.text for family in families for row in family}) > 1
    return [_extremes(family, metric, split, several) for family in families if family]


def _extremes(done: Sequence[TableRow], metric: Metric, split: str, name_text: bool) -> str:
    what = f"{'validation' if split == 'valid' else 'test'} {metric.name}"
    what += f" on {done[0].text}" if name_text else ""
    what += f" by {in_words(done[0].manner)}" if done[0].manner else ""
    ordered = sorted(done, key=lambda row: metric.sign * _mean(row.figure(metric, split)))
    best, worst = ordered[0], ordered[-1]
    figure = shown(metric, best.figure(metric, split))
    size = f" with {best.size:,} parameters" if best.size else ""
    if len(done) == 1:
        return f"{best.name} reaches a {what} of {figure}{size}."
    first, last = ("lowest", "highest") if metric.better == "lower" else ("highest", "lowest")
    return (
        f"{best.name} has the {first} {what}, {figure}{size}; "
        f"{worst.name} has the {last}, {shown(metric, worst.figure(metric, split))}."
    )


def _mean(figure: Spread | None) -> float:
    assert figure is not None
    return figure.mean


def _ties(done: Sequence[TableRow], split: str) -> list[str]:
    """Report what sharing tables saves, and how BLEU changes, against each row without shared tables."""
    sentences = []
    for apart in done:
        if apart.size is None or any(_spare(other, apart) for other in done):
            continue
        for row in done:
            saved = apart.size - (row.size or apart.size)
            if _spare(apart, row) and saved > 0:
                gap = _apart(row.figure(BLEU, split), apart.figure(BLEU, split))
                sentences.append(
                    f"Sharing tables saves {saved:,} parameters ({100 * saved / apart.size:.0f} %) in {row.name}, "
                    f"which differs from {apart.name} in nothing else{gap}."
                )
    return sentences


def _apart(ours: Spread | None, others: Spread | None) -> str:
    """Format a difference of BLEU, with its 95 % interval (Welch's) if both rows have several seeds."""
    if not ours or not others:
        return ""
    gap = ours.mean - others.mean
    text = f": {signed(gap)} BLEU"
    if ours.sd is None or others.sd is None or not ours.sd + others.sd:
        return text
    variances = [(each.sd or 0.0) ** 2 / each.n for each in (ours, others)]
    freedom = sum(variances) ** 2 / sum(
        variance**2 / (each.n - 1) for variance, each in zip(variances, (ours, others), strict=True)
    )
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(sum(variances))
    return f"{text}, 95 % interval over seeds {signed(gap - half)} to {signed(gap + half)}"


def _papers_bleu(done: Sequence[TableRow]) -> list[str]:
    compared = [(row, gap) for row in done if (gap := row.bleu_difference("test")) is not None]
    if not compared:
        return []
    row, gap = max(compared, key=lambda pair: abs(pair[1]))
    ours, papers = points(row.figure(BLEU, "test")), papers_points(row.paper["bleu_test"])
    return [f"The largest difference to the paper's test BLEU is {signed(gap)} ({row.name}: {ours} against {papers})."]


def _sharing(done: Sequence[TableRow]) -> list[str]:
    """Report what one table for both ends saves, if two rows differ in nothing else."""
    for apart in done:
        for shared in done:
            if len(_spare(apart, shared)) == 1 and apart.size and shared.size and apart.size > shared.size:
                saved = apart.size - shared.size
                return [
                    f"Sharing one table between the two ends saves {saved:,} parameters "
                    f"({100 * saved / apart.size:.0f} %): {apart.size:,} in {apart.name}, "
                    f"{shared.size:,} in {shared.name}, which differ in nothing else."
                ]
    return []


def _spare(apart: TableRow, shared: TableRow) -> set[str]:
    """Return the tables that only the first row has, if the rows differ only in which tables their ends use."""
    if not apart.results or not shared.results:
        return set()
    one, other = (distinguishing(row.results[0].settings) for row in (apart, shared))
    spare = _tables(one) - _tables(other)
    only = all(
        (key.startswith("tables.") and key.split(".")[1] in spare) or (key.endswith(".table") and one.get(key) in spare)
        for key in differing([one, other])
    )
    return spare if only else set()


def _tables(settings: Mapping[str, Any]) -> set[str]:
    return {key.split(".")[1] for key in settings if key.startswith("tables.")}


def _paper(done: Sequence[TableRow], fair: Sequence[Sequence[TableRow]]) -> list[str]:
    compared = [(row, gap) for row in done if (gap := row.difference("test")) is not None]
    if not compared:
        return []
    row, gap = max(compared, key=lambda pair: abs(pair[1]))
    if len(compared) == 1:
        return [f"Against the paper's test figure, {row.name} differs by {percent(gap)}."]
    held = [row for row, _ in compared]
    return [
        f"The largest difference to the paper's test figures is {percent(gap)} ({row.name}: "
        f"{number(_mean(row.compared('test')))} against {number(row.paper['test'])}).",
        *_order([[row for row in family if row in held] for family in fair]),
    ]


def _order(families: Sequence[Sequence[TableRow]]) -> list[str]:
    """Report how many pairs of rows that differ by more than noise have the same order as in the paper."""
    alike = []
    for a, b in (pair for family in families for pair in combinations(family, 2)):
        papers = a.paper["test"] - b.paper["test"]
        if papers and (ours := _seen(a, b)):
            alike.append(ours * papers > 0)
    if not alike:
        return []
    number = "all" if all(alike) else str(sum(alike)) if any(alike) else "none"
    return [
        f"Pairs of rows that differ by more than twice the standard error over seeds: {len(alike)}, "
        f"{number} in the paper's order."
    ]


def _seen(a: TableRow, b: TableRow) -> float | None:
    """Return the difference of two rows if it exceeds twice its standard error; None with one seed."""
    one, other = a.compared("test"), b.compared("test")
    if not one or not other or one.sd is None or other.sd is None:
        return None
    error = math.hypot(one.sd / math.sqrt(one.n), other.sd / math.sqrt(other.n))
    gap = one.mean - other.mean
    return gap if abs(gap) > 2 * error else None


def _sizes(done: Sequence[TableRow]) -> list[str]:
    return [
        f"{row.name} has {row.size:,} parameters where {row.parameters:,} were expected."
        for row in done
        if row.size and row.parameters and row.size != row.parameters
    ]


def _seeds(done: Sequence[TableRow]) -> list[str]:
    if not done:
        return []
    counts = {len(row.records) or len(row.models) for row in done}
    if counts == {1}:
        return [] if len(done) == 1 else ["One seed for each row: differences between rows may be noise."]
    sentence = "± is the standard deviation over seeds."
    if 1 in counts:
        sentence += " Rows with one seed have none: their differences may be noise."
    return [sentence]
