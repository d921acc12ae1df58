"""Save the scores of an evaluation of a finished run, in RUN/evaluations/NAME.json.

Start with `save_evaluation`. RUN is the folder of a run (one training of a model), and NAME is the kind of evaluation:

    dynamic, cache, mc             dynamic evaluation, a continuous cache, Monte-Carlo dropout
    context-2560-stride-512        other evaluation windows
    beam-10-length-penalty-0.6     another search for translations

The plain scores are in RUN/result.json. `runs/result.py` defines the format of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reefknot.lab.evaluation.grid import Grid
from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.runs.changes import find_changes
from reefknot.lab.runs.environment import capture_environment
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import FORMAT, SPLITS, SavedEvaluation, Translations, TranslationScores


def save_evaluation(
    run: RunFolder,
    kind: str,
    settings: dict[str, Any],
    grid: Grid | None,
    scores: Mapping[str, Score],
    translated: Mapping[str, TranslationScores] | None = None,
) -> str:
    """Save scores, and keep the saved score of the other split if it has the same settings and source code.

    Args:
        run: The run.
        kind: Kind of evaluation, which is also the name of the file.
        settings: Settings of the evaluation.
        grid: The search that chose the settings, if there was one.
        scores: The score of each split.
        translated: BLEU and chrF of each split, for a translator.

    Returns:
        A message that says where the scores are saved, and whether they replace earlier scores.
    """
    new_evaluation = _build_evaluation(kind, settings, grid, scores, translated)
    old_evaluation = run.evaluation(kind)
    if old_evaluation is None:
        return f"saved to {run.write_evaluation(new_evaluation)}"

    # Replace the old scores if they were computed with other settings or other source code.
    origin_differences = find_changes(_origin(old_evaluation), _origin(new_evaluation))
    if origin_differences:
        differences = "; ".join(map(str, origin_differences))
        return f"saved to {run.write_evaluation(new_evaluation)}, replacing an evaluation that differs ({differences})"

    # Otherwise, keep the old score of a split that was not scored now.
    for split in SPLITS:
        if old_evaluation.score(split) and not new_evaluation.score(split):
            merged = _merge(old_evaluation, new_evaluation, split)
            return f"saved to {run.write_evaluation(merged)}, together with the {split} score that was there"
    return f"saved to {run.write_evaluation(new_evaluation)}"


def save_text_evaluation(run: RunFolder, kind: str, settings: dict[str, Any], grid: Grid | None, score: Score) -> str:
    """Save the score of a text that is not a split of the run's corpus, in RUN/texts.

    An earlier evaluation of the same text in the same mode is replaced. Returns a message with the path.
    """
    evaluation = _build_evaluation(kind, settings, grid, {}, None).replace(other=score.summary())
    return f"saved to {run.write_evaluation(evaluation)}"


def _build_evaluation(
    kind: str,
    settings: dict[str, Any],
    grid: Grid | None,
    scores: Mapping[str, Score],
    translated: Mapping[str, TranslationScores] | None,
) -> SavedEvaluation:
    """Return the content of the file. The arguments are the arguments of `save_evaluation`."""
    environment = capture_environment()
    summaries = {split: score.summary() for split, score in scores.items()}
    return SavedEvaluation(
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


def _origin(evaluation: SavedEvaluation) -> dict[str, Any]:
    """Return the values that must be equal so that the scores of two splits can be in one file."""
    return {"settings": evaluation.settings, "source_sha256": evaluation.source_sha256}


def _merge(old_evaluation: SavedEvaluation, new_evaluation: SavedEvaluation, split: str) -> SavedEvaluation:
    """Return the new evaluation with the scores of a split that only the old evaluation has."""
    translated = {}
    for split_name in SPLITS:
        translation_scores = new_evaluation.translated(split_name) or old_evaluation.translated(split_name)
        if translation_scores:
            translated[split_name] = translation_scores
    return new_evaluation.replace(
        **{split: old_evaluation.score(split)},
        search=new_evaluation.search or old_evaluation.search,
        translation=Translations(**translated) if translated else None,
    )
