"""The report's section on word vectors: a plot of some words at each end, word similarity, and nearest neighbours.

Shapes: W words, K candidate positions of a label, B obstacles. A box has the coordinates left, bottom, right and top,
in points.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from reefknot.errors import ReefknotError
from reefknot.lab.reports.drawing import Plot, style_of, svg
from reefknot.lab.reports.results import Result
from reefknot.lab.reports.rows import TableRow
from reefknot.lab.runs.result import Embedding, Judgement, NearestWords, Neighbors, RunResult
from reefknot.lab.runs.stored import Stored
from reefknot.lab.text.bpe import format_token

Floats = NDArray[np.float64]

LONGEST = 18
"""Longer words are shortened to this many letters in a plot."""
_WIDTH, _LOWEST, _HIGHEST = 4.9 * 72, 2.6 * 72, 4.4 * 72  # size of a plot, in points
_MARGIN = 18.0  # from the edge to the outermost words; twice as much on the left and right
_SIZE = 8.0  # font size
_RINGS = (3.5, 9.0, 16.0, 25.0, 36.0)
_ANGLES = np.radians([0, 180, 90, 270, 45, 135, 315, 225, 20, 160, 340, 200, 70, 110, 290, 250])
_ENDS = {"input": "input vectors", "output": "output vectors", "tied": "shared table"}
_TRANSLATOR = {
    "three-way": "one table for source, input and output",
    "decoder": "one table for input and output, one for the source",
    "none": "separate tables for source, input and output",
}


@dataclass(frozen=True)
class Neighbor:
    """A neighbour of a word at one end. `only` is true if it is not a neighbour at the other end."""

    word: str
    cosine: float
    only: bool


@dataclass(frozen=True)
class Judged:
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
class Learned:
    """The content of the section for one row, from the first finished run that has any of it."""

    row: str
    seed: int
    note: str
    pictures: tuple[Plot, ...]
    judged_ends: tuple[str, ...]
    judged: tuple[Judged, ...]
    near_ends: tuple[str, ...]
    near: tuple[tuple[str, tuple[tuple[Neighbor, ...], ...]], ...]
    """Words with their neighbours at each end."""


def learned(rows: Sequence[TableRow]) -> list[Learned]:
    """Return an entry for each row that has anything to show."""
    entries = []
    for n, row in enumerate(rows):
        if (shown := shown_of(row)) and shown.record:
            show = format_token if shown.cuts_words else str
            entries.append(_learned(f"ends-{n}", row.name, shown.record, show))
    return entries


def shown_of(row: TableRow) -> Result | None:
    """Return the first finished run of a row that has anything to show."""
    return next((result for result in row.results if result.record and _has_any(result.record)), None)


def _has_any(record: RunResult) -> bool:
    near = record.neighbors
    return bool(near.input or near.output or record.similarity or record.embedding.words)


def with_picture(row: TableRow) -> TableRow:
    """Return a row whose run has a picture of its word vectors.

    If the run has weights but no picture, the picture is computed and stored in its folder.
    """
    shown = shown_of(row)
    if shown is None or shown.record is None or shown.record.embedding.words or not (shown.folder / "best").exists():
        return row
    from reefknot.lab.tasks.word_vectors import store_embedding

    try:
        record = store_embedding(shown.folder)
    except ReefknotError:
        return row  # leave the picture out if the weights are damaged or incomplete
    pictured = replace(shown, record=record)
    return replace(row, results=tuple(pictured if result is shown else result for result in row.results))


def with_words(row: TableRow, look: Callable[[Result], Mapping[str, Stored]]) -> TableRow:
    """Return a row with the neighbours and the picture of other words.

    Args:
        row: The row.
        look: Computes the fields of a run's record that are replaced.
    """
    shown = shown_of(row)
    if shown is None or shown.record is None:
        return row
    other = replace(shown, record=shown.record.replace(**look(shown)))
    return replace(row, results=tuple(other if result is shown else result for result in row.results))


def _learned(name: str, row: str, record: RunResult, show: Callable[[str], str]) -> Learned:
    """Collect the content of the section for a row. `show` makes a token readable."""
    near = _ends(record.neighbors)
    words = tuple(map(show, record.embedding.words))
    judged = record.similarity
    tied = record.neighbors.tied or "tied" in judged or record.embedding.tied is not None
    return Learned(
        row,
        record.seed,
        _TRANSLATOR.get(record.tied or "", "one table for both ends" if tied else "two tables"),
        tuple(_pictures(name, record.embedding.replace(words=words))),
        tuple(_ENDS.get(end, end) for end in judged),
        tuple(_judged(judged)),
        tuple(near),
        tuple(_side_by_side(near, show)),
    )


def _ends(near: Neighbors) -> dict[str, NearestWords]:
    """Return the neighbours by end, or a single entry if both ends share a table and have the same neighbours."""
    if near.tied and near.input == near.output:
        return {_ENDS["tied"]: near.input}
    ends = {_ENDS["input"]: near.input, _ENDS["output"]: near.output}
    return {end: words for end, words in ends.items() if words}


def _side_by_side(
    ends: dict[str, NearestWords], show: Callable[[str], str]
) -> list[tuple[str, tuple[tuple[Neighbor, ...], ...]]]:
    """Return the neighbours of every word by end, and mark neighbours that are missing at another end."""
    rows = []
    for word in dict.fromkeys(word for end in ends.values() for word in end):
        lists = [end.get(word, ()) for end in ends.values()]
        shared = set.intersection(*({other for other, _ in near} for near in lists))
        marked = (tuple(Neighbor(show(other), cosine, other not in shared) for other, cosine in near) for near in lists)
        rows.append((show(word), tuple(marked)))
    return rows


def _judged(ends: dict[str, tuple[Judgement, ...]]) -> list[Judged]:
    """Return the benchmarks that have at least one pair of known words, in their order."""
    by_end = [{judgement.name: judgement for judgement in judgements} for judgements in ends.values()]
    benchmarks = []
    for name in dict.fromkeys(name for end in by_end for name in end):
        judgements = tuple(end.get(name) for end in by_end)
        known = [judgement for judgement in judgements if judgement is not None and judgement.rho is not None]
        if known:
            best = max(known, key=lambda judgement: judgement.rho or 0.0) if len(judgements) > 1 else None
            benchmarks.append(Judged(name, known[0].pairs, known[0].of, judgements, best))
    return benchmarks


def _pictures(name: str, shown: Embedding) -> list[Plot]:
    """Draw one plot per end, all of the same size. Ends without coordinates for every word are left out."""
    ends = {"input": shown.input, "output": shown.output, "tied": shown.tied}
    count = len(shown.words)
    complete = {end: plane for end, plane in ends.items() if plane and len(plane.xy) == len(shown.groups) == count > 1}
    coordinates = {end: np.array(plane.xy, dtype=np.float64) for end, plane in complete.items()}
    height = max(map(_height, coordinates.values()), default=_LOWEST)
    return [
        _picture(f"{name}-{end}", _ENDS[end], shown, _fit(coordinates[end], height), height, plane.explained)
        for end, plane in complete.items()
    ]


def _picture(
    name: str, end: str, shown: Embedding, points_W2: Floats, height: float, explained: tuple[float, float]
) -> Plot:
    """Draw the words of an end. A group has one colour and marker, and lines from its first word to the others."""
    words = [_short(word) for word in shown.words]
    labels = _place(points_W2, words, height)
    leaders = [_leader(*entry) for entry in zip(points_W2, labels, words, strict=True) if entry[1][2]]

    def draw(figure: Figure) -> None:
        figure.set_layout_engine("none")
        axes: Any = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(0, height))
        axes.axis("off")
        for group in sorted(set(shown.groups)):
            middle, *others = (n for n, number in enumerate(shown.groups) if number == group)
            style = style_of(group) | {"linestyle": "none", "markersize": 5, "markeredgewidth": 1.1}
            star = [n for other in others for n in (middle, other)]  # one line that returns to the middle every time
            axes.plot(*points_W2[star].T, color=style["color"], linewidth=0.7, alpha=0.35)
            axes.plot(*points_W2[others].T, **style, fillstyle="none")
            axes.plot(*points_W2[middle], **style)
        axes.add_collection(LineCollection(leaders, colors="#888888", linewidths=0.5))
        for word, (left, bottom, _) in zip(words, labels, strict=True):
            axes.text(left, bottom, word, fontsize=_SIZE)

    shares = " and ".join(f"{100 * share:.0f}" for share in explained)
    caption = f"{end.capitalize()}: the first two principal components, which explain {shares} % of the variance."
    return Plot(svg(name, height / 72, (), draw, caption), caption)


def _leader(point: Floats, label: tuple[float, float, bool], word: str) -> Floats:
    """Return the line from a word's marker to the nearest point of its label."""
    left, bottom, _ = label
    return np.array([point, np.clip(point, (left, bottom), (left + _width(word), bottom + 0.7 * _SIZE))])


