"""`reefknot bench skip-gram`: measure our skip-gram next to gensim's Word2Vec, on one text in one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.errors import CorpusNotFound, SettingsError
from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import Record, RecordFile, open_record
from reefknot.lab.cli.options import Data, Device, plain_corpus

if TYPE_CHECKING:
    from reefknot.lab.bench.skip_gram import Job, Row
    from reefknot.lab.evaluation.similarity import Benchmark

EXAMPLES = """\b
Examples:
  reefknot bench skip-gram python-docs --workers 1,2
  reefknot bench skip-gram ptb --seeds 5 --data DIR --json skip-gram.json
"""


def skip_gram(
    corpus: Annotated[
        str | None,
        typer.Argument(help="A corpus (see `reefknot ls corpora`), or a folder of text. [default: enwiki-sample]"),
    ] = None,
    workers: Annotated[str, typer.Option(help="Numbers of threads to measure, such as 1,2.")] = "1",
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the text.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Number of seeds. Two or more give intervals.")] = 1,
    json: RecordFile = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Measure skip-gram: words per second, and the similarity benchmarks if they are in the data folder."""
    from reefknot.lab.bench.skip_gram import CORPUS, LEAST, Job, measure_all
    from reefknot.lab.tasks.skip_gram import SkipGramSettings
    from reefknot.lab.text.dataset import open_dataset
    from reefknot.lab.text.vocabulary import VocabularySettings
    from reefknot.lab.training.skip_gram import SkipGramTraining

    record = open_record("skip-gram", device, json)
    thread_counts = _thread_counts(workers)
    dataset = open_dataset(
        plain_corpus(corpus or CORPUS), VocabularySettings(min_count=LEAST), data=data, notify=record.progress
    )
    job = Job(dataset, SkipGramSettings(), SkipGramTraining(epochs=epochs), _benchmarks(data), seeds)
    _print_setup(record, job)
    names = list(job.benchmarks)
    for rows in measure_all(job, thread_counts, record.device, record.progress):
        record.print(f"\nworkers: {rows[0].workers}")
        titles = ["competitor", "words/s", *(["slowest", "fastest"] if seeds > 1 else []), "x gensim", *names]
        lines = [_line(row, names) for row in rows if row.trials]
        printing.print_numbers(titles, lines, [(row.competitor, row.note) for row in rows])
        quality = _quality(rows)
        if quality:
            record.print("")
            printing.print_numbers(["competitor", "mean rho", "less gensim's"], _quality_lines(quality), [])
        record.add(row.record() | quality.get(row.competitor, {}) for row in rows)


def _print_setup(record: Record, job: Job) -> None:
    """Print and record the machine, the text, the settings, and the coverage of the benchmarks."""
    from reefknot.lab.bench.skip_gram import facts

    dataset, coverage, machine = job.dataset, job.coverage(), facts()
    settings = job.settings.model_dump() | job.training.model_dump(include={"epochs", "learning_rate", "lowest_rate"})
    notes = [f"{name} {machine[name] or 'absent'}" for name in ("numba", "gensim")]
    text = {"corpus": dataset.name, "fingerprint": dataset.fingerprint, "pairs": coverage}
    record.begin(machine, notes, **text, settings=settings, seeds=job.seeds)
    epochs = job.training.epochs
    record.print(f"{dataset.summary}; dimension {job.settings.dim}, epochs {epochs}, seeds {job.seeds}")
    if coverage:
        pairs = ", ".join(f"{name} {known:,} of {total:,}" for name, (known, total) in coverage.items())
        record.print(f"pairs whose words are known: {pairs}")


def _line(row: Row, names: list[str]) -> list[str]:
    rhos = row.similarity
    speeds = [row.words_per_second, *((row.spread or ()) if len(row.trials) > 1 else ())]
    ratio = "" if row.over_gensim is None else f"{row.over_gensim:.2f}"
    cells = (f"{rhos[name]:.3f}" if name in rhos else "" for name in names)
    return [row.competitor, *(f"{speed:,.0f}" for speed in speeds), ratio, *cells]


def _quality(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return by competitor the mean of rho over the benchmarks and its difference from the mean of gensim.

    Both have 95 % intervals over seeds. The difference has Welch's interval, because runs with the same seed are not
    paired: gensim draws other random numbers.
    """
    from reefknot.lab.bench.skip_gram import GENSIM
    from reefknot.lab.papers.figures.intervals import estimate_difference, estimate_mean

    measured = [row for row in rows if row.trials]
    names = measured[0].similarity if measured else ()
    shared = [name for name in names if all(name in row.similarity for row in measured)]
    if not shared:
        return {}
    means = {row.competitor: [fmean(trial.rhos[name] for name in shared) for trial in row.trials] for row in measured}
    quality: dict[str, dict[str, Any]] = {
        name: {"mean_rho": estimate_mean(rhos).json()} for name, rhos in means.items()
    }
    for name in quality.keys() - {GENSIM} if GENSIM in means else ():
        quality[name]["less_gensim"] = estimate_difference(means[name], means[GENSIM]).json()
    return quality


def _quality_lines(quality: dict[str, dict[str, Any]]) -> list[list[str]]:
    from reefknot.lab.papers.figures.intervals import format_estimate as interval_text

    keys = ("mean_rho", "less_gensim")
    return [
        [name, *(interval_text(estimates[key], 3) if key in estimates else "" for key in keys)]
        for name, estimates in quality.items()
    ]


def _thread_counts(text: str) -> list[int]:
    """Return the numbers of threads in a text: [1, 2] for "1,2"."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise SettingsError(f"--workers {text}: must be numbers of threads from 1 to 1,024, such as 1,2")
    return [int(part) for part in parts]


def _benchmarks(data: Path | None) -> dict[str, Benchmark]:
    """Return the similarity benchmarks; an empty dictionary if they are not on this machine."""
    from reefknot.lab.evaluation.benchmarks import PRESS
    from reefknot.lab.evaluation.similarity import find_benchmarks

    try:
        benchmarks = find_benchmarks(data)
    except CorpusNotFound:
        return {}
    return {name: benchmarks[name] for name in PRESS if name in benchmarks}
