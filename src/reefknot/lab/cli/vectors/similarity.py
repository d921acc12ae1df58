"""`reefknot vectors similarity`: compare word vectors with human judgements, or with each other.

A table holds one vector per word. The score is Spearman's rank correlation over pairs of words.
`_compare_with_benchmarks` correlates the cosine of a pair with people's rating of the pair. `_compare_tables`
correlates the cosines in two tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from reefknot.lab.cli.options import DataOption, JsonOption, open_tables, print_result, reject_options, user_options

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

BETWEEN_PANEL = "Options with --between"
"""Heading of the help page."""


class NamedTable(NamedTuple):
    """A table of a run or of a file."""

    source: Path
    """The run folder or the file."""
    name: str
    """The name of the table in its source, such as "input"."""
    vectors: WordVectors


def similarity(
    ctx: typer.Context,
    sources: Annotated[list[Path], typer.Argument(metavar="RUN|FILE", help="Run folders, or files of word vectors.")],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Benchmark, such as SimLex-999, or a file with two words and a score per line. Can be repeated. "
            "[default: all benchmarks in the data folder]",
        ),
    ] = None,
    between: Annotated[
        bool, typer.Option("--between", help="Compare the vectors with each other instead of with benchmarks.")
    ] = False,
    exact_below: Annotated[
        int,
        typer.Option(
            min=0,
            help="Compare all word pairs if two tables share at most this many words.",
            rich_help_panel=BETWEEN_PANEL,
        ),
    ] = 20_000,
    samples: Annotated[
        int,
        typer.Option(
            min=120,
            help="Number of word pairs to sample if two tables share more than --exact-below words.",
            rich_help_panel=BETWEEN_PANEL,
        ),
    ] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the bootstrap and of sampled pairs.")] = 0,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare word vectors with human judgements of similarity, or with each other.

    Prints Spearman's rank correlation over word pairs, with a 95 % interval and the number of pairs whose words are
    known.
    """
    if between:
        reject_options(ctx, ("sets", "data"), "with --between; leave one of them out")
        tables = _open_all_tables(sources)
        _check_sampling_options(tables, exact_below, samples, user_options(ctx))
        _compare_tables(tables, exact_below, samples, seed, as_json)
    else:
        reject_options(ctx, ("exact_below", "samples"), "without --between; add --between or leave {option} out")
        benchmarks = _open_benchmarks(sets, data)
        _compare_with_benchmarks(_open_all_tables(sources), benchmarks, seed, as_json)


def _open_all_tables(sources: Sequence[Path]) -> list[NamedTable]:
    """Return the tables of all sources. A source that is named twice is read once."""
    tables = []
    for source in dict.fromkeys(sources):
        for name, vectors in open_tables(source).items():
            tables.append(NamedTable(source, name, vectors))
    return tables


def _open_benchmarks(sets: Sequence[str] | None, data: Path | None) -> list[Benchmark]:
    """Return the named benchmarks without repetitions, or all benchmarks in the data folder."""
    from reefknot.errors import CorpusNotFound, SettingsError
    from reefknot.lab.evaluation.benchmarks import BENCHMARKS
    from reefknot.lab.evaluation.similarity import find_benchmarks, read_benchmark

    if sets is None:
        return list(find_benchmarks(data).values())

    # The name of the benchmark that each value of --set means, or None if the value is a file.
    name_by_lower_case = {name.lower(): name for name in BENCHMARKS}
    names = [name_by_lower_case.get(set_value.lower()) for set_value in sets]
    for set_value, name in zip(sets, names, strict=True):
        if name is None and not Path(set_value).is_file():
            raise _unknown_set_error(set_value, name_by_lower_case)
    if data is not None and not any(names):
        raise SettingsError("--data has no effect, because every --set names a file; leave --data out")

    # Read the benchmarks.
    available = find_benchmarks(data) if any(names) else {}
    chosen = {}
    for set_value, name in zip(sets, names, strict=True):
        if name is None:
            chosen[set_value] = read_benchmark(Path(set_value))
        elif name in available:
            chosen[name] = available[name]
        else:
            raise CorpusNotFound(f"{name} not found: expected {BENCHMARKS[name].file} next to the other benchmarks.")
    return list(chosen.values())


def _unknown_set_error(set_value: str, name_by_lower_case: dict[str, str]) -> SettingsError:
    """Return the error for a value of --set that is neither a benchmark nor a file, with a suggestion."""
    from difflib import get_close_matches

    from reefknot.errors import SettingsError, shorten

    suggestions = get_close_matches(set_value.lower(), name_by_lower_case, n=1)
    if suggestions:
        hint = f"did you mean {name_by_lower_case[suggestions[0]]}?"
    else:
        hint = f"the benchmarks are {', '.join(name_by_lower_case.values())}"
    return SettingsError(f"--set {shorten(set_value)}: neither a benchmark nor a file; {hint}")


