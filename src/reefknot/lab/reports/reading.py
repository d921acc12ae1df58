"""A short summary of a table of rows in sentences: what the scores show, and how reliable they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from scipy import stats

from reefknot.lab.reports.cells import (
    format_difference,
    format_paper_points,
    format_percent,
    format_perplexity,
    format_points,
    format_score,
)
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
from reefknot.lab.runs.modes import describe_mode
from reefknot.lab.runs.scores import BLEU, PERPLEXITY, Metric


def read(rows: Sequence[TableRow]) -> list[str]:
    """Return sentences that summarise the rows, the most interesting first, or nothing if no row was run."""
    split = deciding(rows)
    done = [row for row in rows if row.mean_score(PERPLEXITY, split)]
    fair = families(done)
    not_compared: list[str] = []
    if judged_by_time(rows):
        sentences = _pace(rows)
    elif judged_by(rows) == BLEU:
        sentences = [*_best(rows, split), *_ties(done, split), *_papers_bleu(done)]
    else:
        sentences = [*_best(rows, split), *_sharing(done), *_paper(done, fair)]
        not_compared = [row.name for row in done if not any(row in family for family in fair)]
    sentences += [*_sizes(done), *_seeds(done)]
    for names, text in (
        (not_compared, "Not compared, because they were scored differently"),
        ([row.name for row in rows if row.state == "unfinished"], "Not finished (the last metrics are shown)"),
        ([row.name for row in rows if row.state == "not run"], "Not run"),
    ):
        if names:
            sentences.append(f"{text}: {', '.join(names)}.")
    return [_with_no_break_spaces(sentence) for sentence in sentences]


def _with_no_break_spaces(sentence: str) -> str:
    """Replace the spaces inside numbers, so that no line breaks there."""
    return sentence.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")


def _pace(rows: Sequence[TableRow]) -> list[str]:
    """Compare the time of an epoch, in one sentence for each corpus."""
    by_corpus: dict[str | None, list[str]] = {}
    for row in rows:
        ours, papers = times_first(rows, row)
        texts = by_corpus.setdefault(row.corpus, [])
        if ours and papers:
            texts.append(f"{ours:.2f} times as long in {row.name} (paper {papers:.2f})" if texts else row.name)
    return [
        f"Relative to {first}, an epoch takes {', '.join(others)}." for first, *others in by_corpus.values() if others
    ]


def _best(rows: Sequence[TableRow], split: str) -> list[str]:
    """Name the best and the worst row of each corpus and evaluation mode."""
    metric = judged_by(rows)
    families = [[row for row in family if row.mean_score(metric, split)] for family in competing(rows, split)]
    several = len({row.text for family in families for row in family}) > 1
    return [_extremes(family, metric, split, several) for family in families if family]


def _extremes(done: Sequence[TableRow], metric: Metric, split: str, name_text: bool) -> str:
    what = f"{'validation' if split == 'valid' else 'test'} {metric.name}"
    what += f" on {done[0].text}" if name_text else ""
    what += f" with {describe_mode(done[0].special_mode)}" if done[0].special_mode else ""
    ordered = sorted(done, key=lambda row: metric.sign * _mean(row.mean_score(metric, split)))
    best, worst = ordered[0], ordered[-1]
    score = format_score(metric, best.mean_score(metric, split))
    size = f" with {best.size:,} parameters" if best.size else ""
    if len(done) == 1:
        return f"{best.name} reaches a {what} of {score}{size}."
    first, last = ("lowest", "highest") if metric.better == "lower" else ("highest", "lowest")
    return (
        f"{best.name} has the {first} {what}, {score}{size}; "
        f"{worst.name} has the {last}, {format_score(metric, worst.mean_score(metric, split))}."
    )


def _mean(score: Spread | None) -> float:
    assert score is not None
    return score.mean


def _ties(done: Sequence[TableRow], split: str) -> list[str]:
    """Report how many parameters shared tables save, and how they change BLEU, for each row without shared tables."""
    sentences = []
    for apart in done:
        if apart.size is None or any(_spare(other, apart) for other in done):
            continue
        for row in done:
            saved = apart.size - (row.size or apart.size)
            if _spare(apart, row) and saved > 0:
                gap = _apart(row.mean_score(BLEU, split), apart.mean_score(BLEU, split))
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
    text = f": {format_difference(gap)} BLEU"
    if ours.sd is None or others.sd is None or not ours.sd + others.sd:
        return text
    variances = [(spread.sd or 0.0) ** 2 / spread.n for spread in (ours, others)]
    freedom = sum(variances) ** 2 / sum(
        variance**2 / (spread.n - 1) for variance, spread in zip(variances, (ours, others), strict=True)
    )
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(sum(variances))
    return f"{text}, 95 % interval over seeds {format_difference(gap - half)} to {format_difference(gap + half)}"


def _papers_bleu(done: Sequence[TableRow]) -> list[str]:
    compared = [(row, gap) for row in done if (gap := row.bleu_difference("test")) is not None]
    if not compared:
        return []
    row, gap = max(compared, key=lambda pair: abs(pair[1]))
    ours, papers = format_points(row.mean_score(BLEU, "test")), format_paper_points(row.paper["bleu_test"])
    return [
        f"The largest difference from the paper's test BLEU is {format_difference(gap)} "
        f"({row.name}: {ours} against {papers})."
    ]


def _sharing(done: Sequence[TableRow]) -> list[str]:
    """Report how many parameters one table for both ends saves, if two rows differ in nothing else."""
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
    """Return the tables that only the first row has, or nothing if the rows differ in more than the ends' tables."""
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
        return [f"{row.name} differs from the paper's test perplexity by {format_percent(gap)}."]
    compared_rows = [row for row, _ in compared]
    return [
        f"The largest difference from the paper's test perplexity is {format_percent(gap)} ({row.name}: "
        f"{format_perplexity(_mean(row.compared('test')))} against {format_perplexity(row.paper['test'])}).",
        *_order([[row for row in family if row in compared_rows] for family in fair]),
    ]


