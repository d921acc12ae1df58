"""Figure 3 of Pappas & Henderson: which runs can be compared with DRILL, and notes on the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reefknot.errors import DataError
from reefknot.lab.evaluation.frequency import FIGURE_3
from reefknot.lab.papers.figures import relative_loss
from reefknot.lab.papers.figures.relative_loss import RelativeLoss
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.loading import Result
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.vocabulary_settings import VocabularySettings

from .conftest import Write

Score = Callable[..., Result]

LINES = ["green river house bird", "green river tree", "green house", "green river house stone"]


@pytest.fixture
def write_scored(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Score:
    """Return a function that writes a finished run with random losses on a text, tokenised by its settings."""
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "valid", "test"):
        (text / f"{name}.txt").write_text("\n".join(LINES * 40) + "\n", encoding="utf-8")

    def open_texts(run: RunFolder, data: Path | None) -> Dataset:
        settings = run.config["settings"]
        corpus = CorpusSettings(name=str(text), **settings.get("corpus", {}))
        return open_dataset(corpus, VocabularySettings(**settings.get("vocabulary", {})), cache=tmp_path / "cache")

    def write_scored(row: str, kind: str, table: str = "words", fields: Any = None, **settings: Any) -> Result:
        ends = {"input": {"table": "words"}, "output": {"classifier": {"kind": kind, "table": table, "depth": 2}}}
        score = {"test": {"perplexity": 9.0, "nll": 2.2, "streams": 1}}
        result = write("ends", row, settings=ends | settings, **score | (fields or {}))
        run = RunFolder.open(result.folder)
        texts = open_texts(run, None)
        (result.folder / "config.json").write_text(json.dumps(run.config | {"corpus": texts.fingerprint}))
        draw = torch.Generator().manual_seed(len(row))
        RunFolder.open(result.folder).write_scores({"test": torch.rand(texts.splits["test"].tokens, generator=draw)})
        return result

    monkeypatch.setattr(relative_loss, "open_texts", open_texts)
    return write_scored


def test_baselines_with_other_tokens_are_left_out_and_named(write_scored: Score) -> None:
    runs = [
        write_scored("DRILL", "drill"),
        write_scored("tied", "plain"),
        write_scored("BPE", "plain", vocabulary={"bpe": {"merges": 4}}),
        write_scored("fewer words", "bilinear", vocabulary={"max_size": 5}),
        write_scored("less text", "dual", corpus={"tokens": 10}),
    ]
    measured = RelativeLoss().measure(runs)
    assert [baseline["row"] for baseline in measured["compared"]] == ["tied"]
    notes = [line for line in RelativeLoss().format_lines(measured) if line.startswith("left out: ")]
    facts = (("BPE", "tokens"), ("fewer words", "0 unknown words", "120"), ("less text", "0 unknown words", "40"))
    for note, (row, *reasons) in zip(notes, facts, strict=True):
        assert note.startswith(f"left out: {row}: no fair comparison with DRILL")
        assert all(reason in note for reason in reasons)


def test_one_certain_type_changes_the_mean_but_not_the_total(write_scored: Score) -> None:
    """DRILL is certain of one rare word: its mean over types is far better, its total loss is not."""
    runs = [write_scored("DRILL", "drill"), write_scored("tied", "plain")]
    texts = relative_loss.open_texts(RunFolder.open(runs[0].folder), None)
    targets = torch.from_numpy(texts.splits["test"].ids.astype("int64"))
    certain = targets == texts.vocabulary.words.index("bird")
    ours, theirs = torch.where(certain, 1e-6, 1.0), torch.where(certain, 0.01, 0.9)
    for run, losses in zip(runs, (ours, theirs), strict=True):
        RunFolder.open(run.folder).write_scores({"test": losses})
    measured = RelativeLoss().measure(runs)
    counts = dict(zip(texts.vocabulary.words, texts.vocabulary.counts, strict=True))
    (band,) = [band for band in measured["compared"][0]["bands"] if band["low"] <= counts["bird"] <= band["high"]]
    inside = torch.tensor([band["low"] <= counts[texts.vocabulary.words[target]] <= band["high"] for target in targets])
    assert band["tokens"] == int(inside.sum())
    assert band["relative"]["mean"] < -100_000
    expected = 100 * float(ours[inside].double().sum() / theirs[inside].double().sum() - 1)
    assert band["whole"]["mean"] == pytest.approx(expected, rel=1e-5)
    assert expected > 0
    # The text repeats itself, so all parts of it are equal.
    assert (band["whole"]["low"], band["whole"]["high"]) == pytest.approx((expected, expected))
    RelativeLoss().draw(measured)


@pytest.mark.parametrize(("certain", "missing"), [(1, "whole"), (0, "relative")])
def test_relative_loss_is_none_without_a_loss_to_divide_by(write_scored: Score, certain: int, missing: str) -> None:
    """The total is relative to the baseline, the mean over types to DRILL."""
    runs = [write_scored("DRILL", "drill"), write_scored("tied", "plain")]
    run = RunFolder.open(runs[certain].folder)
    run.write_scores({"test": torch.zeros_like(torch.as_tensor(run.read_scores()["test"]))})
    measured = RelativeLoss().measure(runs)
    bands = measured["compared"][0]["bands"]
    assert [band[missing] for band in bands] == [None] * len(bands)
    present = {"whole", "relative"} - {missing}
    assert [band[name]["mean"] for name in present for band in bands] == pytest.approx(
        [100.0 if certain else -100.0] * len(bands)
    )
    assert len(RelativeLoss().format_lines(measured)) > len(bands)
    RelativeLoss().draw(measured)


@pytest.mark.parametrize("baseline", sorted(relative_loss.PAPER_TYPE_MEANS))
def test_paper_has_one_value_per_band(baseline: str) -> None:
    bands = len(FIGURE_3) - 1  # without unseen words
    assert len(relative_loss.PAPER_TYPE_MEANS[baseline]) == len(relative_loss.PAPER_ALL_TOKENS[baseline]) == bands


def test_no_baseline_with_the_same_tokens_is_rejected(write_scored: Score) -> None:
    runs = [write_scored("DRILL", "drill"), write_scored("fewer words", "plain", vocabulary={"max_size": 5})]
    with pytest.raises(DataError, match="fewer words: no fair comparison with DRILL: one scores 0 unknown words as"):
        RelativeLoss().measure(runs)


def test_different_streams_are_rejected(write_scored: Score) -> None:
    fields = {"test": {"perplexity": 9.0, "nll": 2.2, "streams": 7}}
    runs = [write_scored("drill", "drill"), write_scored("plain", "plain", fields=fields)]
    with pytest.raises(DataError, match="drill: scored in 1 and in 7 streams; train both with the same"):
        RelativeLoss().measure(runs)


def test_different_windows_are_rejected(write_scored: Score) -> None:
    fields = {"test": {"perplexity": 9.0, "nll": 2.2, "streams": 1, "windows": "lines"}}
    runs = [write_scored("DRILL", "drill"), write_scored("lines", "plain", fields=fields)]
    with pytest.raises(DataError, match=r"context: one stream and lines; train both with the same evaluation\.windows"):
        RelativeLoss().measure(runs)
    runs.append(write_scored("tied", "bilinear"))
    assert list(RelativeLoss().measure(runs)["left_out"]) == ["lines"]


def test_error_says_which_baselines_are_possible(write_scored: Score) -> None:
    runs = [write_scored("DRILL", "drill"), write_scored("untied", "plain", table="classes")]
    with pytest.raises(
        DataError, match=r"plain classifier tied to the table of the input, a bilinear or a dual classifier"
    ):
        RelativeLoss().measure(runs)
