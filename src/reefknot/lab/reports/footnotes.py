"""Add footnotes to the rows of a results table: remarks on their training and on the definition of their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reefknot.lab.reports.rows import TableRow, group_comparable, score_difference
from reefknot.lab.runs.comparability import explain_in_table
from reefknot.lab.runs.loading import Result, flatten

FOOTNOTE_SIGNS = "†‡§¶"


def add_footnotes(rows: Sequence[TableRow]) -> tuple[list[TableRow], tuple[str, ...]]:
    """Add a footnote sign to the name of each row that needs a remark, and return the rows and the footnotes.

    Rows with the same remark share a sign: †, ‡, §, ¶, then ††, ‡‡ and so on.
    """
    # The first row of each comparable group is the reference of its corpus and evaluation mode.
    references = {(group[0].scored_corpus, group[0].special_mode): group[0] for group in group_comparable(rows)}
    signs_by_remark: dict[str, str] = {}
    marked_rows = []
    for row in rows:
        remark = _describe_row(row, references.get((row.scored_corpus, row.special_mode)))
        if not remark:
            marked_rows.append(row)
            continue
        repeats, index = divmod(len(signs_by_remark), len(FOOTNOTE_SIGNS))
        next_sign = FOOTNOTE_SIGNS[index] * (1 + repeats)
        sign = signs_by_remark.setdefault(remark, next_sign)
        marked_rows.append(replace(row, name=f"{row.name} {sign}"))
    return marked_rows, tuple(f"{sign} {remark}" for remark, sign in signs_by_remark.items())


def _describe_row(row: TableRow, reference: TableRow | None) -> str:
    """Return the remarks on a row, compared with the reference row of its corpus and mode, as one string."""
    remarks = _training_remarks(row)
    if row.score and not row.has_words:
        remarks.append("perplexity per token, because spaces do not separate the words of this text")
    elif row.score and row.uses_subwords:
        remarks.append(
            "perplexity per word: the probability of a word is the product of the probabilities of its sub-words "
            f"(on average, {row.score.tokens_per_word:.1f} sub-words per word)"
        )
    if reference:
        difference = score_difference(row, reference)
        if difference:
            prefix = ""
            if difference.prevents:
                prefix = "perplexity not comparable: " if row.translation_scores("test") else "not comparable: "
            remarks.append(prefix + explain_in_table(difference, reference.name))
    return "; ".join(remarks)


def _training_remarks(row: TableRow) -> list[str]:
    """Return remarks on the starting weights and on early stopping."""
    remarks = []
    if row.results and row.starting_row:
        remarks.append(f"began with the best weights of {row.starting_row}{_not_improved_remark(row.results)}")
    if any(result.record and result.epochs < (result.record.training.epochs or 0) for result in row.results):
        rule = flatten(row.results[0].settings).get("training.stop.rule")
        remarks.append(f"stopped early, by the {rule} rule" if rule else "stopped early")
    return remarks


def _not_improved_remark(results: Sequence[Result]) -> str:
    """Return a remark if runs did not improve on the weights that they started from."""
    unimproved_count = sum(result.best_epoch == 0 for result in results)
    if not unimproved_count:
        return ""
    seeds = "" if unimproved_count == len(results) else f"with {unimproved_count} of {len(results)} seeds, "
    return f"; {seeds}no epoch improved on them, so their scores are shown"
