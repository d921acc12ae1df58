"""Inan et al. 2017, Figure 1: the distance between the subspaces of class vectors and input vectors.

The paper varies the share of the augmented loss (beta), and its temperature (tau).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from reefknot.errors import DataError
from reefknot.lab.evaluation.subspace import between_ends
from reefknot.lab.papers.figures.contract import Figure, Measured
from reefknot.lab.papers.figures.intervals import format_estimate, over_bounded, verdict
from reefknot.lab.papers.figures.runs import check_one_row
from reefknot.lab.reports.drawing import Drawing, style_of
from reefknot.lab.reports.results import Result, differing, distinguishing, flatten
from reefknot.lab.runs.result import Subspace
from reefknot.lab.tasks.word_vectors import open_vectors

TAU = 10.0
"""The temperature of the runs that vary beta."""
DESCRIBED = {"beta": {0.0: "near 1", 1.0: "about 0.06"}, "tau": {2.0: "already low"}}
"""The paper's description of its curves. It prints no numbers."""
ABOUT = 0.06
"""The paper's distance at beta = 1."""
NEAR = 0.03
"""The largest difference that counts as "near" or "about". The paper gives no bounds; this is our choice."""
LOW = 0.5
"""Distances below this share of the distance by chance count as "low". This is our choice, too."""


