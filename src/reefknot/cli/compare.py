"""`reefknot compare`: is one run better than another, or was it the text?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.cli.options import AsJson, Data, emit

if TYPE_CHECKING:
    from reefknot.runs.folder import RunFolder

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
    systems = [_system(path) for path in runs]
    of = "word" if _cut_differently(systems) else "token"
    _refuse_other_texts(systems, same_tokens=of == "token")
    if of == "word" and by == "documents":
        raise SettingsError("--by documents: these runs cut words into pieces in different ways; use --by blocks")
    scores = [system.scores(split) for system in systems]
    if of == "word":
        scores = _by_words(systems, scores, split, data)
    first, *others = systems
    scores_a, *scores_b = scores
    tokens = len(scores_a[0])
    if by == "blocks":
        boundaries = comparison.blocks(tokens, block)
    else:
        boundaries = _documents(first.runs[0], split, tokens, data)
    told: list[dict[str, Any]] = []
    lines = [f"A = {first}", f"{split} text: {tokens:,} {of}s in {len(boundaries) - 1:,} {by}"]
    for system, scores_of_b in zip(others, scores_b, strict=True):
        found = comparison.compare(scores_a, scores_of_b, boundaries, of=of)
        lines += [
            f"B = {system}",
            f"  perplexity A {found.perplexity_a:.2f}, B {found.perplexity_b:.2f}",
            f"  {found.verdict}",
        ]
        low, high = found.ratio_interval
        told.append(
            {
                "a": str(first.path),
                "b": str(system.path),
                "perplexity_a": found.perplexity_a,
                "perplexity_b": found.perplexity_b,
                "difference": found.difference,
                "interval": list(found.interval),
                "ratio": found.ratio,
                "ratio_interval": [low, high],
                "seen": found.seen,
                "units": found.units,
                "by": by,
                "of": of,
                "seeds": [found.seeds_a, found.seeds_b],
                "verdict": found.verdict,
            }
        )
    emit(told, "\n".join(lines), as_json)


@dataclass(frozen=True)
class _System:
    """A or B: the finished runs below a path, which differ in nothing but the seed."""

    path: Path
    runs: list[RunFolder]
    seeds: int
    """Those that are not finished included."""

    def __str__(self) -> str:
        count = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        return f"{self.path} ({count if len(self.runs) == self.seeds else f'{len(self.runs)} of {count} finished'})"

    def scores(self, split: str) -> list[Any]:
        """The losses of every token, one array per run."""
        from reefknot.errors import SettingsError

        losses = []
        for run in self.runs:
            scores = run.read_scores()
            if split not in scores:
                raise SettingsError(f"--split {split}: a run keeps scores of {' and '.join(sorted(scores))}")
            losses.append(scores[split].numpy())
        return losses


def _system(path: Path) -> _System:
    from reefknot.errors import DataError, SettingsError
    from reefknot.reports.results import collect, group
    from reefknot.runs.folder import RunFolder

    groups = group(collect([path]))
    if len(groups) > 1:
        raise SettingsError(
            f"{path} holds runs that differ in more than the seed: {'; '.join(groups)}; name the folders of one each"
        )
    (results,) = groups.values()
    finished = [result for result in results if result.record is not None]
    if not finished:
        raise DataError(f"{path}: training is not finished, so there is nothing to compare yet")
    folders = {result.seed: result.folder for result in finished}
    for result in finished:
        if result.folder != folders[result.seed]:
            raise SettingsError(
                f"{result.folder} and {folders[result.seed]} are the same seed, {result.seed}, twice; leave one out"
            )
    runs = [RunFolder.open(folder) for folder in folders.values()]
    return _System(path, runs, seeds=len({result.seed for result in results}))


def _cut_differently(systems: list[_System]) -> bool:
    """Whether the runs' tokens are other pieces of the words."""
    from reefknot.reports.results import flatten

    runs = [run for system in systems for run in system.runs]
    return len({flatten(run.config).get("settings.vocabulary.bpe.merges") for run in runs}) > 1


def _by_words(systems: list[_System], scores: list[list[Any]], split: str, data: Path | None) -> list[list[Any]]:
    """Losses of words from losses of tokens. They can be paired where the same words were scored as themselves."""
    from reefknot.errors import SettingsError
    from reefknot.evaluation.perplexity import word_losses
    from reefknot.experiments import open_texts

    opened = [[open_texts(run, data) for run in system.runs] for system in systems]
    facts = [
        (each.hashes, each.vocabulary.eos is None, each.splits[split].unknown) for texts in opened for each in texts
    ]
    if any(fact != facts[0] for fact in facts):
        raise SettingsError("the runs were scored on different texts, line ends or unknown words: no fair comparison")
    return [
        [word_losses(nll, each.splits[split], each.vocabulary) for nll, each in zip(losses, texts, strict=True)]
        for losses, texts in zip(scores, opened, strict=True)
    ]


def _refuse_other_texts(systems: list[_System], same_tokens: bool) -> None:
    """Losses of tokens can be paired only under the same vocabulary, and any losses only if scored in the same way."""
    from reefknot.errors import SettingsError
    from reefknot.reports.results import flatten

    first, *others = [run for system in systems for run in system.runs]
    expected = flatten(first.config)
    for run in others:
        config = flatten(run.config)
        if same_tokens and config.get("corpus") != expected.get("corpus"):
            raise SettingsError(f"{run.path} and {first.path} were scored on different texts or vocabularies")
        here, there = (each.get("settings.evaluation.streams") for each in (config, expected))
        if here != there:
            raise SettingsError(f"{run.path} was scored in {here} streams, {first.path} in {there}: no fair comparison")


def _documents(run: RunFolder, split: str, tokens: int, data: Path | None) -> Any:
    from reefknot.errors import DataError
    from reefknot.evaluation.comparison import FEWEST_UNITS
    from reefknot.evaluation.documents import document_boundaries
    from reefknot.experiments import open_texts

    dataset = open_texts(run, data)
    if tokens != dataset.splits[split].tokens:
        raise DataError("the first token was not scored, so documents do not line up; use --by blocks")
    boundaries = document_boundaries(dataset.splits[split], dataset.vocabulary)
    if len(boundaries) - 1 < FEWEST_UNITS:
        raise DataError(
            f"the {split} text has {len(boundaries) - 1} documents (parted by empty lines), too few to resample; "
            "use --by blocks"
        )
    return boundaries
