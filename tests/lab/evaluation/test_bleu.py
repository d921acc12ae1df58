"""BLEU and chrF: equal to what sacrebleu's own command prints, signatures included."""

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
from reefknot.lab.evaluation.bleu import BleuSettings, open_metrics

WORDS = ["ein", "Hund", "läuft", ".", "über", "die", "Wiese,", "und", "(sieht)", "eine", "Katze", "日本語", "3.14"]


def command(folder: Path, lines: list[str], references: list[str], *options: str) -> dict[str, dict[str, Any]]:
    """What `sacrebleu` prints, by the name of the measure."""
    for name, text in (("translations", lines), ("references", references)):
        (folder / name).write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    words = ["references", "-i", "translations", "-m", "bleu", "chrf", "--width", "12", *options]
    done = subprocess.run(
        [sys.executable, "-m", "sacrebleu", *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return {each["name"]: each for each in json.loads(done.stdout)}


def spoilt(references: list[str], seed: int = 0) -> list[str]:
    """Texts that share much with the references, an empty one among them."""
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
    ids=lambda each: each.tokenize if isinstance(each, BleuSettings) else "",
)
def test_figures_are_those_of_the_command(
    tmp_path: Path, references: list[str], settings: BleuSettings, options: tuple[str, ...]
) -> None:
    lines = spoilt(references)
    printed = command(tmp_path, lines, references, *options)
    found = open_metrics(settings).figures(lines, references)
    assert 20 < found.bleu < 95
    assert found.bleu == pytest.approx(printed["BLEU"]["score"], abs=1e-10)
    assert found.chrf == pytest.approx(printed["chrF2"]["score"], abs=1e-10)
    assert found.bleu_signature == printed["BLEU"]["signature"]
    assert found.chrf_signature == printed["chrF2"]["signature"]
    assert f"BP = {found.brevity_penalty:.3f} ratio = {found.length_ratio:.3f}" in printed["BLEU"]["verbose_score"]


def test_bands_hold_every_pair_once(references: list[str]) -> None:
    metrics, lines = open_metrics(BleuSettings(tokenize="none")), spoilt(references)
    lengths = np.array([len(line.split()) for line in references])
    lengths[:3] = (0, 10, 11)
    bands = metrics.by_length(lines, references, lengths)
    assert [(each.low, each.high) for each in bands[:2]] == [(0, 10), (11, 20)]
    assert bands[-1].high is None
    assert bands[-1].low == 51
    assert sum(each.pairs for each in bands) == len(lines)
    for band in bands:
        inside = (lengths >= band.low) & (lengths <= (band.high or 10**9))
        chosen = [[line for line, here in zip(text, inside, strict=True) if here] for text in (lines, references)]
        assert band.bleu == pytest.approx(metrics.figures(*chosen).bleu)


def test_bands_without_pairs_are_left_out() -> None:
    metrics = open_metrics(BleuSettings())
    bands = metrics.by_length(["a b c d", "a b c d"], ["a b c d", "a b c d"], np.array([4, 45]))
    assert [(each.low, each.high) for each in bands] == [(0, 10), (41, 50)]
    assert [each.bleu for each in bands] == pytest.approx([100.0, 100.0])


def test_what_is_not_installed_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(SettingsError, match="BLEU needs the package sacrebleu; pip install sacrebleu"):
        open_metrics(BleuSettings())


def test_a_tokeniser_that_is_not_installed_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from sacrebleu.tokenizers import tokenizer_ja_mecab

    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    with pytest.raises(SettingsError, match=r"tokenize = ja-mecab: .*pip install sacrebleu\[ja\]"):
        open_metrics(BleuSettings(tokenize="ja-mecab"))


def test_a_tokenised_text_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    """sacrebleu warns of it, where nobody has said that it is meant."""
    lines = ["das ist gut ."] * 120
    open_metrics(BleuSettings(tokenize="none")).figures(lines, lines)
    assert not caplog.records
    open_metrics(BleuSettings()).figures(lines, lines)
    assert any("tokenized period" in record.message for record in caplog.records)
