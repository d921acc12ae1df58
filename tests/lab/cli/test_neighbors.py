"""`reefknot vectors neighbors` on files of vectors and on skip-gram runs; test_verbs has language models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reefknot.lab.tasks.word_vectors import open_vectors
from reefknot.vectors.files import write_vectors
from reefknot.vectors.word_vectors import WordVectors

from .conftest import Outcome

Cli = Callable[..., Outcome]

SKIP_GRAM = """
title = "Vectors"

[base.corpus]
name = {corpus}

[base.skip_gram]
dim = 6

[base.training]
epochs = 1

[[rows]]
name = "untied"
"""


@pytest.fixture(scope="module")
def run(cli: Cli, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skip-gram")
    (folder / "vectors.toml").write_text(SKIP_GRAM.format(corpus=repr(str(corpus))), encoding="utf-8")
    outcome = cli("train", folder / "vectors.toml", "--out", folder / "run", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    return folder / "run"


def test_neighbors_are_found_in_a_file(cli: Cli, tmp_path: Path) -> None:
    rows = np.array([[1, 0], [3, 1], [-1, 9], [0, 0]], np.float32)
    write_vectors(WordVectors(("King", "queen", "pear", "nil"), rows), tmp_path / "file.vec", "word2vec")
    neighbors = cli("vectors", "neighbors", tmp_path / "file.vec", "King", "PEAR", "-k", 2, "--json").json()
    assert neighbors == {
        "vectors": {
            "King": [["queen", round(3 / 10**0.5, 4)], ["nil", 0.0]],
            "pear": [["queen", round(6 / 820**0.5, 4)], ["nil", 0.0]],
        }
    }
    assert cli("vectors", "neighbors", tmp_path / "file.vec", "King", "-k", 1).out == "King (vectors): queen 0.95\n"
    assert cli("vectors", "export", tmp_path / "file.vec", "--format", "projector", "-o", tmp_path / "folder").code == 0
    assert cli("vectors", "neighbors", tmp_path / "folder", "King", "PEAR", "-k", 2, "--json").json() == neighbors
    (tmp_path / "double.vec").write_text("3 2\na 1 2\nb 3 4\na 5 6\n")
    outcome = cli("vectors", "neighbors", tmp_path / "double.vec", "a", "--json")
    assert (outcome.code, list(outcome.json()["vectors"])) == (0, ["a"])
    assert "only the first vector of a word is kept" in outcome.err
    outcome = cli("vectors", "neighbors", tmp_path / "file.vec", "queeen")
    assert (outcome.code, outcome.out) == (3, "")
    assert "file.vec: queeen (did you mean queen?)" in outcome.err


def test_zero_vector_or_no_other_word_prints_a_warning(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("nil 0 0\na 1 2\nb 2 1\n")
    outcome = cli("vectors", "neighbors", tmp_path / "v.txt", "nil", "a")
    assert (outcome.code, outcome.out) == (0, "nil (vectors): none\na (vectors): b 0.80, nil 0.00\n")
    assert outcome.err == "nil (vectors): the vector of nil is zero, which has no direction\n"
    assert cli("vectors", "neighbors", tmp_path / "v.txt", "nil", "--json").json() == {"vectors": {"nil": []}}
    (tmp_path / "v.txt").write_text("a 1 2\n")
    outcome = cli("vectors", "neighbors", tmp_path / "v.txt", "a")
    assert (outcome.code, outcome.out) == (0, "a (vectors): none\n")
    assert outcome.err == "a (vectors): there is no other word\n"


def test_neighbors_are_found_in_both_tables_of_a_skip_gram_run(cli: Cli, run: Path) -> None:
    neighbors = cli("vectors", "neighbors", run, "green", "-k", 3, "--json").json()
    assert list(neighbors) == ["input", "output"]
    for end, vectors in open_vectors(run).items():
        cosines = vectors.unit_VD @ vectors.unit_VD[vectors.id_of("green")]
        others = [row for row in np.argsort(-cosines, kind="stable") if vectors.words[row] != "green"][:3]
        assert [word for word, _ in neighbors[end]["green"]] == [vectors.words[row] for row in others]
    outcome = cli("vectors", "neighbors", run, "zebra")
    assert (outcome.code, outcome.err) == (3, f"reefknot: not in the vocabulary of {run}: zebra\n")
    assert cli("vectors", "analogy", run, "green", "river", "house", "--json").json().keys() == {"input", "output"}
