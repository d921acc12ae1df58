"""Pappas & Henderson 2019, Figure 3: how far DRILL's loss lies from each baseline's, by how often a word was seen.

The paper's measure: of each word type the difference of both models' summed losses on the test text, in percent of
DRILL's, and the mean over the types of a band of training counts; the interval is that of resampled types. A type that
DRILL predicts for certain (the second half of a name) has almost no loss to divide by, and a few such decide the mean
of their band: of the 17.5 % on rare words that the paper prints against weight tying, its whole loss on those words
has 2.2 %. So beside it stands the relative difference of the whole loss of a band, with the interval of resampled
text, and that of the losses which the authors published. Below zero, DRILL is better.

<unk> and <eos> are types of their bands like any word. The authors' counts of the training text have <unk> but no
<eos>, which is in none of their bands: theirs from 5,000 on has 16 types of the Penn Treebank, ours 17.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reefknot.errors import DataError
from reefknot.lab.evaluation.comparison import blocks
from reefknot.lab.evaluation.frequency import FIGURE_3, Pair, TypeComparison, compare_by_target
from reefknot.lab.evaluation.pairing import pair
from reefknot.lab.papers.figures.contract import Figure, Measured
from reefknot.lab.papers.figures.intervals import told
from reefknot.lab.papers.figures.pictures import Panel, bars
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.results import Result, flatten
from reefknot.lab.reports.rows import group
from reefknot.lab.runs.comparability import in_comparison
from reefknot.lab.runs.definition import seen
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks.language_model import open_texts

PAPER = {
    "weight tying": (-17.546, -2.804, -0.108, -0.759, 0.512, -0.222, -0.680, 0.188),
    "bilinear": (-9.589, -7.369, -3.336, -4.665, 0.027, -0.258, 1.205, 2.054),
    "dual nonlinear": (-4.789, -6.502, -0.567, -0.702, 0.644, -0.026, 0.367, -0.808),
}
"""By the bands from one occurrence on, as the authors' files have them."""
PAPER_WHOLE = {
    "weight tying": (-2.237, -1.362, 0.023, 0.420, 0.245, -0.048, -0.767, 0.278),
    "bilinear": (-3.878, -3.888, -2.133, -0.495, 0.114, -0.018, 0.603, 2.731),
    "dual nonlinear": (0.393, 0.363, 0.869, 0.623, 0.400, 0.119, 0.351, -3.968),
}
"""Of the whole loss of a band: computed by us from the losses of every word that the authors published beside their
code. The paper does not have it."""
CAPTION = (
    "Above the loss of all tokens of a band; below, as Pappas and Henderson have it, the mean over its word types, "
    "which a few can decide that a model predicts almost for certain. With 95 % intervals."
)
LINEAR_TO = 10.0
"""Percent; where a mean is ten times as far, what is beyond is drawn on a logarithmic scale."""
Found = dict[str, Any]
"""An estimate, or the estimates of a band."""
BASELINES = {"plain": "weight tying", "bilinear": "bilinear", "dual": "dual nonlinear"}
"""By the kind of a row's classifier."""


class RelativeLoss(Figure):
    """A bar for each band and baseline."""

    name = "pappas2019/3"
    recipe = "pappas2019/figure3"
    needs = "token losses and the text"
    options = ("data",)
    title = "Pappas & Henderson 2019, Figure 3: DRILL against its baselines by word frequency"
    shows = (
        "The mean relative difference of the cross-entropy between DRILL and weight tying, the bilinear and the dual "
        "nonlinear mapping, for word types in bands of their training frequency, Penn Treebank. DRILL gains most on "
        "rare words."
    )

    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """For each baseline the bands, the mean over types and its interval; several seeds of a row are averaged.

        Baselines that were scored on other tokens than DRILL, or in other streams or windows, are named and left out.
        """
        systems = group(runs)
        ours = [name for name, results in systems.items() if _classifier(results[0]) == "drill"]
        if not ours:
            raise DataError("none of these runs has the classifier DRILL; name one with its baselines")
        drill = max(ours, key=lambda name: _depth(systems[name][0]))
        baselines = {name: results for name, results in systems.items() if _classifier(results[0]) in BASELINES}
        if not baselines:
            raise DataError(
                "these runs have no baseline (a plain classifier tied to the input's table, a bilinear or a dual one); "
                "name one with DRILL's"
            )
        first, *seeds = systems[drill]
        texts = open_texts(RunFolder.open(first.folder), data)
        left_out = {
            name: f"no fair comparison with {drill}: {reason}"
            for name, results in baselines.items()
            if (reason := _why_unfair(first, [*seeds, *results], data))
        }
        baselines = {name: results for name, results in baselines.items() if name not in left_out}
        if not baselines:
            raise DataError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
        losses = {name: [_losses(result) for result in systems[name]] for name in (drill, *baselines)}
        boundaries = blocks(len(losses[drill][0]))
        compared = []
        for name, results in baselines.items():
            pair = Pair(losses[name], losses[drill], boundaries)
            bands = compare_by_target(pair, texts.splits["test"], texts.vocabulary)
            compared.append(
                {
                    "row": name,
                    "baseline": BASELINES[str(_classifier(results[0]))],
                    "seeds": [result.seed for result in results],
                    "bands": [described(band) for band in bands],
                }
            )
        return {
            "drill": drill,
            "seeds": [result.seed for result in systems[drill]],
            "compared": compared,
            "left_out": left_out,
        }

    def draw(self, measured: Measured) -> Drawing:
        """The bands side by side, the paper's figures marked."""
        compared = {each["row"]: each["bands"] for each in measured["compared"]}
        papers = {
            measure: {
                each["row"]: {band["low"]: _papers(given, each["baseline"], band["low"]) for band in each["bands"]}
                for each in measured["compared"]
            }
            for measure, given in (("whole", PAPER_WHOLE), ("relative", PAPER))
        }
        caption = (
            f"Loss of {measured['drill']} against each baseline; below zero, DRILL is better. {CAPTION} Marked above: "
            "the same by the losses that the authors published, which the paper does not show."
        )
        shares = "% of baseline's loss", "% of DRILL's loss"
        return drawn(self.slug, compared, caption, shares, against=": DRILL less baseline", papers=papers)

    def lines(self, measured: Measured) -> list[str]:
        """A line for each band and baseline."""
        lines = [
            f"loss of {measured['drill']} against baselines, %: of all tokens of a band, in parts of the baseline's "
            "[95 %, text resampled], beside it by the losses that the authors published; and the mean over its word "
            "types, in parts of DRILL's [95 %, types resampled], beside it the paper's",
            "<unk> and <eos> are types of their bands; in the paper <unk> is, <eos> is left out",
        ]
        for each in measured["compared"]:
            lines.append(f"against {each['row']}")
            titles = f"{'all tokens':<20} {'authors':>8}   {'mean over types':<24} {'paper':>6}"
            lines.append(f"  {'seen':>12} {'tokens':>7} {'types':>6}  {titles}")
            for band in each["bands"]:
                whole, relative = (told(found, 1) if found else "" for found in (band["whole"], band["relative"]))
                theirs, paper = (_shown(given, each["baseline"], band["low"]) for given in (PAPER_WHOLE, PAPER))
                counts = f"{seen(band['low'], band['high']):>12} {band['tokens']:>7,} {band['types']:>6,}"
                lines.append(f"  {counts}  {whole:<20} {theirs:>8}   {relative:<24} {paper:>6}".rstrip())
        return [*lines, *(f"left out: {name}: {reason}" for name, reason in measured.get("left_out", {}).items())]


