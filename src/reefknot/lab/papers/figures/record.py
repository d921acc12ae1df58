"""Build the record of a measured figure: the measurements, the runs, and the code, command and machine.

    reefknot figure inan2017/2 RUN ... --json results/figures/inan2017-2.json

writes such a record, and `script/papers` shows all records of results/figures in PAPERS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.runs import environment
from reefknot.lab.runs.loading import Result

FORMAT = 1
"""The version of the record's format."""


def build_record(
    figure: Figure, measured: Measurements, runs: Sequence[Result], notes: Sequence[str]
) -> dict[str, Any]:
    """Return everything that is needed to reproduce the figure, as plain JSON.

    Args:
        figure: The figure.
        measured: What it measured.
        runs: The runs that were measured.
        notes: Sentences on how the runs were selected.
    """
    return {
        "format": FORMAT,
        "figure": figure.name,
        "measured": measured,
        "notes": list(notes),
        "environment": environment.capture_environment(),
        "runs": [_describe_origin(result) for result in runs],
    }


def _describe_origin(result: Result) -> dict[str, Any]:
    """Return the settings, code, command and machine of one run."""
    record = result.record
    assert record is not None
    return {
        "recipe": record.recipe,
        "row": record.row,
        "seed": record.seed,
        "command": record.command,
        "commit": record.commit,
        "dirty": record.dirty,
        "config_hash": record.config_hash,
        "changed": [change.record() for change in record.changed],
        "corpus": f"{record.corpus.name} ({record.corpus.fingerprint[:12]})",
        "device": record.training.device,
        "torch": result.environment.get("torch"),
    }
