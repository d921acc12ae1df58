"""`reefknot compare` on files of scores, which `rk.hf.score_tokens` writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reefknot.storage.files import write_tensors
from reefknot.storage.token_scores import TokenScores, write_token_scores

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]
TARGETS = torch.arange(4_000) % 50
LOSSES = torch.rand(4_000, generator=torch.Generator().manual_seed(1)) + 2
WINDOWS = torch.tensor([512, 256])


def write(path: Path, shift: float = 0.0, targets: torch.Tensor = TARGETS, windows: torch.Tensor = WINDOWS) -> Path:
    write_token_scores(path, TokenScores(LOSSES[: len(targets)] + shift, targets, windows))
    return path


def test_files_are_compared(cli: Cli, tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.safetensors"), write(tmp_path / "b.safetensors", -0.1)
    outcome = cli("compare", first, second)
    assert outcome.code == 0
    assert "4,000 tokens in 20 blocks" in outcome.out
    assert "B is better: 9.5% lower perplexity" in outcome.out
    assert not outcome.err
    (record,) = cli("compare", first, second, "--block", 100, "--json").json()
    assert record["ratio"] == pytest.approx(math.exp(-0.1), rel=1e-5)
    assert record["units"] == 40


def test_folder_holds_seeds(cli: Cli, tmp_path: Path) -> None:
    for seed in range(3):
        write(tmp_path / "seeds" / f"{seed}.safetensors", 0.01 * seed)
    outcome = cli("compare", tmp_path / "seeds", write(tmp_path / "b.safetensors", 0.5))
    assert f"A = {tmp_path / 'seeds'} (3 seeds)" in outcome.out
    assert "A is better" in outcome.out


def test_different_windows_are_noted(cli: Cli, tmp_path: Path) -> None:
    other = write(tmp_path / "b.safetensors", windows=torch.tensor([0, 64]))
    outcome = cli("compare", write(tmp_path / "a.safetensors"), other)
    assert outcome.code == 0
    assert "different windows: context 512 and 0, stride 256 and 64" in outcome.err


def test_mistakes_are_reported(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    first, second = (write(tmp_path / f"{name}.safetensors") for name in ("a", "second"))
    other_text = write(tmp_path / "b.safetensors", targets=TARGETS[1:])
    other_file = tmp_path / "c.safetensors"
    write_tensors(other_file, {"weight": LOSSES})
    for arguments, message in {
        (first, other_text): "they score different tokens",
        (first, other_file): "does not contain scores of rk.hf.score_tokens: it has the tensors weight",
        (first, runs.tied): "is not a file of scores",
        (first,): "needs at least two systems",
        (first, first): f"{first} is in two of the systems",
        (first, second, "--bands"): "--bands has no effect on files of scores",
        (first, second, "--by", "documents"): "--by documents has no effect",
        (first, second, "--split", "valid"): "--split has no effect",
        (first, second, "--html", tmp_path / "page.html"): "--html has no effect",
    }.items():
        outcome = cli("compare", *arguments)
        assert outcome.code in (2, 3)
        assert message in outcome.err
