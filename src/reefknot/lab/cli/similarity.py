"""`reefknot similarity`: word vectors against people's judgement, or against one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
  reefknot similarity runs/demo/untied/seed0 vectors.txt --data DIR
  reefknot similarity runs/demo/tied/seed0 --set SimLex-999 --set my-pairs.tsv --json
  reefknot similarity --between runs/demo/untied/seed0 runs/demo/tied/seed0
"""


def similarity(
    invocation: typer.Context,
    sources: Annotated[list[Path], typer.Argument(metavar="RUN|FILE", help="Run folders, or files of word vectors.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="A benchmark, or a file of word, word, score; all that are found unless given."),
    ] = None,
    between: Annotated[bool, typer.Option("--between", help="Compare every two tables instead.")] = False,
    exact_below: Annotated[
        int, typer.Option(min=0, help="With --between: take all pairs of at most so many words.")
    ] = 20_000,
    samples: Annotated[
        int, typer.Option(min=120, help="With --between: draw so many pairs of more words.")
    ] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Rank correlation (Spearman) of cosines with people's scores of word pairs, with coverage and a 95 % interval.

    With --between: of all pairwise cosines of one table with those of another.
    """
    from reefknot.errors import SettingsError

    other_way = ("sets", "data") if between else ("exact_below", "samples")
    for name, written in given_options(invocation):
        if name in other_way:
            raise SettingsError(f"{written} goes {'without' if between else 'with'} --between; leave one of them out")
    benchmarks = [] if between else _benchmarks(sets, data)
    tables = _tables(sources)
    if between:
        _compare(tables, exact_below, samples, seed, as_json)
    else:
        _judge(tables, benchmarks, seed, as_json)


def _tables(sources: Sequence[Path]) -> list[tuple[Path, str, WordVectors]]:
    """The tables of all runs and files, each with its name."""
    distinct = dict.fromkeys(sources)
    return [(source, name, table) for source in distinct for name, table in open_tables(source).items()]


def _benchmarks(sets: Sequence[str] | None, data: Path | None) -> list[Benchmark]:
    """Those that are named, each once, or all that are found."""
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.evaluation.benchmarks import BENCHMARKS
    from reefknot.lab.evaluation.similarity import find_benchmarks, read_benchmark

    published = {name.lower(): name for name in BENCHMARKS}
    named = [published.get(each.lower()) for each in sets or []]
    found = find_benchmarks(data) if sets is None or any(named) else {}
    if sets is None:
        return list(found.values())
    chosen = {}
    for each, name in zip(sets, named, strict=True):
        if name is None:
            if not Path(each).is_file():
                raise _no_such_set(each, published)
            chosen[each] = read_benchmark(Path(each))
        elif name in found:
            chosen[name] = found[name]
        else:
            raise CorpusNotFound(f"{name} not found: expected {BENCHMARKS[name].file} next to the other benchmarks.")
    return list(chosen.values())


def _no_such_set(name: str, published: dict[str, str]) -> SettingsError:
    from difflib import get_close_matches

    from reefknot.errors import SettingsError, shortened

    near = get_close_matches(name.lower(), published, n=1)
    hint = f"did you mean {published[near[0]]}?" if near else f"there are {', '.join(published.values())}"
    return SettingsError(f"--set {shortened(name)}: neither a benchmark nor a file; {hint}")


def _judge(tables: list[tuple[Path, str, WordVectors]], benchmarks: list[Benchmark], seed: int, as_json: bool) -> None:
    from reefknot.lab.evaluation.similarity import judge

    found: list[dict[str, Any]] = []
    lines: list[str] = []
    width = max(len(each.name) for each in benchmarks)
    for source, name, vectors in tables:
        judgements = [judge(vectors, benchmark, seed=seed) for benchmark in benchmarks]
        found.append(
            {
                "source": str(source),
                "table": name,
                "words": len(vectors),
                "judgements": [each.record() for each in judgements],
            }
        )
        lines.append(f"{source}, {name}: {len(vectors):,} words")
        lines += [f"  {each.name:<{width}}  {_told(each)}" for each in judgements]
    emit(found, "\n".join(lines), as_json)


def _told(found: Judgement) -> str:
    from reefknot.lab.evaluation.spearman import FEWEST_PAIRS, FEWEST_RESAMPLED

    covered = f"{found.pairs:,} of {found.of:,} pairs"
    if found.rho is None:
        why = (
            f"fewer than {FEWEST_PAIRS} pairs" if found.pairs < FEWEST_PAIRS else "all scores or all cosines are equal"
        )
        return f"undefined: {why} ({covered})"
    if found.low is None:
        few = found.pairs < FEWEST_RESAMPLED
        why = f"fewer than {FEWEST_RESAMPLED} pairs" if few else "a perfect order, and so is every resample"
        return f"{found.rho:6.3f}  (no interval: {why}), {covered}"
    return f"{found.rho:6.3f}  ({found.low:6.3f} to {found.high:6.3f}), {covered}"


def _compare(
    tables: list[tuple[Path, str, WordVectors]], exact_below: int, samples: int, seed: int, as_json: bool
) -> None:
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.pairwise_similarity import pairwise_correlation

    if len(tables) < 2:
        raise SettingsError("--between needs two tables, and one is named; name another run or file of vectors")
    found: list[dict[str, Any]] = []
    lines: list[str] = []
    for (source, name, one), (other_source, other_name, other) in combinations(tables, 2):
        correlation = pairwise_correlation(one, other, exact_below=exact_below, samples=samples, seed=seed)
        sides = {"a": {"source": str(source), "table": name}, "b": {"source": str(other_source), "table": other_name}}
        found.append({**sides, **asdict(correlation)})
        lines.append(f"{source}, {name} and {other_source}, {other_name}: {_correlated(correlation)}")
    emit(found, "\n".join(lines), as_json)


def _correlated(found: PairwiseCorrelation) -> str:
    over = f"all {found.pairs:,} pairs" if found.exact else f"{found.pairs:,} pairs drawn from all"
    if found.rho is None:
        return f"undefined: fewer than 3 pairs, or all cosines of a table are equal ({over})"
    interval = "" if found.low is None else f" ({found.low:.4f} to {found.high:.4f})"
    return f"{found.rho:.4f}{interval}, over {over}"
