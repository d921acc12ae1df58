"""Decide whether the losses of two runs can be paired, token by token or word by word.

`runs/comparability.py` decides this from the scores in the results. Results of format 1 do not describe the text, its
unknown words and the vocabulary. For these results, the texts are opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from reefknot.errors import DataError
from reefknot.lab.evaluation.perplexity import scored_text
from reefknot.lab.runs.comparability import Difference, find_difference, have_same_tokens
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.scores import TextScore
from reefknot.lab.text.dataset import Dataset


class Pairing(NamedTuple):
    """How the scores of two runs differ, and whether both runs scored the same tokens."""

    difference: Difference | None
    same_tokens: bool


def pair(first: RunFolder, other: RunFolder, split: str, open_texts: Callable[[RunFolder], Dataset]) -> Pairing:
    """Compare the texts that two finished runs were scored on.

    Args:
        first: The first run.
        other: The other run.
        split: Name of the split.
        open_texts: Function that opens the texts of a run. It is called only if a result does not describe its text.
    """
    score_a, score_b = (_score(run, split) for run in (first, other))
    if first.config.get("corpus") == other.config.get("corpus"):
        return Pairing(find_difference(score_a, score_b, paired=True), same_tokens=True)
    score_a, score_b = _with_text(score_a, split, first, open_texts), _with_text(score_b, split, other, open_texts)
    return Pairing(find_difference(score_a, score_b, paired=True), have_same_tokens(score_a, score_b))


def _score(run: RunFolder, split: str) -> TextScore:
    result = run.result
    score = result.score(split) if result else None
    if score is None:
        raise DataError(f"{run.path} has no score for the {split} text; compare finished runs of language models")
    return score


def _with_text(score: TextScore, split: str, run: RunFolder, open_texts: Callable[[RunFolder], Dataset]) -> TextScore:
    if score.text and score.text.complete:
        return score
    dataset = open_texts(run)
    text = dataset.splits[split]
    return score.replace(text=scored_text(text, text.ids, dataset.vocabulary))
