"""`bench skip-gram`: our implementations and gensim on the same text, and missing packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reefknot.lab.bench.skip_gram import GENSIM, Job, describe_machine, measure_all
from reefknot.lab.evaluation.similarity import Benchmark
from reefknot.lab.tasks.skip_gram import SkipGramSettings
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.lab.training.skip_gram import SkipGramTraining

SYMBOLS = ("<eos>", "<unk>")
PAIRS = Benchmark("made", (("w0", "w1", 3.0), ("w1", "w2", 1.0), ("w3", "w4", 2.0), ("w0", "nowhere", 9.0)))


@pytest.fixture
def job(made_text: Callable[[int], Path]) -> Job:
    dataset = open_dataset(CorpusSettings(name=str(made_text(600))), VocabularySettings(min_count=2))
    return Job(dataset, SkipGramSettings(dim=8), SkipGramTraining(epochs=2), {"made": PAIRS})


def test_our_implementations_and_gensim_are_measured(job: Job) -> None:
    pytest.importorskip("gensim")
    pytest.importorskip("numba")
    messages: list[str] = []
    first, second = measure_all(job, [1, 2], "cpu", messages.append)
    assert [row.competitor for row in first] == ["reefknot, numba", "reefknot, torch", GENSIM]
    assert [row.competitor for row in second] == ["reefknot, numba", GENSIM]
    assert messages[0] == "  reefknot, numba, workers: 1"
    words = job.dataset.vocabulary
    assert words.eos is not None
    assert job.num_words == len(job.ids) - words.counts[words.eos]  # every word occurs twice, so none is unknown
    for row in (*first, *second):
        assert not row.note
        assert row.words == 2 * job.num_words
        assert row.words_per_second == pytest.approx(row.words / (row.seconds or 0))
        assert row.over_gensim is not None
        assert -1.0 <= row.similarity["made"] <= 1.0
        assert row.spread == (row.words_per_second, row.words_per_second)
    assert first[-1].over_gensim == 1.0
    record = first[0].record()
    assert (record["competitor"], record["similarity"]) == ("reefknot, numba", first[0].similarity)
    assert record["trials"][0]["rhos"] == first[0].similarity
    assert job.coverage() == {"made": (3, 4)}


def test_every_seed_is_measured_and_summarised(job: Job) -> None:
    pytest.importorskip("gensim")
    messages: list[str] = []
    (rows,) = measure_all(replace(job, seeds=3), [1], "cpu", messages.append)
    assert messages[len(rows)].endswith("workers: 1, seed 1")  # competitors alternate
    for row in rows:
        assert [trial.seed for trial in row.trials] == [0, 1, 2]
        assert row.seconds == sorted(trial.seconds for trial in row.trials)[1]
        speeds = [row.words / trial.seconds for trial in row.trials]
        assert row.spread == (min(speeds), max(speeds))
        assert row.similarity["made"] == pytest.approx(sum(trial.rhos["made"] for trial in row.trials) / 3)
        assert row.record()["slowest"] == min(speeds)


def test_gensim_gets_our_settings_and_text(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("gensim.models")
    monkeypatch.setattr("reefknot.lab.bench.skip_gram.MAX_LINE_LENGTH", 7)
    models_trained: list[Any] = []
    calls: list[Any] = []

    class RecordingWord2Vec(models.Word2Vec):  # type: ignore[misc, name-defined]
        def train(self, lines: list[list[str]], **options: Any) -> Any:
            models_trained.append(self)
            calls.append((lines, options))
            return super().train(lines, **options)

    monkeypatch.setattr(models, "Word2Vec", RecordingWord2Vec)
    settings = SkipGramSettings(dim=6, window=3, negatives=2, power=0.5, sample=1e-2)
    (rows,) = measure_all(replace(job, settings=settings), [1], "cpu", lambda text: None)
    assert not rows[-1].note
    ((model,), ((lines, options),)) = (models_trained, calls)
    assert (model.sg, model.hs, model.negative, model.ns_exponent) == (1, 0, 2, 0.5)
    assert (model.vector_size, model.window, model.shrink_windows, model.sample) == (6, 3, True, 1e-2)
    assert (model.alpha, model.min_alpha, model.epochs) == (0.025, 2.5e-6, 2)
    assert (options["epochs"], options["total_words"]) == (2, job.num_words)
    words = job.dataset.vocabulary
    counts = {word: count for word, count in zip(words.words, words.counts, strict=True) if word not in SYMBOLS}
    assert {word: model.wv.get_vecattr(word, "count") for word in model.wv.index_to_key} == counts
    assert [counts[word] for word in model.wv.index_to_key] == sorted(counts.values(), reverse=True)
    assert max(map(len, lines)) == 7
    text = [words.words[index] for index in job.ids if words.words[index] not in SYMBOLS]
    assert [word for line in lines for word in line] == text


def test_missing_gensim_and_numba_are_noted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gensim.models", None)
    monkeypatch.setattr("reefknot.lab.bench.skip_gram.numba_available", lambda: False)
    (rows,) = measure_all(job, [1], "cpu", lambda text: None)
    assert [row.competitor for row in rows] == ["reefknot, torch", GENSIM]
    assert rows[0].words_per_second is not None
    assert rows[0].over_gensim is None
    assert rows[1].note == "not installed: pip install 'reefknot[gensim]'"
    assert rows[1].record()["words_per_second"] is None
    assert rows[1].record()["similarity"] is None


def test_facts_list_the_package_versions() -> None:
    assert set(describe_machine()) == {"torch", "triton", "numba", "gensim"}
