"""Build the report's section on word vectors: a plot of some words, their nearest neighbours, and word similarity.

A model has word vectors at two ends, the input (embedding) and the output (classifier). The ends of a tied model share
one table of vectors. `build_sections` returns the content for each row (one experiment of a recipe), and
`embedding.html` shows it. The second half of the file draws the plots (`_draw_pictures`), and places the labels of the
words so that they do not overlap (`_place_labels`).

Shapes of arrays, after the underscore in a name: W words, K candidate positions of a label, B obstacles; 2 is x and y;
4 is a box with left, bottom, right and top. Coordinates are in points (1/72 inch).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from reefknot.errors import ReefknotError
from reefknot.lab.reports.drawing import Drawing, row_style
from reefknot.lab.reports.rows import TableRow
from reefknot.lab.runs.loading import Result
from reefknot.lab.runs.result import Embedding, Judgement, NearestWords, Neighbors, RunResult
from reefknot.lab.runs.stored import Stored
from reefknot.lab.text.bpe import format_token

Floats = NDArray[np.float64]

MAX_WORD_LENGTH = 18
"""Longer words are shortened to this many letters in a plot."""
_PLOT_WIDTH = 4.9 * 72
_MIN_PLOT_HEIGHT, _MAX_PLOT_HEIGHT = 2.6 * 72, 4.4 * 72
_MARGIN = 18.0  # from the edge to the outermost words; twice as much on the left and right
_FONT_SIZE = 8.0
# A label may be placed at any of these distances from its word, in any of these directions.
_LABEL_DISTANCES = (3.5, 9.0, 16.0, 25.0, 36.0)
_LABEL_ANGLES = np.radians([0, 180, 90, 270, 45, 135, 315, 225, 20, 160, 340, 200, 70, 110, 290, 250])
_END_TITLES = {"input": "input vectors", "output": "output vectors", "tied": "shared table"}
_TRANSLATOR_TYING = {
    "three-way": "one table for source, input and output",
    "decoder": "one table for input and output, one for the source",
    "none": "separate tables for source, input and output",
}


@dataclass(frozen=True)
class Neighbor:
    """A neighbour of a word at one end."""

    word: str
    cosine: float
    is_unique: bool
    """Whether it is not a neighbour at the other end."""


@dataclass(frozen=True)
class BenchmarkScores:
    """A word similarity benchmark with the correlation of each end."""

    name: str
    pairs: int
    """Number of pairs with a vector for both words."""
    total: int
    """Number of pairs in the benchmark."""
    ends: tuple[Judgement | None, ...]
    best: Judgement | None
    """The highest correlation; None if there is only one end."""


@dataclass(frozen=True)
class EmbeddingSection:
    """The content of the section for one row, from the first finished run that has any of it."""

    row: str
    """The name of the row."""
    seed: int
    tying: str
    """Which ends share a table, in words."""
    pictures: tuple[Drawing, ...]
    similarity_ends: tuple[str, ...]
    """Titles of the columns of `similarity`."""
    similarity: tuple[BenchmarkScores, ...]
    neighbor_ends: tuple[str, ...]
    """Titles of the columns of `neighbors`."""
    neighbors: tuple[tuple[str, tuple[tuple[Neighbor, ...], ...]], ...]
    """Words with their neighbours at each end."""


def build_sections(rows: Sequence[TableRow]) -> list[EmbeddingSection]:
    """Return the content of the section for each row that has anything to show."""
    sections = []
    for index, row in enumerate(rows):
        run = find_shown_run(row)
        if run and run.record:
            decode_token = format_token if run.uses_subwords else str
            sections.append(_build_section(f"ends-{index}", row.name, run.record, decode_token))
    return sections


def find_shown_run(row: TableRow) -> Result | None:
    """Return the first finished run of a row that has anything to show."""
    for result in row.results:
        if result.record and _has_content(result.record):
            return result
    return None


def _has_content(record: RunResult) -> bool:
    neighbors = record.neighbors
    return bool(neighbors.input or neighbors.output or record.similarity or record.embedding.words)


def with_picture(row: TableRow) -> TableRow:
    """Return a row whose run has a picture of its word vectors.

    If the run has weights but no picture, the picture is computed and stored in its folder.
    """
    run = find_shown_run(row)
    if run is None or run.record is None:
        return row
    has_weights = (run.folder / "best").exists()
    if run.record.embedding.words or not has_weights:
        return row

    from reefknot.lab.tasks.word_vectors import store_embedding

    try:
        record = store_embedding(run.folder)
    except ReefknotError:
        return row  # leave the picture out if the weights are damaged or incomplete
    return _replace_record(row, run, record)


def with_words(row: TableRow, compute_fields: Callable[[Result], Mapping[str, Stored]]) -> TableRow:
    """Return a row with the neighbours and the picture of other words.

    Args:
        row: The row.
        compute_fields: Computes the fields of a run's record that are replaced.
    """
    run = find_shown_run(row)
    if run is None or run.record is None:
        return row
    return _replace_record(row, run, run.record.replace(**compute_fields(run)))


def _replace_record(row: TableRow, run: Result, record: RunResult) -> TableRow:
    """Return the row with another record for one of its runs."""
    results = tuple(replace(run, record=record) if result is run else result for result in row.results)
    return replace(row, results=results)


def _build_section(name: str, row: str, record: RunResult, decode_token: Callable[[str], str]) -> EmbeddingSection:
    """Collect the content of the section for a row.

    Args:
        name: A prefix for the names of the plots, unique in the page.
        row: The name of the row.
        record: The result of the run that is shown.
        decode_token: Makes a token readable.
    """
    neighbors_by_end = _neighbors_by_end(record.neighbors)
    words = tuple(decode_token(word) for word in record.embedding.words)
    similarity = record.similarity
    is_tied = record.neighbors.tied or "tied" in similarity or record.embedding.tied is not None
    tying = "one table for both ends" if is_tied else "two tables"
    return EmbeddingSection(
        row=row,
        seed=record.seed,
        tying=_TRANSLATOR_TYING.get(record.tied or "", tying),
        pictures=tuple(_draw_pictures(name, record.embedding.replace(words=words))),
        similarity_ends=tuple(_END_TITLES.get(end, end) for end in similarity),
        similarity=tuple(_compare_benchmarks(similarity)),
        neighbor_ends=tuple(neighbors_by_end),
        neighbors=tuple(_compare_neighbors(neighbors_by_end, decode_token)),
    )


def _neighbors_by_end(neighbors: Neighbors) -> dict[str, NearestWords]:
    """Return the neighbours by the title of the end.

    There is a single entry if both ends share a table and have the same neighbours.
    """
    if neighbors.tied and neighbors.input == neighbors.output:
        return {_END_TITLES["tied"]: neighbors.input}
    by_end = {_END_TITLES["input"]: neighbors.input, _END_TITLES["output"]: neighbors.output}
    return {title: nearest_words for title, nearest_words in by_end.items() if nearest_words}


def _compare_neighbors(
    neighbors_by_end: dict[str, NearestWords], decode_token: Callable[[str], str]
) -> list[tuple[str, tuple[tuple[Neighbor, ...], ...]]]:
    """Return every word with its neighbours at each end, and mark neighbours that are missing at another end."""
    words = dict.fromkeys(word for nearest_words in neighbors_by_end.values() for word in nearest_words)
    entries = []
    for word in words:
        neighbor_lists = [nearest_words.get(word, ()) for nearest_words in neighbors_by_end.values()]
        neighbor_sets = [{neighbor for neighbor, _ in neighbors} for neighbors in neighbor_lists]
        shared_neighbors = set.intersection(*neighbor_sets)
        columns = []
        for neighbors in neighbor_lists:
            column = [
                Neighbor(decode_token(neighbor), cosine, is_unique=neighbor not in shared_neighbors)
                for neighbor, cosine in neighbors
            ]
            columns.append(tuple(column))
        entries.append((decode_token(word), tuple(columns)))
    return entries


def _compare_benchmarks(judgements_by_end: dict[str, tuple[Judgement, ...]]) -> list[BenchmarkScores]:
    """Return the benchmarks that have at least one pair of known words, in their order."""
    judgements_by_name = [
        {judgement.name: judgement for judgement in judgements} for judgements in judgements_by_end.values()
    ]  # one dict for each end
    names = dict.fromkeys(name for judgements in judgements_by_name for name in judgements)
    benchmarks = []
    for name in names:
        scores = tuple(judgements.get(name) for judgements in judgements_by_name)
        valid_scores = [score for score in scores if score is not None and score.rho is not None]
        if not valid_scores:
            continue
        best = None
        if len(scores) > 1:
            best = max(valid_scores, key=lambda score: score.rho or 0.0)
        benchmarks.append(BenchmarkScores(name, valid_scores[0].pairs, valid_scores[0].of, scores, best))
    return benchmarks


def _draw_pictures(name: str, embedding: Embedding) -> list[Drawing]:
    """Draw one plot per end, all of the same size. Ends without coordinates for every word are left out."""
    planes = {"input": embedding.input, "output": embedding.output, "tied": embedding.tied}
    word_count = len(embedding.words)
    complete_planes = {}
    for end, plane in planes.items():
        if plane and len(plane.xy) == len(embedding.groups) == word_count > 1:
            complete_planes[end] = plane

    coordinates = {end: np.array(plane.xy, dtype=np.float64) for end, plane in complete_planes.items()}
    height = max(map(_fitting_height, coordinates.values()), default=_MIN_PLOT_HEIGHT)
    plots = []
    for end, plane in complete_planes.items():
        points_W2 = _scale_to_plot(coordinates[end], height)
        shares = " and ".join(f"{100 * share:.0f}" for share in plane.explained)
        caption = (
            f"{_END_TITLES[end].capitalize()}: the first two principal components, which explain {shares} % of the "
            "variance."
        )
        plots.append(_draw_picture(f"{name}-{end}", embedding, points_W2, height, caption))
    return plots


def _draw_picture(name: str, embedding: Embedding, points_W2: Floats, height: float, caption: str) -> Drawing:
    """Draw the words of an end. A group has one colour and marker, and lines from its first word to the others."""
    words = [_shorten(word) for word in embedding.words]
    labels = _place_labels(points_W2, words, height)
    label_lines = [
        _connect_label(point, label, word)
        for point, label, word in zip(points_W2, labels, words, strict=True)
        if label.needs_line
    ]

    def draw(figure: Figure) -> None:
        figure.set_layout_engine("none")
        axes: Any = figure.add_axes((0, 0, 1, 1), xlim=(0, _PLOT_WIDTH), ylim=(0, height))
        axes.axis("off")
        for group in sorted(set(embedding.groups)):
            centre, *others = (index for index, word_group in enumerate(embedding.groups) if word_group == group)
            style = row_style(group) | {"linestyle": "none", "markersize": 5, "markeredgewidth": 1.1}
            star = [index for other in others for index in (centre, other)]  # a line that returns to the centre
            axes.plot(*points_W2[star].T, color=style["color"], linewidth=0.7, alpha=0.35)
            axes.plot(*points_W2[others].T, **style, fillstyle="none")
            axes.plot(*points_W2[centre], **style)
        axes.add_collection(LineCollection(label_lines, colors="#888888", linewidths=0.5))
        for word, label in zip(words, labels, strict=True):
            axes.text(label.left, label.baseline, word, fontsize=_FONT_SIZE)

    return Drawing(name, height / 72, [], draw, caption)


class _Label(NamedTuple):
    """The position of a word's label."""

    left: float
    baseline: float
    needs_line: bool
    """Whether the label is so far from its word that a line must connect them."""


