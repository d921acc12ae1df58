"""Baevski & Auli 2019, Figures 2 to 5: test loss by how often a word was seen in training.

A model is a pair of ends: an input end (embedding) and an output end (classifier and loss). The figures compare such
pairs. All four are subclasses of `_LossByFrequency`:

    Figure 2, 3    WikiText-103; tokens grouped by the target (2) or by the word before it (3)
    Figure 4, 5    Billion Word corpus; grouped by the target (4) or by the word before it (5)

A band is a range of training counts, such as 10 to 99. The paper's bands differ from ours, which are the powers of ten
in every result. A row is one experiment of a recipe, with one run per random seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from reefknot.errors import DataError
from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.papers.figures.intervals import estimate_mean, format_estimate
from reefknot.lab.papers.figures.pictures import Panel, draw_bars
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.rows import group_by_row
from reefknot.lab.runs.definition import format_count_range
from reefknot.lab.runs.loading import Result
from reefknot.lab.runs.result import Band, RunResult


class _LossByFrequency(Figure):
    """A bar for each band of training counts and each pair of ends."""

    position: ClassVar[str]
    """Which word the tokens are grouped by: `target` or `previous`."""
    word: ClassVar[str]
    """The name of this word in the picture and the table."""

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measurements:
        """Measure the mean loss by band over the seeds of each row.

        Rows must have the same tokens. Rows with sub-words of their own frequency, or with other tokens than the first
        row, are left out and listed. Bands of older results end at 10,000, so finer bands are merged.
        """
        rows = []
        left_out = []
        reference_counts: list[tuple[int, int | None, int]] = []  # low, high and tokens of the first row's bands
        runs_by_row = group_by_row(runs)
        coarsest_low = self._find_coarsest_low(runs)
        for name, results in runs_by_row.items():
            bands_by_seed = [self._read_bands(result.record) for result in results if result.record]
            bands_by_seed = [_merge_bands(bands, coarsest_low) for bands in bands_by_seed if bands]
            if not bands_by_seed:
                continue

            token_counts = [(band.low, band.high, band.tokens) for band in bands_by_seed[0]]
            if not reference_counts and not results[0].uses_subwords:
                reference_counts = token_counts
            if token_counts != reference_counts:
                left_out.append(name)
                continue

            losses = []
            for same_band in zip(*bands_by_seed, strict=True):
                losses.append(estimate_mean([band.nll for band in same_band]).json())
            rows.append({"row": name, "seeds": [result.seed for result in results], "nll": losses})
        if not rows:
            raise DataError("these runs have no losses by frequency; pass finished language models over whole words")

        first_row_runs = runs_by_row[str(rows[0]["row"])]
        total_tokens = sum(tokens for _, _, tokens in reference_counts)
        return {
            "side": self.position,
            "corpus": next(run.record.corpus.name for run in first_row_runs if run.record),
            "bands": [
                {"low": low, "high": high, "share": tokens / total_tokens} for low, high, tokens in reference_counts
            ],
            "rows": rows,
            "left_out": left_out,
        }

    def _find_coarsest_low(self, runs: Sequence[Result]) -> int | None:
        """Return the lowest bound from which a result has only one band, or None if no result has such a band."""
        lows = []
        for result in runs:
            if result.record and (bands := self._read_bands(result.record)):
                lows += [band.low for band in bands if band.high is None]
        return min(lows, default=None)

    def _read_bands(self, record: RunResult) -> list[Band]:
        """Return the losses by training count of a run, without bands that have no tokens."""
        return [band for band in getattr(record.frequency, self.position) if band.tokens]

    def draw(self, measured: Measurements) -> Drawing:
        """Draw the losses, and below them the differences from the first row, which are too small to see above."""
        labels = [f"{format_count_range(band['low'], band['high'])}\n{band['share']:.0%}" for band in measured["bands"]]
        losses = {row["row"]: row["nll"] for row in measured["rows"]}
        panels = [Panel(measured["corpus"], labels, losses, y_label="loss, nats")]
        if len(losses) > 1:
            first_name, first_losses = next(iter(losses.items()))
            gaps = {}
            for name, row_losses in losses.items():
                gaps[name] = [
                    _subtract_means(loss, first_loss) for loss, first_loss in zip(row_losses, first_losses, strict=True)
                ]
            panels.append(Panel("", labels, gaps, y_label=f"minus {first_name}"))

        caption = (
            f"Mean test loss by the training frequency of {self.word}, and its share of the text; lower is better."
        )
        x_label = f"training count of {self.word}, and share of tokens"
        return draw_bars(self.slug, panels, x_label=x_label, caption=caption)

    def format_lines(self, measured: Measurements) -> list[str]:
        """Return a line for each row with a column for each band."""
        # The first line has the titles, and the others have the name and the losses of a row.
        titles = [format_count_range(band["low"], band["high"]) for band in measured["bands"]]
        cell_rows = [["row", *titles]]
        for row in measured["rows"]:
            cell_rows.append([row["row"], *(format_estimate(loss) for loss in row["nll"])])
        name_width, *widths = [max(map(len, column)) for column in zip(*cell_rows, strict=True)]

        lines = [f"loss in nats by the training frequency of {self.word}, {measured['corpus']}"]
        for name, *cells in cell_rows:
            aligned_cells = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
            lines.append("  ".join([f"{name:<{name_width}}", *aligned_cells]))
        if measured["left_out"]:
            lines.append(f"left out, because their tokens differ: {', '.join(measured['left_out'])}")
        return lines


class ByTarget(_LossByFrequency):
    """Figure 2."""

    name = "baevski2019/2"
    recipe = "baevski2019/figure2"
    fallback_recipe: ClassVar[str | None] = "baevski2019/enwiki"
    title = "Baevski & Auli 2019, Figure 2: loss by frequency of the word to predict, WikiText-103"
    description = (
        "The test loss of each pair of ends in bins of the training frequency of the word to predict, on WikiText-103. "
        "It shows on which words one pair of ends is better than another."
    )
    position, word = "target", "the word to predict"


class ByPrevious(_LossByFrequency):
    """Figure 3."""

    name = "baevski2019/3"
    recipe = "baevski2019/figure3"
    fallback_recipe: ClassVar[str | None] = "baevski2019/enwiki"
    title = "Baevski & Auli 2019, Figure 3: loss by frequency of the word before, WikiText-103"
    description = (
        "The test loss of each pair of ends in bins of the training frequency of the word before the one to predict, "
        "on WikiText-103. It shows how much a rare word at the input costs each pair of ends."
    )
    position, word = "previous", "the word before"


class ByTargetBillionWord(ByTarget):
    """Figure 4."""

    name = "baevski2019/4"
    recipe = "baevski2019/figure4"
    fallback_recipe = None
    title = "Baevski & Auli 2019, Figure 4: loss by frequency of the word to predict, Billion Word"
    description = (
        "The test loss of each pair of ends in bins of the training frequency of the word to predict, on the Billion "
        "Word corpus. It shows on which words one pair of ends is better than another."
    )


class ByPreviousBillionWord(ByPrevious):
    """Figure 5."""

    name = "baevski2019/5"
    recipe = "baevski2019/figure5"
    fallback_recipe = None
    title = "Baevski & Auli 2019, Figure 5: loss by frequency of the word before, Billion Word"
    description = (
        "The test loss of each pair of ends in bins of the training frequency of the word before the one to predict, "
        "on the Billion Word corpus. It shows how much a rare word at the input costs each pair of ends."
    )


def _merge_bands(bands: list[Band], low: int | None) -> list[Band]:
    """Merge all bands from `low` on into one band without an upper bound."""
    if low is None:
        return bands
    upper = [band for band in bands if band.low >= low]
    if not upper:
        return bands
    tokens = sum(band.tokens for band in upper)
    nll = sum(band.tokens * band.nll for band in upper) / tokens
    merged = Band(low=low, high=None, tokens=tokens, types=sum(band.types for band in upper), nll=nll)
    return [*(band for band in bands if band.low < low), merged]


def _subtract_means(loss: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Return the difference of two means, without an interval."""
    return {"mean": loss["mean"] - baseline["mean"], "low": None, "high": None}