def described(band: TypeComparison) -> Found:
    """What is shown of a band: the relative difference, in percent, of its whole loss, and the mean over its types.
    Neither is there where there is no loss to divide by.

    The interval of the first is that of the difference, in parts of the baseline's loss as it is."""
    whole = None
    if band.nll_a > 0:
        share = 100 / band.nll_a
        interval = band.interval and (share * band.interval[0], share * band.interval[1])
        whole = _estimate(share * band.difference, interval)
    return {
        "low": band.low,
        "high": band.high,
        "types": band.types,
        "tokens": band.tokens,
        "whole": whole,
        "relative": None if band.relative is None else _estimate(band.relative, band.relative_interval),
    }


def drawn(
    name: str,
    compared: Mapping[str, Sequence[Found]],
    caption: str,
    measured: tuple[str, str],
    *,
    against: str = "",
    papers: Mapping[str, Mapping[str, Mapping[int, float | None]]] | None = None,
) -> Drawing:
    """Bands side by side, a bar for each that is compared: by all their tokens, and below that by their types; each
    with what it measures."""
    bands = sorted({(band["low"], band["high"] or 0) for own in compared.values() for band in own})
    labels = [seen(low, high or None) for low, high in bands]

    def bars_of(measure: str) -> dict[str, list[Found | None]]:
        by_low = {row: {band["low"]: band[measure] for band in own} for row, own in compared.items()}
        return {row: [own.get(low) for low, _ in bands] for row, own in by_low.items()}

    def marks_of(measure: str) -> dict[str, list[float | None]]:
        by_row = (papers or {}).get(measure, {})
        return {row: [own.get(low) for low, _ in bands] for row, own in by_row.items()}

    panels = [
        Panel(f"all tokens of a band{against}", labels, bars_of("whole"), marks_of("whole"), measured[0]),
        Panel(
            f"mean over word types{against}",
            *(labels, bars_of("relative"), marks_of("relative"), measured[1]),
            linear_to=LINEAR_TO,
        ),
    ]
    return bars(name, panels, along="times seen in training", caption=caption)


def _classifier(result: Result) -> str | None:
    kind = flatten(result.settings).get("output.classifier.kind")
    settings = flatten(result.settings)
    untied = kind == "plain" and settings.get("output.classifier.table") != settings.get("input.table")
    return None if untied or not isinstance(kind, str) else kind


def _depth(result: Result) -> int:
    return int(flatten(result.settings).get("output.classifier.depth") or 0)


def _losses(result: Result) -> Any:
    return np.asarray(RunFolder.open(result.folder).read_scores()["test"])


def _why_unfair(first: Result, others: Sequence[Result], data: Path | None) -> str | None:
    """Why the losses of runs cannot stand beside those of the first one, token by token; None where they can."""
    ours = RunFolder.open(first.folder)
    for run in (RunFolder.open(result.folder) for result in others):
        found = pair(ours, run, "test", lambda run: open_texts(run, data))
        if found.difference:
            advice = "" if found.difference.prevents else "; train both with one evaluation.windows"
            return in_comparison(found.difference, "test") + advice
        if not found.same_tokens:
            return "their tokens are others; name runs with one vocabulary"
    return None


def _estimate(mean: float, interval: tuple[float, float] | None) -> Found:
    low, high = interval or (None, None)
    return {"mean": mean, "low": low, "high": high}


def _papers(given: Mapping[str, Sequence[float]], baseline: str, low: int) -> float | None:
    edges = FIGURE_3[1:]
    return given[baseline][edges.index(low)] if low in edges else None


def _shown(given: Mapping[str, Sequence[float]], baseline: str, low: int) -> str:
    number = _papers(given, baseline, low)
    return "" if number is None else f"{number:+.1f}".replace("-", "\N{MINUS SIGN}")
