"""Hand-written records of runs from which figures can be drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from reefknot.lab.runs.loading import Result, load_run

Write = Callable[..., Result]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a finished run of a recipe's row and reads it back."""

    def write(
        recipe: str,
        row: str,
        seed: int = 0,
        *,
        settings: dict[str, Any] | None = None,
        curve: Sequence[float] = (),
        corpus: str = "ptb",
        **fields: Any,
    ) -> Result:
        folder = tmp_path / "runs" / recipe / row / f"seed{seed}"
        (folder / "checkpoints").mkdir(parents=True)
        config = {"recipe": recipe, "row": row, "settings": (settings or {}) | {"training": {"seed": seed}}}
        record = {
            "format": 2,
            "task": _task(settings or {}),
            "recipe": recipe,
            "row": row,
            "seed": seed,
            "command": f"reefknot train {recipe} --row '{row}' training.seed={seed}",
            "commit": "0123456789abcdef",
            "dirty": False,
            "config_hash": "cd" * 32,
            "corpus": {"name": corpus, "fingerprint": "ef" * 32},
            "parameters": {"total": 10},
            "training": {"device": "NVIDIA H200", "epochs": len(curve)},
        }
        lines = [
            {"kind": "valid", "step": epoch, "epoch": epoch, "nll": math.log(value), "perplexity": value}
            for epoch, value in enumerate(curve)
        ]
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0"}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "result.json").write_text(json.dumps(record | fields))
        return load_run(folder)

    return write


def _task(settings: dict[str, Any]) -> str:
    if "skip_gram" in settings:
        return "skip_gram"
    return "translation" if "pairs" in settings.get("corpus", {}) else "language_model"
