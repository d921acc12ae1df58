"""Summarise a table of results in a few sentences: what the scores show, and how reliable they are.

`summarise_rows` is the only public function; the HTML report prints its sentences below the table. Each private
function returns the sentences on one question, or an empty list if the rows cannot answer it. A row is one experiment
of a recipe, with one run per random seed. In a tied row, input and output share one table of word vectors.
"""

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
from reefknot.lab.reports.rows import (
    TableRow,
    group_comparable,
    group_rankable,
    has_only_times,
    ranking_metric,
    time_ratios,
)
from reefknot.lab.reports.table import ranking_split
from reefknot.lab.runs.loading import Spread, differing_keys, distinguishing_settings
from reefknot.lab.runs.modes import describe_mode
from reefknot.lab.runs.scores import BLEU, PERPLEXITY, Metric


def summarise_rows(rows: Sequence[TableRow]) -> list[str]:
    """Return sentences that summarise the rows, the most interesting first, or nothing if no row was run."""
    split = ranking_split(rows)
    scored = [row for row in rows if row.mean_score(PERPLEXITY, split)]
    groups = group_comparable(scored)
    not_compared: list[str] = []

    if has_only_times(rows):
        sentences = _compare_times(rows)
    elif ranking_metric(rows) == BLEU:
        sentences = [*_name_best(rows, split), *_compare_tied_bleu(scored, split), *_compare_paper_bleu(scored)]
    else:
        sentences = [*_name_best(rows, split), *_report_saved_parameters(scored), *_compare_paper(scored, groups)]
        not_compared = [row.name for row in scored if not any(row in group for group in groups)]
    sentences += _report_unexpected_sizes(scored)
    sentences += _explain_seeds(scored)

    # List the rows that were not compared.
    unfinished = [row for row in rows if row.state == "unfinished"]
    has_metrics = [row for row in unfinished if any(result.metrics for result in row.results)]
    names_by_reason = {
        "Not compared, because they were scored differently": not_compared,
        "Not finished (the last metrics are shown)": [row.name for row in has_metrics],
        "Not finished, without metrics so far": [row.name for row in unfinished if row not in has_metrics],
        "Not run": [row.name for row in rows if row.state == "not run"],
    }
    for reason, names in names_by_reason.items():
        if names:
            sentences.append(f"{reason}: {', '.join(names)}.")
    return [_use_no_break_spaces(sentence) for sentence in sentences]


def _use_no_break_spaces(sentence: str) -> str:
    """Replace the spaces inside numbers, so that no line breaks there."""
    return sentence.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")


def _compare_times(rows: Sequence[TableRow]) -> list[str]:
    """Compare the time of an epoch with the paper's, in one sentence for each corpus."""
    first_rows: dict[str | None, str] = {}  # the name of the first row of each corpus
    comparisons: dict[str | None, list[str]] = {}
    for row in rows:
        ratio, paper_ratio = time_ratios(rows, row)
        if not ratio or not paper_ratio:
            continue
        if row.corpus not in first_rows:
            first_rows[row.corpus] = row.name
            continue
        comparison = f"{ratio:.2f} times as long in {row.name} (paper {paper_ratio:.2f})"
        comparisons.setdefault(row.corpus, []).append(comparison)

    sentences = []
    for corpus, first_row in first_rows.items():
        if corpus in comparisons:
            sentences.append(f"Relative to {first_row}, an epoch takes {', '.join(comparisons[corpus])}.")
    return sentences


def _name_best(rows: Sequence[TableRow], split: str) -> list[str]:
    """Name the best and the worst row of each corpus and evaluation mode."""
    metric = ranking_metric(rows)
    groups = [[row for row in group if row.mean_score(metric, split)] for group in group_rankable(rows, split)]
    has_several_corpora = len({row.scored_corpus for group in groups for row in group}) > 1
    return [_name_extremes(group, metric, split, has_several_corpora) for group in groups if group]


