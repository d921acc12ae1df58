"""Baevski & Auli 2019, Figures 2 to 5: the loss of each pair of ends by how often a word was seen in training.

Figures 2 and 4 group tokens by the target, Figures 3 and 5 by the word before it. Figures 2 and 3 are for WikiText-103,
4 and 5 for the Billion Word corpus. The paper's bins differ from ours, which are the powers of ten in every result.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from reefknot.errors import DataError
from reefknot.lab.papers.figures.contract import Figure, Measured
from reefknot.lab.papers.figures.intervals import format_estimate, over_seeds
from reefknot.lab.papers.figures.pictures import Panel, bars
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.results import Result
from reefknot.lab.reports.rows import group
from reefknot.lab.runs.definition import format_count_range
from reefknot.lab.runs.result import Band, RunResult


class _LossByFrequency(Figure):
    """A bar for each band of training counts and each pair of ends."""

    side: ClassVar[str]
    """Which word the tokens are grouped by: `target` or `previous`."""
    word: ClassVar[str]
    """The name of this word in the picture and the table."""

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """Measure the mean loss by band over the seeds of each row.

        Rows must have the same tokens. Rows with sub-words, or with other tokens than the first row, are left out and
        listed.
        """
        rows, left_out = [], []
        first: list[tuple[int, int | None, int]] = []
        systems = group(runs)
        for name, results in systems.items():
            bands = [bands for result in results if result.record and (bands := self._bands(result.record))]
            if not bands:
                continue
            ends = [(band.low, band.high, band.tokens) for band in bands[0]]
            first = first or ([] if results[0].cuts_words else ends)
            if ends != first:
                left_out.append(name)
                continue
            losses = [over_seeds([band.nll for band in seeds]).json() for seeds in zip(*bands, strict=True)]
            rows.append({"row": name, "seeds": [result.seed for result in results], "nll": losses})
        if not rows:
            raise DataError("these runs have no losses by frequency; name finished language models over whole words")
        total = sum(tokens for _, _, tokens in first)
        return {
            "side": self.side,
            "corpus": next(run.record.corpus.name for run in systems[str(rows[0]["row"])] if run.record),
            "bands": [{"low": low, "high": high, "share": tokens / total} for low, high, tokens in first],
            "rows": rows,
            "left_out": left_out,
        }

    def _bands(self, record: RunResult) -> list[Band]:
        return [band for band in getattr(record.frequency, self.side) if band.tokens]

    def draw(self, measured: Measured) -> Drawing:
        """Draw the losses, and below them the differences from the first row, which are too small to see above."""
        labels = [f"{format_count_range(band['low'], band['high'])}\n{band['share']:.0%}" for band in measured["bands"]]
        losses = {row["row"]: row["nll"] for row in measured["rows"]}
        panels = [Panel(measured["corpus"], labels, losses, measured="loss, nats")]
        if len(losses) > 1:
            reference, *_ = losses.values()
            gaps = {name: [_gap(*pair) for pair in zip(row, reference, strict=True)] for name, row in losses.items()}
            panels.append(Panel("", labels, gaps, measured=f"minus {next(iter(losses))}"))
        caption = (
            f"Mean test loss by the training frequency of {self.word}, and its share of the text; lower is better."
        )
        along = f"training count of {self.word}, and share of tokens"
        return bars(self.slug, panels, along=along, caption=caption)

    def lines(self, measured: Measured) -> list[str]:
        """Return a line for each row with a column for each band."""
        heads = [format_count_range(band["low"], band["high"]) for band in measured["bands"]]
        cells = [[format_estimate(loss) for loss in row["nll"]] for row in measured["rows"]]
        widths = [max(len(head), *(len(row[n]) for row in cells)) for n, head in enumerate(heads)]
        width = max(len("row"), *(len(row["row"]) for row in measured["rows"]))
        lines = [
            f"loss in nats by the training frequency of {self.word}, {measured['corpus']}",
            "  ".join([f"{'row':<{width}}", *(f"{head:>{w}}" for head, w in zip(heads, widths, strict=True))]),
        ]
        for row, row_cells in zip(measured["rows"], cells, strict=True):
            columns = (f"{cell:>{w}}" for cell, w in zip(row_cells, widths, strict=True))
            lines.append("  ".join([f"{row['row']:<{width}}", *columns]))
        if measured["left_out"]:
            lines.append(f"left out, because their tokens differ: {', '.join(measured['left_out'])}")
        return lines


class ByTarget(_LossByFrequency):
    """Figure 2."""

    name = "baevski2019/2"
    recipe = "baevski2019/figure2"
    stand_in: ClassVar[str | None] = "baevski2019/enwiki"
    title = "Baevski & Auli 2019, Figure 2: loss by frequency of the word to predict, WikiText-103"
    shows = (
        "The test loss of each pair of ends in bins of the training frequency of the word to predict, on WikiText-103. "
        "It shows on which words one pair of ends is better than another."
    )
    side, word = "target", "the word to predict"


class ByPrevious(_LossByFrequency):
    """Figure 3."""

    name = "baevski2019/3"
    recipe = "baevski2019/figure3"
    stand_in: ClassVar[str | None] = "baevski2019/enwiki"
    title = "Baevski & Auli 2019, Figure 3: loss by frequency of the word before, WikiText-103"
    shows = (
        "The test loss of each pair of ends in bins of the training frequency of the word before the one to predict, "
        "on WikiText-103. It shows how much a rare word at the input costs each pair of ends."
    )
    side, word = "previous", "the word before"


class ByTargetBillionWord(ByTarget):
    """Figure 4."""

    name = "baevski2019/4"
    recipe = "baevski2019/figure4"
    stand_in = None
    title = "Baevski & Auli 2019, Figure 4: loss by frequency of the word to predict, Billion Word"
    shows = (
        "The test loss of each pair of ends in bins of the training frequency of the word to predict, on the Billion "
        "Word corpus. It shows on which words one pair of ends is better than another."
    )


class ByPreviousBillionWord(ByPrevious):
    """Figure 5."""

    name = "baevski2019/5"
    recipe = "baevski2019/figure5"
    stand_in = None
    title = "Baevski & Auli 2019, Figure 5: loss by frequency of the word before, Billion Word"
    shows = (
        "The test loss of each pair of ends in bins of the training frequency of the word before the one to predict, "
        "on the Billion Word corpus. It shows how much a rare word at the input costs each pair of ends."
    )


def _gap(loss: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    return {"mean": loss["mean"] - reference["mean"], "low": None, "high": None}