def _compare_with_benchmarks(tables: list[NamedTable], benchmarks: list[Benchmark], seed: int, as_json: bool) -> None:
    """Compare every table with every benchmark and print the correlations."""
    from reefknot.lab.evaluation.similarity import score_benchmark

    records: list[dict[str, Any]] = []
    lines: list[str] = []
    width = max(len(benchmark.name) for benchmark in benchmarks)
    for table in tables:
        judgements = [score_benchmark(table.vectors, benchmark, seed=seed) for benchmark in benchmarks]
        records.append(
            {
                "source": str(table.source),
                "table": table.name,
                "words": len(table.vectors),
                "judgements": [judgement.record() for judgement in judgements],
            }
        )
        lines.append(f"{table.source}, {table.name}: {len(table.vectors):,} words")
        lines += [f"  {judgement.name:<{width}}  {_format_judgement(judgement)}" for judgement in judgements]
    print_result(records, "\n".join(lines), as_json)


def _format_judgement(judgement: Judgement) -> str:
    """Format the correlation with its interval and coverage, or the reason why one of them is undefined."""
    from reefknot.lab.evaluation.spearman import FEWEST_PAIRS, FEWEST_RESAMPLED

    coverage = f"{judgement.pairs:,} of {judgement.of:,} pairs"
    if judgement.rho is None:
        reason = "all scores or all cosines are equal"
        if judgement.pairs < FEWEST_PAIRS:
            reason = f"fewer than {FEWEST_PAIRS} pairs"
        return f"undefined: {reason} ({coverage})"
    if judgement.low is None:
        reason = "the two orders agree perfectly, even in every resample"
        if judgement.pairs < FEWEST_RESAMPLED:
            reason = f"fewer than {FEWEST_RESAMPLED} pairs"
        return f"{judgement.rho:6.3f}  (no interval: {reason}), {coverage}"
    return f"{judgement.rho:6.3f}  ({judgement.low:6.3f} to {judgement.high:6.3f}), {coverage}"


def _check_sampling_options(
    tables: list[NamedTable], exact_below: int, samples: int, options: Mapping[str, str]
) -> None:
    """Raise an error if --samples or --seed is set, but no two tables share enough words for pairs to be sampled.

    `options` are the options that the user has set, such as {"samples": "--samples"}.
    """
    from reefknot.errors import SettingsError

    # The number of words that two tables share, for every pair of tables.
    shared_counts = []
    for table_a, table_b in combinations(tables, 2):
        shared_counts.append(sum(word in table_b.vectors for word in table_a.vectors.words))

    # Pairs of words are sampled only if there are more than `samples` of them.
    uses_samples = any(count > exact_below for count in shared_counts)
    uses_seed = any(count > exact_below and count * (count - 1) // 2 > samples for count in shared_counts)
    for name, has_effect in (("samples", uses_samples), ("seed", uses_seed)):
        if name in options and shared_counts and not has_effect:
            raise SettingsError(
                f"{options[name]} has no effect, because the tables share at most {max(shared_counts):,} words, so all "
                f"their pairs are compared; leave {options[name]} out or lower --exact-below"
            )


def _compare_tables(tables: list[NamedTable], exact_below: int, samples: int, seed: int, as_json: bool) -> None:
    """Compare every pair of tables and print the correlations."""
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.pairwise_similarity import pairwise_correlation

    if len(tables) < 2:
        raise SettingsError(
            "--between needs at least two tables, but there is only one; pass another run or file of vectors"
        )
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    for table_a, table_b in combinations(tables, 2):
        correlation = pairwise_correlation(
            table_a.vectors, table_b.vectors, exact_below=exact_below, samples=samples, seed=seed
        )
        records.append(
            {
                "a": {"source": str(table_a.source), "table": table_a.name},
                "b": {"source": str(table_b.source), "table": table_b.name},
                **asdict(correlation),
            }
        )
        names = f"{table_a.source}, {table_a.name} and {table_b.source}, {table_b.name}"
        lines.append(f"{names}: {_format_correlation(correlation)}")
    print_result(records, "\n".join(lines), as_json)


def _format_correlation(correlation: PairwiseCorrelation) -> str:
    """Format the correlation with its interval and the number of word pairs."""
    pairs = f"all {correlation.pairs:,} pairs" if correlation.exact else f"{correlation.pairs:,} randomly drawn pairs"
    if correlation.rho is None:
        return f"undefined: fewer than 3 pairs, or all cosines of a table are equal ({pairs})"
    interval = "" if correlation.low is None else f" ({correlation.low:.4f} to {correlation.high:.4f})"
    return f"{correlation.rho:.4f}{interval}, over {pairs}"
