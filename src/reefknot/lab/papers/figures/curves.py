"""Inan et al. 2017, Figure 2: validation perplexity by epoch, for two network sizes.

The curves are variational LSTMs without changes (VD), with the augmented loss (AL), with reused embeddings (RE: input
and output share one table), and with both (REAL). Start reading at `Progress`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from reefknot.errors import DataError
from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.papers.figures.intervals import estimate_mean, format_verdict, subtract_estimates
from reefknot.lab.reports.drawing import Drawing, row_style
from reefknot.lab.reports.results import Result, flatten
from reefknot.lab.reports.rows import group_by_row

METHODS = ("VD", "VD+AL", "VD+RE", "VD+REAL")
CORPUS = "ptb"
SMALL_UNITS, LARGE_UNITS = 200, 1500
"""The number of hidden units of the paper's networks."""
_SHARED_CLAIMS = (("VD+AL", "VD", "AL lowers the perplexity"), ("VD+RE", "VD", "RE lowers the perplexity"))
CLAIMS = {
    ("Small", SMALL_UNITS): (*_SHARED_CLAIMS, ("VD+AL", "VD+RE", "AL lowers it more than RE")),
    ("Large", LARGE_UNITS): (*_SHARED_CLAIMS, ("VD+RE", "VD+AL", "RE lowers it more than AL")),
}
"""The paper's claims by network and number of units: the better method, the other method, and the claim as text."""

UNIT = "in validation perplexity"


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
            seed_curves = [curve for result in results if (curve := _read_perplexities(result))]
            if not seed_curves:
                continue
            epochs = sorted(set.intersection(*(set(curve) for curve in seed_curves)))
            perplexity = [estimate_mean([curve[epoch] for curve in seed_curves]).json() for epoch in epochs]
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
            for size, (axes,) in zip(sizes, grid, strict=True):
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
            best = means.index(_lowest_point(curve)["mean"])  # the index of the lowest point
            paper = f"{curve['paper']:.1f}" if curve["paper"] else ""
            lines.append(
                f"{curve['row']:<36} {means[best]:>7.1f} {curve['epochs'][best]:>6g} {paper:>6} "
                f"{means[len(means) // 3]:>11.1f} {curve['epochs'][-1]:>7g} {len(curve['seeds']):>6}"
            )
        if any(not curve["paper"] and curve["size"] == SMALL_UNITS for curve in measured["curves"]):
            # Inan et al. trained their small networks a second time, and print only the scores after that.
            lines.append("The paper prints no perplexity for the first training of its small networks.")
        return [*lines, *_check_claims(measured["curves"])]


def _check_claims(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Check the paper's claims on its two networks, by the lowest point of each curve."""
    verdicts = []
    for (network, units), claims in CLAIMS.items():
        relevant = [curve for curve in curves if curve["size"] == units and _corpus_name(curve) == CORPUS]
        lowest_points = {}
        for method in METHODS[:3]:
            lowest_points[method] = [_lowest_point(curve) for curve in relevant if curve["method"] == method]
        # A claim needs exactly one row for each of its two methods.
        unusable = {method: len(points) for method, points in lowest_points.items() if len(points) != 1}
        subject = f"{network} network ({units} units, {CORPUS})"
        for better, other, claim in claims:
            if better not in unusable and other not in unusable:
                gap = subtract_estimates(lowest_points[other][0], lowest_points[better][0])
                verdicts.append(format_verdict(gap.json(), f"{subject}: {claim}", unit=UNIT))
        if unusable:
            undecided = "all claims" if len(unusable) > 1 else "the other claims"
            methods = ", ".join(f"{method} (there are {count})" for method, count in unusable.items())
            verdicts.append(f"{subject}: {undecided} are undecided: they need exactly one row of {methods}.")
    return [*verdicts, *_list_unused(curves)]


def _list_unused(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence that names the rows that no verdict uses."""
    sizes = [units for _, units in CLAIMS]
    unused = [
        f"{curve['row']} ({curve['method']}, {curve['size']} units, {_corpus_name(curve)})"
        for curve in curves
        if curve["method"] in METHODS[:3] and (curve["size"] not in sizes or _corpus_name(curve) != CORPUS)
    ]
    return (
        [f"Not used, because the network or the corpus differs from the paper's: {'; '.join(unused)}."]
        if unused
        else []
    )


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
    is_tied = settings.get("output.classifier.table") == settings.get("input.table")
    is_augmented = settings.get("output.kind") == "augmented"
    if is_tied:
        return "VD+REAL" if is_augmented else "VD+RE"
    return "VD+AL" if is_augmented else "VD"


def _draw_curve(axes: Any, curve: dict[str, Any]) -> None:
    style = row_style(METHODS.index(curve["method"])) | {"markevery": max(1, len(curve["epochs"]) // 12)}
    axes.plot(curve["epochs"], [point["mean"] for point in curve["perplexity"]], **style)
    if all(point["low"] is not None for point in curve["perplexity"]):
        lower = [point["low"] for point in curve["perplexity"]]
        upper = [point["high"] for point in curve["perplexity"]]
        axes.fill_between(curve["epochs"], lower, upper, color=style["color"], alpha=0.2, linewidth=0)


def _cut_beginning(axes: Any, curves: Sequence[dict[str, Any]]) -> None:
    """Cut off the steep beginning of long curves, so that their differences are visible."""
    means = [[point["mean"] for point in curve["perplexity"]] for curve in curves]
    if max(map(len, means)) > 16:
        highest = max(curve_means[len(curve_means) // 8] for curve_means in means)
        axes.set_ylim(0.97 * min(map(min, means)), 1.02 * highest)
