"""Compares models by files with the loss of every token, which `rk.hf.score_tokens` writes.

Start with `compare_score_files`, which `reefknot compare` calls if it gets such files. A system is a file, or a folder
with one file per seed. The comparison is that of `compare_texts.py`, in blocks of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.comparison import BLOCK, block_boundaries, compare
from reefknot.lab.tasks.compare_texts import TextComparison, TextComparisons
from reefknot.lab.tasks.requests import ComparisonRequest
from reefknot.storage.progress import Notify
from reefknot.storage.token_scores import SUFFIX, TokenScores, read_token_scores


@dataclass(frozen=True)
class ScoreFiles:
    """One model in a comparison: a file of scores, or a folder with one file per seed."""

    path: Path
    files: list[Path]

    def __str__(self) -> str:
        return f"{self.path} ({len(self.files)} seed{'' if len(self.files) == 1 else 's'})"


def find_score_files(path: Path) -> ScoreFiles | None:
    """Return the files of scores at a path, or None if the path is something else, such as a run folder."""
    if path.is_file() and path.suffix == SUFFIX:
        return ScoreFiles(path, [path])
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob(f"*{SUFFIX}"))
        return ScoreFiles(path, files) if files else None
    return None


def compare_score_files(
    paths: Sequence[Path], systems: Sequence[ScoreFiles | None], request: ComparisonRequest, *, notify: Notify
) -> TextComparisons:
    """Compare files of scores with the first one.

    Args:
        paths: The paths that the user gave.
        systems: The files at these paths.
        request: The options of the comparison.
        notify: Called with notes for the user.
    """
    score_systems = [system for system in systems if system is not None]
    if len(score_systems) < len(systems):
        run = next(path for path, system in zip(paths, systems, strict=True) if system is None)
        raise SettingsError(
            f"{run} is not a file of scores, but {score_systems[0].path} is; compare systems of one kind"
        )
    _check_options(request)
    scores = [[read_token_scores(file) for file in system.files] for system in score_systems]
    _check_pairs(score_systems, scores, notify)

    baseline, *others = score_systems
    baseline_losses, *other_losses = [[score.nll.numpy() for score in system] for system in scores]
    num_tokens = len(baseline_losses[0])
    boundaries = block_boundaries(num_tokens, request.block or BLOCK)
    comparisons = []
    for system, losses in zip(others, other_losses, strict=True):
        comparisons.append(TextComparison(baseline, system, compare(baseline_losses, losses, boundaries), None))
    description = f"{num_tokens:,} tokens in {len(boundaries) - 1:,} blocks"
    return TextComparisons("blocks", description, comparisons, request.split, unknown_share=None)


def _check_options(request: ComparisonRequest) -> None:
    """Raise an error if an option has no effect on files of scores."""
    unused = {
        "--split": request.split != "test",
        "--by documents": request.by not in (None, "blocks"),
        "--bands": request.bands,
        "--figure": request.figure is not None,
        "--data": request.data is not None,
    }
    for option, is_given in unused.items():
        if is_given:
            raise SettingsError(
                f"{option} has no effect on files of scores, which do not contain the text; leave it out"
            )


def _check_pairs(systems: Sequence[ScoreFiles], scores: Sequence[Sequence[TokenScores]], notify: Notify) -> None:
    """Raise an error unless all files score the same tokens. Different windows are reported as a note."""
    files = [file for system in systems for file in system.files]
    all_scores = [score for system in scores for score in system]
    first = all_scores[0]
    for file, score in zip(files, all_scores, strict=True):
        if not score.targets.equal(first.targets):
            raise SettingsError(
                f"{files[0]} and {file}: no fair comparison: they score different tokens; score the same text with the "
                "same tokenizer"
            )
        if not score.windows.equal(first.windows):
            (context, stride), (other_context, other_stride) = first.windows.tolist(), score.windows.tolist()
            notify(
                f"note: {files[0]} and {file}: different windows: context {context} and {other_context}, "
                f"stride {stride} and {other_stride}"
            )
