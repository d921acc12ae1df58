"""Inan et al. 2017, Figure 1: how far apart the subspaces of the input vectors and of the output vectors are.

The paper trains with the loss beta tau^2 V J_aug + (1 - beta) J, and measures two sweeps: one over the share of the
augmented loss (beta), and one over its temperature (tau). Start reading at `SubspaceDistance`; `_check_claims` compares
the measured distances with what the paper says about its curves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas

from reefknot.errors import DataError
from reefknot.lab.evaluation.subspace import between_ends
from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.papers.figures.intervals import estimate_bounded_mean, format_estimate, format_verdict
from reefknot.lab.papers.figures.runs import check_one_row
from reefknot.lab.reports.drawing import Drawing, row_style
from reefknot.lab.runs.loading import Result, differing_keys, distinguishing_settings, flatten
from reefknot.lab.runs.result import Subspace
from reefknot.lab.tasks.word_vectors import open_vectors

BETA_SWEEP_TAU = 10.0
"""The temperature of the runs that vary beta."""
PAPER_DESCRIPTIONS = {"beta": {0.0: "near 1", 1.0: "about 0.06"}, "tau": {2.0: "already low"}}
"""The paper's description of its curves. It prints no numbers."""
PAPER_DISTANCE = 0.06
"""The paper's distance at beta = 1."""
TOLERANCE = 0.03
"""The largest difference that counts as "near" or "about". The paper gives no bounds; this is our choice."""
LOW_SHARE = 0.5
"""Distances below this fraction of the chance level (the distance of two unrelated tables) count as "low".

This is our choice, too.
"""


