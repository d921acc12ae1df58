"""RUN/evaluations/NAME.json: a finished run scored by dynamic evaluation, with a cache or by Monte-Carlo dropout, in
other windows (NAME is theirs, such as context-2560-stride-512), or a translator with another search (such as
beam-10-length-penalty-0.6). The plain figures are in result.json. `runs/result.py` defines what the file holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reefknot.lab.evaluation.grid import Grid
from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.runs.changes import differences
from reefknot.lab.runs.environment import capture
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import FORMAT, SPLITS, SavedEvaluation, Translated, Translations


def save(
    run: RunFolder,
    kind: str,
    settings: dict[str, Any],
    grid: Grid | None,
    scores: Mapping[str, Score],
    translated: Mapping[str, Translated] | None = None,
) -> str:
    """Save scores, next to the score of the other split if the same code has saved that with the same settings.

    Returns a sentence: where they are saved, and what became of earlier figures.
    """
    environment = capture()
    summaries = {split: score.summary() for split, score in scores.items()}
    new = SavedEvaluation(
        format=FORMAT,
        kind=kind,
        settings=settings,
        search=grid.summary() if grid else None,
        valid=summaries.get("valid"),
        test=summaries.get("test"),
        translation=Translations(**translated) if translated else None,
        command=environment["command"],
        commit=environment["commit"],
        dirty=environment["dirty"],
        source_sha256=environment["source_sha256"],
    )
    told, old = "", run.evaluation(kind)
    if old is not None:
        kept = [split for split in SPLITS if old.score(split) and not new.score(split)]
        changed = differences(_origin(old), _origin(new))
        if changed:
            told = f", in place of another evaluation ({'; '.join(map(str, changed))})"
        elif kept:
            new = _joined(old, new, kept[0])
            told = f", beside the {kept[0]} figure that was there"
    return f"saved to {run.write_evaluation(new)}{told}"


def _origin(evaluation: SavedEvaluation) -> dict[str, Any]:
    """What must be the same for figures of two splits to stand in one file."""
    return {"settings": evaluation.settings, "source_sha256": evaluation.source_sha256}


def _joined(old: SavedEvaluation, new: SavedEvaluation, split: str) -> SavedEvaluation:
    """The new evaluation with the figures of a split that only the old one has."""
    translated = {name: found for name in SPLITS if (found := new.translated(name) or old.translated(name))}
    return new.replace(
        **{split: old.score(split)},
        search=new.search or old.search,
        translation=Translations(**translated) if translated else None,
    )
