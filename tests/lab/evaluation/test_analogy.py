"""Analogies, checked by hand and against gensim."""

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


def make_vectors(seed: int = 0) -> WordVectors:
    """Return vectors in few directions, so that some analogies hold and others nearly do."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((10, 6))
    second = rng.standard_normal((5, 6))
    rows = (first[:, None] + second[None]).reshape(50, 6) + 0.6 * rng.standard_normal((50, 6))
    return WordVectors(WORDS, rows.astype(np.float32))


def to_gensim(vectors: WordVectors) -> Any:
    keyed_vectors = pytest.importorskip("gensim.models.keyedvectors")
    gensim_vectors = keyed_vectors.KeyedVectors(vectors.dim)
    gensim_vectors.add_vectors(list(vectors.words), vectors.vectors_VD)
    return gensim_vectors


def test_man_is_to_king_as_woman_is_to_queen() -> None:
    (best, cosine), *others = analogy(ROYAL, "man", "king", "woman", 8)
    unit = ROYAL.vectors_VD / np.linalg.norm(ROYAL.vectors_VD, axis=1, keepdims=True)
    wanted = unit[2] - unit[0] + unit[1]
    assert best == "queen"
    assert cosine == pytest.approx(wanted @ unit[3] / np.linalg.norm(wanted), abs=1e-6)
    assert [word for word, _ in others] == ["apple"]  # the three given words are never the answer
    assert analogy(ROYAL, "Man", "KING", "woman", 1) == [(best, cosine)]


def test_analogy_equals_gensim_most_similar() -> None:
    vectors = make_vectors()
    theirs = to_gensim(vectors)
    rng = np.random.default_rng(1)
    for _ in range(30):
        a, b, c = (WORDS[index] for index in rng.choice(50, 3))
        answers = analogy(vectors, a, b, c, 6)
        expected = theirs.most_similar(positive=[b, c], negative=[a], topn=6)
        assert [word for word, _ in answers] == [word for word, _ in expected]
        assert [value for _, value in answers] == pytest.approx([value for _, value in expected], abs=1e-5)


def write_questions(path: Path, seed: int = 0) -> Path:
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
def test_accuracy_equals_gensim(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both use a lower-cased vocabulary without limit and skip questions with unknown words."""
    monkeypatch.setattr(module, "_COSINES_AT_ONCE", 50 * 7)  # seven questions at a time
    path = write_questions(tmp_path / "questions.txt", seed)
    vectors = make_vectors(seed)
    share, sections = to_gensim(vectors).evaluate_word_analogies(str(path), restrict_vocab=None)
    accuracies = score_questions(vectors, read_questions(path))
    theirs = [(len(part["correct"]), len(part["correct"]) + len(part["incorrect"])) for part in sections]
    assert [(accuracy.right, accuracy.asked) for accuracy in accuracies] == theirs
    assert [accuracy.name for accuracy in accuracies[:-1]] == [part["section"] for part in sections[:-1]]
    assert accuracies[-1].share == pytest.approx(share)
    assert 0.05 < share < 0.95
    assert [accuracy.of for accuracy in accuracies] == [121, 121, 2, 244]


def test_share_is_none_if_every_question_has_unknown_words() -> None:
    accuracies = score_questions(ROYAL, [Section("s", (("a", "b", "c", "d"),))])
    assert accuracies == [Accuracy("s", 0, 0, 1), Accuracy("total", 0, 0, 1)]
    assert accuracies[0].share is None


def test_zero_vectors_give_cosine_zero_not_nan() -> None:
    flat = WordVectors(WORDS, np.zeros((50, 3), np.float32))
    assert [value for _, value in analogy(flat, "ba", "be", "bi", 3)] == [0.0, 0.0, 0.0]
    assert analogy(ROYAL.select(["man", "king", "woman"]), "man", "king", "woman", 3) == []


def test_questions_without_a_heading_form_one_section(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"man king woman queen\r\n\r\n: plurals\na b c d\n")
    assert read_questions(path) == (
        Section("mine", (("man", "king", "woman", "queen"),)),
        Section("plurals", (("a", "b", "c", "d"),)),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no questions"),
        (b": a\n: b\n", "holds no questions"),
        (b": a\nman king woman\n", "line 2: 'man king woman' is neither four words nor ': NAME'"),
        (b"\x00" * 10, "NUL byte"),
        (b"a b c \xff\n", "not valid UTF-8"),
    ],
)
def test_invalid_questions_file_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "q.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_questions(path)


def test_unknown_word_is_named_with_a_suggestion() -> None:
    with pytest.raises(DataError, match=r"not in the vocabulary of these vectors: qeen \(did you mean queen\?\)"):
        analogy(ROYAL, "man", "qeen", "woman", 1)
