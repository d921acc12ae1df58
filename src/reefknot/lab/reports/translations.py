"""Build the report's section on translations: BLEU by source length, example translations, and attention weights.

Each public function takes the rows of the report (one per experiment of a recipe) and returns one part of the section;
`translations.html` shows them. A length band is a range of source lengths, such as 10 to 19 tokens.

Shapes of arrays, after the underscore in a name: S tokens of a source, T tokens of its translation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from reefknot.lab.reports.drawing import COLOURS, Drawing, add_legend, describe_left_out, row_style
from reefknot.lab.reports.rows import TableRow, group_by_bleu
from reefknot.lab.runs.result import Example, LengthBand, TranslationScores
from reefknot.lab.text.bpe import format_token

MAX_ATTENTION_PLOTS = 2
"""The number of attention plots per row."""
MIN_DRAWN_WEIGHT = 0.02
"""Smaller attention weights are not drawn, because they would be invisible."""
MAX_PLOTTED_TOKENS = 40
"""Pairs with more tokens than this on a side get no plot."""
_CELL_SIZE = 0.19  # size in inches of a token in a plot
_LETTER_SIZE = 0.08  # size in inches of a letter of its label
_WEIGHT_COLOURS = LinearSegmentedColormap.from_list("attention", [f"{COLOURS[0]}00", COLOURS[0]])
"""From transparent (weight 0), which fits any background, to the colour of the first row (weight 1)."""


@dataclass(frozen=True)
class TranslatedPair:
    """A sentence pair of the test text with the translations of its source."""

    source: str
    reference: str
    translations: tuple[tuple[str, str], ...]
    """Names of rows and their translations."""


def plot_by_length(rows: Sequence[TableRow]) -> list[Drawing]:
    """Plot test BLEU by the length of the source, for the largest group of comparable rows."""
    scored = [row for row in rows if _length_bands(row)]
    plotted = max(group_by_bleu(scored, "test"), key=len, default=[])
    range_set = {(band.low, band.high) for row in plotted for band in _length_bands(row)}
    length_ranges = sorted(range_set, key=lambda length_range: length_range[0])
    if len(length_ranges) < 2:
        return []
    pair_counts = {(band.low, band.high): band.pairs for band in _length_bands(plotted[0])}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row in plotted:
            bleu_by_range = {(band.low, band.high): band.bleu for band in _length_bands(row)}
            xs = [x for x, length_range in enumerate(length_ranges) if length_range in bleu_by_range]
            ys = [bleu_by_range[length_ranges[x]] for x in xs]
            style = row_style(rows.index(row)) | {"linewidth": 1.1}
            axes.plot(xs, ys, **style)
        labels = [f"{_format_range(low, high)}\n{pair_counts.get((low, high), 0):,}" for low, high in length_ranges]
        axes.set_xticks(range(len(length_ranges)), labels)
        axes.set(xlabel="tokens of the source (pairs)", ylabel="BLEU")
        add_legend(figure, rows, plotted)

    caption = "Test BLEU by the length of the source; higher is better."
    if any(len(row.translation_scores("test")) > 1 for row in plotted):
        caption += " Means over seeds."
    not_plotted = [row for row in scored if row not in plotted]
    caption += describe_left_out(not_plotted, "their text or their BLEU settings differ")
    return [Drawing("by-length", 2.8, [row.name for row in plotted], draw, caption)]


def compare_examples(rows: Sequence[TableRow]) -> list[TranslatedPair]:
    """Return the example pairs with the translations by the first run of every row that has examples."""
    translations_by_pair: dict[tuple[str, str], dict[str, str]] = {}  # by source and reference; then by row
    for row in rows:
        for example in _find_examples(row):
            translations = translations_by_pair.setdefault((example.source, example.reference), {})
            translations.setdefault(row.name, example.translation)
    return [
        TranslatedPair(source, reference, tuple(translations.items()))
        for (source, reference), translations in translations_by_pair.items()
    ]


def plot_attention(rows: Sequence[TableRow]) -> list[tuple[str, list[Drawing]]]:
    """Return the names of rows with plots of the attention weights over the source, for some of their translations."""
    plots_by_row = []
    for row_index, row in enumerate(rows):
        uses_subwords = bool(row.results) and row.results[0].uses_subwords
        decode_token = format_token if uses_subwords else str
        examples = [example for example in _find_examples(row) if _fits_plot(example)]
        plots = []
        for example_index, example in enumerate(examples[:MAX_ATTENTION_PLOTS]):
            plots.append(_draw_attention(f"attention-{row_index}-{example_index}", example, decode_token))
        if plots:
            plots_by_row.append((row.name, plots))
    return plots_by_row


def list_run_scores(rows: Sequence[TableRow]) -> list[tuple[str, int, TranslationScores]]:
    """Return the row, the seed and the scores of each run of a translator.

    The scores are on the test text, or on the validation text if test scores are withheld.
    """
    entries = []
    for row in rows:
        for record in row.records:
            if record.translation:
                scores = record.translation.test or record.translation.valid
                if scores:
                    entries.append((row.name, record.seed, scores))
    return entries


def list_signatures(rows: Sequence[TableRow]) -> list[str]:
    """Return the distinct signatures of BLEU and chrF."""
    scores = [score for _, _, score in list_run_scores(rows)]
    signatures = [f"BLEU: {score.bleu_signature}" for score in scores if score.bleu_signature]
    signatures += [f"chrF: {score.chrf_signature}" for score in scores if score.chrf_signature]
    return list(dict.fromkeys(signatures))


def _draw_attention(name: str, example: Example, decode_token: Callable[[str], str]) -> Drawing:
    """Draw the attention weights: source tokens as columns, target tokens as rows, darker for larger weights."""
    source_tokens = [decode_token(token) for token in example.source_tokens]
    target_tokens = [decode_token(token) for token in example.target_tokens]
    weights_TS = np.ma.masked_less(np.asarray(example.attention), MIN_DRAWN_WEIGHT)
    height = 0.3 + _CELL_SIZE * len(target_tokens) + _LETTER_SIZE * max(map(len, source_tokens))

    def draw(figure: Figure) -> None:
        axes: Any = figure.add_subplot()
        axes.pcolormesh(weights_TS, cmap=_WEIGHT_COLOURS, vmin=0.0, vmax=1.0)
        axes.set_xticks(np.arange(len(source_tokens)) + 0.5, source_tokens, rotation=90)
        axes.set_yticks(np.arange(len(target_tokens)) + 0.5, target_tokens)
        axes.invert_yaxis()
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.grid(visible=False)

    caption = f"{example.translation} — attention of the translation (rows) to the source (columns)."
    return Drawing(name, height, [], draw, caption)


def _fits_plot(example: Example) -> bool:
    """Return whether every pair of tokens has a weight and all tokens fit into a plot."""
    source_length = len(example.source_tokens)
    target_length = len(example.target_tokens)
    if len(example.attention) != target_length:
        return False
    if any(len(weights) != source_length for weights in example.attention):
        return False
    return 0 < source_length <= MAX_PLOTTED_TOKENS and 0 < target_length <= MAX_PLOTTED_TOKENS


def _find_examples(row: TableRow) -> tuple[Example, ...]:
    """Return the examples of the first finished run that has any."""
    for record in row.records:
        if record.translation and record.translation.examples:
            return record.translation.examples
    return ()


def _length_bands(row: TableRow) -> list[LengthBand]:
    """Return the length bands with the mean BLEU over seeds."""
    bands_by_range: dict[tuple[int, int | None], list[LengthBand]] = {}  # one band per seed
    for scores in row.translation_scores("test"):
        for band in scores.by_length:
            bands_by_range.setdefault((band.low, band.high), []).append(band)
    return [bands[0].replace(bleu=fmean(band.bleu for band in bands)) for bands in bands_by_range.values()]


def _format_range(low: int, high: int | None) -> str:
    return f"{low}+" if high is None else f"{low}–{high}"
