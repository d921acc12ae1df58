"""Inan et al. 2017, Figure 2: validation perplexity by epoch, for two network sizes.

The curves are variational LSTMs without changes (VD), with the augmented loss (AL), with reused embeddings (RE: input
and output share one table of word vectors), and with both (REAL). Start reading at `Progress`.

A row is one experiment of a recipe; the curve of a row is the mean over its runs, one per random seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from reefknot.errors import DataError
from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.papers.figures.intervals import estimate_mean, format_verdict, subtract_estimates
from reefknot.lab.reports.drawing import Drawing, row_style
from reefknot.lab.reports.rows import group_by_row
from reefknot.lab.runs.loading import Result, flatten

METHODS = ("VD", "VD+AL", "VD+RE", "VD+REAL")
CORPUS = "ptb"
SMALL_UNITS, LARGE_UNITS = 200, 1500
"""The number of hidden units of the paper's networks."""


class Claim(NamedTuple):
    """A claim of the paper: one method has a lower perplexity than another."""

    better: str
    other: str
    sentence: str


_SHARED_CLAIMS = (
    Claim("VD+AL", "VD", "AL lowers the perplexity"),
    Claim("VD+RE", "VD", "RE lowers the perplexity"),
)
CLAIMS = {
    ("Small", SMALL_UNITS): (*_SHARED_CLAIMS, Claim("VD+AL", "VD+RE", "AL lowers it more than RE")),
    ("Large", LARGE_UNITS): (*_SHARED_CLAIMS, Claim("VD+RE", "VD+AL", "RE lowers it more than AL")),
}
"""The paper's claims, by network and number of units."""
CLAIMED_METHODS = METHODS[:3]
"""The methods that the claims are about."""
GAP_UNIT = "in validation perplexity"
"""The unit of the measured differences, for the verdicts on the claims."""