def _connect_label(point: Floats, label: _Label, word: str) -> Floats:
    """Return the line from a word's marker to the nearest point of its label."""
    bottom_left = (label.left, label.baseline)
    top_right = (label.left + _estimate_width(word), label.baseline + 0.7 * _FONT_SIZE)
    return np.array([point, np.clip(point, bottom_left, top_right)])


def _fitting_height(xy_W2: Floats) -> float:
    """Return the height of a plot that uses the full width."""
    x_extent, y_extent = np.ptp(xy_W2, axis=0)
    height = 0.0
    if x_extent:
        height = (_PLOT_WIDTH - 4 * _MARGIN) * y_extent / x_extent
    return float(np.clip(height, _MIN_PLOT_HEIGHT, _MAX_PLOT_HEIGHT))


def _scale_to_plot(xy_W2: Floats, height: float) -> Floats:
    """Scale coordinates to points: centred and as large as fits, with the same scale for both axes."""
    minimum, maximum = xy_W2.min(axis=0), xy_W2.max(axis=0)
    available = np.array([_PLOT_WIDTH - 4 * _MARGIN, height - 2 * _MARGIN])
    scales = [size / extent for size, extent in zip(available, maximum - minimum, strict=True) if extent > 0]
    scale = min(scales, default=1.0)
    centre = (minimum + maximum) / 2
    plot_centre = np.array([_PLOT_WIDTH, height]) / 2
    return np.asarray((xy_W2 - centre) * scale + plot_centre)


