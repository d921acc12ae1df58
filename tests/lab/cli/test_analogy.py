"""`reefknot vectors analogy` on runs and on files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from reefknot.vectors.files import write_vectors
from reefknot.vectors.lookup import Lookup
from reefknot.vectors.word_vectors import WordVectors

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vectors") / "royal.txt"
    words = ("man", "woman", "king", "queen", "apple")
    rows = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 3], [0, 1, 3], [-1, -1, 1]], np.float32)
    write_vectors(WordVectors(words, rows), path, "glove")
    return path


def test_answer_is_nearest_to_b_minus_a_plus_c(cli: Cli, file: Path) -> None:
    answers = cli("vectors", "analogy", file, "man", "king", "woman", "--json").json()
    assert [word for word, _ in answers["vectors"]] == ["queen", "apple"]
    assert cli("vectors", "analogy", file, "man", "king", "woman", "-k", 1).out == "vectors: queen 0.79\n"


def test_zero_vector_or_no_other_word_prints_a_warning(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("nil 0 0\na 1 2\nb 2 1\n")
    note = "vectors: the vector of nil is zero, which has no direction\n"
    for words in (("nil", "a", "b"), ("a", "NIL", "nil")):
        outcome = cli("vectors", "analogy", tmp_path / "v.txt", *words)
        assert (outcome.code, outcome.out, outcome.err) == (0, "vectors: none\n", note)
    assert cli("vectors", "analogy", tmp_path / "v.txt", "a", "nil", "b", "--json").json() == {"vectors": []}
    (tmp_path / "v.txt").write_text("a 1 2\nb 2 1\n")
    outcome = cli("vectors", "analogy", tmp_path / "v.txt", "a", "b", "a")
    assert (outcome.code, outcome.out, outcome.err) == (0, "vectors: none\n", "vectors: there is no other word\n")


def test_words_are_looked_up_once(cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[list[str]] = []
    require = Lookup.require

    def counting_require(lookup: Lookup, words: Sequence[str], where: str) -> list[int]:
        lookups.append(list(words))
        return require(lookup, words, where)

    monkeypatch.setattr(Lookup, "require", counting_require)
    assert cli("vectors", "analogy", file, "Man", "king", "WOMAN", "-k", 1).out == "vectors: queen 0.79\n"
    assert lookups.count(["Man", "king", "WOMAN"]) == 1


def test_every_table_of_a_run_gives_answers(cli: Cli, runs: Runs) -> None:
    answers = cli("vectors", "analogy", runs.untied, "green", "river", "house", "-k", 3, "--json").json()
    assert list(answers) == ["input", "output"]
    assert all(
        len(neighbors) == 3 and not {"green", "river", "house"} & {word for word, _ in neighbors}
        for neighbors in answers.values()
    )
    assert cli("vectors", "analogy", runs.tied, "Green", "river", "house").out.startswith("tied: ")


def test_questions_file_prints_the_share_of_correct_answers(cli: Cli, file: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.txt"
    text = ": family\nman king woman queen\nMan woman king apple\n: fruit\npear apple man king\n"
    questions.write_text(text, encoding="utf-8")
    answers = cli("vectors", "analogy", file, "--questions", questions, "--json").json()
    assert answers["vectors"] == [
        {"name": "family", "right": 1, "asked": 2, "of": 2, "accuracy": 0.5},
        {"name": "fruit", "right": 0, "asked": 0, "of": 1, "accuracy": None},
        {"name": "total", "right": 1, "asked": 2, "of": 3, "accuracy": 0.5},
    ]
    assert cli("vectors", "analogy", file, "--questions", questions).out.splitlines() == [
        "vectors",
        "  family   50.0%  (1 of 2)",
        "  fruit   undefined: no question could be answered, 1 left out because of unknown words",
        "  total    50.0%  (1 of 2, 1 left out because of unknown words)",
    ]


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("vectors analogy {file}", 2, "an analogy has three words, not 0; pass three words, or --questions FILE"),
        ("vectors analogy {file} man king", 2, "an analogy has three words, not 2"),
        ("vectors analogy {file} man king woman queen", 2, "an analogy has three words, not 4"),
        (
            "vectors analogy {file} man king woman --questions {file}",
            2,
            "words and --questions FILE exclude each other; leave one of them out",
        ),
        ("vectors analogy {file} --questions {file} -k 3", 2, "-k has no effect with --questions"),
        ("vectors analogy {file} man kind woman", 3, "royal.txt: kind (did you mean king?)"),
        ("vectors analogy {tied} green river zebra", 3, "not in the vocabulary of"),
        ("vectors analogy {file} --questions nowhere", 3, "nowhere: cannot be read"),
        ("vectors analogy {file} --questions {tied}/vocabulary.json", 3, "is neither four words nor ': NAME'"),
        ("vectors analogy nowhere man king woman", 3, "nowhere"),
    ],
)
def test_mistakes_print_one_line(cli: Cli, runs: Runs, file: Path, command: str, code: int, message: str) -> None:
    outcome = cli(*(word.format(file=file, tied=runs.tied) for word in command.split()))
    assert (outcome.code, outcome.out) == (code, "")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