def _height(xy_W2: Floats) -> float:
    """Return the height of a plot that uses the full width."""
    across, up = np.ptp(xy_W2, axis=0)
    return float(np.clip((_WIDTH - 4 * _MARGIN) * up / across if across else 0.0, _LOWEST, _HIGHEST))


def _fit(xy_W2: Floats, height: float) -> Floats:
    """Scale coordinates to points: centred and as large as fits, with the same scale for both axes."""
    low, high = xy_W2.min(axis=0), xy_W2.max(axis=0)
    available = np.array([_WIDTH - 4 * _MARGIN, height - 2 * _MARGIN])
    scale = min((size / extent for size, extent in zip(available, high - low, strict=True) if extent > 0), default=1.0)
    return np.asarray((xy_W2 - (low + high) / 2) * scale + np.array([_WIDTH, height]) / 2)


def _place(points_W2: Floats, words: Sequence[str], height: float) -> list[tuple[float, float, bool]]:
    """Return the left end and the baseline of every label, and whether the label needs a line to its word.

    In three passes over all words, each label moves to the candidate position with the lowest cost. The cost is the
    overlap with other labels and with markers, plus the distance from the word.
    """
    markers_W4 = np.hstack([points_W2 - 3, points_W2 + 3])
    choices = [_choices(point, word) for point, word in zip(points_W2, words, strict=True)]
    far_K = np.repeat(_RINGS, len(_ANGLES))
    taken_W4 = np.full((len(words), 4), np.inf)  # empty boxes, which overlap with nothing
    chosen = [0] * len(words)
    for _ in range(3):
        for n, boxes_K4 in enumerate(choices):
            taken_W4[n] = np.inf
            covered_K = _overlap(boxes_K4, taken_W4).sum(axis=1) + _overlap(boxes_K4, markers_W4).sum(axis=1)
            outside_K = (boxes_K4[:, :2] < 0).any(axis=1) | (boxes_K4[:, 2:] > (_WIDTH, height)).any(axis=1)
            chosen[n] = int(np.argmin(covered_K + far_K + 1e6 * outside_K))
            taken_W4[n] = boxes_K4[chosen[n]]
    boxes = [boxes_K4[k] for boxes_K4, k in zip(choices, chosen, strict=True)]
    # Labels on the nearest ring need no line.
    return [
        (float(box[0]), float(box[1] + 0.22 * _SIZE), k >= len(_ANGLES)) for box, k in zip(boxes, chosen, strict=True)
    ]


