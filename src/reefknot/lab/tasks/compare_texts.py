"""Compares language models by their losses on the same text, with confidence intervals from paired resampling.

Start with `compare_texts`, which `reefknot compare` calls. A system is one model, trained with one or more seeds. The
first system is the baseline A, and every other system B is compared with it. The losses, one per token, were saved by
training.

Resampling draws units of the text (blocks of tokens, or documents) with replacement. It is paired: a unit always comes
with the losses of both systems. `--bands` also compares by band, a group of words of similar training frequency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

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
from reefknot.lab.runs.definition import describe_unknown_share, format_count_range, warn_of_unknown_words
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks.language_model import open_texts
from reefknot.lab.tasks.other_text import Losses, SystemLosses, TokenText, describe_difference, score_other_text
from reefknot.lab.tasks.requests import ComparisonRequest, System
from reefknot.lab.text.dataset import Dataset
from reefknot.storage.progress import Notify


def compare_texts(systems: Sequence[System], request: ComparisonRequest, *, notify: Notify) -> TextComparisons:
    """Compare language models with the first one, by the losses that their runs have saved or, on another text, now."""
    resample_by = request.by or "blocks"
    _check_options(request, resample_by)

    # Read or compute the losses.
    opener = _TextOpener(request.data)
    if request.text is None:
        losses = _read_saved_losses(systems, request.split, opener, notify)
    else:
        losses = score_other_text(systems, request, notify)
    if losses.loss_unit == "word":
        _check_word_options(request, resample_by)
    baseline_losses, *other_losses = losses.by_system

    # Divide the text into the units that are resampled.
    baseline, *other_systems = systems
    num_losses = len(baseline_losses[0])
    block_length = BLOCK if request.block is None else request.block
    baseline_text = losses.open_text() if resample_by == "documents" or request.bands else None
    if resample_by == "blocks":
        boundaries = block_boundaries(num_losses, block_length)
    else:
        assert baseline_text is not None
        boundaries = _document_boundaries(baseline_text, num_losses)

    # Compare every other system with the baseline.
    opener.check_data_option()
    comparisons = []
    for system, system_losses in zip(other_systems, other_losses, strict=True):
        result = compare(baseline_losses, system_losses, boundaries, loss_unit=losses.loss_unit)
        bands = None
        if request.bands:
            assert baseline_text is not None
            paired_losses = PairedLosses(baseline_losses, system_losses, boundaries)
            bands = _compare_by_frequency(paired_losses, baseline_text)
        comparisons.append(TextComparison(baseline, system, result, bands))

    num_units = len(boundaries) - 1
    description = f"{losses.name} text: {num_losses:,} {losses.loss_unit}s in {num_units:,} {resample_by}"
    if resample_by == "blocks" and block_length > boundaries[1] and num_units > 1:
        # `block_boundaries` has made the blocks shorter.
        description += f" of {boundaries[1]:,}, because with {block_length:,} there would be fewer than {FEWEST_UNITS}"
    unknown_share = losses.score.unknown_share if losses.score else None
    subwords = losses.score is not None and losses.score.uses_subwords
    return TextComparisons(resample_by, description, comparisons, losses.name, unknown_share, subwords)


def _check_options(request: ComparisonRequest, resample_by: str) -> None:
    """Raise an error if options contradict each other, before anything is opened."""
    request.check_other_text()
    if request.text is None and request.device != "auto":
        raise SettingsError("--device has no effect without --text, because training has saved the losses")
    if request.text is not None and request.data is not None:
        raise SettingsError("--data has no effect with --text, which names the text; leave --data out")
    if resample_by not in ("blocks", "documents"):
        raise SettingsError(f"--by {resample_by}: must be blocks or documents")
    if resample_by == "documents" and request.block is not None:
        raise SettingsError("--block has no effect with --by documents; leave one of them out")
    if request.figure is not None and not request.bands:
        raise SettingsError("--figure has no effect without --bands; add --bands or leave --figure out")


def _check_word_options(request: ComparisonRequest, resample_by: str) -> None:
    """Raise an error if an option needs runs with the same tokens, but the runs can only be compared by words."""
    if request.bands:
        raise SettingsError("these runs do not have the same tokens; leave out --bands")
    if resample_by == "documents":
        raise SettingsError("these runs do not have the same tokens; use --by blocks")


# -- reading the losses ------------------------------------------------------------------------------------------------


@dataclass
class _TextOpener:
    """Opens the texts of runs when they are needed. Many comparisons need only the losses that a run has saved."""

    data_folder: Path | None
    """The folder that `--data` names."""
    has_opened: bool = False
    """Whether a text was opened."""

    def open(self, run: RunFolder) -> Dataset:
        """Return the texts of a run."""
        self.has_opened = True
        return open_texts(run, self.data_folder)

    def open_split(self, run: RunFolder, split: str) -> TokenText:
        """Return one split of the texts of a run."""
        dataset = self.open(run)
        return TokenText(dataset.splits[split], dataset.vocabulary)

    def check_data_option(self) -> None:
        """Raise an error if `--data` was given but no text was opened."""
        if self.data_folder is not None and not self.has_opened:
            raise SettingsError(
                "--data has no effect, because this comparison needs only the losses in the run folders; leave --data "
                "out"
            )


def _read_saved_losses(systems: Sequence[System], split: str, opener: _TextOpener, notify: Notify) -> SystemLosses:
    """Return the losses that runs have saved, per token if the runs have the same tokens, and otherwise per word.

    Losses can be compared by words only if the same words are in all vocabularies.
    """
    token_losses = [_read_losses(system, split) for system in systems]
    all_runs = [run for system in systems for run in system.runs]
    baseline_run = all_runs[0]
    score = baseline_run.result.score(split) if baseline_run.result else None
    open_text = partial(opener.open_split, baseline_run, split)
    if _have_same_tokens(all_runs, split, opener, notify):
        return SystemLosses(split, "token", token_losses, score, open_text)

    losses_by_system = []
    for system, system_losses in zip(systems, token_losses, strict=True):
        run_losses = []
        for run, nll in zip(system.runs, system_losses, strict=True):
            run_losses.append(word_losses(nll, *opener.open_split(run, split)))
        losses_by_system.append(run_losses)
    return SystemLosses(split, "word", losses_by_system, score, open_text)


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

    Different windows do not prevent a comparison, because they may be what is compared. The first such difference is
    printed as a note.
    """
    baseline_run, *other_runs = runs
    notes = []
    have_same_tokens = True
    for run in other_runs:
        pairing = pair_scores(baseline_run, run, split, opener.open)
        if not pairing.same_tokens:
            have_same_tokens = False
        if pairing.difference:
            notes.append(describe_difference(pairing.difference, baseline_run, run, split))
    if notes:
        notify(notes[0])
    return have_same_tokens


