"""`reefknot vectors similarity`: compare word vectors with human judgements, or with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from reefknot.lab.cli.options import AsJson, Data, emit, given_options, open_tables

if TYPE_CHECKING:
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.pairwise_similarity import PairwiseCorrelation
    from reefknot.lab.evaluation.similarity import Benchmark
    from reefknot.lab.runs.result import Judgement
    from reefknot.vectors.word_vectors import WordVectors

EXAMPLES = """\b
Examples:
  reefknot vectors similarity runs/demo/untied/seed0 vectors.txt --data DIR
  reefknot vectors similarity runs/demo/tied/seed0 --set SimLex-999 --set my-pairs.tsv --json
  reefknot vectors similarity --between runs/demo/untied/seed0 runs/demo/tied/seed0
"""

BETWEEN = "Options with --between"
NamedTable: TypeAlias = "tuple[Path, str, WordVectors]"
"""The source of a table, its name in the source, and its vectors."""


def similarity(
    invocation: typer.Context,
    sources: Annotated[list[Path], typer.Argument(metavar="RUN|FILE", help="Run folders, or files of word vectors.")],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Benchmark, or a file with two words and a score per line. Can be repeated. "
            "[default: all benchmarks in the data folder]",
        ),
    ] = None,
    between: Annotated[
        bool, typer.Option("--between", help="Compare the tables with each other instead of with benchmarks.")
    ] = False,
    exact_below: Annotated[
        int,
        typer.Option(
            min=0,
            help="Compare all word pairs if two tables share at most this many words.",
            rich_help_panel=BETWEEN,
        ),
    ] = 20_000,
    samples: Annotated[
        int,
        typer.Option(
            min=120,
            help="Number of word pairs to sample if two tables share more than --exact-below words.",
            rich_help_panel=BETWEEN,
        ),
    ] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resamples and of the drawn pairs.")] = 0,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Correlate the cosines of word vectors with human judgements of word pairs, or with the cosines of other vectors.

    Prints Spearman's rank correlation with its coverage and a 95 % interval.
    """
    from reefknot.errors import SettingsError

    written = dict(given_options(invocation))
    for name in ("sets", "data") if between else ("exact_below", "samples"):
        if name in written:
            preposition = "with" if between else "without"
            raise SettingsError(f"{written[name]} has no effect {preposition} --between; leave one of them out")
    benchmarks = [] if between else _benchmarks(sets, data)
    tables = _tables(sources)
    if between:
        _check_draws(tables, exact_below, samples, written)
        _compare(tables, exact_below, samples, seed, as_json)
    else:
        _judge(tables, benchmarks, seed, as_json)


def _tables(sources: Sequence[Path]) -> list[NamedTable]:
    """Return the tables of all sources. A source that is named twice is read once."""
    distinct = dict.fromkeys(sources)
    return [(source, name, table) for source in distinct for name, table in open_tables(source).items()]


def _benchmarks(sets: Sequence[str] | None, data: Path | None) -> list[Benchmark]:
    """Return the named benchmarks without repetitions, or all benchmarks in the data folder."""
    from reefknot.errors import CorpusNotFound, SettingsError
    from reefknot.lab.evaluation.benchmarks import BENCHMARKS
    from reefknot.lab.evaluation.similarity import find_benchmarks, read_benchmark

    published = {name.lower(): name for name in BENCHMARKS}
    if sets is None:
        return list(find_benchmarks(data).values())
    names = [published.get(text.lower()) for text in sets]
    for text, name in zip(sets, names, strict=True):
        if name is None and not Path(text).is_file():
            raise _unknown_set(text, published)
    if data is not None and not any(names):
        raise SettingsError("--data has no effect, because every --set names a file; leave --data out")
    available = find_benchmarks(data) if any(names) else {}
    chosen = {}
    for text, name in zip(sets, names, strict=True):
        if name is None:
            chosen[text] = read_benchmark(Path(text))
        elif name in available:
            chosen[name] = available[name]
        else:
            raise CorpusNotFound(f"{name} not found: expected {BENCHMARKS[name].file} next to the other benchmarks.")
    return list(chosen.values())


