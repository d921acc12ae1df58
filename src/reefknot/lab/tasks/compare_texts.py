"""Compares language models by their losses on the same text, with confidence intervals from paired resampling.

`compare_texts` is the entry point. A system is one model trained with several seeds; the first system is the baseline
A, and every other system B is compared with it. Units of the text (blocks of tokens, or documents) are resampled, and a
unit has the losses of both systems: so the comparison is paired. It reads the losses that training has saved, one per
token. `--bands` also compares by band (a group of words of similar training frequency).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError, SettingsError
from reefknot.lab.evaluation.comparison import BLOCK, FEWEST_UNITS, Comparison, block_boundaries, compare
from reefknot.lab.evaluation.documents import document_boundaries
from reefknot.lab.evaluation.frequency import (
    BandComparison,
    PairedLosses,
    TokenComparison,
    TypeComparison,
    compare_by_previous,
    compare_by_target,
    compare_on_symbols,
)
from reefknot.lab.evaluation.pairing import pair_scores
from reefknot.lab.evaluation.perplexity import word_losses
from reefknot.lab.runs.comparability import explain_in_comparison
from reefknot.lab.runs.definition import format_count_range
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks.language_model import open_texts
from reefknot.lab.tasks.requests import ComparisonRequest, System
from reefknot.lab.text.dataset import Dataset
from reefknot.storage.progress import Notify

Losses = NDArray[Any]
"""The loss of every token, or of every word, of a text."""


@dataclass(frozen=True)
class FrequencyComparison:
    """A comparison of two systems by the training frequency of tokens."""

    targets: list[TypeComparison]
    """Comparisons by the frequency of the predicted token."""
    symbols: dict[str, TokenComparison]
    """Comparisons on <unk> and <eos>, which are also part of `targets`."""
    previous: list[BandComparison]
    """Comparisons by the frequency of the token before the predicted token."""

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
        lines = [
            "  loss per token by how often the target was seen in training",
            "  by type: 100 (B - A) / B of each type's loss, the mean over the types of the band",
            f"{columns} {'types':>6} {'by type':>9}",
        ]
        for band in self.targets:
            line = _format_line(format_count_range(band.low, band.high), band)
            lines.append(f"{line} {band.types:>6,} {_format_percent(band.relative)}".rstrip())
        if self.symbols:
            lines.append(f"  {'of these:':>12}")
        lines += [_format_line(name, comparison).rstrip() for name, comparison in self.symbols.items()]
        lines += ["  loss per token by how often the token before was seen", columns.rstrip()]
        lines += [_format_line(format_count_range(band.low, band.high), band).rstrip() for band in self.previous]
        return lines


@dataclass(frozen=True)
class TextComparison:
    """A comparison of one system with the first one."""

    a: System
    """The first system, which is the baseline."""
    b: System
    result: Comparison
    bands: FrequencyComparison | None
    """The comparison by training frequency, if it was requested."""

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
            "seen": result.is_significant,
            "units": result.units,
            "of": result.loss_unit,
            "seeds": [result.seeds_a, result.seeds_b],
            "verdict": result.verdict,
        } | ({"bands": self.bands.record()} if self.bands else {})

    def lines(self) -> list[str]:
        """Return the comparison as readable lines."""
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
    """The unit that is resampled: blocks or documents."""
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
class _TextOpener:
    """Opens the texts of runs when they are needed. Many comparisons need only the losses that a run has saved."""

    data: Path | None
    has_opened: bool = False
    """Whether a text was opened."""

    def open(self, run: RunFolder) -> Dataset:
        """Return the texts of a run."""
        self.has_opened = True
        return open_texts(run, self.data)

    def check_data_option(self) -> None:
        """Raise an error if `--data` was given but no text was opened."""
        if self.data is not None and not self.has_opened:
            raise SettingsError(
                "--data has no effect, because this comparison needs only the losses in the run folders; leave --data "
                "out"
            )


def compare_texts(systems: Sequence[System], request: ComparisonRequest, *, notify: Notify) -> TextComparisons:
    """Compare language models with the first one, by the losses that their runs have saved."""
    resample_by = request.by or "blocks"
    _check_options(request, resample_by)
    split, opener = request.split, _TextOpener(request.data)
    loss_unit, (baseline_losses, *other_losses) = _pair_losses(systems, split, opener, notify)
    if loss_unit == "word":
        _check_word_options(request, resample_by)
    baseline, *other_systems = systems
    baseline_run = baseline.runs[0]
    tokens = len(baseline_losses[0])
    block_length = BLOCK if request.block is None else request.block
    if resample_by == "blocks":
        boundaries = block_boundaries(tokens, block_length)
    else:
        boundaries = _document_boundaries(opener.open(baseline_run), split, tokens)
    band_dataset = opener.open(baseline_run) if request.bands else None
    opener.check_data_option()
    comparisons = []
    for system, losses in zip(other_systems, other_losses, strict=True):
        result = compare(baseline_losses, losses, boundaries, loss_unit=loss_unit)
        bands = None
        if band_dataset:
            bands = _compare_by_frequency(PairedLosses(baseline_losses, losses, boundaries), band_dataset, split)
        comparisons.append(TextComparison(baseline, system, result, bands))
    units = f"{split} text: {tokens:,} {loss_unit}s in {len(boundaries) - 1:,} {resample_by}"
    if resample_by == "blocks" and block_length > boundaries[1] and len(boundaries) > 2:
        # `block_boundaries` has made the blocks shorter.
        units += f" of {boundaries[1]:,}, because with {block_length:,} there would be fewer than {FEWEST_UNITS}"
    return TextComparisons(resample_by, units, comparisons)


def _check_options(request: ComparisonRequest, resample_by: str) -> None:
    """Raise an error if options contradict each other, before anything is opened."""
    if resample_by not in ("blocks", "documents"):
        raise SettingsError(f"--by {resample_by}: must be blocks or documents")
    if resample_by == "documents" and request.block is not None:
        raise SettingsError("--block has no effect with --by documents; leave one of them out")
    if request.figure is not None and not request.bands:
        raise SettingsError("--figure has no effect without --bands; add --bands or leave --figure out")


def _check_word_options(request: ComparisonRequest, resample_by: str) -> None:
    """Raise an error if an option needs runs with the same tokens, but the runs can only be compared by words."""
    if request.bands or resample_by == "documents":
        remedy = "leave out --bands" if request.bands else "use --by blocks"
        raise SettingsError(f"these runs do not have the same tokens; {remedy}")


def _pair_losses(
    systems: Sequence[System], split: str, opener: _TextOpener, notify: Notify
) -> tuple[str, list[list[Losses]]]:
    """Return the unit that is compared, token or word, and for each system its losses, one array per run.

    Runs with different tokens are compared by words. For this, the same words must be in all vocabularies.
    """
    token_losses = [_read_losses(system, split) for system in systems]
    if _have_same_tokens([run for system in systems for run in system.runs], split, opener, notify):
        return "token", token_losses
    losses = []
    for system, system_losses in zip(systems, token_losses, strict=True):
        run_losses = []
        for run, nll in zip(system.runs, system_losses, strict=True):
            dataset = opener.open(run)
            run_losses.append(word_losses(nll, dataset.splits[split], dataset.vocabulary))
        losses.append(run_losses)
    return "word", losses


def _read_losses(system: System, split: str) -> list[Losses]:
    """Return the losses of every token, one array per run."""
    losses = []
    for run in system.runs:
        scores = run.read_scores()
        if split not in scores:
            raise SettingsError(f"--split {split}: a run stores scores of {' and '.join(sorted(scores))}")
        losses.append(scores[split].numpy())
    return losses


def _have_same_tokens(runs: Sequence[RunFolder], split: str, opener: _TextOpener, notify: Notify) -> bool:
    """Return whether all runs have the same tokens; raise an error if their losses cannot be paired.

    Different windows do not prevent a comparison, because they may be what is compared. They are noted once.
    """
    baseline_run, *other_runs = runs
    notes, have_same_tokens = [], True
    for run in other_runs:
        pairing = pair_scores(baseline_run, run, split, opener.open)
        have_same_tokens = have_same_tokens and pairing.same_tokens
        difference = pairing.difference
        if difference:
            paths, reason = f"{baseline_run.path} and {run.path}", explain_in_comparison(difference, split)
            if difference.prevents:
                raise SettingsError(f"{paths}: no fair comparison: {reason}")
            notes.append(f"note: {paths}: {reason}")
    if notes:
        notify(notes[0])
    return have_same_tokens


def _document_boundaries(dataset: Dataset, split: str, tokens: int) -> NDArray[np.int64]:
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


def _compare_by_frequency(losses: PairedLosses, dataset: Dataset, split: str) -> FrequencyComparison:
    text, vocabulary = dataset.splits[split], dataset.vocabulary
    return FrequencyComparison(
        compare_by_target(losses, text, vocabulary),
        compare_on_symbols(losses, text, vocabulary),
        compare_by_previous(losses, text, vocabulary),
    )


def _format_line(name: str, comparison: TokenComparison) -> str:
    interval = "{:+.4f} {:+.4f}".format(*comparison.interval) if comparison.interval else "too few tokens"
    losses = f"{comparison.nll_a:>7.4f} {comparison.nll_b:>7.4f} {comparison.difference:>+8.4f}"
    return f"  {name:>12} {comparison.tokens:>9,} {losses}  {interval:<17}"


def _format_percent(percent: float | None) -> str:
    return "" if percent is None else f"{percent:>+8.2f}%"
