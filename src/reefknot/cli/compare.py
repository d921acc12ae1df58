"""`reefknot compare`: is one run better than another, or was it the text?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from reefknot.cli.options import AsJson, Data, emit

EXAMPLES = """\b
Examples:
  reefknot compare runs/demo/untied/seed0 runs/demo/tied/seed0
  reefknot compare runs/demo/untied runs/demo/tied --json          all their seeds
  reefknot compare A B --by documents --data DIR
"""


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders with a run per seed. The first is A.")],
    split: Annotated[str, typer.Option(help="valid or test.")] = "test",
    by: Annotated[
        str, typer.Option(help="Unit of resampling: blocks, or documents (parted by empty lines).")
    ] = "blocks",
    block: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 500,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs with the first: paired over blocks or documents of the text, and over seeds."""
    from reefknot.errors import SettingsError
    from reefknot.evaluation import comparison

    if len(runs) < 2:
        raise SettingsError("compare needs at least two runs")
    if by not in ("blocks", "documents"):
        raise SettingsError(f"--by {by}: must be blocks or documents")
    systems = [_scores(path, split) for path in runs]
    _refuse_other_texts(runs, systems)
    tokens = len(systems[0][0][0])
    if by == "blocks":
        boundaries = comparison.blocks(tokens, block)
    else:
        boundaries = _documents(systems[0][1], split, tokens, data)
    told: list[dict[str, Any]] = []
    lines = [f"A = {runs[0]}", f"{split} text: {tokens:,} tokens in {len(boundaries) - 1:,} {by}"]
    for path, (scores, _) in zip(runs[1:], systems[1:], strict=True):
        found = comparison.compare(systems[0][0], scores, boundaries)
        lines += [
            f"B = {path}",
            f"  perplexity A {found.perplexity_a:.2f}, B {found.perplexity_b:.2f}",
            f"  {found.verdict}",
        ]
        low, high = found.ratio_interval
        told.append(
            {
                "a": str(runs[0]),
                "b": str(path),
                "perplexity_a": found.perplexity_a,
                "perplexity_b": found.perplexity_b,
                "difference": found.difference,
                "interval": list(found.interval),
                "ratio": found.ratio,
                "ratio_interval": [low, high],
                "seen": found.seen,
                "units": found.units,
                "by": by,
                "seeds": [found.seeds_a, found.seeds_b],
                "verdict": found.verdict,
            }
        )
    emit(told, "\n".join(lines), as_json)


def _scores(path: Path, split: str) -> tuple[list[Any], Path]:
    """The losses of every token, one array per finished seed below `path`, and one of its run folders."""
    from reefknot.errors import DataError, SettingsError
    from reefknot.reports.results import collect
    from reefknot.runs.folder import RunFolder

    done = [result for result in collect([path]) if result.record is not None]
    if not done:
        raise DataError(f"{path}: training is not finished, so there is nothing to compare yet")
    if len({result.row for result in done}) > 1:
        raise SettingsError(f"{path} holds several rows; name one row's folder each")
    scores = [RunFolder.open(result.folder).read_scores() for result in done]
    if split not in scores[0]:
        raise SettingsError(f"--split {split}: a run keeps scores of {' and '.join(sorted(scores[0]))}")
    return [each[split].numpy() for each in scores], done[0].folder


def _refuse_other_texts(paths: list[Path], systems: list[tuple[list[Any], Path]]) -> None:
    """Losses can be paired only where the same tokens were scored under the same vocabulary."""
    from reefknot.errors import SettingsError
    from reefknot.runs.folder import RunFolder

    corpora = [RunFolder.open(folder).config.get("corpus") for _, folder in systems]
    for path, corpus in zip(paths, corpora, strict=True):
        if corpus != corpora[0]:
            raise SettingsError(f"{path} and {paths[0]} were scored on different texts or vocabularies")


def _documents(folder: Path, split: str, tokens: int, data: Path | None) -> Any:
    from reefknot.errors import DataError
    from reefknot.evaluation.comparison import FEWEST_UNITS
    from reefknot.evaluation.documents import document_boundaries
    from reefknot.experiments import open_run

    trained = open_run(folder)
    dataset = trained.dataset(data)
    if tokens != dataset.splits[split].tokens:
        raise DataError("the first token was not scored, so documents do not line up; use --by blocks")
    boundaries = document_boundaries(dataset.splits[split], dataset.vocabulary)
    if len(boundaries) - 1 < FEWEST_UNITS:
        raise DataError(
            f"the {split} text has {len(boundaries) - 1} documents (parted by empty lines), too few to resample; "
            "use --by blocks"
        )
    return boundaries