class Progress(Figure):
    """A curve for each method and size."""

    name = "inan2017/2"
    recipe = "inan2017/figure2"
    title = "Inan et al. 2017, Figure 2: progress of validation perplexity"
    description = (
        "The validation perplexity after every epoch of variational LSTMs, plain (VD), with the augmented loss (AL), "
        "with reused embeddings (RE) and with both (REAL), for a small and a large network on the Penn Treebank. RE "
        "and AL lower the perplexity. AL lowers it more in the small network, and RE in the large network."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measurements:
        """Measure the mean over seeds after each epoch, with intervals, by row."""
        curves = []
        for name, results in group_by_row(runs).items():
            all_seed_curves = [_read_perplexities(result) for result in results]
            seed_curves = [seed_curve for seed_curve in all_seed_curves if seed_curve]
            if not seed_curves:
                continue

            # Average the epochs that all seeds have.
            epochs = sorted(set.intersection(*(set(seed_curve) for seed_curve in seed_curves)))
            perplexity = []
            for epoch in epochs:
                epoch_perplexities = [seed_curve[epoch] for seed_curve in seed_curves]
                perplexity.append(estimate_mean(epoch_perplexities).json())

            settings = flatten(results[0].settings)
            record = results[0].record
            curves.append(
                {
                    "row": name,
                    "method": _find_method(settings),
                    "size": settings.get("encoder.hidden_dim"),
                    "corpus": record.corpus.name if record else None,
                    "seeds": [result.seed for result in results],
                    "epochs": epochs,
                    "perplexity": perplexity,
                    "paper": record.paper.get("valid") if record else None,
                }
            )
        if not curves:
            raise DataError("these runs have no validation perplexity by epoch; pass runs that were trained by epochs")
        return {"curves": sorted(curves, key=lambda curve: curve["size"] or 0)}

    def draw(self, measured: Measurements) -> Drawing:
        """Draw a panel for each size, without the steep beginning of long curves."""
        curves = measured["curves"]
        sizes = list(dict.fromkeys(curve["size"] for curve in curves))
        methods = sorted({curve["method"] for curve in curves}, key=METHODS.index)

        def draw(figure: Canvas) -> None:
            grid: Any = figure.subplots(len(sizes), 1, squeeze=False)
            for size, (axes,) in zip(sizes, grid, strict=True):  # the grid has one column
                panel_curves = [curve for curve in curves if curve["size"] == size]
                for curve in panel_curves:
                    _draw_curve(axes, curve)
                _cut_beginning(axes, panel_curves)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
                axes.set(title=f"{size} units", ylabel="validation perplexity")
            axes.set_xlabel("epoch")
            handles = [Line2D([], [], **row_style(METHODS.index(method))) for method in methods]
            figure.legend(handles, methods, loc="outside lower center", ncols=2, handlelength=2.6)

        caption = "Validation perplexity by epoch, mean over seeds; shaded: its 95 % interval."
        return Drawing(self.slug, 0.4 + 2.4 * len(sizes), methods, draw, caption)

    def format_lines(self, measured: Measurements) -> list[str]:
        """Return the lowest point of each curve, its value after a third of the epochs, and the paper's claims."""
        lines = [f"{'row':<36} {'lowest':>7} {'epoch':>6} {'paper':>6} {'at a third':>11} {'epochs':>7} {'seeds':>6}"]
        for curve in measured["curves"]:
            means = [point["mean"] for point in curve["perplexity"]]
            lowest_index = means.index(_lowest_point(curve)["mean"])
            lowest_epoch = curve["epochs"][lowest_index]
            mean_at_third = means[len(means) // 3]
            paper_score = f"{curve['paper']:.1f}" if curve["paper"] else ""
            lines.append(
                f"{curve['row']:<36} {means[lowest_index]:>7.1f} {lowest_epoch:>6g} {paper_score:>6} "
                f"{mean_at_third:>11.1f} {curve['epochs'][-1]:>7g} {len(curve['seeds']):>6}"
            )
        if any(not curve["paper"] and curve["size"] == SMALL_UNITS for curve in measured["curves"]):
            # Inan et al. trained their small networks a second time, and print only the scores after that.
            lines.append("The paper prints no perplexity for the first training of its small networks.")
        return [*lines, *_check_claims(measured["curves"])]


def _check_claims(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Check the paper's claims on its two networks, by the lowest point of each curve."""
    verdicts = []
    for (network, units), claims in CLAIMS.items():
        relevant_curves = [curve for curve in curves if curve["size"] == units and _corpus_name(curve) == CORPUS]
        lowest_points = {}
        for method in CLAIMED_METHODS:
            lowest_points[method] = [_lowest_point(curve) for curve in relevant_curves if curve["method"] == method]

        # A claim needs exactly one row for each of its two methods.
        unusable_counts = {method: len(points) for method, points in lowest_points.items() if len(points) != 1}
        subject = f"{network} network ({units} units, {CORPUS})"
        for claim in claims:
            if claim.better not in unusable_counts and claim.other not in unusable_counts:
                gap = subtract_estimates(lowest_points[claim.other][0], lowest_points[claim.better][0])
                verdicts.append(format_verdict(gap.json(), f"{subject}: {claim.sentence}", unit=GAP_UNIT))

        if unusable_counts:
            undecided = "all claims" if len(unusable_counts) > 1 else "the other claims"
            methods = ", ".join(f"{method} (there are {count})" for method, count in unusable_counts.items())
            verdicts.append(f"{subject}: {undecided} are undecided: they need exactly one row of {methods}.")
    return [*verdicts, *_list_unused(curves)]


def _list_unused(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence that names the rows that no verdict uses; an empty list if there are none."""
    paper_sizes = [units for _, units in CLAIMS]
    unused = []
    for curve in curves:
        is_used = curve["size"] in paper_sizes and _corpus_name(curve) == CORPUS
        if curve["method"] in CLAIMED_METHODS and not is_used:
            unused.append(f"{curve['row']} ({curve['method']}, {curve['size']} units, {_corpus_name(curve)})")
    if not unused:
        return []
    return [f"Not used, because the network or the corpus differs from the paper's: {'; '.join(unused)}."]


def _corpus_name(curve: Mapping[str, Any]) -> str | None:
    """Return the corpus of a curve. Older records do not name the corpus; they are all on the paper's corpus."""
    corpus: str | None = curve.get("corpus", CORPUS)
    return corpus


def _lowest_point(curve: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first point with the lowest mean."""
    points: Sequence[Mapping[str, Any]] = curve["perplexity"]
    return min(points, key=lambda point: float(point["mean"]))


def _read_perplexities(result: Result) -> dict[float, float]:
    """Return the validation perplexity by epoch, without the value of the starting weights."""
    return {
        metric.epoch: metric.perplexity
        for metric in result.metrics
        if metric.kind == "valid" and metric.epoch > 0 and metric.perplexity is not None
    }


def _find_method(settings: dict[str, Any]) -> str:
    """Return the method of a run, which is one of `METHODS`."""
    is_tied = settings.get("output.classifier.table") == settings.get("input.table")
    is_augmented = settings.get("output.kind") == "augmented"
    if is_tied:
        return "VD+REAL" if is_augmented else "VD+RE"
    return "VD+AL" if is_augmented else "VD"


def _draw_curve(axes: Any, curve: dict[str, Any]) -> None:
    """Draw the mean as a line, and shade its interval."""
    epochs = curve["epochs"]
    points = curve["perplexity"]
    style = row_style(METHODS.index(curve["method"])) | {"markevery": max(1, len(epochs) // 12)}
    axes.plot(epochs, [point["mean"] for point in points], **style)
    if all(point["low"] is not None for point in points):
        lower = [point["low"] for point in points]
        upper = [point["high"] for point in points]
        axes.fill_between(epochs, lower, upper, color=style["color"], alpha=0.2, linewidth=0)


def _cut_beginning(axes: Any, curves: Sequence[dict[str, Any]]) -> None:
    """Cut off the steep beginning of long curves, so that their differences are visible."""
    means_by_curve = [[point["mean"] for point in curve["perplexity"]] for curve in curves]
    if max(map(len, means_by_curve)) > 16:
        lowest = min(map(min, means_by_curve))
        highest = max(means[len(means) // 8] for means in means_by_curve)
        axes.set_ylim(0.97 * lowest, 1.02 * highest)
