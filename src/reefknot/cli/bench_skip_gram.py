"""`reefknot bench skip-gram`: our skip-gram beside gensim's Word2Vec, on one text in one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reefknot.errors import CorpusNotHere, SettingsError

if TYPE_CHECKING:
    from reefknot.benchmarks.skip_gram import Row
    from reefknot.cli.bench import Report
    from reefknot.evaluation.similarity import Benchmark

JUDGED = 5
"""Benchmarks that are shown: those of Press and Wolf."""


def bench_skip_gram(
    report: Report, corpus: str | None, overrides: Sequence[str], workers: str, epochs: int, data: Path | None
) -> None:
    """A table for every number of workers."""
    from reefknot.benchmarks.skip_gram import CORPUS, LEAST, Job, facts, measure_all
    from reefknot.cli.bench import print_figures
    from reefknot.cli.options import plain_corpus
    from reefknot.text.dataset import open_dataset
    from reefknot.text.vocabulary import VocabularySettings
    from reefknot.training.skip_gram import SkipGramSettings, SkipGramTraining

    if overrides:
        raise SettingsError(f"bench skip-gram takes no settings; leave out {overrides[0]}")
    numbers = _numbers(workers)
    dataset = open_dataset(
        plain_corpus(corpus or CORPUS), VocabularySettings(min_count=LEAST), data=data, say=report.progress
    )
    job = Job(dataset, SkipGramSettings(), SkipGramTraining(epochs=epochs), _benchmarks(data))
    settings = job.settings.model_dump() | job.training.model_dump(include={"epochs", "learning_rate", "lowest_rate"})
    found = facts()
    told = [f"{name} {found[name] or 'absent'}" for name in ("numba", "gensim")]
    report.begin(found, told, corpus=dataset.name, fingerprint=dataset.fingerprint, settings=settings)
    report.line(f"{dataset.summary}; width {job.settings.dim}, epochs {epochs}")
    names = list(job.benchmarks)
    for rows in measure_all(job, numbers, report.place, report.progress):
        report.line(f"\nworkers: {rows[0].workers}")
        titles = ["competitor", "words/s", "x gensim", *names]
        lines = [_line(row, names) for row in rows if row.words_per_second is not None]
        print_figures(titles, lines, [(row.competitor, row.note) for row in rows])
        report.add(row.record() for row in rows)


def _line(row: Row, names: list[str]) -> list[str]:
    rho = row.similarity or {}
    ratio = "" if row.over_gensim is None else f"{row.over_gensim:.2f}"
    return [row.competitor, f"{row.words_per_second:,.0f}", ratio, *(_rho(rho.get(name)) for name in names)]


def _rho(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _numbers(text: str) -> list[int]:
    """1,2 -> [1, 2]."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise SettingsError(f"--workers {text}: must be numbers of threads from 1 to 1,024, such as 1,2")
    return [int(part) for part in parts]


def _benchmarks(data: Path | None) -> dict[str, Benchmark]:
    """Those that vectors are judged by; none where they are not here."""
    from reefknot.evaluation.similarity import find_benchmarks

    try:
        return dict(list(find_benchmarks(data).items())[:JUDGED])
    except CorpusNotHere:
        return {}