def _unknown_set(name: str, published: dict[str, str]) -> SettingsError:
    from difflib import get_close_matches

    from reefknot.errors import SettingsError, shorten

    near = get_close_matches(name.lower(), published, n=1)
    hint = f"did you mean {published[near[0]]}?" if near else f"the benchmarks are {', '.join(published.values())}"
    return SettingsError(f"--set {shorten(name)}: neither a benchmark nor a file; {hint}")


def _judge(tables: list[NamedTable], benchmarks: list[Benchmark], seed: int, as_json: bool) -> None:
    """Compare every table with every benchmark and print the correlations."""
    from reefknot.lab.evaluation.similarity import score_benchmark

    records: list[dict[str, Any]] = []
    lines: list[str] = []
    width = max(len(benchmark.name) for benchmark in benchmarks)
    for source, name, vectors in tables:
        judgements = [score_benchmark(vectors, benchmark, seed=seed) for benchmark in benchmarks]
        records.append(
            {
                "source": str(source),
                "table": name,
                "words": len(vectors),
                "judgements": [judgement.record() for judgement in judgements],
            }
        )
        lines.append(f"{source}, {name}: {len(vectors):,} words")
        lines += [f"  {judgement.name:<{width}}  {_judgement_text(judgement)}" for judgement in judgements]
    emit(records, "\n".join(lines), as_json)


def _judgement_text(judgement: Judgement) -> str:
    """Return the correlation with its interval and coverage, or the reason why one of them is undefined."""
    from reefknot.lab.evaluation.spearman import FEWEST_PAIRS, FEWEST_RESAMPLED

    coverage = f"{judgement.pairs:,} of {judgement.of:,} pairs"
    if judgement.rho is None:
        few = judgement.pairs < FEWEST_PAIRS
        why = f"fewer than {FEWEST_PAIRS} pairs" if few else "all scores or all cosines are equal"
        return f"undefined: {why} ({coverage})"
    if judgement.low is None:
        few = judgement.pairs < FEWEST_RESAMPLED
        why = f"fewer than {FEWEST_RESAMPLED} pairs" if few else "the order is perfect, also in every resample"
        return f"{judgement.rho:6.3f}  (no interval: {why}), {coverage}"
    return f"{judgement.rho:6.3f}  ({judgement.low:6.3f} to {judgement.high:6.3f}), {coverage}"


def _check_draws(tables: list[NamedTable], exact_below: int, samples: int, written: Mapping[str, str]) -> None:
    """Raise an error if --samples or --seed is set, but no two tables share enough words for pairs to be drawn."""
    from reefknot.errors import SettingsError

    shared = [sum(word in other for word in one.words) for (_, _, one), (_, _, other) in combinations(tables, 2)]
    many = [words for words in shared if words > exact_below]
    sampled = [words for words in many if words * (words - 1) // 2 > samples]
    for name, affected in (("samples", many), ("seed", sampled)):
        if name in written and shared and not affected:
            raise SettingsError(
                f"{written[name]} has no effect, because all pairs of at most {max(shared):,} shared words are "
                f"compared; leave it out or lower --exact-below"
            )


def _compare(tables: list[NamedTable], exact_below: int, samples: int, seed: int, as_json: bool) -> None:
    """Compare every two tables and print the correlations."""
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.pairwise_similarity import pairwise_correlation

    if len(tables) < 2:
        raise SettingsError(
            "--between needs at least two tables, but there is only one; name another run or file of vectors"
        )
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    for (source, name, one), (other_source, other_name, other) in combinations(tables, 2):
        correlation = pairwise_correlation(one, other, exact_below=exact_below, samples=samples, seed=seed)
        sides = {"a": {"source": str(source), "table": name}, "b": {"source": str(other_source), "table": other_name}}
        records.append({**sides, **asdict(correlation)})
        lines.append(f"{source}, {name} and {other_source}, {other_name}: {_correlation_text(correlation)}")
    emit(records, "\n".join(lines), as_json)


def _correlation_text(correlation: PairwiseCorrelation) -> str:
    over = f"all {correlation.pairs:,} pairs" if correlation.exact else f"{correlation.pairs:,} pairs drawn from all"
    if correlation.rho is None:
        return f"undefined: fewer than 3 pairs, or all cosines of a table are equal ({over})"
    interval = "" if correlation.low is None else f" ({correlation.low:.4f} to {correlation.high:.4f})"
    return f"{correlation.rho:.4f}{interval}, over {over}"
