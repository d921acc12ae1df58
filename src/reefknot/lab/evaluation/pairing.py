"""Decide whether the losses of two runs can be compared, token by token or word by word.

Start with `pair_scores`. The rules are in `runs/comparability.py`, which reads only the saved results of the runs. Old
results (format 1) do not describe the text, its unknown words and the vocabulary. For these results, the texts are
opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from reefknot.errors import DataError
from reefknot.lab.evaluation.perplexity import describe_text
from reefknot.lab.runs.comparability import Difference, find_difference, have_same_tokens
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.scores import TextScore
from reefknot.lab.text.dataset import Dataset


class Pairing(NamedTuple):
    """Whether the losses of two runs can be compared."""

    difference: Difference | None
    """How the two runs were scored differently; None if they were scored in the same way."""
    same_tokens: bool
    """Whether both runs scored the same tokens. If not, they can be compared word by word."""


def pair_scores(run_a: RunFolder, run_b: RunFolder, split: str, open_texts: Callable[[RunFolder], Dataset]) -> Pairing:
    """Compare how two finished runs were scored on a split, and on which text.

    Args:
        run_a: A finished run.
        run_b: Another finished run.
        split: Name of the split.
        open_texts: Function that opens the texts of a run. It is called only if a result does not describe its text.
    """
    score_a = _score_of_run(run_a, split)
    score_b = _score_of_run(run_b, split)
    has_same_corpus = run_a.config.get("corpus") == run_b.config.get("corpus")
    if has_same_corpus:
        same_tokens = True
    else:
        score_a = _add_text(score_a, split, run_a, open_texts)
        score_b = _add_text(score_b, split, run_b, open_texts)
        same_tokens = have_same_tokens(score_a, score_b)
    return Pairing(find_difference(score_a, score_b, paired=True), same_tokens)


def _score_of_run(run: RunFolder, split: str) -> TextScore:
    """Return the saved score of a run on a split. Raise an error if there is none."""
    result = run.result
    score = None
    if result is not None:
        score = result.score(split)
    if score is None:
        raise DataError(f"{run.path} has no score for the {split} text; compare finished runs of language models")
    return score


def _add_text(score: TextScore, split: str, run: RunFolder, open_texts: Callable[[RunFolder], Dataset]) -> TextScore:
    """Return the score with a complete description of its text."""
    if score.text and score.text.complete:
        return score
    dataset = open_texts(run)
    opened_split = dataset.splits[split]
    text = describe_text(opened_split, opened_split.ids, dataset.vocabulary)
    return score.replace(text=text)
