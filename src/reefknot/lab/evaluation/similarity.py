"""Word similarity: do the cosines of word vectors rank pairs of words as people do? (Press & Wolf 2017, section 4.1)

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
DECIMALS = 12
"""Number of decimals that cosines are rounded to. Later decimals depend on the order of additions."""
_CHUNK = 1 << 18  # number of vector elements that are processed at once; they fit into the CPU cache

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Benchmark:
    """Pairs of words with human similarity scores. A higher score means more similar."""

    name: str
    pairs: tuple[tuple[str, str, float], ...]


def find_benchmarks(data: Path | None) -> dict[str, Benchmark]:
    """Read the published benchmarks from the folder word-similarity of `data`, by default of REEFKNOT_DATA."""
    root = data or os.environ.get("REEFKNOT_DATA")
    first = next(iter(BENCHMARKS.values())).file
    hint = f"expected {Path(root or 'DIR', FOLDER, first)} and the other files. Pass --data DIR or set REEFKNOT_DATA."
    if not root:
        raise CorpusNotFound(f"word-similarity benchmarks not found: {hint}")
    for folder in (Path(root) / FOLDER, Path(root)):
        paths = {name: folder / published.file for name, published in BENCHMARKS.items()}
        files = {name: path for name, path in paths.items() if path.is_file()}
        if files:
            return {name: _published(name, path) for name, path in files.items()}
    raise CorpusNotFound(f"word-similarity benchmarks not found in {root}: {hint}")


def _published(name: str, path: Path) -> Benchmark:
    benchmark, expected = read_benchmark(path, name), BENCHMARKS[name].pairs
    count = len(benchmark.pairs)
    if count != expected:
        raise DataError(
            f"{path}: not the published {name}: {expected:,} pairs expected, {count:,} found; copy the file again"
        )
    return benchmark


def read_benchmark(path: Path, name: str | None = None) -> Benchmark:
    """Read a file with two words and a score per line, separated by tabs, commas or spaces.

    Lines that start with # are comments.
    """
    pairs = []
    for number, line in enumerate(read_plain(path), start=1):
        if line.strip() and not line.startswith("#"):
            pairs.append(_pair(line, f"{path}, line {number}"))
    if not pairs:
        raise DataError(f"{path}: holds no pairs of words; write two words and a score on each line")
    return Benchmark(name or path.stem, tuple(pairs))


def _pair(line: str, where: str) -> tuple[str, str, float]:
    separator = next((mark for mark in "\t," if mark in line), None)
    fields = [field.strip() for field in line.split(separator)]
    if len(fields) != 3 or not all(fields):
        raise DataError(f"{where}: {shorten(repr(line))} is not two words and a score; correct the line")
    one, other, written = fields
    try:
        score = float(written)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{where}: the score {shorten(repr(written))} is not a finite number; start comments with #")
    return one, other, score


def judge(vectors: WordVectors, benchmark: Benchmark, *, resamples: int = 1000, seed: int = 0) -> Judgement:
    """Correlate the cosines of the pairs of a benchmark with the human scores.

    Words are looked up as written, then in lower case. Pairs with an unknown word are left out and counted. The
    interval is a bootstrap over pairs, if there are enough. It covers the choice of pairs, not training again.
    """
    find = Lookup(vectors).find
    ids = [(find(first), find(second), score) for first, second, score in benchmark.pairs]
    known = [(first, second, score) for first, second, score in ids if first is not None and second is not None]
    ids_N2 = np.array([pair[:2] for pair in known], dtype=np.int64).reshape(-1, 2)
    scores_N = np.array([score for *_, score in known], dtype=np.float64)
    cosines_N = pair_cosines(vectors.vectors_VD, ids_N2[:, 0], ids_N2[:, 1])
    rho = spearman(cosines_N, scores_N)
    low, high = spearman_interval(cosines_N, scores_N, resamples=resamples, seed=seed) or (None, None)
    return Judgement(name=benchmark.name, rho=rho, low=low, high=high, pairs=len(known), of=len(benchmark.pairs))


def pair_cosines(vectors_VD: NDArray[np.float32], one_N: Ids, other_N: Ids) -> NDArray[np.float64]:
    """Return the cosine of each pair of rows, in float64; 0 if a row is zero. Equal pairs have equal cosines."""
    used_U, index_2N = np.unique(np.stack([one_N, other_N]), return_inverse=True)
    lengths_2N = np.sqrt(_products(vectors_VD, used_U, used_U))[index_2N.reshape(2, -1)]
    both_N = lengths_2N.prod(axis=0)
    cosines_N = np.zeros(len(one_N))
    np.divide(_products(vectors_VD, one_N, other_N), both_N, out=cosines_N, where=both_N > 0)
    np.round(cosines_N, DECIMALS, out=cosines_N)
    return cosines_N


def _products(vectors_VD: NDArray[np.float32], one_N: Ids, other_N: Ids) -> NDArray[np.float64]:
    """Return the dot product of each pair of rows, in float64, computed in chunks that bound the memory."""
    products_N = np.empty(len(one_N))
    rows = max(1, _CHUNK // max(1, vectors_VD.shape[1]))
    for start in range(0, len(one_N), rows):
        part = slice(start, start + rows)
        a_ND, b_ND = (vectors_VD[ids[part]].astype(np.float64) for ids in (one_N, other_N))
        products_N[part] = np.einsum("nd,nd->n", a_ND, b_ND)
    return products_N
