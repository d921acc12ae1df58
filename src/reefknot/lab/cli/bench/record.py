"""Common code of all benchmarks: options, checks of options, and the record that `--json FILE` writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from reefknot.errors import SettingsError

Seconds = Annotated[
    float, typer.Option(min=0.0, help="Approximate number of seconds for which every competitor is timed.")
]
Graph = Annotated[bool, typer.Option("--graph", help="Also time a captured CUDA graph. Needs a GPU.")]
RecordFile = Annotated[
    Path | None, typer.Option("--json", help="JSON file to write all measurements to.", show_default=False)
]


@dataclass
class Record:
    """The measurements of one benchmark. They are printed, and written to a file if `path` is set."""

    benchmark: str
    device: str
    path: Path | None
    head: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, machine: dict[str, Any], notes: Sequence[str] = (), **facts: Any) -> None:
        """Print the machine, its software and `notes`, and record them together with `facts`."""
        from reefknot.lab.runs.environment import capture_environment

        environment = capture_environment()
        device = environment["cpu"] if self.device == "cpu" else environment["gpus"][0]
        self.head = {
            "bench": self.benchmark,
            "machine": {"device": device, **machine},
            "environment": environment,
            **facts,
        }
        triton = f"triton {machine['triton']}" if machine["triton"] else "no triton"
        self.print(", ".join([device, f"torch {machine['torch']}", triton, *notes]))

    def print(self, text: str) -> None:
        """Print a line of the result."""
        typer.echo(text)

    def progress(self, text: str) -> None:
        """Print a line about the progress, on stderr."""
        typer.echo(text, err=True)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows and write the file again, so that a benchmark that is stopped keeps what it has measured."""
        from reefknot.storage.files import write_json

        self.rows += rows
        if self.path is not None:
            write_json(self.path, self.head | {"rows": self.rows})


def open_record(benchmark: str, device: str, path: Path | None) -> Record:
    """Choose the device and check that the record can be written, before anything is measured."""
    from reefknot.lab.training.distributed import choose_device

    check_output_file("--json", path)
    return Record(benchmark, choose_device(device), path)


def check_output_file(option: str, path: Path | None) -> None:
    """Raise an error if a file cannot be written because of its path."""
    if path is not None and path.is_dir():
        raise SettingsError(f"{option} {path}: is a folder; name a file")
    if path is not None and not path.resolve().parent.is_dir():
        raise SettingsError(f"{option} {path}: the folder {path.resolve().parent} does not exist; create it first")


def check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise an error if a value of an option is not one of the known names."""
    for name in names:
        if name not in known:
            raise SettingsError(f"{option} {name}: must be {' or '.join(known)}")


def check_gpu_options(record: Record, weights: str | None, graph: bool) -> None:
    """Raise an error if an option needs a GPU and the benchmark runs on a CPU."""
    if record.device == "cpu" and (graph or weights not in (None, "float32")):
        option = "--graph" if graph else f"--weights {weights}"
        raise SettingsError(f"{option} needs a GPU, but this benchmark runs on a CPU; leave it out or use a GPU")
