"""What a figure of a paper is to the rest of the package: what it measures in runs, how that is drawn and told.

A figure is one class in one file and one line in `FIGURES` (see `__init__.py`). What `measure` returns is plain JSON;
from it alone the picture is drawn and the table is written, so that a record shows the same later, without any run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.results import Result

Measured = dict[str, Any]


class Figure(ABC):
    """A figure, or a table that no run alone can fill, of a paper."""

    name: ClassVar[str]
    """As `reefknot figure` knows it, such as inan2017/2."""
    recipe: ClassVar[str]
    """Its rows are those that the figure shows."""
    also: ClassVar[tuple[str, ...]] = ()
    """Other recipes whose rows it shows."""
    stand_in: ClassVar[str | None] = None
    """A recipe of ours whose rows serve where there are no runs of the last of `recipes`."""
    kinds: ClassVar[tuple[str, ...]] = ("language model",)
    """What it can speak of: language model, skip-gram, translator."""
    title: ClassVar[str]
    shows: ClassVar[str]
    """What the paper's figure shows, in a sentence or two."""
    needs: ClassVar[str] = ""
    """What it reads in a run besides its results and metrics, such as "weights"; a record under results/ has none."""

    @property
    def recipes(self) -> tuple[str, ...]:
        """Every recipe whose rows the figure shows."""
        return (self.recipe, *self.also)

    @property
    def slug(self) -> str:
        """Its name as a file's."""
        return self.name.replace("/", "-")

    @abstractmethod
    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measured:
        """What the runs say, with intervals over their seeds: plain JSON. A DataError where they cannot say it."""

    @abstractmethod
    def draw(self, measured: Measured) -> Drawing:
        """The picture of what was measured."""

    @abstractmethod
    def lines(self, measured: Measured) -> list[str]:
        """The same as text, a line each, for a terminal and for PAPERS.md."""
