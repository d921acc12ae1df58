"""Metrics for other tools, only when asked for by name; metrics.jsonl is written always."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reefknot.errors import SettingsError


def tensorboard(folder: Path) -> Callable[[dict[str, Any]], None]:
    """Write each number of a metrics line as a TensorBoard scalar."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SettingsError("TensorBoard is not installed: pip install 'reefknot[tensorboard]'") from error
    writer: Any = None

    def track(line: dict[str, Any]) -> None:
        nonlocal writer
        if writer is None:
            # What a killed sitting wrote after its last checkpoint is written again, so the older points are hidden.
            writer = SummaryWriter(str(folder), purge_step=line["step"])
        for key, value in _numbers(line, line["kind"]):
            writer.add_scalar(key, value, line["step"])
        writer.flush()

    return track


def _numbers(line: dict[str, Any], prefix: str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in line.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}/{key}")
        elif key not in ("kind", "step") and isinstance(value, int | float):
            found.append((f"{prefix}/{key}", float(value)))
    return found
