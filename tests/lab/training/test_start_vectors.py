"""Tables that start from a file of word vectors, trainable and frozen."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contract.combinations import WORDS, Case
from reefknot.errors import DataError, SettingsError, Stopped
from reefknot.lab.config.parts import CLASSIFIERS, OUTPUTS
from reefknot.lab.experiment import is_done
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import build_model, check_experiment, create_task, open_run
from reefknot.storage import files as durable
from reefknot.vectors.files import fingerprint, read_vectors, write_vectors
from reefknot.vectors.word_vectors import WordVectors

KNOWN = tuple(f"w{index}" for index in range(0, 30, 2))
DECAYED = (
    "training.optimiser={kind = 'sgd', learning_rate = 1.0, momentum = 0.5, weight_decay = 0.1, decoupled_decay = 0.1}"
)
FROZEN = "tables.words.frozen=true"
TABLE = "input.table.weight"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of vectors for every second word of the text, and for a word that the text lacks."""
    rows = np.random.default_rng(0).standard_normal((len(KNOWN) + 1, 8)).astype(np.float32)
    write_vectors(WordVectors((*KNOWN, "elsewhere"), rows), tmp_path / "start.vec", "word2vec")
    return tmp_path / "start.vec"


def _first_and_last(run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    tables = [load_file(step / "model.safetensors")[TABLE] for step in sorted((run / "checkpoints").iterdir())]
    return tables[0], tables[-1]


@pytest.mark.parametrize(
    "optimiser", [DECAYED, "training.optimiser={kind = 'adamw', learning_rate = 0.1, weight_decay = 0.5}"]
)
def test_frozen_table_keeps_the_vectors_of_the_file(
    tmp_path: Path, train: Any, display: Any, file: Path, optimiser: str
) -> None:
    train(tmp_path / "run", f"tables.words.vectors={file}", FROZEN, optimiser, "training.averaging={start = 'at_once'}")
    table, words = _first_and_last(tmp_path / "run")[1].numpy(), open_run(tmp_path / "run").vocabulary.words
    vectors = read_vectors(file)
    for row, word in enumerate(words):
        if word in vectors:
            assert table[row].tobytes() == vectors.vector(word).tobytes()
        else:  # random, as in [init] of the recipe
            assert 0.0 < np.abs(table[row]).max() <= 0.1
    known = sum(word in vectors for word in words)
    assert any(f"{file} has vectors of {known} of the {len(words)} words" in line for line in display.lines)
    assert f"{file} has vectors of {known} of the" in (tmp_path / "run" / "log.txt").read_text()


def test_trainable_table_starts_from_the_vectors_and_changes(tmp_path: Path, train: Any, file: Path) -> None:
    train(tmp_path / "file", f"tables.words.vectors={file}", "training.save_every=1", "training.keep=20")
    train(tmp_path / "drawn", "training.save_every=1", "training.keep=20")
    first, last = _first_and_last(tmp_path / "file")
    drawn, _ = _first_and_last(tmp_path / "drawn")
    words, vectors = open_run(tmp_path / "file").vocabulary.words, read_vectors(file)
    in_file = torch.tensor([word in vectors for word in words])
    expected = torch.from_numpy(np.stack([vectors.vector(word) for word in words if word in vectors]))
    # After one update, the given rows are still close to the file, and the other rows to those of a run without it.
    assert (first[in_file] - expected).abs().mean() < 0.1
    assert (first[~in_file] - drawn[~in_file]).abs().mean() < 0.1
    assert not torch.equal(first, last)


@pytest.mark.parametrize("frozen", [(), (FROZEN,)])
@pytest.mark.parametrize("row", ["tied", "untied"])
def test_stopped_run_resumes_bit_for_bit(
    tmp_path: Path,
    train: Any,
    outcome: Callable[[Path], dict[str, Any]],
    signal_in_step: Callable[[int], None],
    file: Path,
    frozen: tuple[str, ...],
    row: str,
) -> None:
    settings = (f"tables.words.vectors={file}", DECAYED, *frozen)
    train(tmp_path / "unbroken", *settings, row=row)
    signal_in_step(5)
    with pytest.raises(Stopped):
        train(tmp_path / "stopped", *settings, row=row)
    train(tmp_path / "stopped", *settings, row=row)
    assert outcome(tmp_path / "stopped")["metrics"] == outcome(tmp_path / "unbroken")["metrics"]
    assert torch.equal(_first_and_last(tmp_path / "stopped")[1], _first_and_last(tmp_path / "unbroken")[1])


@pytest.mark.parametrize("frozen", [(), (FROZEN,)])
def test_run_with_checkpoints_resumes_without_the_vector_file(
    tmp_path: Path, train: Any, display: Any, signal_in_step: Any, file: Path, frozen: tuple[str, ...]
) -> None:
    settings = (f"tables.words.vectors={file}", *frozen)
    train(tmp_path / "unbroken", *settings)
    signal_in_step(5)
    with pytest.raises(Stopped):
        train(tmp_path / "stopped", *settings)
    config = RunFolder.open(tmp_path / "stopped").config
    file.unlink()
    assert train(tmp_path / "stopped", *settings) is not None
    assert RunFolder.open(tmp_path / "stopped").config == config
    assert torch.equal(_first_and_last(tmp_path / "stopped")[1], _first_and_last(tmp_path / "unbroken")[1])
    display.lines.clear()
    train(tmp_path / "stopped", *settings)
    (line,) = display.lines
    assert "done already" in line
    recipe = load_recipe(str(tmp_path / "tiny.toml"), settings)
    dataset = create_task(recipe.experiments["tied"]).open_data()
    assert is_done(tmp_path / "stopped", recipe, recipe.row("tied"), 0, dataset)


def test_run_without_checkpoints_needs_the_vector_file(tmp_path: Path, train: Any, file: Path) -> None:
    settings = (f"tables.words.vectors={file}",)
    train(tmp_path / "run", *settings)
    for name in ("checkpoints", "result.json", "best"):
        durable.remove(tmp_path / "run" / name)
    file.unlink()
    with pytest.raises(DataError, match=r"cannot read .*start\.vec: No such file"):
        train(tmp_path / "run", *settings)


def test_changed_vector_file_is_rejected_for_training_only(tmp_path: Path, train: Any, file: Path) -> None:
    settings = (f"tables.words.vectors={file}", FROZEN)
    train(tmp_path / "run", *settings)
    assert RunFolder.open(tmp_path / "run").config["vectors"] == {"words": fingerprint(file)}
    vectors = read_vectors(file)
    write_vectors(WordVectors(vectors.words, vectors.vectors_VD + 1), file, "word2vec")
    with pytest.raises(SettingsError, match=rf"{re.escape(str(file))}.*tables\.words.*has changed.*--out"):
        train(tmp_path / "run", *settings)
    with pytest.raises(SettingsError, match=r"other settings \(tables\.words\.vectors: [^;]*\); "):
        train(tmp_path / "run", f"tables.words.vectors={tmp_path / 'gone'}", FROZEN)
    file.unlink()
    assert open_run(tmp_path / "run").model.input.tables()[0].frozen
    with pytest.raises(DataError, match=r"start\.vec: No such file|start\.vec: cannot be read"):
        train(tmp_path / "another", *settings)
    assert not (tmp_path / "another").exists()


def test_unsuitable_vectors_are_rejected(tmp_path: Path, train: Any, file: Path) -> None:
    other_dimension, other_language, truncated = (tmp_path / name for name in ("narrow", "strange", "cut"))
    write_vectors(WordVectors(("w1",), np.ones((1, 5), np.float32)), other_dimension, "glove")
    write_vectors(WordVectors(("ja", "nein"), np.ones((2, 8), np.float32)), other_language, "glove")
    truncated.write_bytes(file.read_bytes()[:-60])
    for path, error, message in (
        (other_dimension, SettingsError, "has vectors of dimension 5 but the table has dim = 8; make them equal"),
        (other_language, DataError, r"has none of the \d+ words; use a file of vectors of the same language"),
        (truncated, DataError, "cut off|numbers after the word"),
    ):
        with pytest.raises(error, match=message):
            train(tmp_path / "run", f"tables.words.vectors={path}")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("classifier", list(CLASSIFIERS))
@pytest.mark.parametrize("output", [kind for kind in OUTPUTS if kind != "adaptive"])
def test_freezing_a_table_does_not_change_other_gradients(output: str, classifier: str) -> None:
    gradients = []
    for frozen in (False, True):
        settings = Case("lookup", "lstm", output, classifier, tied=True).settings()
        settings["tables"]["words"]["frozen"] = frozen
        torch.manual_seed(0)
        model = build_model(check_experiment(settings, "here"), WORDS).double()
        model.loss(torch.arange(10).view(2, 5)).mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    trainable, frozen_gradients = gradients
    assert frozen_gradients[TABLE] is None
    for name in trainable.keys() - {TABLE}:
        torch.testing.assert_close(frozen_gradients[name], trainable[name], rtol=0, atol=1e-14)
