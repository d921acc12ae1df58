"""Reproduce the figures and tables of the papers, measured on our own runs.

`FIGURES` lists all figures, and `open_figure` imports the module of a figure only when it is needed:

    figure = open_figure("inan2017/2")      # see `contract.py` for its methods
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING

from reefknot.errors import SettingsError

if TYPE_CHECKING:
    from reefknot.lab.papers.figures.contract import Figure

FIGURES = {
    "inan2017/1": "reefknot.lab.papers.figures.subspace:SubspaceDistance",
    "inan2017/2": "reefknot.lab.papers.figures.curves:Progress",
    "inan2017/table4": "reefknot.lab.papers.figures.predictions:NextWords",
    "pappas2019/3": "reefknot.lab.papers.figures.relative_loss:RelativeLoss",
    "baevski2019/2": "reefknot.lab.papers.figures.frequency:ByTarget",
    "baevski2019/3": "reefknot.lab.papers.figures.frequency:ByPrevious",
    "baevski2019/4": "reefknot.lab.papers.figures.frequency:ByTargetBillionWord",
    "baevski2019/5": "reefknot.lab.papers.figures.frequency:ByPreviousBillionWord",
    "press2017/section3": "reefknot.lab.papers.figures.updates:UpdateRule",
    "press2017/table2": "reefknot.lab.papers.figures.quality:SkipGramQuality",
    "press2017/table3": "reefknot.lab.papers.figures.quality:LanguageModelQuality",
    "press2017/table4": "reefknot.lab.papers.figures.pairwise:PairwiseSimilarity",
}
"""The module and class of each figure, by name."""


def open_figure(name: str) -> Figure:
    """Return the figure with this name."""
    if name not in FIGURES:
        suggestions = get_close_matches(name, FIGURES, n=1)
        if suggestions:
            hint = f"did you mean {suggestions[0]}?"
        else:
            hint = f"choose one of {', '.join(FIGURES)}"
        raise SettingsError(f"unknown figure {name[:100]!r}; {hint}")

    module_name, _, class_name = FIGURES[name].partition(":")
    figure_class = getattr(importlib.import_module(module_name), class_name)
    figure: Figure = figure_class()
    return figure