# -- units and bands ---------------------------------------------------------------------------------------------------


def _document_boundaries(text: TokenText, num_tokens: int) -> NDArray[np.int64]:
    """Return the positions at which the documents of a text begin, and the end of the text.

    Args:
        text: The text.
        num_tokens: Number of tokens that have a loss.
    """
    split = text.split
    if num_tokens != split.tokens:
        raise DataError("the first token was not scored, so the scores do not line up with documents; use --by blocks")
    boundaries = document_boundaries(split, text.vocabulary)
    num_documents = len(boundaries) - 1
    if num_documents < FEWEST_UNITS:
        raise DataError(
            f"the {split.name} text has too few documents to resample, {num_documents}: documents begin at "
            "first-level headings, `= Title =`, or after empty lines if there are no headings; use --by blocks"
        )
    return boundaries


def _compare_by_frequency(losses: PairedLosses, text: TokenText) -> FrequencyComparison:
    """Compare two systems by the training frequency of the predicted token, and of the token before it."""
    return FrequencyComparison(
        targets=compare_by_target(losses, text.split, text.vocabulary),
        symbols=compare_on_symbols(losses, text.split, text.vocabulary),
        previous=compare_by_previous(losses, text.split, text.vocabulary),
    )


# -- the answer --------------------------------------------------------------------------------------------------------


class NamedSystem(Protocol):
    """A system as the answer names it: by its path, and by a description with the number of seeds (`str`)."""

    @property
    def path(self) -> Path:
        """Where the system is stored."""


@dataclass(frozen=True)
class TextComparisons:
    """Comparisons of several systems with the first one."""

    resample_by: str
    """The unit that is resampled: blocks or documents."""
    description: str
    """Description of the text and of the units that are resampled."""
    comparisons: list[TextComparison]
    split: str
    """Name of the text."""
    unknown_share: float | None
    """Share of unknown words in the text, which are the same for all systems; None if it was not recorded."""
    subwords: bool = False
    """Whether the tokens of the baseline are sub-words."""

    def record(self) -> list[dict[str, Any]]:
        """Return one record per comparison."""
        records = []
        for comparison in self.comparisons:
            paths = {"a": str(comparison.baseline.path), "b": str(comparison.system.path)}
            text = {"by": self.resample_by, "unknown_share": self.unknown_share}
            records.append({**paths, **text, **comparison.record()})
        return records

    def text(self) -> str:
        """Return the systems, the units, and the result of every comparison."""
        baseline = self.comparisons[0].baseline
        lines = [f"A = {baseline}", f"{self.description}; {describe_unknown_share(self.unknown_share)}"]
        warning = warn_of_unknown_words(self.unknown_share, self.split, subwords=self.subwords)
        if warning:
            lines.append(warning)
        for comparison in self.comparisons:
            lines += comparison.lines()
        return "\n".join(lines)


@dataclass(frozen=True)
class TextComparison:
    """A comparison of one system with the baseline."""

    baseline: NamedSystem
    """The first system. It is called A in the output."""
    system: NamedSystem
    """The other system. It is called B in the output."""
    result: Comparison
    bands: FrequencyComparison | None
    """The comparison by training frequency, if it was requested."""

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        result = self.result
        record: dict[str, Any] = {
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
        }
        if self.bands:
            record["bands"] = self.bands.record()
        return record

    def lines(self) -> list[str]:
        """Return the comparison as readable lines."""
        lines = [
            f"B = {self.system}",
            f"  perplexity A {self.result.perplexity_a:.2f}, B {self.result.perplexity_b:.2f}",
            f"  {self.result.verdict}",
        ]
        if self.bands:
            lines += self.bands.lines()
        return lines


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
        for name, comparison in self.symbols.items():
            lines.append(_format_line(name, comparison).rstrip())

        lines += ["  loss per token by how often the token before was seen", columns.rstrip()]
        for previous_band in self.previous:
            line = _format_line(format_count_range(previous_band.low, previous_band.high), previous_band)
            lines.append(line.rstrip())
        return lines


def _format_line(name: str, comparison: TokenComparison) -> str:
    """Return one line of the table: a name or a range of counts, and the losses of both systems."""
    if comparison.interval:
        low, high = comparison.interval
        interval = f"{low:+.4f} {high:+.4f}"
    else:
        interval = "too few tokens"
    losses = f"{comparison.nll_a:>7.4f} {comparison.nll_b:>7.4f} {comparison.difference:>+8.4f}"
    return f"  {name:>12} {comparison.tokens:>9,} {losses}  {interval:<17}"


def _format_percent(percent: float | None) -> str:
    return "" if percent is None else f"{percent:>+8.2f}%"