def _choices(point: Floats, word: str) -> Floats:
    """Return candidate boxes [K, 4] around a point, nearest first. A box touches one of the rings from outside."""
    half = np.array([_width(word), 1.1 * _SIZE]) / 2
    directions = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
    middles = [point + directions * (ring + half) for ring in _RINGS]
    middles_K2 = np.concatenate(middles)
    return np.hstack([middles_K2 - half, middles_K2 + half])


def _overlap(boxes_K4: Floats, obstacles_B4: Floats) -> Floats:
    """Return the area [K, B] of the overlap of every box with every obstacle."""
    low = np.maximum(boxes_K4[:, None, :2], obstacles_B4[None, :, :2])
    high = np.minimum(boxes_K4[:, None, 2:], obstacles_B4[None, :, 2:])
    return np.asarray(np.clip(high - low, 0, None).prod(axis=2))


def _width(word: str) -> float:
    """Estimate the width of a word in the reader's font, in points."""
    return _SIZE * sum(1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.62 for letter in word)


def _short(word: str) -> str:
    """Shorten a word so that it fits into a plot, and replace characters that cannot be printed."""
    printable = "".join(letter if letter.isprintable() else "\ufffd" for letter in word)
    return printable if len(printable) <= LONGEST else printable[: LONGEST - 1] + "…"
