"""Word vectors opened by path: from a language model, from skip-gram and from a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli.conftest import run_command

from reefknot.errors import DataError
from reefknot.lab.tasks import open_run
from reefknot.lab.tasks.skip_gram import SkipGramExperiment
from reefknot.lab.tasks.word_vectors import open_vectors
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.vectors.files import write_vectors
from skip_gram_recipe import write_recipe


def train(recipe: Path, row: str, out: Path) -> Path:
    outcome = run_command("train", recipe, "--row", row, "--out", out, "--device", "cpu", "training.epochs=1")
    assert outcome.code == 0, outcome.err
    return out


@pytest.mark.parametrize(
    ("classifier", "row", "ends"),
    [
        ("plain", "tied", {"tied"}),
        ("plain", "untied", {"input", "output"}),
        ("drill", "tied", {"input", "output"}),  # class vectors are computed from the table
    ],
)
def test_vectors_of_a_language_model_are_those_of_its_ends(
    tiny_recipe: Callable[..., Path], tmp_path: Path, classifier: str, row: str, ends: set[str]
) -> None:
    out = train(tiny_recipe(120, classifier), row, tmp_path / "run")
    vectors_by_end = open_vectors(out)
    assert set(vectors_by_end) == ends
    model, vocabulary = open_run(out).model, Vocabulary.load(out / "vocabulary.json")
    for end, vectors in vectors_by_end.items():
        assert vectors.words == vocabulary.words
        assert "<eos>" in vectors
        assert vectors.counts is not None
        assert tuple(vectors.counts) == vocabulary.counts
        part = model.output if end == "output" else model.input
        assert np.array_equal(vectors.vectors_VD, part.vectors().detach().numpy())


def test_vectors_of_skip_gram_and_of_an_exported_file_are_equal(
    tmp_path: Path, made_text: Callable[[int], Path]
) -> None:
    recipe = write_recipe(tmp_path, made_text(600))
    tied, untied = (train(recipe, row, tmp_path / row) for row in ("tied", "untied"))
    assert set(open_vectors(tied)) == {"tied"}
    vectors_by_end = open_vectors(untied)
    assert set(vectors_by_end) == {"input", "output"}
    opened = open_run(untied)
    assert isinstance(opened.experiment, SkipGramExperiment)
    # The rows of <eos> and <unk> are never trained.
    words = opened.vocabulary
    rows = [row for row in range(len(words)) if row not in (words.eos, words.unk)]
    assert len(rows) == len(words) - 2
    for end, table in (("input", opened.model.input), ("output", opened.model.output)):
        assert vectors_by_end[end].words == tuple(words.words[row] for row in rows)
        assert np.array_equal(vectors_by_end[end].vectors_VD, table.weight.detach().numpy()[rows])
        assert vectors_by_end[end].counts is not None
        assert vectors_by_end[end].counts.tolist() == [words.counts[row] for row in rows]
    assert not {"<eos>", "<unk>"} & set(open_vectors(tied)["tied"].words)
    write_vectors(vectors_by_end["input"], tmp_path / "vectors.safetensors", "safetensors")
    (name, read), *others = open_vectors(tmp_path / "vectors.safetensors").items()
    assert name == "vectors"
    assert not others
    assert read.words == vectors_by_end["input"].words
    assert np.array_equal(read.vectors_VD, vectors_by_end["input"].vectors_VD)
    shutil.rmtree(untied / "checkpoints")
    with pytest.raises(DataError, match=r"untied is finished, but its weights are gone"):
        open_vectors(untied)


def test_path_without_vectors_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        open_vectors(tmp_path)
    with pytest.raises(DataError):
        open_vectors(tmp_path / "nothing.txt")
