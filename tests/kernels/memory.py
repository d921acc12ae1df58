"""Measure the memory that torch allocates on the CPU."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

MEBIBYTE = 2**20


def peak(step: Callable[[], object], folder: Path) -> int:
    """Return the largest number of bytes that torch allocates during a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    trace = folder / "trace.json"
    record.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    changes = [int(event["args"]["Bytes"]) for event in sorted(events, key=lambda event: event["ts"])]
    return max(itertools.accumulate(changes))