def _name_extremes(rows: Sequence[TableRow], metric: Metric, split: str, name_corpus: bool) -> str:
    """Name the best and the worst of some rows with the same corpus and evaluation mode."""
    split_name = "validation" if split == "valid" else "test"
    score_name = f"{split_name} {metric.name}"
    if name_corpus:
        score_name += f" on {rows[0].scored_corpus}"
    if rows[0].special_mode:
        score_name += f" with {describe_mode(rows[0].special_mode)}"

    ordered = sorted(rows, key=lambda row: metric.sign * _mean(row.mean_score(metric, split)))
    best, worst = ordered[0], ordered[-1]
    best_score = format_score(metric, best, split)
    size = f" with {best.parameter_count:,} parameters" if best.parameter_count else ""
    if len(rows) == 1:
        return f"{best.name} reaches a {score_name} of {best_score}{size}."
    worst_score = format_score(metric, worst, split)
    best_word, worst_word = ("lowest", "highest") if metric.better == "lower" else ("highest", "lowest")
    return (
        f"{best.name} has the {best_word} {score_name}, {best_score}{size}; "
        f"{worst.name} has the {worst_word}, {worst_score}."
    )


def _mean(score: Spread | None) -> float:
    """Return the mean of a score that is known to exist."""
    assert score is not None
    return score.mean


def _compare_tied_bleu(rows: Sequence[TableRow], split: str) -> list[str]:
    """Report how many parameters shared tables save, and how they change BLEU, for each row without shared tables."""
    sentences = []
    for untied in rows:
        shares_tables = any(_extra_tables(other, untied) for other in rows)
        if untied.parameter_count is None or shares_tables:
            continue
        for tied in rows:
            saved = untied.parameter_count - (tied.parameter_count or untied.parameter_count)
            if _extra_tables(untied, tied) and saved > 0:
                change = _format_bleu_change(tied.mean_score(BLEU, split), untied.mean_score(BLEU, split))
                percent = 100 * saved / untied.parameter_count
                sentences.append(
                    f"Sharing tables saves {saved:,} parameters ({percent:.0f} %) in {tied.name}, "
                    f"which differs from {untied.name} in nothing else{change}."
                )
    return sentences


def _format_bleu_change(bleu: Spread | None, baseline: Spread | None) -> str:
    """Format a difference of BLEU, with its 95 % interval (Welch's) if both rows have several seeds."""
    if not bleu or not baseline:
        return ""
    gap = bleu.mean - baseline.mean
    change = f": {format_difference(gap)} BLEU"
    if bleu.sd is None or baseline.sd is None or not bleu.sd + baseline.sd:
        return change

    variance = bleu.sd**2 / bleu.n
    baseline_variance = baseline.sd**2 / baseline.n
    gap_variance = variance + baseline_variance
    degrees_of_freedom = gap_variance**2 / (variance**2 / (bleu.n - 1) + baseline_variance**2 / (baseline.n - 1))
    half_width = float(stats.t.ppf(0.975, degrees_of_freedom)) * math.sqrt(gap_variance)
    lower = format_difference(gap - half_width)
    upper = format_difference(gap + half_width)
    return f"{change}, 95 % interval over seeds {lower} to {upper}"


def _compare_paper_bleu(rows: Sequence[TableRow]) -> list[str]:
    """Report the largest difference from the paper's BLEU."""
    rows_with_gaps = [(row, row.bleu_difference("test")) for row in rows]
    compared = [(row, gap) for row, gap in rows_with_gaps if gap is not None]
    if not compared:
        return []
    row, gap = max(compared, key=lambda pair: abs(pair[1]))
    bleu = format_points(row.mean_score(BLEU, "test"))
    paper_bleu = format_paper_points(row.paper["bleu_test"])
    return [
        f"The largest difference from the paper's test BLEU is {format_difference(gap)} "
        f"({row.name}: {bleu} against {paper_bleu})."
    ]


def _report_saved_parameters(rows: Sequence[TableRow]) -> list[str]:
    """Report how many parameters one table for both ends saves, if two rows differ in nothing else."""
    for untied in rows:
        for tied in rows:
            if len(_extra_tables(untied, tied)) != 1 or not untied.parameter_count or not tied.parameter_count:
                continue
            saved = untied.parameter_count - tied.parameter_count
            if saved > 0:
                percent = 100 * saved / untied.parameter_count
                return [
                    f"Sharing one table between the two ends saves {saved:,} parameters "
                    f"({percent:.0f} %): {untied.parameter_count:,} in {untied.name}, "
                    f"{tied.parameter_count:,} in {tied.name}, which differ in nothing else."
                ]
    return []


