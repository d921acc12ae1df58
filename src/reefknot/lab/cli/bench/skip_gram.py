"""`reefknot bench skip-gram`: measure reefknot's skip-gram and gensim's Word2Vec on the same text.

This subcommand parses the options and prints the results; `lab/bench/skip_gram.py` trains and times both. If the
word-similarity benchmarks are on this machine, the quality of the vectors is measured as well (Spearman's rho).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.errors import CorpusNotFound, SettingsError
from reefknot.lab.cli.bench import printing
from reefknot.lab.cli.bench.record import Record, RecordFileOption, open_record
from reefknot.lab.cli.options import DataOption, DeviceOption, monolingual_corpus

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
    workers: Annotated[
        str, typer.Option(help="Numbers of threads to measure, separated by commas, such as 1,2.")
    ] = "1",
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the text.")] = 1,
    seeds: Annotated[
        int, typer.Option(min=1, max=100, help="Number of seeds to train. With two or more, intervals are printed.")
    ] = 1,
    json: RecordFileOption = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure skip-gram against gensim: words per second, and the quality of the vectors.

    Quality is the correlation with word-similarity benchmarks. It is measured if the benchmarks are in the data folder.
    """
    from reefknot.lab.bench.skip_gram import DEFAULT_CORPUS, MIN_COUNT, Job, measure_all
    from reefknot.lab.tasks.skip_gram import SkipGramSettings
    from reefknot.lab.text.dataset import open_dataset
    from reefknot.lab.text.vocabulary_settings import VocabularySettings
    from reefknot.lab.training.skip_gram import SkipGramTraining

    # Open the text and the benchmarks.
    record = open_record("skip-gram", device, json)
    thread_counts = _parse_thread_counts(workers)
    corpus_settings = monolingual_corpus(corpus or DEFAULT_CORPUS)
    vocabulary_settings = VocabularySettings(min_count=MIN_COUNT)
    dataset = open_dataset(corpus_settings, vocabulary_settings, data=data, notify=record.print_progress)
    job = Job(dataset, SkipGramSettings(), SkipGramTraining(epochs=epochs), _find_benchmarks(data), seeds)
    _print_header(record, job)

    # Measure, and print one table per number of threads.
    benchmarks = list(job.benchmarks)
    spread_titles = ["slowest", "fastest"] if seeds > 1 else []
    titles = ["competitor", "words/s", *spread_titles, "x gensim", *benchmarks]
    for rows in measure_all(job, thread_counts, record.device, record.print_progress):
        record.print(f"\nworkers: {rows[0].workers}")
        lines = [_format_line(row, benchmarks) for row in rows if row.trials]
        notes = [(row.competitor, row.note) for row in rows]
        printing.print_table(titles, lines, notes)
        quality = _estimate_quality(rows)
        if quality:
            record.print("")
            printing.print_table(["competitor", "mean rho", "minus gensim's"], _format_quality(quality), [])
        record.add(row.record() | quality.get(row.competitor, {}) for row in rows)


def _print_header(record: Record, job: Job) -> None:
    """Print and record the machine, the text, the settings, and the coverage of the benchmarks."""
    from reefknot.lab.bench.skip_gram import describe_machine

    dataset = job.dataset
    coverage = job.coverage()
    machine = describe_machine()
    settings = job.settings.model_dump() | job.training.model_dump(include={"epochs", "learning_rate", "lowest_rate"})
    notes = [f"{name} {machine[name] or 'absent'}" for name in ("numba", "gensim")]
    record.print_header(
        machine,
        notes,
        corpus=dataset.name,
        fingerprint=dataset.fingerprint,
        pairs=coverage,
        settings=settings,
        seeds=job.seeds,
    )
    epochs = job.training.epochs
    record.print(f"{dataset.summary}; dimension {job.settings.dim}, epochs {epochs}, seeds {job.seeds}")
    if coverage:
        pairs = ", ".join(f"{name} {covered:,} of {total:,}" for name, (covered, total) in coverage.items())
        record.print(f"pairs whose words are known: {pairs}")


def _format_line(row: Row, benchmarks: Sequence[str]) -> list[str]:
    """Return the cells of a row: the competitor, its speeds, its speed divided by gensim's, and its correlations."""
    speeds = [row.words_per_second]
    if len(row.trials) > 1:
        speeds += row.spread or ()
    speed_cells = [f"{speed:,.0f}" for speed in speeds]
    ratio_cell = "" if row.over_gensim is None else f"{row.over_gensim:.2f}"
    rhos = row.similarity
    rho_cells = [f"{rhos[name]:.3f}" if name in rhos else "" for name in benchmarks]
    return [row.competitor, *speed_cells, ratio_cell, *rho_cells]


def _estimate_quality(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return, for each competitor, the mean of rho over the benchmarks and its difference from gensim's mean.

    Both have 95 % intervals over seeds. The difference has Welch's interval, which assumes no pairing: gensim draws
    other random numbers, so two runs with the same seed have nothing in common.
    """
    from reefknot.lab.bench.skip_gram import GENSIM
    from reefknot.lab.papers.figures.intervals import estimate_difference, estimate_mean

    measured_rows = [row for row in rows if row.trials]
    benchmarks = measured_rows[0].similarity if measured_rows else ()
    shared_benchmarks = [name for name in benchmarks if all(name in row.similarity for row in measured_rows)]
    if not shared_benchmarks:
        return {}

    # The mean of rho over the benchmarks, of each competitor and seed.
    mean_rhos: dict[str, list[float]] = {}
    for row in measured_rows:
        mean_rhos[row.competitor] = [fmean(trial.rhos[name] for name in shared_benchmarks) for trial in row.trials]

    quality: dict[str, dict[str, Any]] = {}
    for competitor, rhos in mean_rhos.items():
        quality[competitor] = {"mean_rho": estimate_mean(rhos).json()}
        if GENSIM in mean_rhos and competitor != GENSIM:
            difference = estimate_difference(rhos, mean_rhos[GENSIM])
            quality[competitor]["less_gensim"] = difference.json()
    return quality


def _format_quality(quality: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return one line of cells per competitor: its name and the two estimates of `_estimate_quality`."""
    from reefknot.lab.papers.figures.intervals import format_estimate

    lines = []
    for competitor, estimates in quality.items():
        cells = [competitor]
        for key in ("mean_rho", "less_gensim"):
            cells.append(format_estimate(estimates[key], 3) if key in estimates else "")
        lines.append(cells)
    return lines


def _parse_thread_counts(workers: str) -> list[int]:
    """Parse the value of --workers: "1,2" becomes [1, 2]."""
    thread_counts = []
    for count in workers.split(","):
        if not count.strip().isdecimal() or not 1 <= int(count) <= 1024:
            raise SettingsError(f"--workers {workers}: must be numbers of threads from 1 to 1,024, such as 1,2")
        thread_counts.append(int(count))
    return thread_counts


def _find_benchmarks(data: Path | None) -> dict[str, Benchmark]:
    """Return the word-similarity benchmarks by name; empty if they are not on this machine."""
    from reefknot.lab.evaluation.benchmarks import PRESS
    from reefknot.lab.evaluation.similarity import find_benchmarks

    try:
        benchmarks = find_benchmarks(data)
    except CorpusNotFound:
        return {}
    return {name: benchmarks[name] for name in PRESS if name in benchmarks}
