"""Word similarity: do the cosines of word vectors rank pairs of words as people do? (Press & Wolf 2017, section 4.1)

Start with `score_benchmark`:

    benchmarks = find_benchmarks(data_folder)
    score_benchmark(vectors, benchmarks["SimLex-999"]).rho

A benchmark is a list of word pairs with human similarity scores. The result is Spearman's correlation of these scores
with the cosines, over the pairs whose words both have a vector, and the number of these pairs. A pair that a file lists
twice counts twice, as in published results.

Shapes: N pairs, V words, U distinct words of the pairs, D dimension.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import CorpusNotFound, DataError, shorten
from reefknot.lab.evaluation.benchmarks import BENCHMARKS
from reefknot.lab.evaluation.spearman import spearman, spearman_interval
from reefknot.lab.runs.result import Judgement
from reefknot.storage.lines import read_plain
from reefknot.vectors.lookup import Lookup
from reefknot.vectors.word_vectors import WordVectors

FOLDER = "word-similarity"
"""Name of the folder of benchmark files in the data folder."""
DECIMALS = 12
"""Number of decimals that cosines are rounded to. Later decimals depend on the order of additions."""
_ELEMENTS_AT_ONCE = 1 << 18  # number of vector elements that are processed at once; they fit into the CPU cache

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Benchmark:
    """Pairs of words with human similarity scores. A higher score means more similar."""

    name: str
    pairs: tuple[tuple[str, str, float], ...]
    """First word, second word and score of each pair."""


def find_benchmarks(data: Path | None) -> dict[str, Benchmark]:
    """Read the published benchmarks from the folder `word-similarity` in `data` (if None: in REEFKNOT_DATA).

    Returns the benchmarks whose files exist, by name.
    """
    root = data or os.environ.get("REEFKNOT_DATA")
    example = next(iter(BENCHMARKS.values()))
    expected_path = Path(root or "DIR", FOLDER, example.file)
    hint = f"expected {expected_path} and the other files. Pass --data DIR or set REEFKNOT_DATA."
    if not root:
        raise CorpusNotFound(f"word-similarity benchmarks not found: {hint}")
    for folder in (Path(root) / FOLDER, Path(root)):
        paths = {name: folder / published.file for name, published in BENCHMARKS.items()}
        existing_paths = {name: path for name, path in paths.items() if path.is_file()}
        if existing_paths:
            return {name: _read_published(name, path) for name, path in existing_paths.items()}
    raise CorpusNotFound(f"word-similarity benchmarks not found in {root}: {hint}")


def _read_published(name: str, path: Path) -> Benchmark:
    """Read a published benchmark. Raise an error if its number of pairs is not the published number."""
    benchmark = read_benchmark(path, name)
    num_pairs = len(benchmark.pairs)
    num_expected = BENCHMARKS[name].pairs
    if num_pairs != num_expected:
        raise DataError(
            f"{path}: not the published {name}: {num_expected:,} pairs expected, {num_pairs:,} found; copy the file "
            "again"
        )
    return benchmark


def read_benchmark(path: Path, name: str | None = None) -> Benchmark:
    """Read a file with two words and a score per line, separated by tabs, commas or spaces.

    Lines that start with # are comments.
    """
    pairs = []
    for line_number, line in enumerate(read_plain(path), start=1):
        if line.strip() and not line.startswith("#"):
            pairs.append(_parse_pair(line, f"{path}, line {line_number}"))
    if not pairs:
        raise DataError(f"{path}: holds no pairs of words; write two words and a score on each line")
    return Benchmark(name or path.stem, tuple(pairs))


def _parse_pair(line: str, location: str) -> tuple[str, str, float]:
    """Parse a line such as "cat, dog, 7.5". Errors name the location, a file and line."""
    separator = None  # spaces
    if "\t" in line:
        separator = "\t"
    elif "," in line:
        separator = ","
    fields = [field.strip() for field in line.split(separator)]
    if len(fields) != 3 or not all(fields):
        raise DataError(f"{location}: {shorten(repr(line))} is not two words and a score; correct the line")
    first_word, second_word, score_text = fields
    try:
        score = float(score_text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(
            f"{location}: the score {shorten(repr(score_text))} is not a finite number; correct it, or put # before "
            "the line if it is a header or comment"
        )
    return first_word, second_word, score


def score_benchmark(vectors: WordVectors, benchmark: Benchmark, *, resamples: int = 1000, seed: int = 0) -> Judgement:
    """Correlate the cosines of the pairs of a benchmark with the human scores.

    Words are looked up as written, then in lower case. Pairs with an unknown word are left out and counted. If
    there are enough pairs, the interval is a bootstrap over pairs. It reflects the choice of pairs, not how the result
    varies between training runs.
    """
    # Look up the pairs whose words both have a vector.
    lookup = Lookup(vectors)
    first_ids = []
    second_ids = []
    scores = []
    for first_word, second_word, score in benchmark.pairs:
        first_id = lookup.find(first_word)
        second_id = lookup.find(second_word)
        if first_id is not None and second_id is not None:
            first_ids.append(first_id)
            second_ids.append(second_id)
            scores.append(score)

    # Correlate their cosines with the human scores.
    first_N = np.array(first_ids, dtype=np.int64)
    second_N = np.array(second_ids, dtype=np.int64)
    scores_N = np.array(scores, dtype=np.float64)
    cosines_N = pair_cosines(vectors.vectors_VD, first_N, second_N)
    rho = spearman(cosines_N, scores_N)
    low = high = None
    interval = spearman_interval(cosines_N, scores_N, resamples=resamples, seed=seed)
    if interval is not None:
        low, high = interval
    return Judgement(name=benchmark.name, rho=rho, low=low, high=high, pairs=len(scores), of=len(benchmark.pairs))


def pair_cosines(vectors_VD: NDArray[np.float32], first_N: Ids, second_N: Ids) -> NDArray[np.float64]:
    """Return the cosine of each pair of rows, cosines_N, in float64; 0 if a row is zero.

    Equal pairs have equal cosines.
    """
    # The length of each distinct row is computed once.
    distinct_U, index_in_distinct = np.unique(np.stack([first_N, second_N]), return_inverse=True)
    lengths_U = np.sqrt(_dot_products(vectors_VD, distinct_U, distinct_U))
    lengths_2N = lengths_U[index_in_distinct.reshape(2, -1)]
    length_products_N = lengths_2N.prod(axis=0)

    dot_products_N = _dot_products(vectors_VD, first_N, second_N)
    cosines_N = np.zeros(len(first_N))
    np.divide(dot_products_N, length_products_N, out=cosines_N, where=length_products_N > 0)
    np.round(cosines_N, DECIMALS, out=cosines_N)
    return cosines_N


def _dot_products(vectors_VD: NDArray[np.float32], first_N: Ids, second_N: Ids) -> NDArray[np.float64]:
    """Return the dot product of each pair of rows, in float64, computed in chunks that bound the memory."""
    products_N = np.empty(len(first_N))
    chunk_size = max(1, _ELEMENTS_AT_ONCE // max(1, vectors_VD.shape[1]))
    for start in range(0, len(first_N), chunk_size):
        chunk = slice(start, start + chunk_size)
        first_ND = vectors_VD[first_N[chunk]].astype(np.float64)
        second_ND = vectors_VD[second_N[chunk]].astype(np.float64)
        products_N[chunk] = np.einsum("nd,nd->n", first_ND, second_ND)
    return products_N
