"""Analogies: by hand, and against gensim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.lab.evaluation import analogy as module
from reefknot.lab.evaluation.analogy import Accuracy, Section, analogy, read_questions, score_questions
from reefknot.vectors.word_vectors import WordVectors

ROYAL = WordVectors(
    ("man", "woman", "king", "queen", "apple"),
    np.array([[1, 0, 0], [0, 1, 0], [1, 0, 3], [0, 1, 3], [-1, -1, 1]], np.float32),
)
WORDS = tuple(f"{first}{second}" for first in "bcdfghjklm" for second in "aeiou")


def made(seed: int = 0) -> WordVectors:
    """Vectors in few directions, so that some analogies hold and others nearly do."""
    rng = np.random.default_rng(seed)
    first, second = rng.standard_normal((10, 6)), rng.standard_normal((5, 6))
    rows = (first[:, None] + second[None]).reshape(50, 6) + 0.6 * rng.standard_normal((50, 6))
    return WordVectors(WORDS, rows.astype(np.float32))


def keyed(vectors: WordVectors) -> Any:
    keyed_vectors = pytest.importorskip("gensim.models.keyedvectors")
    found = keyed_vectors.KeyedVectors(vectors.dim)
    found.add_vectors(list(vectors.words), vectors.vectors_VD)
    return found


def test_man_is_to_king_as_woman_is_to_queen() -> None:
    (best, cosine), *others = analogy(ROYAL, "man", "king", "woman", 8)
    unit = ROYAL.vectors_VD / np.linalg.norm(ROYAL.vectors_VD, axis=1, keepdims=True)
    wanted = unit[2] - unit[0] + unit[1]
    assert best == "queen"
    assert cosine == pytest.approx(wanted @ unit[3] / np.linalg.norm(wanted), abs=1e-6)
    assert [word for word, _ in others] == ["apple"]  # the three are never the answer
    assert analogy(ROYAL, "Man", "KING", "woman", 1) == [(best, cosine)]


def test_it_is_gensims_most_similar() -> None:
    vectors = made()
    theirs = keyed(vectors)
    rng = np.random.default_rng(1)
    for _ in range(30):
        a, b, c = (WORDS[index] for index in rng.choice(50, 3))
        found, expected = analogy(vectors, a, b, c, 6), theirs.most_similar(positive=[b, c], negative=[a], topn=6)
        assert [word for word, _ in found] == [word for word, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-5)


def questions(path: Path, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    lines = []
    for section in ("capital-common-countries", "gram1 adverbs"):
        lines.append(f": {section}")
        for _ in range(120):
            one, other = rng.choice(10, 2, replace=False)
            x, y = rng.choice(5, 2, replace=False)
            words = [WORDS[5 * i + j] for i, j in ((one, x), (one, y), (other, x), (other, y))]
            lines.append(" ".join(word.title() if rng.random() < 0.2 else word for word in words))
        lines.append("ba be zebra bu")
    lines += [": nobody-knows", "zebra quagga horse mule", "ba be ba be"]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("seed", range(2))
def test_accuracy_is_gensims(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question: a lower-cased vocabulary, no word of it left out, unknown questions left out."""
    monkeypatch.setattr(module, "_CHUNK", 50 * 7)  # questions in pieces of seven
    path, vectors = questions(tmp_path / "questions.txt", seed), made(seed)
    share, sections = keyed(vectors).evaluate_word_analogies(str(path), restrict_vocab=None)
    found = score_questions(vectors, read_questions(path))
    theirs = [(len(each["correct"]), len(each["correct"]) + len(each["incorrect"])) for each in sections]
    assert [(each.right, each.asked) for each in found] == theirs
    assert [each.name for each in found[:-1]] == [each["section"] for each in sections[:-1]]
    assert found[-1].share == pytest.approx(share)
    assert 0.05 < share < 0.95
    assert [each.of for each in found] == [121, 121, 2, 244]


def test_where_nothing_can_be_asked_there_is_no_share() -> None:
    found = score_questions(ROYAL, [Section("s", (("a", "b", "c", "d"),))])
    assert found == [Accuracy("s", 0, 0, 1), Accuracy("total", 0, 0, 1)]
    assert found[0].share is None


def test_zero_and_equal_vectors_give_no_nan() -> None:
    flat = WordVectors(WORDS, np.zeros((50, 3), np.float32))
    assert [value for _, value in analogy(flat, "ba", "be", "bi", 3)] == [0.0, 0.0, 0.0]
    assert analogy(ROYAL.select(["man", "king", "woman"]), "man", "king", "woman", 3) == []


def test_questions_without_a_heading_are_one_section(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"man king woman queen\r\n\r\n: plurals\na b c d\n")
    assert read_questions(path) == (
        Section("mine", (("man", "king", "woman", "queen"),)),
        Section("plurals", (("a", "b", "c", "d"),)),
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no questions"),
        (b": a\n: b\n", "holds no questions"),
        (b": a\nman king woman\n", "line 2: 'man king woman' is neither four words nor ': NAME'"),
        (b"\x00" * 10, "NUL byte"),
        (b"a b c \xff\n", "not valid UTF-8"),
    ],
)
def test_what_holds_no_questions_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "q.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        read_questions(path)


def test_an_unknown_word_is_named() -> None:
    with pytest.raises(DataError, match=r"not in the vocabulary of these vectors: qeen \(did you mean queen\?\)"):
        analogy(ROYAL, "man", "qeen", "woman", 1)
