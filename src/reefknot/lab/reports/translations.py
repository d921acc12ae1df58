"""The report's section on translations: BLEU by source length, translations side by side, and attention weights.

Shapes: S tokens of a source, T tokens of its translation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from reefknot.lab.reports.drawing import COLOURS, Plot, left_out, legend, style_of, svg
from reefknot.lab.reports.rows import TableRow, rivals
from reefknot.lab.runs.result import Example, LengthBand, TranslationScores
from reefknot.lab.text.bpe import readable

PICTURES = 2
"""The number of attention plots per row."""
FAINT = 0.02
"""Smaller attention weights are not drawn, because they would be invisible."""
LONGEST = 40
"""Pairs with more tokens than this on a side get no plot."""
_CELL, _LETTER = 0.19, 0.08  # size in inches of a token in a plot, and of a letter of its label
_WEIGHT_COLOURS = LinearSegmentedColormap.from_list("attention", [f"{COLOURS[0]}00", COLOURS[0]])
"""From transparent (weight 0), which fits any background, to the colour of the first row (weight 1)."""


@dataclass(frozen=True)
class Pair:
    """A sentence pair of the test text with the translations of its source."""

    source: str
    reference: str
    translations: tuple[tuple[str, str], ...]
    """Names of rows and their translations."""


def by_length(rows: Sequence[TableRow]) -> list[Plot]:
    """Plot test BLEU by the length of the source, for the largest group of comparable rows."""
    scored = [row for row in rows if _bands(row)]
    plotted = max(rivals(scored, "test"), key=len, default=[])
    bands = sorted({(band.low, band.high) for row in plotted for band in _bands(row)}, key=lambda ends: ends[0])
    if len(bands) < 2:
        return []
    pairs = {(band.low, band.high): band.pairs for band in _bands(plotted[0])}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row in plotted:
            points = {(band.low, band.high): band.bleu for band in _bands(row)}
            positions = [n for n, ends in enumerate(bands) if ends in points]
            axes.plot(
                positions, [points[bands[n]] for n in positions], **style_of(rows.index(row)) | {"linewidth": 1.1}
            )
        axes.set_xticks(range(len(bands)), [f"{_ends(*ends)}\n{pairs.get(ends, 0):,}" for ends in bands])
        axes.set(xlabel="tokens of the source (pairs)", ylabel="BLEU")
        legend(figure, rows, plotted)

    caption = "Test BLEU by the length of the source; higher is better."
    if any(len(row.translated("test")) > 1 for row in plotted):
        caption += " Means over seeds."
    caption += left_out([row for row in scored if row not in plotted], "their text or their BLEU settings differ")
    return [Plot(svg("by-length", 2.8, plotted, draw, caption), caption)]


def side_by_side(rows: Sequence[TableRow]) -> list[Pair]:
    """Return the example pairs with the translations by the first run of every row that has examples."""
    by_pair: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        for example in _examples(row):
            by_pair.setdefault((example.source, example.reference), {}).setdefault(row.name, example.translation)
    return [Pair(*pair, tuple(translations.items())) for pair, translations in by_pair.items()]


def attention(rows: Sequence[TableRow]) -> list[tuple[str, list[Plot]]]:
    """Plot the attention weights over the source for some translations of each row."""
    plots = []
    for n, row in enumerate(rows):
        examples = islice(filter(_fits, _examples(row)), PICTURES)
        show = readable if row.results and row.results[0].cuts_words else str
        pictures = [_picture(f"attention-{n}-{k}", example, show) for k, example in enumerate(examples)]
        if pictures:
            plots.append((row.name, pictures))
    return plots


def run_scores(rows: Sequence[TableRow]) -> list[tuple[str, int, TranslationScores]]:
    """Return the row, the seed and the scores of each run of a translator.

    The scores are on the test text, or on the validation text if test scores are withheld.
    """
    records = [(row.name, record) for row in rows for record in row.records if record.translation]
    runs = [(name, record.seed, record.translation) for name, record in records]
    return [(name, seed, split) for name, seed, scores in runs if scores and (split := scores.test or scores.valid)]


def signatures(rows: Sequence[TableRow]) -> list[str]:
    """Return the distinct signatures of BLEU and chrF."""
    scores = [score for _, _, score in run_scores(rows)]
    named = [("BLEU", score.bleu_signature) for score in scores] + [("chrF", score.chrf_signature) for score in scores]
    return list(dict.fromkeys(f"{name}: {signature}" for name, signature in named if signature))


def _picture(name: str, example: Example, show: Callable[[str], str]) -> Plot:
    """Draw the attention weights: source tokens across, target tokens down, darker for larger weights."""
    across, down = (list(map(show, tokens)) for tokens in (example.source_tokens, example.target_tokens))
    weights_TS = np.ma.masked_less(np.asarray(example.attention), FAINT)
    height = 0.3 + _CELL * len(down) + _LETTER * max(map(len, across))

    def draw(figure: Figure) -> None:
        axes: Any = figure.add_subplot()
        axes.pcolormesh(weights_TS, cmap=_WEIGHT_COLOURS, vmin=0.0, vmax=1.0)
        axes.set_xticks(np.arange(len(across)) + 0.5, across, rotation=90)
        axes.set_yticks(np.arange(len(down)) + 0.5, down)
        axes.invert_yaxis()
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.grid(visible=False)

    caption = f"{example.translation} — attention of the translation (rows) to the source (columns)."
    return Plot(svg(name, height, (), draw, caption), caption)


def _fits(example: Example) -> bool:
    """Return whether every pair of tokens has a weight and all tokens fit into a plot."""
    across, down = len(example.source_tokens), len(example.target_tokens)
    complete = len(example.attention) == down and all(len(row) == across for row in example.attention)
    return complete and 0 < across <= LONGEST and 0 < down <= LONGEST


def _examples(row: TableRow) -> tuple[Example, ...]:
    """Return the examples of the first finished run that has any."""
    by_run = (record.translation.examples for record in row.records if record.translation)
    return next((examples for examples in by_run if examples), ())


def _bands(row: TableRow) -> list[LengthBand]:
    """Return the length bands with the mean BLEU over seeds."""
    by_ends: dict[tuple[int, int | None], list[LengthBand]] = {}
    for scores in row.translated("test"):
        for band in scores.by_length:
            by_ends.setdefault((band.low, band.high), []).append(band)
    return [bands[0].replace(bleu=fmean(band.bleu for band in bands)) for bands in by_ends.values()]


def _ends(low: int, high: int | None) -> str:
    return f"{low}+" if high is None else f"{low}–{high}"
