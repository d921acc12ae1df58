"""Whether the losses of two runs may be held against each other, token by token or word by word."""

from __future__ import annotations

import numpy as np

from reefknot.lab.evaluation.perplexity import word_losses
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.text.dataset import Dataset


def same_tokens(a: Dataset, b: Dataset, split: str) -> bool:
    """Whether the targets of two runs are the same; inputs may differ, as of a run that keeps spellings."""
    return a.vocabulary.words == b.vocabulary.words and np.array_equal(a.splits[split].ids, b.splits[split].ids)


def why_unfair(a: Dataset, b: Dataset, split: str) -> str | None:
    """Why losses on two texts cannot be paired, and what to do; None where they can be."""
    if a.hashes[split] != b.hashes[split]:
        return f"their {split} texts differ; compare runs of one corpus"
    if (a.vocabulary.eos is None) != (b.vocabulary.eos is None):
        return "one scores the ends of lines, the other does not; compare runs with the same vocabulary.end_of_line"
    unknown_a, unknown_b = (
        word_losses(each.splits[split].ids == each.vocabulary.unk, each.splits[split], each.vocabulary) > 0
        for each in (a, b)
    )
    if not np.array_equal(unknown_a, unknown_b):
        return (
            f"{unknown_a.sum():,} unknown words, scored as <unk>, against {unknown_b.sum():,}; "
            "compare runs whose vocabularies know the same words (vocabulary.min_count, max_size, bpe)"
        )
    return None


def other_streams(a: RunFolder, b: RunFolder) -> str | None:
    """Why the losses of two runs cannot be paired, where it is that they were read in more streams or fewer: more leave
    less context, and so make a loss higher."""
    here, there = (run.config.get("settings", {}).get("evaluation", {}).get("streams", 1) for run in (a, b))
    return f"scored in {here} and in {there} streams; train both with one evaluation.streams" if here != there else None


def other_windows(a: RunFolder, b: RunFolder, split: str) -> str | None:
    """How the context of their losses differs, where that is by the windows that were computed afresh."""
    here, there = ((run.result or {}).get(split, {}).get("windows", "one stream") for run in (a, b))
    return f"scored with other context, {here} and {there}" if here != there else None
