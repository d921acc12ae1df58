"""Word similarity: do cosines of word vectors rank pairs of words as people do? (Press & Wolf 2017, section 4.1)

A benchmark is a list of pairs with scores by people. The figure is Spearman's correlation of these scores with the
cosines, over the pairs whose words both have a vector; how many these are is part of the finding. A pair that a
file lists twice counts twice, as in the figures others publish.

Shapes: N pairs, V words, U those of any pair, D width.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import CorpusNotFound, DataError, shortened
from reefknot.lab.evaluation.spearman import spearman, spearman_interval
from reefknot.lab.runs.result import Judgement
from reefknot.storage.lines import read_plain
from reefknot.vectors.lookup import Lookup
from reefknot.vectors.word_vectors import WordVectors

FOLDER = "word-similarity"
DECIMALS = 12
"""Of a cosine; what is left differs by the order of additions only."""
_CHUNK = 1 << 18  # numbers of vectors held at once: what a cache holds

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Published:
    """The file of a benchmark and how many pairs it lists."""

    file: str
    pairs: int


BENCHMARKS: Mapping[str, Published] = {
    "SimLex-999": Published("EN-SIMLEX-999.txt", 999),
    "Verb-143": Published("EN-VERB-143.txt", 144),
    "MEN": Published("EN-MEN-TR-3k.txt", 3_000),
    "Rare-Word": Published("EN-RW-STANFORD.txt", 2_034),
    "MTurk-771": Published("EN-MTurk-771.txt", 771),
    "MTurk-287": Published("EN-MTurk-287.txt", 287),
    "WordSim-353": Published("EN-WS-353-ALL.txt", 353),
    "WordSim-353-sim": Published("EN-WS-353-SIM.txt", 203),
    "WordSim-353-rel": Published("EN-WS-353-REL.txt", 252),
    "SimVerb-3500": Published("EN-SimVerb-3500.txt", 3_500),
    "RG-65": Published("EN-RG-65.txt", 65),
    "MC-30": Published("EN-MC-30.txt", 30),
    "YP-130": Published("EN-YP-130.txt", 130),
}
"""The benchmarks of Press & Wolf first, then the others."""
PRESS = ("SimLex-999", "Verb-143", "MEN", "Rare-Word", "MTurk-771")
"""The benchmarks of Press & Wolf: those that tables and figures show."""


@dataclass(frozen=True)
class Benchmark:
    """Pairs of words with the score that people gave them: the higher, the more alike."""

    name: str
    pairs: tuple[tuple[str, str, float], ...]


def find_benchmarks(data: Path | None) -> dict[str, Benchmark]:
    """The published benchmarks in the folder word-similarity of `data`, else of the environment's REEFKNOT_DATA."""
    named = data or os.environ.get("REEFKNOT_DATA")
    first = next(iter(BENCHMARKS.values())).file
    hint = f"expected {Path(named or 'DIR', FOLDER, first)} and the others. Pass --data DIR or set REEFKNOT_DATA."
    if not named:
        raise CorpusNotFound(f"word-similarity benchmarks not found: {hint}")
    for place in (Path(named) / FOLDER, Path(named)):
        files = {name: place / each.file for name, each in BENCHMARKS.items() if (place / each.file).is_file()}
        if files:
            return {name: _published(name, path) for name, path in files.items()}
    raise CorpusNotFound(f"word-similarity benchmarks not found in {named}: {hint}")


def _published(name: str, path: Path) -> Benchmark:
    benchmark, expected = read_benchmark(path, name), BENCHMARKS[name].pairs
    found = len(benchmark.pairs)
    if found != expected:
        raise DataError(f"{path}: not the published {name}: {expected:,} pairs expected, {found:,} found; copy it anew")
    return benchmark


def read_benchmark(path: Path, name: str | None = None) -> Benchmark:
    """A file with a pair and its score on each line, between tabs, commas or spaces; lines with # are remarks."""
    pairs = []
    for number, line in enumerate(read_plain(path), start=1):
        if line.strip() and not line.startswith("#"):
            pairs.append(_pair(line, f"{path}, line {number}"))
    if not pairs:
        raise DataError(f"{path}: holds no pairs of words; give a word, a word and a score on each line")
    return Benchmark(name or path.stem, tuple(pairs))


def _pair(line: str, where: str) -> tuple[str, str, float]:
    separator = next((each for each in "\t," if each in line), None)
    fields = [field.strip() for field in line.split(separator)]
    if len(fields) != 3 or not all(fields):
        raise DataError(f"{where}: {shortened(repr(line))} is not a word, a word and a score")
    one, other, written = fields
    try:
        score = float(written)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{where}: the score {shortened(repr(written))} is not a finite number; # begins a remark")
    return one, other, score


def judge(vectors: WordVectors, benchmark: Benchmark, *, resamples: int = 1000, seed: int = 0) -> Judgement:
    """Rank the pairs of a benchmark by the cosines of their vectors and compare with people's scores.

    Words are looked up as written, then lower-cased; pairs with an unknown word are left out and counted. The interval
    is that of resampled pairs, where there are enough: it speaks of the choice of pairs, not of training again.
    """
    find = Lookup(vectors).find
    found = [(find(one), find(other), score) for one, other, score in benchmark.pairs]
    known = [(one, other, score) for one, other, score in found if one is not None and other is not None]
    ids_N2 = np.array([pair[:2] for pair in known], dtype=np.int64).reshape(-1, 2)
    scores_N = np.array([score for *_, score in known], dtype=np.float64)
    cosines_N = pair_cosines(vectors.vectors_VD, ids_N2[:, 0], ids_N2[:, 1])
    rho = spearman(cosines_N, scores_N)
    low, high = spearman_interval(cosines_N, scores_N, resamples=resamples, seed=seed) or (None, None)
    return Judgement(name=benchmark.name, rho=rho, low=low, high=high, pairs=len(known), of=len(benchmark.pairs))


def pair_cosines(vectors_VD: NDArray[np.float32], one_N: Ids, other_N: Ids) -> NDArray[np.float64]:
    """The cosine of each pair of rows, in float64; that of a zero row is 0. Equal pairs have equal cosines."""
    used_U, places_2N = np.unique(np.stack([one_N, other_N]), return_inverse=True)
    lengths_2N = np.sqrt(_products(vectors_VD, used_U, used_U))[places_2N.reshape(2, -1)]
    both_N = lengths_2N.prod(axis=0)
    cosines_N = np.zeros(len(one_N))
    np.divide(_products(vectors_VD, one_N, other_N), both_N, out=cosines_N, where=both_N > 0)
    np.round(cosines_N, DECIMALS, out=cosines_N)
    return cosines_N


def _products(vectors_VD: NDArray[np.float32], one_N: Ids, other_N: Ids) -> NDArray[np.float64]:
    """The scalar product of each pair of rows, in float64, with few rows in memory at once."""
    products_N = np.empty(len(one_N))
    rows = max(1, _CHUNK // max(1, vectors_VD.shape[1]))
    for start in range(0, len(one_N), rows):
        part = slice(start, start + rows)
        a_ND, b_ND = (vectors_VD[ids[part]].astype(np.float64) for ids in (one_N, other_N))
        products_N[part] = np.einsum("nd,nd->n", a_ND, b_ND)
    return products_N
