"""Inan et al. 2017, Figure 2: validation perplexity by epoch, with and without AL and RE, at two network sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from reefknot.errors import DataError
from reefknot.figures.contract import Figure, Measured
from reefknot.figures.intervals import over_seeds
from reefknot.reports.drawing import Drawing, style_of
from reefknot.reports.results import Result, flatten
from reefknot.reports.rows import group

METHODS = ("VD", "VD+AL", "VD+RE", "VD+REAL")


class Progress(Figure):
    """A curve for each method and size."""

    name = "inan2017/2"
    recipe = "inan2017/figure2"
    title = "Inan et al. 2017, Figure 2: progress of validation perplexity"
    shows = (
        "The validation perplexity after every epoch of variational LSTMs, plain (VD), with the augmented loss (AL), "
        "with reused embeddings (RE) and with both (REAL), for a small and a large network on the Penn Treebank. RE "
        "and AL lower it, AL more in the small network and RE more in the large one."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """Per row the mean over seeds after each epoch, with intervals."""
        curves = []
        for name, results in group(runs).items():
            seeds = [points for result in results if (points := _points(result))]
            if not seeds:
                continue
            epochs = sorted(set.intersection(*(set(points) for points in seeds)))
            found = [over_seeds([points[epoch] for points in seeds]).json() for epoch in epochs]
            settings = flatten(results[0].settings)
            record = results[0].record
            curves.append(
                {
                    "row": name,
                    "method": _method(settings),
                    "size": settings.get("encoder.hidden_dim"),
                    "seeds": [result.seed for result in results],
                    "epochs": epochs,
                    "perplexity": found,
                    "paper": record.paper.get("valid") if record else None,
                }
            )
        if not curves:
            raise DataError("these runs have logged no validation perplexity by epoch; name runs trained for epochs")
        return {"curves": sorted(curves, key=lambda curve: curve["size"] or 0)}

    def draw(self, measured: Measured) -> Drawing:
        """A panel for each size, without the steep beginning of long curves."""
        curves = measured["curves"]
        sizes = list(dict.fromkeys(curve["size"] for curve in curves))
        told = sorted({curve["method"] for curve in curves}, key=_place)

        def draw(figure: Canvas) -> None:
            grid: Any = figure.subplots(len(sizes), 1, squeeze=False)
            for size, (axes,) in zip(sizes, grid, strict=True):
                own = [curve for curve in curves if curve["size"] == size]
                for curve in own:
                    _draw(axes, curve)
                _cut(axes, own)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
                axes.set(title=f"{size} units", ylabel="validation perplexity")
            axes.set_xlabel("epoch")
            handles = [Line2D([], [], **style_of(_place(method))) for method in told]
            figure.legend(handles, told, loc="outside lower center", ncols=2, handlelength=2.6)

        caption = "Validation perplexity by epoch, mean over seeds; shaded: its 95 % interval."
        return Drawing(self.slug, 0.4 + 2.4 * len(sizes), told, draw, caption)

    def lines(self, measured: Measured) -> list[str]:
        """The lowest point of each curve, and where it lies after a third of its epochs."""
        lines = [f"{'row':<36} {'lowest':>7} {'epoch':>6} {'paper':>6} {'at a third':>11} {'epochs':>7} {'seeds':>6}"]
        for curve in measured["curves"]:
            means = [point["mean"] for point in curve["perplexity"]]
            best = min(range(len(means)), key=means.__getitem__)
            paper = f"{curve['paper']:.1f}" if curve["paper"] else ""
            lines.append(
                f"{curve['row']:<36} {means[best]:>7.1f} {curve['epochs'][best]:>6g} {paper:>6} "
                f"{means[len(means) // 3]:>11.1f} {curve['epochs'][-1]:>7g} {len(curve['seeds']):>6}"
            )
        return lines


def _points(result: Result) -> dict[float, float]:
    """Validation perplexity by epoch; what stands before the first epoch is another training's."""
    return {
        metric.epoch: metric.perplexity
        for metric in result.metrics
        if metric.kind == "valid" and metric.epoch > 0 and metric.perplexity is not None
    }


def _method(settings: dict[str, Any]) -> str:
    tied = settings.get("output.labels.table") == settings.get("input.table")
    return METHODS[2 * tied + (settings.get("output.kind") == "augmented")]


def _place(method: str) -> int:
    return METHODS.index(method)


def _draw(axes: Any, curve: dict[str, Any]) -> None:
    style = style_of(_place(curve["method"])) | {"markevery": max(1, len(curve["epochs"]) // 12)}
    axes.plot(curve["epochs"], [point["mean"] for point in curve["perplexity"]], **style)
    if all(point["low"] is not None for point in curve["perplexity"]):
        low, high = ([point[end] for point in curve["perplexity"]] for end in ("low", "high"))
        axes.fill_between(curve["epochs"], low, high, color=style["color"], alpha=0.2, linewidth=0)


def _cut(axes: Any, curves: Sequence[dict[str, Any]]) -> None:
    """Room for what sets long curves apart."""
    means = [[point["mean"] for point in curve["perplexity"]] for curve in curves]
    if max(map(len, means)) > 16:
        axes.set_ylim(0.97 * min(map(min, means)), 1.02 * max(each[len(each) // 8] for each in means))
