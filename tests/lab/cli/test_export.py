"""`reefknot vectors export`: from a run or a file to every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reefknot.lab.tasks import open_run
from reefknot.vectors.files import FORMATS, read_vectors, write_vectors
from reefknot.vectors.word_vectors import WordVectors

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


@pytest.mark.parametrize("format", FORMATS)
def test_tied_table_is_written_in_every_format(format: str, cli: Cli, runs: Runs, tmp_path: Path) -> None:
    done = cli("vectors", "export", runs.tied, "--format", format, "-o", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{tmp_path / 'out'}: 12 words, dimension 8 (tied), read back\n"
    trained, written = open_run(runs.tied), read_vectors(tmp_path / "out")
    assert written.words == trained.vocabulary.words
    assert "<eos>" in written
    assert written.vectors_VD.tolist() == trained.model.input.tables()[0].weight.tolist()


def test_table_option_is_required_for_several_tables(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "v.txt"
    several = cli("vectors", "export", runs.untied, "--format", "glove", "-o", out)
    assert (several.code, several.out) == (2, "")
    assert "has several tables; choose one with --table: input or output" in several.err
    wrong = cli("vectors", "export", runs.untied, "--table", "tied", "--format", "glove", "-o", out)
    assert wrong.code == 2
    assert "--table tied" in wrong.err
    assert "it has: input, output" in wrong.err
    assert not out.exists()
    tables = {}
    for table in ("input", "output"):
        record = cli(
            "vectors", "export", runs.untied, "--table", table, "--format", "glove", "-o", out, "--json"
        ).json()
        assert record == {"output": str(out), "format": "glove", "table": table, "words": 12, "dim": 8}
        tables[table] = read_vectors(out).vectors_VD
    assert not np.array_equal(tables["input"], tables["output"])


def test_file_is_converted_with_a_warning_about_repeated_words(cli: Cli, tmp_path: Path) -> None:
    foreign, out = tmp_path / "foreign.txt", tmp_path / "out.safetensors"
    foreign.write_bytes(b"a 1 2\nb 3 4\na 5 6\n")
    done = cli("vectors", "export", foreign, "--format", "safetensors", "-o", out)
    assert done.code == 0
    assert "is repeated; only the first vector of a word is kept" in done.err
    assert done.out.endswith("2 words, dimension 2 (vectors), read back\n")
    projector = tmp_path / "projector"
    assert cli("vectors", "export", out, "--format", "projector", "-o", projector).code == 0
    assert cli("vectors", "export", projector, "--format", "word2vec-binary", "-o", tmp_path / "v.bin").code == 0
    assert read_vectors(tmp_path / "v.bin").words == ("a", "b")


def test_mistakes_print_one_line(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    spaced = tmp_path / "spaced.safetensors"
    write_vectors(WordVectors(("a b",), np.ones((1, 2), np.float32)), spaced, "safetensors")
    out = tmp_path / "out"
    for words, code, message in (
        (
            (spaced, "--format", "word2vec"),
            3,
            "the format word2vec cannot store the word 'a b'; use projector or safetensors",
        ),
        ((spaced, "--format", "fasttext"), 2, "unknown format of word vectors 'fasttext'; the formats are word2vec, "),
        ((tmp_path / "none", "--format", "glove"), 3, "none"),
        ((tmp_path, "--format", "glove"), 3, "is not a run folder"),
    ):
        done = cli("vectors", "export", *words, "-o", out)
        assert done.code == code, done.err
        assert message in done.err
        assert done.err.count("\n") == 1
        assert not out.exists()
