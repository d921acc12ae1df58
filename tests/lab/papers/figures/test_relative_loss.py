"""Figure 3 of Pappas & Henderson: which runs may stand beside DRILL, and what is said of the others."""

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
from reefknot.lab.reports.results import Result
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.vocabulary import VocabularySettings

from .conftest import Write

Score = Callable[..., Result]

LINES = ["green river house bird", "green river tree", "green house", "green river house stone"]


@pytest.fixture
def scored(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Score:
    """A finished run with random losses on a text, cut into tokens as its settings say."""
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "valid", "test"):
        (text / f"{name}.txt").write_text("\n".join(LINES * 40) + "\n", encoding="utf-8")

    def open_texts(run: RunFolder, data: Path | None) -> Dataset:
        settings = run.config["settings"]
        corpus = CorpusSettings(name=str(text), **settings.get("corpus", {}))
        return open_dataset(corpus, VocabularySettings(**settings.get("vocabulary", {})), cache=tmp_path / "cache")

    def scored(row: str, kind: str, table: str = "words", found: Any = None, **settings: Any) -> Result:
        ends = {"input": {"table": "words"}, "output": {"classifier": {"kind": kind, "table": table, "depth": 2}}}
        score = {"test": {"perplexity": 9.0, "nll": 2.2, "streams": 1}}
        result = write("ends", row, settings=ends | settings, **score | (found or {}))
        run = RunFolder.open(result.folder)
        texts = open_texts(run, None)
        (result.folder / "config.json").write_text(json.dumps(run.config | {"corpus": texts.fingerprint}))
        draw = torch.Generator().manual_seed(len(row))
        RunFolder.open(result.folder).write_scores({"test": torch.rand(texts.splits["test"].tokens, generator=draw)})
        return result

    monkeypatch.setattr(relative_loss, "open_texts", open_texts)
    return scored


def test_baselines_with_other_tokens_are_named_and_left_out(scored: Score) -> None:
    runs = [
        scored("DRILL", "drill"),
        scored("tied", "plain"),
        scored("BPE", "plain", vocabulary={"bpe": {"merges": 4}}),
        scored("fewer words", "bilinear", vocabulary={"max_size": 5}),
        scored("less text", "dual", corpus={"tokens": 10}),
    ]
    measured = RelativeLoss().measure(runs)
    assert [each["row"] for each in measured["compared"]] == ["tied"]
    assert [line for line in RelativeLoss().lines(measured) if line.startswith("left out: ")] == [
        "left out: BPE: no fair comparison with DRILL: their tokens differ; name runs with the same vocabulary",
        "left out: fewer words: no fair comparison with DRILL: 0 unknown words, scored as <unk>, against 120; compare "
        "runs whose vocabularies know the same words (vocabulary.min_count, max_size, bpe)",
        "left out: less text: no fair comparison with DRILL: 0 unknown words, scored as <unk>, against 40; compare "
        "runs whose vocabularies know the same words (vocabulary.min_count, max_size, bpe)",
    ]


def test_one_type_without_loss_decides_a_mean_but_not_a_band(scored: Score) -> None:
    """DRILL is certain of one rare word: its mean over types is better by far, its whole loss is not."""
    runs = [scored("DRILL", "drill"), scored("tied", "plain")]
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
    # The text repeats itself, so that every part of it says the same.
    assert (band["whole"]["low"], band["whole"]["high"]) == pytest.approx((expected, expected))
    RelativeLoss().draw(measured)


@pytest.mark.parametrize(("certain", "missing"), [(1, "whole"), (0, "relative")])
def test_without_a_loss_there_is_nothing_to_divide_by(scored: Score, certain: int, missing: str) -> None:
    """The whole loss is in parts of the baseline's, that of types in parts of DRILL's."""
    runs = [scored("DRILL", "drill"), scored("tied", "plain")]
    run = RunFolder.open(runs[certain].folder)
    run.write_scores({"test": torch.zeros_like(torch.as_tensor(run.read_scores()["test"]))})
    measured = RelativeLoss().measure(runs)
    bands = measured["compared"][0]["bands"]
    assert [band[missing] for band in bands] == [None] * len(bands)
    there = {"whole", "relative"} - {missing}
    assert [band[name]["mean"] for name in there for band in bands] == pytest.approx(
        [100.0 if certain else -100.0] * len(bands)
    )
    assert len(RelativeLoss().lines(measured)) > len(bands)
    RelativeLoss().draw(measured)


@pytest.mark.parametrize("baseline", sorted(relative_loss.PAPER))
def test_the_papers_figures_have_a_band_each(baseline: str) -> None:
    bands = len(FIGURE_3) - 1  # but the unseen
    assert len(relative_loss.PAPER[baseline]) == len(relative_loss.PAPER_WHOLE[baseline]) == bands


def test_no_baseline_with_the_same_tokens_is_a_sentence(scored: Score) -> None:
    runs = [scored("DRILL", "drill"), scored("fewer words", "plain", vocabulary={"max_size": 5})]
    with pytest.raises(DataError, match="fewer words: no fair comparison with DRILL: 0 unknown words, scored as"):
        RelativeLoss().measure(runs)


def test_other_streams_leave_other_context(scored: Score) -> None:
    found = {"test": {"perplexity": 9.0, "nll": 2.2, "streams": 7}}
    runs = [scored("drill", "drill"), scored("plain", "plain", found=found)]
    with pytest.raises(DataError, match="drill: scored in 1 and in 7 streams; train both with the same"):
        RelativeLoss().measure(runs)


def test_other_windows_leave_other_context(scored: Score) -> None:
    found = {"test": {"perplexity": 9.0, "nll": 2.2, "streams": 1, "windows": "lines"}}
    runs = [scored("DRILL", "drill"), scored("lines", "plain", found=found)]
    with pytest.raises(DataError, match=r"context: one stream and lines; train both with the same evaluation\.windows"):
        RelativeLoss().measure(runs)
    runs.append(scored("tied", "bilinear"))
    assert list(RelativeLoss().measure(runs)["left_out"]) == ["lines"]


def test_what_a_baseline_must_be_is_said(scored: Score) -> None:
    runs = [scored("DRILL", "drill"), scored("untied", "plain", table="classes")]
    with pytest.raises(
        DataError, match=r"plain classifier tied to the table of the input, a bilinear or a dual classifier"
    ):
        RelativeLoss().measure(runs)
