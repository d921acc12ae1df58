"""Word-similarity benchmarks: published files, and correlations against scipy and gensim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from reefknot.errors import CorpusNotFound, DataError
from reefknot.lab.evaluation.similarity import (
    BENCHMARKS,
    Benchmark,
    Judgement,
    find_benchmarks,
    pair_cosines,
    read_benchmark,
    score_benchmark,
)
from reefknot.vectors.word_vectors import WordVectors

WORDS = tuple(f"{first}{second}" for first in "bcdfghjklm" for second in "aeiou")


def vectors(seed: int = 0, words: tuple[str, ...] = WORDS, dim: int = 7) -> WordVectors:
    rng = np.random.default_rng(seed)
    return WordVectors(words, rng.standard_normal((len(words), dim)).astype(np.float32))


def made_pairs(count: int, seed: int = 0, words: tuple[str, ...] = WORDS) -> tuple[tuple[str, str, float], ...]:
    """Return random pairs with scores in steps of 0.5, so that there are ties."""
    rng = np.random.default_rng(seed)
    return tuple(
        (words[rng.integers(len(words))], words[rng.integers(len(words))], int(rng.integers(21)) / 2)
        for _ in range(count)
    )


def write_pairs(path: Path, pairs: tuple[tuple[str, str, float], ...], end: str = "\n") -> Path:
    path.write_bytes("".join(f"{one}\t{other}\t{score}{end}" for one, other, score in pairs).encode())
    return path


def test_first_five_benchmarks_are_those_of_the_paper() -> None:
    assert list(BENCHMARKS)[:5] == ["SimLex-999", "Verb-143", "MEN", "Rare-Word", "MTurk-771"]
    assert len(BENCHMARKS) == len({benchmark.file for benchmark in BENCHMARKS.values()}) == 13


def test_rho_equals_scipy() -> None:
    table = vectors()
    pairs = made_pairs(300)
    judgement = score_benchmark(table, Benchmark("made", pairs))
    v = {word: table.vectors_VD[row].astype(np.float64) for row, word in enumerate(WORDS)}
    cosines = [v[a] @ v[b] / np.linalg.norm(v[a]) / np.linalg.norm(v[b]) for a, b, _ in pairs]
    expected = spearmanr(np.round(cosines, 12), [score for *_, score in pairs]).statistic
    assert judgement.rho == pytest.approx(expected, abs=1e-12)
    assert (judgement.name, judgement.pairs, judgement.of) == ("made", 300, 300)
    assert judgement.low is not None
    assert judgement.high is not None
    assert -0.25 < judgement.low < expected < judgement.high < 0.25


@pytest.mark.parametrize("seed", range(3))
def test_rho_equals_gensim(tmp_path: Path, seed: int) -> None:
    """Both use a lower-cased vocabulary without limit and skip pairs with unknown words."""
    keyed_vectors = pytest.importorskip("gensim.models.keyedvectors")
    table = vectors(seed)
    keyed: Any = keyed_vectors.KeyedVectors(table.dim)
    keyed.add_vectors(list(WORDS), table.vectors_VD)
    # Only one pair of equal words: gensim rounds their cosine to slightly different values, which breaks ties.
    others = [(one, other, score) for one, other, score in made_pairs(250, seed) if one != other]
    pairs = (*others, ("Ba", "CE", 3.0), ("ba", "ba", 9.5), ("ba", "zebra", 9.0), ("zebra", "quagga", 1.0))
    path = write_pairs(tmp_path / "made.tsv", pairs)
    _, spearman, unknown = keyed.evaluate_word_pairs(str(path), restrict_vocab=None, dummy4unknown=False)
    judgement = score_benchmark(table, read_benchmark(path))
    assert judgement.rho == pytest.approx(spearman.statistic, abs=1e-12)
    assert 100 * (judgement.of - judgement.pairs) / judgement.of == pytest.approx(unknown)
    assert judgement.of - judgement.pairs == 2


def test_words_match_exactly_then_in_lower_case() -> None:
    table = WordVectors(("Turkey", "turkey", "ankara"), np.array([[1, 0], [0, 1], [1, 1]], np.float32))
    judgement = score_benchmark(
        table, Benchmark("b", (("Turkey", "Ankara", 1.0), ("turkey", "ANKARA", 2.0), ("Turkey", "turkey", 0.0)))
    )
    assert judgement.pairs == 3


UNDEFINED = {
    "no pairs": (vectors(), ()),
    "unknown words": (vectors(), (("x", "y", 1.0),) * 5),
    "two pairs": (vectors(), made_pairs(2)),
    "equal scores": (vectors(), tuple((one, other, 1.0) for one, other, _ in made_pairs(20))),
    "equal vectors": (WordVectors(WORDS, np.full((50, 5), 0.3, np.float32)), made_pairs(20)),
    "one direction": (
        WordVectors(WORDS, np.outer(np.arange(1, 51), [0.1, 0.7, -0.3]).astype(np.float32)),
        made_pairs(20),
    ),
    "zero vectors": (WordVectors(WORDS, np.zeros((50, 5), np.float32)), made_pairs(20)),
}


@pytest.mark.parametrize("case", UNDEFINED)
def test_undefined_correlation_is_none(case: str) -> None:
    table, pairs = UNDEFINED[case]
    used = 0 if case in ("no pairs", "unknown words") else len(pairs)
    assert score_benchmark(table, Benchmark("b", pairs)) == Judgement(name="b", pairs=used, of=len(pairs))


def test_equal_seeds_give_equal_intervals() -> None:
    benchmark = Benchmark("b", made_pairs(60))
    assert score_benchmark(vectors(), benchmark, seed=1) == score_benchmark(vectors(), benchmark, seed=1)
    assert score_benchmark(vectors(), benchmark, seed=1) != score_benchmark(vectors(), benchmark, seed=2)


def test_pair_cosines_are_symmetric_and_do_not_overflow() -> None:
    table = vectors(dim=300).vectors_VD * np.float32(1e18)
    one = np.repeat(np.arange(50), 50)
    other = np.tile(np.arange(50), 50)
    cosines = pair_cosines(table, one, other)
    assert (cosines == pair_cosines(table, other, one)).all()
    assert (cosines[one == other] == 1.0).all()


# Published files have carriage returns, no final newline and duplicate pairs.


def test_benchmark_file_may_have_bom_comments_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_bytes(b"\xef\xbb\xbf# a remark\nold\tnew\t1.58\r\n\nnew\told\t2\r\ncaf\xc3\xa9\tbar\t4.5")
    benchmark = read_benchmark(path)
    assert benchmark == Benchmark("set", (("old", "new", 1.58), ("new", "old", 2.0), ("café", "bar", 4.5)))
    assert read_benchmark(path, "Name").name == "Name"


@pytest.mark.parametrize("line", ["old new 1.5", "old,new,1.5", "old \t new\t 1.5 ", "old  new\t1.5"])
def test_columns_are_separated_by_tab_space_or_comma(tmp_path: Path, line: str) -> None:
    path = tmp_path / "set"
    path.write_text(line)
    if line.count("\t") == 1:
        with pytest.raises(DataError, match=r"line 1: .* is not two words and a score"):
            read_benchmark(path)
    else:
        assert read_benchmark(path).pairs == (("old", "new", 1.5),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no pairs of words"),
        (b"# only this\n\n", "holds no pairs of words"),
        (b"a\tb\t1\na\tb", "line 2: .* is not two words and a score"),
        (b"a\tb\t1\t2\n", "line 1: .* is not two words and a score"),
        (b"a\t\t1\n", "line 1: .* is not two words"),
        (b"word1\tword2\tscore\n", "line 1: the score 'score' is not a finite number"),
        (b"a\tb\tnan\n", "line 1: the score 'nan' is not a finite number"),
        (b"a\tb\t1e999\n", "not a finite number"),
        (b"\x00\x01\x02", "NUL byte"),
        (b"a\tb\xff\t1\n", "not valid UTF-8"),
        (b"x" * 100_000, "line 1: .*is not two words and a score"),
    ],
)
def test_invalid_benchmark_file_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "set.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_benchmark(path)
    assert "set.txt" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_missing_file_and_folder_are_rejected(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            read_benchmark(path)


def test_benchmarks_are_found_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    with pytest.raises(CorpusNotFound, match=r"benchmarks not found: expected DIR/.* Pass --data DIR or set REEFK"):
        find_benchmarks(None)
    with pytest.raises(CorpusNotFound, match="word-similarity benchmarks not found in "):
        find_benchmarks(tmp_path)
    folder = tmp_path / "word-similarity"
    folder.mkdir()
    write_pairs(folder / "EN-MC-30.txt", made_pairs(30))
    write_pairs(folder / "EN-RG-65.txt", made_pairs(65), end="\r\n")
    monkeypatch.setenv("REEFKNOT_DATA", str(tmp_path))
    benchmarks = find_benchmarks(None)
    assert {name: len(benchmark.pairs) for name, benchmark in benchmarks.items()} == {"RG-65": 65, "MC-30": 30}
    assert benchmarks == find_benchmarks(tmp_path) == find_benchmarks(folder)
    assert all(name == benchmark.name for name, benchmark in benchmarks.items())


def test_truncated_published_file_is_rejected(tmp_path: Path) -> None:
    write_pairs(tmp_path / "EN-MC-30.txt", made_pairs(29))
    with pytest.raises(DataError, match="not the published MC-30: 30 pairs expected, 29 found"):
        find_benchmarks(tmp_path)