class SubspaceDistance(Figure):
    """Two panels, by beta and by tau, with a point for each value."""

    name = "inan2017/1"
    recipe = "inan2017/figure1"
    title = "Inan et al. 2017, Figure 1: subspace distance between input and output vectors"
    description = (
        "The distance between the subspaces of the input and the output vectors of an untied model, trained on 20,000 "
        "words with the loss beta tau^2 V J_aug + (1 - beta) J. The distance falls as the share of the augmented loss, "
        "beta, rises: from near 1 at beta = 0 to about 0.06 at beta = 1. At beta = 1 it is low already for tau = 2.\n\n"
        "The distance does not have to reach 0, even if the augmented loss does. Softmax cannot see a constant that is "
        "added to all logits, so the loss does not train the mean of the output vectors. This leaves one direction of "
        "their space free. In 300 dimensions, one orthogonal direction alone gives a distance of sqrt(1/300) = 0.058; "
        "the paper has 0.06. For centred tables, from which the mean vectors are subtracted, the distance can reach 0. "
        "It is in the column 'centred' of the table, if the runs have measured it."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measurements:
        """Measure the distance by beta at tau = 10, and by tau at beta = 1, as means over seeds with intervals.

        If beta = 1 at tau = 10 was also trained for more or fewer epochs, the distance by epochs is measured, too.
        """
        _check_settings(runs)
        runs_by_point: dict[_Point, list[Result]] = {}
        for run in runs:
            runs_by_point.setdefault(self._read_point(run), []).append(run)
        usual_epochs = Counter(point.epochs for point in runs_by_point).most_common(1)[0][0]
        for point, point_runs in runs_by_point.items():
            check_one_row(point_runs)
            if point.epochs != usual_epochs and (point.beta, point.tau) != (1.0, BETA_SWEEP_TAU):
                raise DataError(
                    f"{point_runs[0].folder}: trained for {point.epochs} epochs, other runs for {usual_epochs}; only "
                    f"beta = 1 at tau = {BETA_SWEEP_TAU:g} may be trained for several lengths"
                )

        # Average the distances over seeds.
        chance_levels = []
        estimates = {}
        for point, point_runs in sorted(runs_by_point.items()):
            subspaces = [_read_subspace(run, device) for run in point_runs]
            estimates[point] = _estimate_distance(subspaces)
            chance_levels.append(subspaces[0].chance)

        usual = {point: estimate for point, estimate in estimates.items() if point.epochs == usual_epochs}
        lengths = {
            point: estimate
            for point, estimate in estimates.items()
            if point.beta == 1.0 and point.tau == BETA_SWEEP_TAU
        }
        sweeps = {
            "beta": [{"at": point.beta, **usual[point]} for point in usual if point.tau == BETA_SWEEP_TAU],
            "tau": [{"at": point.tau, **usual[point]} for point in usual if point.beta == 1.0],
        }
        if not any(sweeps.values()):
            raise DataError(f"none of these runs has tau = {BETA_SWEEP_TAU:g} or beta = 1; pass runs of {self.recipe}")
        if len(lengths) > 1:
            sweeps["epochs"] = [{"at": point.epochs, **lengths[point]} for point in lengths]
        return {**sweeps, "chance": chance_levels[0]}

    def _read_point(self, run: Result) -> _Point:
        """Return the values of beta, tau and the epochs of a run."""
        settings = flatten(run.settings)
        beta = settings.get("output.beta")
        tau = settings.get("output.tau")
        if beta is None or tau is None:
            raise DataError(f"{run.folder}: not trained with output.beta; pass runs of {self.recipe}")
        return _Point(beta, tau, settings.get("training.epochs") or 0)

    def draw(self, measured: Measurements) -> Drawing:
        """Draw two panels with a common scale."""
        x_labels = {
            "beta": f"share of the augmented loss, beta (tau = {BETA_SWEEP_TAU:g})",
            "tau": "temperature, tau (beta = 1)",
        }
        sweeps = [sweep for sweep in x_labels if measured[sweep]]

        def draw(figure: Canvas) -> None:
            grid: Any = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)
            for sweep, axes in zip(sweeps, grid[0], strict=True):
                _draw_sweep(axes, measured[sweep], PAPER_DESCRIPTIONS[sweep])
                axes.axhline(measured["chance"], color="#888888", linestyle=":", linewidth=1)
                axes.set(xlabel=x_labels[sweep], ylim=(0, 1.08))
            grid[0][0].set_ylabel("subspace distance")

        caption = (
            "Distance between the subspaces of the input and the output vectors, mean over seeds with 95 % interval. "
            "Dotted: two unrelated tables. Grey: the paper's description of its curves."
        )
        return Drawing(self.slug, 2.9, (), draw, caption, width=7.2)

    def format_lines(self, measured: Measurements) -> list[str]:
        """Return a line per point with the paper's description, and whether it is confirmed."""
        sweeps = {"beta": "beta", "tau": "tau", "epochs": "beta 1, epochs"}
        all_points = [point for sweep in sweeps for point in measured.get(sweep, [])]
        has_centred = any("centred" in point for point in all_points)
        centred_title = f" {'centred':>7}" if has_centred else ""
        width = 20 if measured.get("epochs") else 12
        lines = [f"{'':<{width}} {'distance':<24}{centred_title} {'runs':>4}  paper, in words"]
        for sweep, label in sweeps.items():
            for point in measured.get(sweep, []):
                description = PAPER_DESCRIPTIONS.get(sweep, {}).get(point["at"], "")
                setting = f"{label} = {point['at']:g}"
                centred = f"{point['centred']:.3f}" if "centred" in point else ""
                centred_cell = f" {centred:>7}" if has_centred else ""
                cells = f"{setting:<{width}} {format_estimate(point, 3):<24}{centred_cell} {point['runs']:>4}"
                lines.append(f"{cells}  {description}".rstrip())
        return [*lines, f"{'by chance':<{width}} {measured['chance']:.3f}", *_check_claims(measured)]


class _Point(NamedTuple):
    """The settings that differ between runs."""

    beta: float
    tau: float
    epochs: int


VARIED_SETTINGS = ("output.beta", "output.tau", "training.epochs", "training.schedule.period")
"""The settings in which runs may differ. The schedule's period is as long as the training."""


def _estimate_distance(subspaces: Sequence[Subspace]) -> dict[str, Any]:
    """Return the mean distance with its interval, and the mean distance of the centred tables if all runs have it."""
    distances = [subspace.distance for subspace in subspaces]
    # Distances are between 0 and 1 and come close to both bounds, so plain intervals could exceed these bounds.
    estimate = estimate_bounded_mean(distances, 0.0, 1.0).json()
    centred_distances = [subspace.centred_distance for subspace in subspaces if subspace.centred_distance is not None]
    if len(centred_distances) == len(distances):
        estimate["centred"] = fmean(centred_distances)
    return estimate


