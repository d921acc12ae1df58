"""RUN/evaluations/KIND.json: what a finished run gives when it is scored by dynamic evaluation, with a cache, by
Monte-Carlo dropout, or in other windows (KIND is their name then, such as context-2560-stride-512), or what a
translator gives with another search (such as beam-10-length-penalty-0.6). The plain figures are in result.json.

    format, kind
    settings                                 what was used, whether given, searched for or by default
    search                                   what was tried on the validation text, if it was
    valid, test                              perplexity, nll, tokens, definition of each, where it was scored; of a
                                             translator also what its translations are worth
    command, commit, dirty, source_sha256    of the command that wrote the file
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reefknot.lab.evaluation.grid import Grid
from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.runs.environment import capture
from reefknot.lab.runs.folder import RunFolder, differences

EVALUATION_FORMAT = 1
SPLITS = ("valid", "test")
"""The texts whose figures are kept."""


def save(
    run: RunFolder,
    kind: str,
    settings: dict[str, Any],
    grid: Grid | None,
    scores: Mapping[str, Score],
    figures: Mapping[str, dict[str, Any]] | None = None,
) -> str:
    """Write the scores down, beside that of the other text where the same code has scored it with the same settings.
    `figures` are more of each text.

    Returns a sentence: where they are, and what has become of figures that were there.
    """
    environment = capture()
    new: dict[str, Any] = {
        "format": EVALUATION_FORMAT,
        "kind": kind,
        "settings": settings,
        "search": grid.record() if grid else None,
        **{split: _figures(score) | (figures or {}).get(split, {}) for split, score in scores.items()},
        **{key: environment[key] for key in ("command", "commit", "dirty", "source_sha256")},
    }
    told, old = "", run.evaluation(kind)
    if old is not None:
        same = ("format", "settings", "source_sha256")
        changed = differences(*({key: each.get(key) for key in same} for each in (old, new)))
        kept = [split for split in SPLITS if split in old and split not in new]
        if changed:
            told = f", in place of another evaluation ({'; '.join(changed)})"
        elif kept:
            new |= {split: old[split] for split in kept} | {"search": new["search"] or old.get("search")}
            told = f", beside the {kept[0]} figure that was there"
    return f"saved to {run.write_evaluation(kind, new)}{told}"


def _figures(score: Score) -> dict[str, Any]:
    told = score.summary()
    return {key: told[key] for key in ("perplexity", "nll", "tokens", "definition")}