def _place_labels(points_W2: Floats, words: Sequence[str], height: float) -> list[_Label]:
    """Return the position of every word's label.

    In three passes over all words, each label moves to the candidate position with the lowest cost. The cost is the
    overlap with other labels and with markers, plus the distance from the word.
    """
    markers_W4 = np.hstack([points_W2 - 3, points_W2 + 3])
    candidate_boxes = [_candidate_boxes(point, word) for point, word in zip(points_W2, words, strict=True)]
    distance_K = np.repeat(_LABEL_DISTANCES, len(_LABEL_ANGLES))
    labels_W4 = np.full((len(words), 4), np.inf)  # empty boxes, which overlap with nothing
    chosen = [0] * len(words)  # the index of each word's best candidate
    for _ in range(3):
        for index, boxes_K4 in enumerate(candidate_boxes):
            labels_W4[index] = np.inf
            overlap_K = _overlap(boxes_K4, labels_W4).sum(axis=1) + _overlap(boxes_K4, markers_W4).sum(axis=1)
            outside_K = (boxes_K4[:, :2] < 0).any(axis=1) | (boxes_K4[:, 2:] > (_PLOT_WIDTH, height)).any(axis=1)
            cost_K = overlap_K + distance_K + 1e6 * outside_K
            chosen[index] = int(np.argmin(cost_K))
            labels_W4[index] = boxes_K4[chosen[index]]

    labels = []
    for boxes_K4, candidate in zip(candidate_boxes, chosen, strict=True):
        left, bottom, _, _ = boxes_K4[candidate]
        is_far = candidate >= len(_LABEL_ANGLES)  # labels at the smallest distance need no line
        labels.append(_Label(float(left), float(bottom + 0.22 * _FONT_SIZE), is_far))
    return labels


