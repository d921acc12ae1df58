"""`reefknot bench skip-gram`: our skip-gram beside gensim's Word2Vec, on one text in one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from reefknot.errors import CorpusNotFound, SettingsError

if TYPE_CHECKING:
    from reefknot.lab.bench.skip_gram import Row
    from reefknot.lab.cli.bench import Report
    from reefknot.lab.evaluation.similarity import Benchmark


def bench_skip_gram(
    report: Report,
    corpus: str | None,
    overrides: Sequence[str],
    workers: str,
    epochs: int,
    seeds: int,
    data: Path | None,
) -> None:
    """Tables for every number of workers: speed and each benchmark, then their mean and how far it is from gensim's."""
    from reefknot.lab.bench.skip_gram import CORPUS, LEAST, Job, facts, measure_all
    from reefknot.lab.cli.bench import print_figures
    from reefknot.lab.cli.options import plain_corpus
    from reefknot.lab.tasks.skip_gram import SkipGramSettings
    from reefknot.lab.text.dataset import open_dataset
    from reefknot.lab.text.vocabulary import VocabularySettings
    from reefknot.lab.training.skip_gram import SkipGramTraining

    if overrides:
        raise SettingsError(f"bench skip-gram takes no settings; leave out {overrides[0]}")
    numbers = _numbers(workers)
    dataset = open_dataset(
        plain_corpus(corpus or CORPUS), VocabularySettings(min_count=LEAST), data=data, say=report.progress
    )
    job = Job(dataset, SkipGramSettings(), SkipGramTraining(epochs=epochs), _benchmarks(data), seeds)
    covered = job.coverage()
    settings = job.settings.model_dump() | job.training.model_dump(include={"epochs", "learning_rate", "lowest_rate"})
    found = facts()
    told = [f"{name} {found[name] or 'absent'}" for name in ("numba", "gensim")]
    text = {"corpus": dataset.name, "fingerprint": dataset.fingerprint, "pairs": covered}
    report.begin(found, told, **text, settings=settings, seeds=seeds)
    report.line(f"{dataset.summary}; width {job.settings.dim}, epochs {epochs}, seeds {seeds}")
    if covered:
        pairs = ", ".join(f"{name} {known:,} of {of:,}" for name, (known, of) in covered.items())
        report.line(f"pairs whose words are known: {pairs}")
    names = list(job.benchmarks)
    for rows in measure_all(job, numbers, report.place, report.progress):
        report.line(f"\nworkers: {rows[0].workers}")
        titles = ["competitor", "words/s", *(["slowest", "fastest"] if seeds > 1 else []), "x gensim", *names]
        lines = [_line(row, names) for row in rows if row.trials]
        print_figures(titles, lines, [(row.competitor, row.note) for row in rows])
        quality = _quality(rows)
        if quality:
            report.line("")
            print_figures(["competitor", "mean rho", "less gensim's"], _quality_lines(quality), [])
        report.add(row.record() | quality.get(row.competitor, {}) for row in rows)


def _line(row: Row, names: list[str]) -> list[str]:
    rhos = row.similarity
    speeds = [row.words_per_second, *((row.spread or ()) if len(row.trials) > 1 else ())]
    ratio = "" if row.over_gensim is None else f"{row.over_gensim:.2f}"
    told = (f"{rhos[name]:.3f}" if name in rhos else "" for name in names)
    return [row.competitor, *(f"{each:,.0f}" for each in speeds), ratio, *told]


def _quality(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """By competitor the mean of rho over the benchmarks, and that less gensim's, with 95 % intervals over seeds; the
    difference has Welch's, since equal seeds draw other numbers there."""
    from reefknot.lab.bench.skip_gram import GENSIM
    from reefknot.lab.papers.figures.intervals import apart, over_seeds

    measured = [row for row in rows if row.trials]
    names = measured[0].similarity if measured else ()
    shared = [name for name in names if all(name in row.similarity for row in measured)]
    if not shared:
        return {}
    means = {row.competitor: [fmean(each.rhos[name] for name in shared) for each in row.trials] for row in measured}
    found: dict[str, dict[str, Any]] = {name: {"mean_rho": over_seeds(each).json()} for name, each in means.items()}
    for name in found.keys() - {GENSIM} if GENSIM in means else ():
        found[name]["less_gensim"] = apart(means[name], means[GENSIM]).json()
    return found


def _quality_lines(quality: dict[str, dict[str, Any]]) -> list[list[str]]:
    from reefknot.lab.papers.figures.intervals import format_estimate

    figures = ("mean_rho", "less_gensim")
    return [
        [name, *(format_estimate(each[key], 3) if key in each else "" for key in figures)]
        for name, each in quality.items()
    ]


def _numbers(text: str) -> list[int]:
    """1,2 -> [1, 2]."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise SettingsError(f"--workers {text}: must be numbers of threads from 1 to 1,024, such as 1,2")
    return [int(part) for part in parts]


def _benchmarks(data: Path | None) -> dict[str, Benchmark]:
    """Those that vectors are judged by; none where they are not here."""
    from reefknot.lab.evaluation.benchmarks import PRESS
    from reefknot.lab.evaluation.similarity import find_benchmarks

    try:
        found = find_benchmarks(data)
    except CorpusNotFound:
        return {}
    return {name: found[name] for name in PRESS if name in found}
