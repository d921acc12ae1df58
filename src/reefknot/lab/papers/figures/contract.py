"""Define the interface of a figure: measure it on our runs, draw it, and write it as text.

    measured = figure.measure(runs)     # {"curves": [...]}
    figure.draw(measured).svg_file      # the picture
    figure.format_lines(measured)       # the table

`measure` returns plain JSON. `draw` and `format_lines` see nothing but this JSON, so that a figure can be stored and
shown later without the runs. To add a figure, write a subclass of `Figure` in a new file, and add one line to `FIGURES`
of `__init__.py`.

A recipe is a file of experiments, and each of its experiments is a row. A row has one run per random seed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.runs.loading import Result

Measurements = dict[str, Any]
"""What a figure measured, as plain JSON values."""


class Figure(ABC):
    """A figure of a paper, or a table that needs several runs."""

    name: ClassVar[str]
    """The name for `reefknot figure`, such as inan2017/2."""
    recipe: ClassVar[str]
    """The recipe whose rows the figure shows."""
    extra_recipes: ClassVar[tuple[str, ...]] = ()
    """Other recipes whose rows it shows."""
    fallback_recipe: ClassVar[str | None] = None
    """A recipe of ours that replaces the last of `recipes` if that recipe has no runs."""
    tasks: ClassVar[tuple[str, ...]] = ("language_model",)
    """The tasks (kinds of experiment) whose runs it can show, by their names in `lab/tasks`."""
    title: ClassVar[str]
    description: ClassVar[str]
    """What the paper's figure shows, in a sentence or two."""
    needs: ClassVar[str] = ""
    """What `measure` reads from a run besides results and metrics, such as "weights". Records do not contain it."""
    options: ClassVar[tuple[str, ...]] = ()
    """The arguments of `measure` that have an effect: `data` if it reads a text, `device` if it runs a model."""

    @property
    def recipes(self) -> tuple[str, ...]:
        """Every recipe whose rows the figure shows."""
        return (self.recipe, *self.extra_recipes)

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return self.name.replace("/", "-")

    @abstractmethod
    def measure(self, runs: Sequence[Result], *, data: Path | None = None, device: str = "cpu") -> Measurements:
        """Measure the runs and return plain JSON, with intervals over seeds.

        Args:
            runs: The runs of the figure's rows.
            data: The folder of the corpora; None for the default folder.
            device: The device on which models run.

        Raises:
            DataError: The runs do not have what the figure needs.
        """

    @abstractmethod
    def draw(self, measured: Measurements) -> Drawing:
        """Return the picture of what was measured."""

    @abstractmethod
    def format_lines(self, measured: Measurements) -> list[str]:
        """Return the measurements as lines of text, for a terminal and for PAPERS.md."""
