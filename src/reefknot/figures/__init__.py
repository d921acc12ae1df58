"""The figures of the papers, by name. Only the one that is asked for is imported."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING

from reefknot.errors import SettingsError

if TYPE_CHECKING:
    from reefknot.figures.contract import Figure

FIGURES = {
    "inan2017/1": "reefknot.figures.subspace:SubspaceDistance",
    "inan2017/2": "reefknot.figures.curves:Progress",
    "inan2017/table4": "reefknot.figures.predictions:NextWords",
    "pappas2019/3": "reefknot.figures.relative_loss:RelativeLoss",
    "baevski2019/2": "reefknot.figures.frequency:ByTarget",
    "baevski2019/3": "reefknot.figures.frequency:ByPrevious",
    "baevski2019/4": "reefknot.figures.frequency:ByTargetBillionWord",
    "baevski2019/5": "reefknot.figures.frequency:ByPreviousBillionWord",
    "press2017/section3": "reefknot.figures.updates:UpdateRule",
    "press2017/table2": "reefknot.figures.quality:SkipGramQuality",
    "press2017/table3": "reefknot.figures.quality:LanguageModelQuality",
    "press2017/table4": "reefknot.figures.pairwise:PairwiseSimilarity",
}
"""Name, and where the class of the figure is."""


def open_figure(name: str) -> Figure:
    """The figure of that name."""
    if name not in FIGURES:
        near = get_close_matches(name, FIGURES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(FIGURES)}"
        raise SettingsError(f"no figure {name[:100]!r}; {hint}")
    module, _, kind = FIGURES[name].partition(":")
    figure: Figure = getattr(importlib.import_module(module), kind)()
    return figure
