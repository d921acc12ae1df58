"""Optional export of metrics to other tools, in addition to metrics.jsonl.

A tracker is a function that a trainer calls with every line of metrics:

    track = open_tensorboard(folder)
    track({"kind": "train", "step": 100, "nll": 5.2})    # writes the scalar train/nll
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reefknot.errors import SettingsError


def open_tensorboard(folder: Path) -> Callable[[dict[str, Any]], None]:
    """Return a tracker that writes every number of a metrics line as a TensorBoard scalar to `folder`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SettingsError("TensorBoard is not installed: pip install 'reefknot[track]'") from error
    writer: Any = None  # a SummaryWriter, opened with the step of the first line

    def track(line: dict[str, Any]) -> None:
        nonlocal writer
        if writer is None:
            # A killed session may have written points after its last checkpoint. Hide them: they are written again.
            writer = SummaryWriter(str(folder), purge_step=line["step"])
        for tag, value in _scalars(line, line["kind"]):
            writer.add_scalar(tag, value, line["step"])
        writer.flush()

    return track


def _scalars(line: dict[str, Any], prefix: str) -> list[tuple[str, float]]:
    """Return the numbers of a metrics line under tags such as `train/wall/seconds`."""
    scalars: list[tuple[str, float]] = []
    for key, value in line.items():
        if isinstance(value, dict):
            scalars += _scalars(value, f"{prefix}/{key}")
        elif key not in ("kind", "step") and isinstance(value, int | float):
            scalars.append((f"{prefix}/{key}", float(value)))
    return scalars