def _candidate_boxes(point: Floats, word: str) -> Floats:
    """Return candidate boxes [K, 4] for a label around a point, nearest first."""
    half_size = np.array([_estimate_width(word), 1.1 * _FONT_SIZE]) / 2
    directions = np.stack([np.cos(_LABEL_ANGLES), np.sin(_LABEL_ANGLES)], axis=1)
    centres_K2 = np.concatenate([point + directions * (distance + half_size) for distance in _LABEL_DISTANCES])
    return np.hstack([centres_K2 - half_size, centres_K2 + half_size])


def _overlap(boxes_K4: Floats, obstacles_B4: Floats) -> Floats:
    """Return the area [K, B] of the overlap of every box with every obstacle."""
    bottom_left = np.maximum(boxes_K4[:, None, :2], obstacles_B4[None, :, :2])
    top_right = np.minimum(boxes_K4[:, None, 2:], obstacles_B4[None, :, 2:])
    return np.asarray(np.clip(top_right - bottom_left, 0, None).prod(axis=2))


def _estimate_width(word: str) -> float:
    """Estimate the width of a word in the reader's font, in points. East Asian letters are wider than others."""
    return _FONT_SIZE * sum(1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.62 for letter in word)


def _shorten(word: str) -> str:
    """Shorten a word so that it fits into a plot, and replace characters that cannot be printed."""
    printable = "".join(letter if letter.isprintable() else "\ufffd" for letter in word)
    if len(printable) <= MAX_WORD_LENGTH:
        return printable
    return printable[: MAX_WORD_LENGTH - 1] + "…"
