"""`bench skip-gram`: ours and gensim's on one text, and who did not take part."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.benchmarks.skip_gram import GENSIM, Job, facts, measure_all
from reefknot.evaluation.similarity import Benchmark
from reefknot.models.skip_gram import SkipGramSettings
from reefknot.text.corpora import CorpusSettings
from reefknot.text.dataset import open_dataset
from reefknot.text.vocabulary import VocabularySettings
from reefknot.training.skip_gram import SkipGramTraining

PAIRS = Benchmark("made", (("w0", "w1", 3.0), ("w1", "w2", 1.0), ("w3", "w4", 2.0), ("w0", "nowhere", 9.0)))


@pytest.fixture
def job(made_text: Callable[[int], Path]) -> Job:
    dataset = open_dataset(CorpusSettings(name=str(made_text(600))), VocabularySettings(min_count=2))
    return Job(dataset, SkipGramSettings(dim=8), SkipGramTraining(epochs=2), {"made": PAIRS})


def test_ours_and_gensim_side_by_side(job: Job) -> None:
    pytest.importorskip("gensim")
    pytest.importorskip("numba")
    said: list[str] = []
    first, second = measure_all(job, [1, 2], "cpu", said.append)
    assert [row.competitor for row in first] == ["reefknot, numba", "reefknot, torch", GENSIM]
    assert [row.competitor for row in second] == ["reefknot, numba", GENSIM]
    assert said[0] == "  reefknot, numba, workers: 1"
    words = job.dataset.vocabulary
    assert words.eos is not None
    assert job.words == len(job.ids) - words.counts[words.eos]  # every word occurs twice: none is unknown
    for row in (*first, *second):
        assert not row.note
        assert row.words == 2 * job.words
        assert row.words_per_second == pytest.approx(row.words / (row.seconds or 0))
        assert row.over_gensim is not None
        assert -1.0 <= (row.similarity or {})["made"] <= 1.0
    assert first[-1].over_gensim == 1.0
    assert first[0].record()["competitor"] == "reefknot, numba"


def test_without_gensim_and_numba(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gensim.models", None)
    monkeypatch.setattr("reefknot.benchmarks.skip_gram.numba_available", lambda: False)
    (rows,) = measure_all(job, [1], "cpu", lambda text: None)
    assert [row.competitor for row in rows] == ["reefknot, torch", GENSIM]
    assert rows[0].words_per_second is not None
    assert rows[0].over_gensim is None
    assert rows[1].note == "not installed: pip install 'reefknot[gensim]'"


def test_facts() -> None:
    assert set(facts()) == {"torch", "triton", "numba", "gensim"}
