"""`reefknot vectors similarity`: compare word vectors with human judgements, or with each other.

The score is Spearman's rank correlation over pairs of words. `_compare_with_benchmarks` correlates the cosine of a pair
with people's rating of the pair; `_compare_tables` correlates the cosines in two tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from reefknot.lab.cli.options import AsJson, Data, open_tables, print_result, reject_options, user_options

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
NamedTable: TypeAlias = "tuple[Path, str, WordVectors]"
"""The source of a table, the name of the table in its source, and its vectors."""


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
    data: Data = None,
    as_json: AsJson = False,
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
        tables += [(source, name, vectors) for name, vectors in open_tables(source).items()]
    return tables


def _open_benchmarks(sets: Sequence[str] | None, data: Path | None) -> list[Benchmark]:
    """Return the named benchmarks without repetitions, or all benchmarks in the data folder."""
    from reefknot.errors import CorpusNotFound, SettingsError
    from reefknot.lab.evaluation.benchmarks import BENCHMARKS
    from reefknot.lab.evaluation.similarity import find_benchmarks, read_benchmark

    name_by_lower_case = {name.lower(): name for name in BENCHMARKS}
    if sets is None:
        return list(find_benchmarks(data).values())
    # None stands for a file.
    names = [name_by_lower_case.get(text.lower()) for text in sets]
    for text, name in zip(sets, names, strict=True):
        if name is None and not Path(text).is_file():
            raise _unknown_set_error(text, name_by_lower_case)
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


def _unknown_set_error(text: str, name_by_lower_case: dict[str, str]) -> SettingsError:
    """Return the error for a --set that is neither a benchmark nor a file, with a suggestion."""
    from difflib import get_close_matches

    from reefknot.errors import SettingsError, shorten

    suggestions = get_close_matches(text.lower(), name_by_lower_case, n=1)
    if suggestions:
        hint = f"did you mean {name_by_lower_case[suggestions[0]]}?"
    else:
        hint = f"the benchmarks are {', '.join(name_by_lower_case.values())}"
    return SettingsError(f"--set {shorten(text)}: neither a benchmark nor a file; {hint}")


def _compare_with_benchmarks(tables: list[NamedTable], benchmarks: list[Benchmark], seed: int, as_json: bool) -> None:
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
        lines += [f"  {judgement.name:<{width}}  {_format_judgement(judgement)}" for judgement in judgements]
    print_result(records, "\n".join(lines), as_json)


def _format_judgement(judgement: Judgement) -> str:
    """Format the correlation with its interval and coverage, or the reason why one of them is undefined."""
    from reefknot.lab.evaluation.spearman import FEWEST_PAIRS, FEWEST_RESAMPLED

    coverage = f"{judgement.pairs:,} of {judgement.of:,} pairs"
    if judgement.rho is None:
        too_few = judgement.pairs < FEWEST_PAIRS
        reason = f"fewer than {FEWEST_PAIRS} pairs" if too_few else "all scores or all cosines are equal"
        return f"undefined: {reason} ({coverage})"
    if judgement.low is None:
        too_few = judgement.pairs < FEWEST_RESAMPLED
        reason = (
            f"fewer than {FEWEST_RESAMPLED} pairs"
            if too_few
            else "the two orders agree perfectly, even in every resample"
        )
        return f"{judgement.rho:6.3f}  (no interval: {reason}), {coverage}"
    return f"{judgement.rho:6.3f}  ({judgement.low:6.3f} to {judgement.high:6.3f}), {coverage}"


def _check_sampling_options(
    tables: list[NamedTable], exact_below: int, samples: int, options: Mapping[str, str]
) -> None:
    """Raise an error if --samples or --seed is set, but no two tables share enough words for pairs to be sampled."""
    from reefknot.errors import SettingsError

    shared_counts = []
    for (_, _, table_a), (_, _, table_b) in combinations(tables, 2):
        shared_counts.append(sum(word in table_b for word in table_a.words))
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
    for (source_a, name_a, vectors_a), (source_b, name_b, vectors_b) in combinations(tables, 2):
        correlation = pairwise_correlation(vectors_a, vectors_b, exact_below=exact_below, samples=samples, seed=seed)
        table_a = {"source": str(source_a), "table": name_a}
        table_b = {"source": str(source_b), "table": name_b}
        records.append({"a": table_a, "b": table_b, **asdict(correlation)})
        lines.append(f"{source_a}, {name_a} and {source_b}, {name_b}: {_format_correlation(correlation)}")
    print_result(records, "\n".join(lines), as_json)


def _format_correlation(correlation: PairwiseCorrelation) -> str:
    pairs = f"all {correlation.pairs:,} pairs" if correlation.exact else f"{correlation.pairs:,} randomly drawn pairs"
    if correlation.rho is None:
        return f"undefined: fewer than 3 pairs, or all cosines of a table are equal ({pairs})"
    interval = "" if correlation.low is None else f" ({correlation.low:.4f} to {correlation.high:.4f})"
    return f"{correlation.rho:.4f}{interval}, over {pairs}"
