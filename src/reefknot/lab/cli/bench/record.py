"""Code that all benchmarks share: their options, checks of these options, and the file that `--json FILE` writes.

A benchmark opens a `Record`, prints its header, and then adds one table after another. Every table is printed at once
and saved at once, so a benchmark that is stopped keeps what it has measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from reefknot.errors import SettingsError
from reefknot.lab.cli.bench import printing

if TYPE_CHECKING:
    from reefknot.lab.recipes.recipe import Recipe, Row

SecondsOption = Annotated[
    float, typer.Option(min=0.0, help="Approximate number of seconds to time each implementation for.")
]
GraphOption = Annotated[bool, typer.Option("--graph", help="Also time a captured CUDA graph. Needs a GPU.")]
RowPatternsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Row to measure, or a pattern with * for several rows. Can be repeated. [default: all rows of RECIPE]"
    ),
]
RecordFileOption = Annotated[
    Path | None, typer.Option("--json", help="Write all measurements to this JSON file.", show_default=False)
]


class Measurement(Protocol):
    """The measurements of one implementation, which is one line of a table."""

    @property
    def ms(self) -> float | None:
        """Time in milliseconds; None if nothing was measured."""

    @property
    def note(self) -> str:
        """The reason why something was not measured, or an empty text."""

    def record(self) -> dict[str, Any]:
        """Return the measurements as plain JSON values."""


AnyMeasurement = TypeVar("AnyMeasurement", bound=Measurement)


@dataclass
class Record:
    """The measurements of one benchmark. They are printed, and written to a file if `path` is set."""

    benchmark: str
    """The name of the benchmark, such as "heads"."""
    device: str
    """`cuda` or `cpu`."""
    path: Path | None
    header: dict[str, Any] = field(default_factory=dict)
    """The part of the file that is not measurements: the benchmark, the machine and the options."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The measurements of all tables so far, as plain JSON values."""
    started_at: float = field(default_factory=time.monotonic)

    def print_header(self, machine: dict[str, Any], notes: Sequence[str] = (), **details: Any) -> None:
        """Print the machine, its software and `notes`, and record them together with `details`."""
        from reefknot.lab.runs.environment import capture_environment

        environment = capture_environment()
        device_name = environment["cpu"] if self.device == "cpu" else environment["gpus"][0]
        self.header = {
            "bench": self.benchmark,
            "machine": {"device": device_name, **machine},
            "environment": environment,
            **details,
        }
        triton = f"triton {machine['triton']}" if machine["triton"] else "no triton"
        self.print(", ".join([device_name, f"torch {machine['torch']}", triton, *notes]))

    def print(self, text: str) -> None:
        """Print a line of the result."""
        typer.echo(text)

    def print_progress(self, text: str) -> None:
        """Print a line about the progress, with the time since the start, on stderr."""
        typer.echo(f"{time.monotonic() - self.started_at:4.0f} s  {text}", err=True)

    def add_table(
        self,
        heading: str,
        measurements: Sequence[AnyMeasurement],
        format_cells: Callable[[AnyMeasurement], Mapping[str, str]],
        hide_empty: bool = False,
    ) -> None:
        """Print measurements as a table and add them to the record. `print_table` describes the arguments."""
        self.print_table(heading, measurements, format_cells, hide_empty)
        self.add(measurement.record() for measurement in measurements)

    def print_table(
        self,
        heading: str,
        measurements: Sequence[AnyMeasurement],
        format_cells: Callable[[AnyMeasurement], Mapping[str, str]],
        hide_empty: bool = False,
    ) -> None:
        """Print measurements as a table below a heading.

        Args:
            heading: The line above the table.
            measurements: One measurement per line. A measurement without a time has only a note, below the table.
            format_cells: Returns the cells of a measurement by column title. The first cell is its name.
            hide_empty: Leave out columns that are empty in every line.
        """
        timed_lines: list[Mapping[str, str]] = []
        notes: list[tuple[str, str]] = []
        for measurement in measurements:
            cells = format_cells(measurement)
            name = next(iter(cells.values()))
            notes.append((name, measurement.note))
            if measurement.ms is not None:
                timed_lines.append(cells)

        titles = list(format_cells(measurements[0]))
        if hide_empty:
            titles = printing.filled_columns(timed_lines)
        table_lines = [[cells[title] for title in titles] for cells in timed_lines]
        self.print(f"\n{heading}")
        printing.print_table(titles, table_lines, notes)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows of JSON values, and write the whole file again."""
        from reefknot.storage.files import write_json

        self.rows += rows
        if self.path is not None:
            write_json(self.path, self.header | {"rows": self.rows})


def open_record(benchmark: str, device: str, path: Path | None) -> Record:
    """Choose the device and check that the record can be written, before anything is measured."""
    from reefknot.lab.training.distributed import choose_device

    check_output_file("--json", path)
    return Record(benchmark, choose_device(device), path)


def load_rows(
    recipe: str, overrides: Sequence[str] | None, patterns: Sequence[str] | None, data: Path | None
) -> tuple[Recipe, list[Row]]:
    """Load a recipe, and return it with its rows (experiments) to measure.

    Args:
        recipe: The recipe's name or path.
        overrides: Settings to change, as `key=value`.
        patterns: Names of rows, or patterns with `*`. None selects all rows that can be trained.
        data: The value of `--data`. It is an error if no row reads a text from it.
    """
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.recipes.recipe import load_recipe

    loaded_recipe = load_recipe(recipe, overrides or [], patterns or None, alone=True)
    rows = [row for row in loaded_recipe.rows if row.trained]
    corpora = [loaded_recipe.experiments[row.name].corpus for row in rows]
    check_data(data, corpora, recipe)
    return loaded_recipe, rows


def check_output_file(option: str, path: Path | None) -> None:
    """Raise an error if `path` is a folder, or if its parent folder does not exist. None is valid."""
    if path is None:
        return
    if path.is_dir():
        raise SettingsError(f"{option} {path}: is a folder; use the path of a file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise SettingsError(f"{option} {path}: the folder {folder} does not exist; create it first")


def check_names(option: str, names: Sequence[str], choices: Sequence[str]) -> None:
    """Raise an error if a value of an option is not one of the choices."""
    for name in names:
        if name not in choices:
            raise SettingsError(f"{option} {name}: must be {' or '.join(choices)}")


def check_gpu_options(record: Record, weights: str | None, graph: bool) -> None:
    """Raise an error if an option needs a GPU and the benchmark runs on a CPU."""
    if record.device == "cpu" and (graph or weights not in (None, "float32")):
        option = "--graph" if graph else f"--weights {weights}"
        raise SettingsError(f"{option} needs a GPU, but this benchmark runs on a CPU; leave {option} out or use a GPU")


def check_memory(budgets: Sequence[float], competitors: Sequence[str]) -> None:
    """Raise an error if a budget of --memory is not positive, or if reefknot is not measured."""
    for budget in budgets:
        if not budget > 0:
            raise SettingsError(f"--memory {budget:g}: must be a number of MiB above 0")
    if budgets and "reefknot" not in competitors:
        raise SettingsError(
            "--memory has no effect without --competitor reefknot; add this competitor or leave --memory out"
        )