def _check_settings(runs: Sequence[Result]) -> None:
    """Raise a DataError if runs differ in more than beta, tau, the length of training and the seed."""
    first = runs[0]
    for run in runs:
        keys = differing_keys([distinguishing_settings(result.settings) for result in (first, run)])
        unexpected = [key for key in keys if key not in VARIED_SETTINGS]
        if unexpected:
            raise DataError(
                f"{first.folder} and {run.folder} differ in {unexpected[0]}, not only in beta, tau and the length of "
                "training; pass runs that differ in nothing else"
            )


class _Claim(NamedTuple):
    """A statement of the paper: at this value of beta or tau, the distance lies between two bounds."""

    sweep: str
    value: float
    description: str
    lower: float
    upper: float


def _check_claims(measured: Measurements) -> list[str]:
    """Check the paper's three statements. The bounds are our interpretation of its words."""
    chance = measured["chance"]
    low_distance = LOW_SHARE * chance
    claims = [
        _Claim(
            sweep="beta",
            value=0.0,
            description=f"near its chance level (within {TOLERANCE} of {chance:.3f})",
            lower=chance - TOLERANCE,
            upper=chance + TOLERANCE,
        ),
        _Claim(
            sweep="beta",
            value=1.0,
            description=f"about {PAPER_DISTANCE} (within {TOLERANCE})",
            lower=PAPER_DISTANCE - TOLERANCE,
            upper=PAPER_DISTANCE + TOLERANCE,
        ),
        _Claim(
            sweep="tau",
            value=2.0,
            description=f"already low (below {low_distance:.3f}, which is {LOW_SHARE} times chance)",
            lower=-math.inf,
            upper=low_distance,
        ),
    ]
    verdicts = []
    for claim in claims:
        sentence = f"At {claim.sweep} = {claim.value:g} the distance is {claim.description}"
        for point in measured[claim.sweep]:
            if point["at"] == claim.value:
                verdicts.append(format_verdict(point, sentence, claim.lower, claim.upper))
    usual_distances = [point["mean"] for point in measured["beta"] if point["at"] == 1.0]
    for point in measured.get("epochs", []):
        if point["mean"] not in usual_distances:
            sentence = f"Trained for {point['at']} epochs, the distance at beta = 1 is {claims[1].description}"
            verdicts.append(format_verdict(point, sentence, claims[1].lower, claims[1].upper))
    return verdicts


def _read_subspace(run: Result, device: str) -> Subspace:
    """Return the distance from a run's result, or compute it from the weights."""
    if run.record and run.record.subspace:
        return run.record.subspace
    vectors = open_vectors(run.folder, device=device)
    if "input" not in vectors or "output" not in vectors:
        raise DataError(f"{run.folder}: both ends use the same table, so there is no distance; pass an untied run")
    return between_ends(vectors["input"].vectors_VD, vectors["output"].vectors_VD)


def _draw_sweep(axes: Any, points: Sequence[dict[str, Any]], descriptions: dict[float, str]) -> None:
    """Draw the mean distances with their intervals, and the paper's descriptions next to their points."""
    means = {point["at"]: point["mean"] for point in points}
    style = row_style(0)
    axes.plot(list(means), list(means.values()), **style)
    with_interval = [point for point in points if point["low"] is not None]
    axes.vlines(
        [point["at"] for point in with_interval],
        [point["low"] for point in with_interval],
        [point["high"] for point in with_interval],
        color=style["color"],
    )
    for value, description in descriptions.items():
        if value in means:
            # The label is where a falling curve leaves room: below left of the last point, above right of the others.
            is_last = value == max(means)
            axes.annotate(
                f"paper: {description}",
                (value, means[value]),
                xytext=(-10, -3) if is_last else (6, 5),
                textcoords="offset points",
                ha="right" if is_last else "left",
                va="top" if is_last else "bottom",
                color="#888888",
                fontsize=8,
            )
