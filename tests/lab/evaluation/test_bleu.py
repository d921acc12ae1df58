"""BLEU and chrF equal the output of the sacrebleu command, including signatures."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.bleu import BleuSettings, create_metrics

WORDS = ["ein", "Hund", "läuft", ".", "über", "die", "Wiese,", "und", "(sieht)", "eine", "Katze", "日本語", "3.14"]


def run_sacrebleu(folder: Path, lines: list[str], references: list[str], *options: str) -> dict[str, dict[str, Any]]:
    """Run the sacrebleu command and return what it prints, by metric."""
    for name, text in (("translations", lines), ("references", references)):
        (folder / name).write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    words = ["references", "-i", "translations", "-m", "bleu", "chrf", "--width", "12", *options]
    done = subprocess.run(
        [sys.executable, "-m", "sacrebleu", *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return {metric["name"]: metric for metric in json.loads(done.stdout)}


def corrupted(references: list[str], seed: int = 0) -> list[str]:
    """Return texts that share much with the references; the first one is empty."""
    draw = random.Random(seed)
    lines = []
    for line in references:
        words = [word if draw.random() < 0.8 else draw.choice(WORDS) for word in line.split()]
        lines.append(" ".join(words[: draw.randint(1, len(words))] if draw.random() < 0.3 else words))
    return ["", *lines[1:]]


@pytest.fixture(scope="module")
def references() -> list[str]:
    draw = random.Random(1)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(4, 60))) for _ in range(40)]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (BleuSettings(tokenize="none"), ("--tokenize", "none")),
        (BleuSettings(), ()),
        (BleuSettings(tokenize="intl", lowercase=True), ("--tokenize", "intl", "--lowercase")),
        (BleuSettings(tokenize="char"), ("--tokenize", "char")),
        (BleuSettings(tokenize="zh"), ("--tokenize", "zh")),
    ],
    ids=lambda value: value.tokenize if isinstance(value, BleuSettings) else "",
)
def test_scores_equal_the_sacrebleu_command(
    tmp_path: Path, references: list[str], settings: BleuSettings, options: tuple[str, ...]
) -> None:
    lines = corrupted(references)
    printed = run_sacrebleu(tmp_path, lines, references, *options)
    scores = create_metrics(settings).score(lines, references)
    assert 20 < scores.bleu < 95
    assert scores.bleu == pytest.approx(printed["BLEU"]["score"], abs=1e-10)
    assert scores.chrf == pytest.approx(printed["chrF2"]["score"], abs=1e-10)
    assert scores.bleu_signature == printed["BLEU"]["signature"]
    assert scores.chrf_signature == printed["chrF2"]["signature"]
    assert f"BP = {scores.brevity_penalty:.3f} ratio = {scores.length_ratio:.3f}" in printed["BLEU"]["verbose_score"]


def test_length_bands_hold_every_pair_once(references: list[str]) -> None:
    metrics = create_metrics(BleuSettings(tokenize="none"))
    lines = corrupted(references)
    lengths = np.array([len(line.split()) for line in references])
    lengths[:3] = (0, 10, 11)
    bands = metrics.score_by_length(lines, references, lengths)
    assert [(band.low, band.high) for band in bands[:2]] == [(0, 10), (11, 20)]
    assert bands[-1].high is None
    assert bands[-1].low == 51
    assert sum(band.pairs for band in bands) == len(lines)
    for band in bands:
        inside = (lengths >= band.low) & (lengths <= (band.high or 10**9))
        chosen = [
            [line for line, is_inside in zip(text, inside, strict=True) if is_inside] for text in (lines, references)
        ]
        assert band.bleu == pytest.approx(metrics.score(*chosen).bleu)


def test_empty_length_bands_are_left_out() -> None:
    metrics = create_metrics(BleuSettings())
    bands = metrics.score_by_length(["a b c d", "a b c d"], ["a b c d", "a b c d"], np.array([4, 45]))
    assert [(band.low, band.high) for band in bands] == [(0, 10), (41, 50)]
    assert [band.bleu for band in bands] == pytest.approx([100.0, 100.0])


def test_missing_tokeniser_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from sacrebleu.tokenizers import tokenizer_ja_mecab

    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    with pytest.raises(SettingsError, match=r"tokenize = ja-mecab: .*pip install sacrebleu\[ja\]"):
        create_metrics(BleuSettings(tokenize="ja-mecab"))


def test_tokenize_none_suppresses_the_tokenised_text_warning(caplog: pytest.LogCaptureFixture) -> None:
    """sacrebleu warns about tokenised text unless tokenize = none says that it is intended."""
    lines = ["das ist gut ."] * 120
    create_metrics(BleuSettings(tokenize="none")).score(lines, lines)
    assert not caplog.records
    create_metrics(BleuSettings()).score(lines, lines)
    assert any("tokenized period" in record.message for record in caplog.records)
