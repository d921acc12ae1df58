"""Comparison of language models by their losses, paired over blocks or documents of a text, with several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError, SettingsError
from reefknot.lab.evaluation.comparison import BLOCK, FEWEST_UNITS, Comparison, blocks, compare
from reefknot.lab.evaluation.documents import document_boundaries
from reefknot.lab.evaluation.frequency import (
    BandComparison,
    Pair,
    TokenComparison,
    TypeComparison,
    compare_by_previous,
    compare_by_target,
    compare_on_symbols,
)
from reefknot.lab.evaluation.pairing import pair
from reefknot.lab.evaluation.perplexity import word_losses
from reefknot.lab.runs.comparability import explain_in_comparison
from reefknot.lab.runs.definition import format_count_range
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks.language_model import open_texts
from reefknot.lab.tasks.requests import ComparisonRequest, System
from reefknot.lab.text.dataset import Dataset
from reefknot.storage.progress import Notify

Losses = NDArray[Any]


@dataclass(frozen=True)
class FrequencyComparison:
    """A comparison of two systems by the training frequency of tokens."""

    targets: list[TypeComparison]
    symbols: dict[str, TokenComparison]
    """Comparisons on <unk> and <eos>, which are also part of `targets`."""
    previous: list[BandComparison]

    def record(self) -> dict[str, Any]:
        """Return all bands as JSON values."""
        return {
            "target": [asdict(band) for band in self.targets],
            "symbols": {name: asdict(comparison) for name, comparison in self.symbols.items()},
            "previous": [asdict(band) for band in self.previous],
        }

    def lines(self) -> list[str]:
        """Return a table of all bands."""
        columns = f"  {'seen':>12} {'tokens':>9} {'A':>7} {'B':>7} {'B - A':>8}  {'95 % interval':<17}"
        return [
            "  loss per token by how often the target was seen in training",
            "  by type: 100 (B - A) / B of each type's loss, the mean over the types of the band",
            f"{columns} {'types':>6} {'by type':>9}",
            *(
                (
                    f"{_row(format_count_range(band.low, band.high), band)} {band.types:>6,} {_percent(band.relative)}"
                ).rstrip()
                for band in self.targets
            ),
            *([f"  {'of these:':>12}"] if self.symbols else []),
            *(_row(name, comparison).rstrip() for name, comparison in self.symbols.items()),
            "  loss per token by how often the token before was seen",
            columns.rstrip(),
            *(_row(format_count_range(band.low, band.high), band).rstrip() for band in self.previous),
        ]


@dataclass(frozen=True)
class TextComparison:
    """A comparison of one system with the first one."""

    a: System
    b: System
    result: Comparison
    bands: FrequencyComparison | None

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        result = self.result
        return {
            "perplexity_a": result.perplexity_a,
            "perplexity_b": result.perplexity_b,
            "difference": result.difference,
            "interval": list(result.interval),
            "ratio": result.ratio,
            "ratio_interval": list(result.ratio_interval),
            "seen": result.seen,
            "units": result.units,
            "of": result.loss_unit,
            "seeds": [result.seeds_a, result.seeds_b],
            "verdict": result.verdict,
        } | ({"bands": self.bands.record()} if self.bands else {})

    def lines(self) -> list[str]:
        """Return the comparison in lines for people."""
        return [
            f"B = {self.b}",
            f"  perplexity A {self.result.perplexity_a:.2f}, B {self.result.perplexity_b:.2f}",
            f"  {self.result.verdict}",
            *(self.bands.lines() if self.bands else []),
        ]


@dataclass(frozen=True)
class TextComparisons:
    """Comparisons of several systems with the first one."""

    by: str
    units: str
    """Description of the text and of the units that are resampled."""
    comparisons: list[TextComparison]

    def record(self) -> list[dict[str, Any]]:
        """Return one record per comparison."""
        return [
            {"a": str(comparison.a.path), "b": str(comparison.b.path), "by": self.by, **comparison.record()}
            for comparison in self.comparisons
        ]

    def text(self) -> str:
        """Return the systems, the units, and the result of every comparison."""
        lines = [line for comparison in self.comparisons for line in comparison.lines()]
        return "\n".join([f"A = {self.comparisons[0].a}", self.units, *lines])


@dataclass
class _Texts:
    """Opens the texts of runs when they are needed. Many comparisons need only the losses that a run has saved."""

    data: Path | None
    used: bool = False
    """Whether a text was opened."""

    def open(self, run: RunFolder) -> Dataset:
        """Return the texts of a run."""
        self.used = True
        return open_texts(run, self.data)

    def check_data_option(self) -> None:
        """Raise an error if `--data` was given but no text was opened."""
        if self.data is not None and not self.used:
            raise SettingsError(
                "--data has no effect, because this comparison needs only the losses in the run folders; leave it out"
            )


def compare_texts(systems: Sequence[System], request: ComparisonRequest, *, notify: Notify) -> TextComparisons:
    """Compare language models with the first one, by the losses that their runs have saved."""
    by = request.by or "blocks"
    _check(request, by)
    split, texts = request.split, _Texts(request.data)
    unit, (losses_a, *losses_b) = _paired_losses(systems, split, texts, notify)
    if unit == "word" and (request.bands or by == "documents"):
        remedy = "leave out --bands" if request.bands else "use --by blocks"
        raise SettingsError(f"these runs do not have the same tokens; {remedy}")
    first, *others = systems
    tokens = len(losses_a[0])
    length = BLOCK if request.block is None else request.block
    boundaries = blocks(tokens, length) if by == "blocks" else _documents(texts.open(first.runs[0]), split, tokens)
    dataset = texts.open(first.runs[0]) if request.bands else None
    texts.check_data_option()
    comparisons = [
        TextComparison(
            first,
            system,
            compare(losses_a, losses, boundaries, loss_unit=unit),
            _by_frequency(Pair(losses_a, losses, boundaries), dataset, split) if dataset else None,
        )
        for system, losses in zip(others, losses_b, strict=True)
    ]
    units = f"{split} text: {tokens:,} {unit}s in {len(boundaries) - 1:,} {by}"
    if by == "blocks" and length > boundaries[1] and len(boundaries) > 2:
        units += f" of {boundaries[1]:,}, because with {length:,} there would be fewer than {FEWEST_UNITS}"
    return TextComparisons(by, units, comparisons)


def _check(request: ComparisonRequest, by: str) -> None:
    """Raise an error if options contradict each other, before anything is opened."""
    if by not in ("blocks", "documents"):
        raise SettingsError(f"--by {by}: must be blocks or documents")
    if by == "documents" and request.block is not None:
        raise SettingsError("--block has no effect with --by documents; leave one of them out")
    if request.figure is not None and not request.bands:
        raise SettingsError("--figure has no effect without --bands; add --bands or leave --figure out")


def _paired_losses(
    systems: Sequence[System], split: str, texts: _Texts, notify: Notify
) -> tuple[str, list[list[Losses]]]:
    """Return the unit that is compared, token or word, and for each system its losses, one array per run.

    Runs with different tokens are compared by words. For this, the same words must be in all vocabularies.
    """
    losses = [_losses(system, split) for system in systems]
    if _same_tokens([run for system in systems for run in system.runs], split, texts, notify):
        return "token", losses

    def by_word(nll: Losses, run: RunFolder) -> Losses:
        dataset = texts.open(run)
        return word_losses(nll, dataset.splits[split], dataset.vocabulary)

    return "word", [
        [by_word(nll, run) for nll, run in zip(system_losses, system.runs, strict=True)]
        for system_losses, system in zip(losses, systems, strict=True)
    ]


def _losses(system: System, split: str) -> list[Losses]:
    """Return the losses of every token, one array per run."""
    losses = []
    for run in system.runs:
        scores = run.read_scores()
        if split not in scores:
            raise SettingsError(f"--split {split}: a run stores scores of {' and '.join(sorted(scores))}")
        losses.append(scores[split].numpy())
    return losses


def _same_tokens(runs: Sequence[RunFolder], split: str, texts: _Texts, notify: Notify) -> bool:
    """Return whether all runs have the same tokens; raise an error if their losses cannot be paired.

    Different windows do not prevent a comparison, because they may be what is compared. They are noted once.
    """
    first, *others = runs
    notes, same_tokens = [], True
    for run in others:
        pairing = pair(first, run, split, texts.open)
        same_tokens = same_tokens and pairing.same_tokens
        if difference := pairing.difference:
            both, reason = f"{first.path} and {run.path}", explain_in_comparison(difference, split)
            if difference.prevents:
                raise SettingsError(f"{both}: no fair comparison: {reason}")
            notes.append(f"note: {both}: {reason}")
    if notes:
        notify(notes[0])
    return same_tokens


def _documents(dataset: Dataset, split: str, tokens: int) -> NDArray[np.int64]:
    """Return the boundaries of the documents of a text."""
    if tokens != dataset.splits[split].tokens:
        raise DataError("the first token was not scored, so the scores do not line up with documents; use --by blocks")
    boundaries = document_boundaries(dataset.splits[split], dataset.vocabulary)
    if len(boundaries) - 1 < FEWEST_UNITS:
        raise DataError(
            f"the {split} text has too few documents to resample, {len(boundaries) - 1}: documents begin at "
            "first-level headings, `= Title =`, or after empty lines if there are no headings; use --by blocks"
        )
    return boundaries


def _by_frequency(losses: Pair, dataset: Dataset, split: str) -> FrequencyComparison:
    text, words = dataset.splits[split], dataset.vocabulary
    return FrequencyComparison(
        compare_by_target(losses, text, words),
        compare_on_symbols(losses, text, words),
        compare_by_previous(losses, text, words),
    )


def _row(name: str, comparison: TokenComparison) -> str:
    interval = "{:+.4f} {:+.4f}".format(*comparison.interval) if comparison.interval else "too few tokens"
    losses = f"{comparison.nll_a:>7.4f} {comparison.nll_b:>7.4f} {comparison.difference:>+8.4f}"
    return f"  {name:>12} {comparison.tokens:>9,} {losses}  {interval:<17}"


def _percent(number: float | None) -> str:
    return "" if number is None else f"{number:>+8.2f}%"
