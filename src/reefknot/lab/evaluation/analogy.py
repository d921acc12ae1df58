"""Analogies of word vectors: which word is to c as b is to a? (Mikolov et al. 2013)

`analogy` answers one question, and `score_questions` returns the accuracy on the questions of a file. For example,
the answer to "man is to king as woman is to" should be "queen":

    analogy(vectors, "man", "king", "woman", k=1)    # [("queen", 0.71)]

The answer is the word whose vector has the largest cosine with b - a + c (3CosAdd). All vectors have length one, and
the three words of the question are excluded, as in word2vec's compute-accuracy and gensim's `most_similar`.

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
    question_ids = Lookup(vectors).require([a, b, c], "these vectors")
    ids_Q3 = np.array([question_ids], dtype=np.int64)
    _, cosines_QV = next(_iterate_cosines(vectors, ids_Q3))
    cosines_V = cosines_QV[0]

    answers = []
    for word_id in np.argsort(-cosines_V, kind="stable")[:k]:
        # The three words of the question have the cosine -inf.
        if cosines_V[word_id] > -np.inf:
            answers.append((vectors.words[word_id], float(cosines_V[word_id])))
    return answers


def read_questions(path: Path) -> tuple[Section, ...]:
    """Read questions in word2vec's format: four words per line, and a line ": NAME" at the start of each section."""
    names: list[str] = []
    questions_by_section: list[list[Question]] = []
    for line in read_file(path):
        words = line.words
        if not words:
            continue

        if words[0].startswith(":"):
            names.append(" ".join(words).lstrip(": "))
            questions_by_section.append([])
        elif len(words) != 4:
            raise DataError(
                f"{path}, line {line.number}: {shorten(' '.join(words))!r} is neither four words nor ': NAME'"
            )
        else:
            if not names:  # questions before the first section are named after the file
                names.append(path.stem)
                questions_by_section.append([])
            a, b, c, d = words
            questions_by_section[-1].append((a, b, c, d))

    if not any(questions_by_section):
        raise DataError(f"{path}: holds no questions; write four words on each line, such as 'man king woman queen'")
    sections = zip(names, questions_by_section, strict=True)
    return tuple(Section(name, tuple(questions)) for name, questions in sections)


def score_questions(vectors: WordVectors, sections: Sequence[Section]) -> list[Accuracy]:
    """Return the accuracy of each section and, last, of all sections together under the name "total".

    Words are looked up as written, then in lower case. Questions with an unknown word are left out and counted.
    """
    lookup = Lookup(vectors)
    accuracies = [_score_section(vectors, lookup, section) for section in sections]
    total = Accuracy(
        "total",
        right=sum(accuracy.right for accuracy in accuracies),
        asked=sum(accuracy.asked for accuracy in accuracies),
        of=sum(accuracy.of for accuracy in accuracies),
    )
    return [*accuracies, total]


def _score_section(vectors: WordVectors, lookup: Lookup, section: Section) -> Accuracy:
    """Return the accuracy on the questions of a section whose words all have a vector."""
    known_questions = []
    for question in section.questions:
        question_ids = [lookup.find(word) for word in question]
        if None not in question_ids:
            known_questions.append(question_ids)
    ids_Q4 = np.array(known_questions, dtype=np.int64).reshape(-1, 4)

    num_correct = 0
    for first_question, cosines_QV in _iterate_cosines(vectors, ids_Q4[:, :3]):
        expected_Q = ids_Q4[first_question : first_question + len(cosines_QV), 3]
        answers_Q = cosines_QV.argmax(axis=1)
        num_correct += int((answers_Q == expected_Q).sum())
    return Accuracy(section.name, right=num_correct, asked=len(ids_Q4), of=len(section.questions))


def _iterate_cosines(vectors: WordVectors, ids_Q3: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield chunks of questions: the index of the first question, and the cosines of all words with b - a + c.

    The cosines of the three words of a question are -inf.
    """
    unit_VD = vectors.unit_VD
    chunk_size = max(1, _COSINES_AT_ONCE // max(1, len(vectors)))
    for start in range(0, len(ids_Q3), chunk_size):
        chunk_Q3 = ids_Q3[start : start + chunk_size]
        a_QD = unit_VD[chunk_Q3[:, 0]]
        b_QD = unit_VD[chunk_Q3[:, 1]]
        c_QD = unit_VD[chunk_Q3[:, 2]]
        target_QD = b_QD - a_QD + c_QD
        norms_Q1 = np.linalg.norm(target_QD, axis=1, keepdims=True)
        target_QD = np.divide(target_QD, norms_Q1, out=target_QD, where=norms_Q1 > 0)

        cosines_QV = target_QD @ unit_VD.T
        np.put_along_axis(cosines_QV, chunk_Q3, -np.inf, axis=1)
        yield start, cosines_QV