def _extra_tables(untied: TableRow, tied: TableRow) -> set[str]:
    """Return the word tables that only the first row has, or nothing if the rows differ in more than their tables."""
    if not untied.results or not tied.results:
        return set()
    untied_settings = distinguishing_settings(untied.results[0].settings)
    tied_settings = distinguishing_settings(tied.results[0].settings)
    extra_tables = _table_names(untied_settings) - _table_names(tied_settings)

    for key in differing_keys([untied_settings, tied_settings]):
        defines_extra_table = key.startswith("tables.") and key.split(".")[1] in extra_tables
        uses_extra_table = key.endswith(".table") and untied_settings.get(key) in extra_tables
        if not defines_extra_table and not uses_extra_table:
            return set()
    return extra_tables


def _table_names(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the word tables that the settings define, such as `words` in `tables.words.dim`."""
    return {key.split(".")[1] for key in settings if key.startswith("tables.")}


def _compare_paper(rows: Sequence[TableRow], groups: Sequence[Sequence[TableRow]]) -> list[str]:
    """Report the largest difference from the paper's perplexity, and whether the rows have the paper's order."""
    rows_with_gaps = [(row, row.relative_difference("test")) for row in rows]
    compared = [(row, gap) for row, gap in rows_with_gaps if gap is not None]
    if not compared:
        return []
    row, gap = max(compared, key=lambda pair: abs(pair[1]))
    if len(compared) == 1:
        return [f"{row.name} differs from the paper's test perplexity by {format_percent(gap)}."]

    perplexity = format_perplexity(_mean(row.comparison_perplexity("test")))
    paper_perplexity = format_perplexity(row.paper["test"])
    sentence = (
        f"The largest difference from the paper's test perplexity is {format_percent(gap)} ({row.name}: "
        f"{perplexity} against {paper_perplexity})."
    )
    compared_rows = [row for row, _ in compared]
    compared_groups = [[row for row in group if row in compared_rows] for group in groups]
    return [sentence, *_compare_order(compared_groups)]


def _compare_order(groups: Sequence[Sequence[TableRow]]) -> list[str]:
    """Report how many pairs of rows that differ by more than noise have the same order as in the paper."""
    agreements = []
    for group in groups:
        for row, other in combinations(group, 2):
            paper_gap = row.paper["test"] - other.paper["test"]
            gap = _clear_difference(row, other)
            if paper_gap and gap:
                agreements.append(gap * paper_gap > 0)
    if not agreements:
        return []
    return [
        f"{sum(agreements)} of {len(agreements)} pairs of rows that differ by more than twice the standard error over "
        "seeds have the same order as in the paper."
    ]


def _clear_difference(row: TableRow, other: TableRow) -> float | None:
    """Return the difference of two rows if it exceeds twice its standard error; None if a row has one seed."""
    score = row.comparison_perplexity("test")
    other_score = other.comparison_perplexity("test")
    if not score or not other_score or score.sd is None or other_score.sd is None:
        return None
    standard_error = math.hypot(score.sd / math.sqrt(score.n), other_score.sd / math.sqrt(other_score.n))
    gap = score.mean - other_score.mean
    return gap if abs(gap) > 2 * standard_error else None


def _report_unexpected_sizes(rows: Sequence[TableRow]) -> list[str]:
    """Report rows whose number of parameters differs from the number in the recipe."""
    sentences = []
    for row in rows:
        count, expected = row.parameter_count, row.expected_parameters
        if count and expected and count != expected:
            sentences.append(f"{row.name} has {count:,} parameters, but the recipe expects {expected:,}.")
    return sentences


def _explain_seeds(rows: Sequence[TableRow]) -> list[str]:
    """Explain the standard deviation over seeds, or warn that there is none."""
    if not rows:
        return []
    seed_counts = {len(row.records) or len(row.source_runs) for row in rows}
    if seed_counts == {1}:
        if len(rows) == 1:
            return []
        return ["Every row has one seed, so differences between rows may be noise."]
    sentence = "± is the standard deviation over seeds."
    if 1 in seed_counts:
        sentence += " A row with one seed has no standard deviation, so its differences from other rows may be noise."
    return [sentence]