class SubspaceDistance(Figure):
    """Two panels, by beta and by tau, with a point for each value."""

    name = "inan2017/1"
    recipe = "inan2017/figure1"
    title = "Inan et al. 2017, Figure 1: subspace distance between input and output vectors"
    shows = (
        "The distance between the subspaces of the input and the output vectors of an untied model, trained on 20,000 "
        "words with the loss beta tau^2 V J_aug + (1 - beta) J. The distance falls as the share of the augmented loss, "
        "beta, rises: from near 1 at beta = 0 to about 0.06 at beta = 1. At beta = 1 it is low already for tau = 2."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """Measure the distance by beta at tau = 10, and by tau at beta = 1, as means over seeds with intervals."""
        by_point: dict[tuple[float, float], list[Result]] = {}
        for run in runs:
            settings = flatten(run.settings)
            beta, tau = settings.get("output.beta"), settings.get("output.tau")
            if beta is None or tau is None:
                raise DataError(f"{run.folder}: not trained with output.beta; name runs of {self.recipe}")
            by_point.setdefault((beta, tau), []).append(run)
        _check_settings(runs)
        for seeds in by_point.values():
            check_one_row(seeds)
        measured = {point: [_subspace(run, device) for run in seeds] for point, seeds in sorted(by_point.items())}
        # Distances are between 0 and 1 and come close to both ends, so plain intervals could exceed these bounds.
        distances = {point: [subspace.distance for subspace in seeds] for point, seeds in measured.items()}
        means = {point: over_bounded(values, 0.0, 1.0).json() for point, values in distances.items()}
        sweeps = {
            "beta": [{"at": beta, **mean} for (beta, tau), mean in means.items() if tau == TAU],
            "tau": [{"at": tau, **mean} for (beta, tau), mean in means.items() if beta == 1.0],
        }
        if not any(sweeps.values()):
            raise DataError(f"none of these runs has tau = {TAU:g} or beta = 1; name runs of {self.recipe}")
        return {**sweeps, "chance": next(iter(measured.values()))[0].chance}

    def draw(self, measured: Measured) -> Drawing:
        """Draw two panels with a common scale."""
        names = {"beta": f"share of the augmented loss, beta (tau = {TAU:g})", "tau": "temperature, tau (beta = 1)"}
        drawn = [sweep for sweep in names if measured[sweep]]

        def draw(figure: Canvas) -> None:
            grid: Any = figure.subplots(1, len(drawn), sharey=True, squeeze=False)
            for sweep, axes in zip(drawn, grid[0], strict=True):
                _draw(axes, measured[sweep], DESCRIBED[sweep])
                axes.axhline(measured["chance"], color="#888888", linestyle=":", linewidth=1)
                axes.set(xlabel=names[sweep], ylim=(0, 1.08))
            grid[0][0].set_ylabel("subspace distance")

        caption = (
            "Distance between the subspaces of the input and the output vectors, mean over seeds with 95 % interval. "
            "Dotted: two unrelated tables. Grey: the paper's description of its curves."
        )
        return Drawing(self.slug, 2.9, (), draw, caption, width=7.2)

    def lines(self, measured: Measured) -> list[str]:
        """Return a line per point with the paper's description, and whether it is confirmed."""
        lines = [f"{'':<12} {'distance':<24} {'runs':>4}  paper, in words"]
        for sweep in ("beta", "tau"):
            for point in measured[sweep]:
                description = DESCRIBED[sweep].get(point["at"], "")
                at = f"{sweep} = {point['at']:g}"
                lines.append(f"{at:<12} {format_estimate(point, 3):<24} {point['runs']:>4}  {description}".rstrip())
        return [*lines, f"by chance    {measured['chance']:.3f}", *_verdicts(measured)]


def _check_settings(runs: Sequence[Result]) -> None:
    """Raise a DataError if runs differ in more than beta, tau and the seed."""
    first = runs[0]
    for run in runs:
        keys = differing([distinguishing(result.settings) for result in (first, run)])
        others = [key for key in keys if key not in ("output.beta", "output.tau")]
        if others:
            raise DataError(
                f"{first.folder} and {run.folder} differ in {others[0]}, not only in beta and tau; name runs that "
                "differ in nothing else"
            )


def _verdicts(measured: Measured) -> list[str]:
    """Check the paper's three statements. The bounds are our interpretation of its words."""
    chance = measured["chance"]
    low = LOW * chance
    statements = {
        ("beta", 0.0): (f"near its chance level (within {NEAR} of {chance:.3f})", chance - NEAR, chance + NEAR),
        ("beta", 1.0): (f"about {ABOUT} (within {NEAR})", ABOUT - NEAR, ABOUT + NEAR),
        ("tau", 2.0): (f"already low (below {low:.3f}, which is {LOW} times chance)", -math.inf, low),
    }
    points = {(sweep, point["at"]): point for sweep in ("beta", "tau") for point in measured[sweep]}
    return [
        verdict(points[sweep, at], f"At {sweep} = {at:g} the distance is {claim}", *ends)
        for (sweep, at), (claim, *ends) in statements.items()
        if (sweep, at) in points
    ]


def _subspace(run: Result, device: str) -> Subspace:
    """Return the distance from a run's result, or compute it from the weights."""
    if run.record and run.record.subspace:
        return run.record.subspace
    vectors = open_vectors(run.folder, device=device)
    if "input" not in vectors or "output" not in vectors:
        raise DataError(f"{run.folder}: both ends use the same table, so there is no distance; name an untied run")
    return between_ends(vectors["input"].vectors_VD, vectors["output"].vectors_VD)


def _draw(axes: Any, points: Sequence[dict[str, Any]], described: dict[float, str]) -> None:
    at, mean = ([point[key] for point in points] for key in ("at", "mean"))
    style = style_of(0)
    axes.plot(at, mean, **style)
    known = [point for point in points if point["low"] is not None]
    axes.vlines(
        [point["at"] for point in known],
        [point["low"] for point in known],
        [point["high"] for point in known],
        color=style["color"],
    )
    means = dict(zip(at, mean, strict=True))
    for value, words in described.items():
        if value in means:
            # The label is on the side of the point that a falling curve does not reach.
            last = value == max(at)
            axes.annotate(
                f"paper: {words}",
                (value, means[value]),
                xytext=(-10, -3) if last else (6, 5),
                textcoords="offset points",
                ha="right" if last else "left",
                va="top" if last else "bottom",
                color="#888888",
                fontsize=8,
            )
