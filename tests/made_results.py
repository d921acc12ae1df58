"""Realistic run folders of three rows with one or two seeds. Some of their words look like HTML."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

WORDS = ("market", "trading", "said", "president", "million", "japan", "because", "<unk>")
NEAR = ("stock", "prices", "exchange", "futures", "<script>alert(1)</script>", "investors", "bonds")
MODES: dict[str, dict[str, Any]] = {
    "dynamic": {"scale": "mean", "eta": 5e-5, "lambda": 0.002, "epsilon": 2e-5, "segment": 5},
    "cache": {"weight": 0.1, "theta": 1.0, "window": 500, "fill": "partial"},
    "mc": {"passes": 3, "window": 35, "seed": 0},
}
"""Settings of each mode of evaluation."""

ROWS: dict[str, dict[str, Any]] = {
    "Small": {"total": 4_651_600, "tied": False, "ppl": 120.7, "paper": {"valid": 120.7, "test": 114.5}},
    "Small + WT": {"total": 2_651_600, "tied": True, "ppl": 116.6, "paper": {"valid": 117.5, "test": 112.4}},
    "Small + WT + PR": {
        "total": 2_691_800,
        "tied": True,
        "ppl": 106.2,
        "paper": {"valid": 104.9, "test": 100.9},
    },
}


def scored(
    perplexity: float, *, pieces: int = 1, unknown: int = 77, streams: int = 1, size: int = 449_945
) -> dict[str, Any]:
    """Return a score as in result.json. Every word has `pieces` sub-words, and the text has `size` bytes."""
    nll, words = math.log(perplexity), 82_430
    return {
        "perplexity": perplexity,
        "word_perplexity": perplexity**pieces,
        "bits_per_byte": nll / math.log(2) * pieces * words / size,
        "nll": nll,
        "tokens": pieces * words,
        "words": words,
        "bytes": size,
        "streams": streams,
        "precision": "float32",
        "text": {
            "split": "test",
            "tokens": pieces * words,
            "line_ends": True,
            "unknown": unknown,
            "tokenisation": "words" if pieces == 1 else "pieces",
        },
    }


def in_pieces(row: str, unknown: int) -> dict[str, Any]:
    """Return the result of a run with two sub-words per word: perplexity 10 per sub-word, 100 per word."""
    scores = scored(10.0, pieces=2, unknown=unknown)
    return result(row, 0, test=scores, valid=scores)


def bands(shift: float) -> list[dict[str, Any]]:
    """Return losses by word frequency, which `shift` improves most for rare words."""
    ends = [(1, 9), (10, 99), (100, 999), (1000, 9999), (10_000, None)]
    shares = [0.04, 0.14, 0.24, 0.26, 0.32]
    return [
        {
            "low": low,
            "high": high,
            "tokens": round(82_430 * share),
            "nll": 9.6 - 1.7 * n - shift * (4 - n) / 2,
            "types": 900,
        }
        for n, ((low, high), share) in enumerate(zip(ends, shares, strict=True))
    ]


def change(key: str, old: Any, new: Any) -> dict[str, Any]:
    """Return a changed setting as in result.json."""
    return {"key": key, "old": old, "new": new}


def result(row: str, seed: int, /, **changes: Any) -> dict[str, Any]:
    """Return the content of result.json for a row and a seed."""
    row_data = ROWS[row]
    shift = 0.1 * list(ROWS).index(row)
    neighbours_of = {
        word: [[NEAR[(n + k + seed) % len(NEAR)], 0.83 - 0.06 * k] for k in range(5)] for n, word in enumerate(WORDS)
    }
    output = (
        neighbours_of
        if row_data["tied"]
        else {word: list(reversed(neighbours)) for word, neighbours in neighbours_of.items()}
    )
    record = {
        "format": 2,
        "task": "language_model",
        "recipe": "press2017/table6",
        "row": row,
        "seed": seed,
        "command": f"reefknot train press2017/table6 --row '{row}' --seed {seed}",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": False,
        "source_sha256": "ab" * 32,
        "config_hash": "cd" * 32,
        "corpus": {
            "name": "ptb",
            "fingerprint": "ef" * 32,
            "describe": "Penn Treebank\ntrain 929,589 tokens",
        },
        "parameters": {"total": row_data["total"], "parts": {"encoder": 641_600}, "expected": row_data["total"]},
        "paper": row_data["paper"],
        "valid": scored(row_data["ppl"] + seed),
        "test": scored(row_data["ppl"] - 4 + seed),
        "best": {"step": 20_907, "epoch": 9},
        "changed": [],
        "training": {
            "steps": 30_199,
            "epochs": 13,
            "tokens": 12_000_000,
            "seconds": 150.2,
            "tokens_per_second": 80_000.0,
            "peak_memory_bytes": 700_000_000,
            "device": "NVIDIA H200",
        },
        "frequency": {"target": bands(shift), "previous": bands(shift / 2)},
        "neighbors": {"input": neighbours_of, "output": output, "tied": row_data["tied"]},
        "samples": [
            {
                "prompt": "the company",
                "text": "said it expects to report a <unk> third-quarter loss of N million <eos> "
                "mr. smith a spokesman for the exchange declined to comment on the <unk> of the bid",
                "temperature": temperature,
                "seed": 0,
            }
            for temperature in (1.0, 0.7)
        ],
    }
    return record | changes


def metrics(row: str) -> list[dict[str, Any]]:
    """Return lines of metrics.jsonl that fall to the perplexity of a row."""
    best = ROWS[row]["ppl"]
    lines: list[dict[str, Any]] = []
    for epoch in range(1, 14):
        floor = math.log(best) + 0.9 * math.exp(-(epoch - 1) / 2.2)
        for part in range(1, 4):
            step = 2323 * (epoch - 1) + 774 * part
            lines.append({"kind": "train", "step": step, "epoch": epoch, "nll": floor + 0.4 - 0.1 * epoch, "wall": {}})
        step = 2323 * epoch
        lines.append({"kind": "valid", "step": step, "epoch": epoch, "nll": floor, "perplexity": math.exp(floor)})
    return lines


def write_run(
    root: Path, row: str, seed: int = 0, record: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Path:
    """Write a run folder, which is unfinished without a record. `sections` are added to the settings."""
    slug = "-".join(row.lower().replace("+", " ").split())
    folder = root / "press2017" / "table6" / slug / f"seed{seed}"
    folder.mkdir(parents=True)
    tied = ROWS[row]["tied"]
    settings = {
        "seed": seed,
        "tables": {"words": {"dim": 200}} | ({} if tied else {"classes": {"dim": 200}}),
        "model": {
            "input": {"kind": "lookup", "table": "words"},
            "encoder": {"kind": "lstm", "dim": 200, "layers": 2, "biases": 1},
            "output": {"kind": "softmax", "classifier": {"kind": "projected" if "PR" in row else "plain"}},
        },
        "training": {"epochs": 13, "streams": 20, "steps": 20, "clip": 5.0},
    }
    settings["model"]["output"]["classifier"]["table"] = "words" if tied else "classes"
    config = {"recipe": "press2017/table6", "row": row, "settings": settings | sections}
    (folder / "config.json").write_text(json.dumps(config))
    environment = {
        "python": "3.11.2",
        "torch": "2.13.0",
        "cpu": "EPYC",
        "gpus": ["NVIDIA H200"],
        "threads": 16,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(row)))
    if record is not None:
        (folder / "result.json").write_text(json.dumps(record))
    return folder


def write_evaluation(run: Path, kind: str, test: float, valid: float = 100.0, **changes: Any) -> None:
    """Write the file that `reefknot evaluate RUN --save` adds to a run."""
    added = {"mode": {"kind": kind, **MODES[kind]}} if kind in MODES else {"windows": kind}
    record = {
        "format": 2,
        "kind": kind,
        "settings": MODES.get(kind, {"windows": kind}),
        "search": None,
        "valid": scored(valid) | added,
        "test": scored(test) | added,
        "command": f"reefknot evaluate RUN --{kind} --save",
        "commit": "fedcba98" * 5,
        "dirty": False,
        "source_sha256": "ab" * 32,
    }
    (run / "evaluations").mkdir(exist_ok=True)
    (run / "evaluations" / f"{kind}.json").write_text(json.dumps(record | changes))


def write_runs(root: Path) -> Path:
    """Write five finished runs: two seeds of the first and last row, one seed of the second row."""
    for row, seeds in (("Small", 2), ("Small + WT", 1), ("Small + WT + PR", 2)):
        for seed in range(seeds):
            write_run(root, row, seed, result(row, seed))
    return root