def _order(families: Sequence[Sequence[TableRow]]) -> list[str]:
    """Report how many pairs of rows that differ by more than noise have the same order as in the paper."""
    same_order = []
    for a, b in (pair for family in families for pair in combinations(family, 2)):
        papers = a.paper["test"] - b.paper["test"]
        if papers and (ours := _clear_difference(a, b)):
            same_order.append(ours * papers > 0)
    if not same_order:
        return []
    return [
        f"{sum(same_order)} of {len(same_order)} pairs of rows that differ by more than twice the standard error over "
        "seeds have the same order as in the paper."
    ]


def _clear_difference(a: TableRow, b: TableRow) -> float | None:
    """Return the difference of two rows if it exceeds twice its standard error; None if a row has one seed."""
    one, other = a.compared("test"), b.compared("test")
    if not one or not other or one.sd is None or other.sd is None:
        return None
    error = math.hypot(one.sd / math.sqrt(one.n), other.sd / math.sqrt(other.n))
    gap = one.mean - other.mean
    return gap if abs(gap) > 2 * error else None


def _sizes(done: Sequence[TableRow]) -> list[str]:
    return [
        f"{row.name} has {row.size:,} parameters, but the recipe expects {row.parameters:,}."
        for row in done
        if row.size and row.parameters and row.size != row.parameters
    ]


def _seeds(done: Sequence[TableRow]) -> list[str]:
    if not done:
        return []
    counts = {len(row.records) or len(row.models) for row in done}
    if counts == {1}:
        return [] if len(done) == 1 else ["Every row has one seed, so differences between rows may be noise."]
    sentence = "± is the standard deviation over seeds."
    if 1 in counts:
        sentence += " A row with one seed has no standard deviation, so its differences from other rows may be noise."
    return [sentence]
