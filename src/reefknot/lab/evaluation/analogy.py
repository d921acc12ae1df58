"""Analogies of word vectors: which word is to c as b is to a? (Mikolov et al. 2013)

`analogy` answers one question, and `score_questions` returns the accuracy on the questions of a file. The answer is the
word whose vector has the largest cosine with b - a + c (3CosAdd). All vectors have length one, and the three words of
the question are excluded, as in word2vec's compute-accuracy and gensim's `most_similar`. For example, "man is to king
as woman is to" should be answered by "queen".

Shapes: Q questions, V words, D dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError, shorten
from reefknot.storage.lines import read_file
from reefknot.vectors.lookup import Lookup
from reefknot.vectors.word_vectors import WordVectors

_COSINES_AT_ONCE = 4_000_000  # number of cosines in memory at once

Question = tuple[str, str, str, str]
"""a is to b as c is to d."""


@dataclass(frozen=True)
class Section:
    """Questions of one kind, such as capitals of countries."""

    name: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on a section of questions."""

    name: str
    right: int
    """Number of questions that are answered correctly."""
    asked: int
    """Number of questions whose words all have a vector."""
    of: int
    """Number of all questions of the section."""

    @property
    def share(self) -> float | None:
        """Fraction of the asked questions that are answered correctly; None if no question was asked."""
        return self.right / self.asked if self.asked else None


def analogy(vectors: WordVectors, a: str, b: str, c: str, k: int) -> list[tuple[str, float]]:
    """Return the k best answers to "a is to b as c is to which word", with their cosines, best first."""
    ids_Q3 = np.array([Lookup(vectors).require([a, b, c], "these vectors")], dtype=np.int64)
    ((_, cosines_QV),) = _iterate_cosines(vectors, ids_Q3)
    cosines_V = cosines_QV[0]
    best_indices = np.argsort(-cosines_V, kind="stable")[:k]
    return [(vectors.words[index], float(cosines_V[index])) for index in best_indices if cosines_V[index] > -np.inf]


def read_questions(path: Path) -> tuple[Section, ...]:
    """Read questions in word2vec's format: four words per line, and a line ": NAME" at the start of each section."""
    sections: list[tuple[str, list[Question]]] = []
    for line in read_file(path):
        words = line.words
        if not words:
            continue
        if words[0].startswith(":"):
            sections.append((" ".join(words).lstrip(": "), []))
        elif len(words) != 4:
            raise DataError(
                f"{path}, line {line.number}: {shorten(' '.join(words))!r} is neither four words nor ': NAME'"
            )
        else:
            if not sections:
                sections.append((path.stem, []))
            sections[-1][1].append((words[0], words[1], words[2], words[3]))
    if not any(questions for _, questions in sections):
        raise DataError(f"{path}: holds no questions; write four words on each line, such as 'man king woman queen'")
    return tuple(Section(name, tuple(questions)) for name, questions in sections)


def score_questions(vectors: WordVectors, sections: Sequence[Section]) -> list[Accuracy]:
    """Return the accuracy of each section and, last, of all sections together under the name "total".

    Words are looked up as written, then in lower case. Questions with an unknown word are left out and counted.
    """
    lookup = Lookup(vectors)
    accuracies = [_score_section(vectors, lookup, section) for section in sections]
    totals = (sum(getattr(accuracy, field) for accuracy in accuracies) for field in ("right", "asked", "of"))
    return [*accuracies, Accuracy("total", *totals)]


def _score_section(vectors: WordVectors, lookup: Lookup, section: Section) -> Accuracy:
    """Return the accuracy on the questions of a section whose words all have a vector."""
    ids_of_questions = [[lookup.find(word) for word in question] for question in section.questions]
    known_questions = [ids for ids in ids_of_questions if None not in ids]
    ids_Q4 = np.array(known_questions, dtype=np.int64).reshape(-1, 4)
    num_correct = 0
    for start, cosines_QV in _iterate_cosines(vectors, ids_Q4[:, :3]):
        expected_Q = ids_Q4[start : start + len(cosines_QV), 3]
        num_correct += int((cosines_QV.argmax(axis=1) == expected_Q).sum())
    return Accuracy(section.name, num_correct, len(ids_Q4), len(section.questions))


def _iterate_cosines(vectors: WordVectors, ids_Q3: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield chunks of questions: the index of the first question, and the cosines of all words with b - a + c.

    The cosines of the three words of a question are -inf.
    """
    unit_VD = vectors.unit_VD
    chunk_size = max(1, _COSINES_AT_ONCE // max(1, len(vectors)))
    for start in range(0, len(ids_Q3), chunk_size):
        chunk_Q3 = ids_Q3[start : start + chunk_size]
        a_QD, b_QD, c_QD = (unit_VD[chunk_Q3[:, column]] for column in range(3))
        answer_QD = b_QD - a_QD + c_QD
        norms_Q1 = np.linalg.norm(answer_QD, axis=1, keepdims=True)
        answer_QD = np.divide(answer_QD, norms_Q1, out=answer_QD, where=norms_Q1 > 0)
        cosines_QV = answer_QD @ unit_VD.T
        np.put_along_axis(cosines_QV, chunk_Q3, -np.inf, axis=1)
        yield start, cosines_QV
