"""Initialisation of all parameters, of the word tables only, and from files of vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.parts import TABLES
from reefknot.lab.config.settings import check_settings
from reefknot.lab.tasks.initialisation import (
    InitialisationSettings,
    fill_table,
    fill_tables,
    hash_table_files,
    initialise,
)
from reefknot.lab.text.vocabulary import BPESettings, Vocabulary, VocabularyPair, VocabularySettings
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable
from reefknot.vectors.files import fingerprint, write_vectors
from reefknot.vectors.word_vectors import WordVectors


def make_model(tied: bool = False) -> nn.ModuleDict:
    torch.manual_seed(0)
    words = WordTable(50, 8)
    classes = words if tied else WordTable(50, 8)
    return nn.ModuleDict({"words": words, "classifier": Plain(classes), "layer": nn.Linear(8, 8)})


def test_default_initialisation_changes_nothing() -> None:
    made, same = make_model(), make_model()
    state = torch.get_rng_state()
    initialise(made, InitialisationSettings())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), same.parameters(), strict=True))


def test_uniform_initialises_every_parameter() -> None:
    made = make_model()
    initialise(made, InitialisationSettings(uniform=0.04))
    for parameter in made.parameters():
        assert 0.0 < float(parameter.detach().abs().max()) <= 0.04
    assert float(made["classifier"].bias.detach().abs().max()) > 0.01


@pytest.mark.parametrize("settings", [{}, {"uniform": 0.1}, {"tables": 0.1}, {"uniform": 0.1, "tables": "normal"}])
def test_setting_of_a_table_overrides_the_general_setting(settings: dict[str, Any]) -> None:
    made = nn.ModuleDict({"words": WordTable(50, 8, uniform=2.0), "classes": WordTable(50, 8)})
    initialise(made, InitialisationSettings(**settings))
    words, classes = (float(made[name].weight.detach().abs().max()) for name in ("words", "classes"))
    assert 1.9 < words <= 2.0
    assert classes < (0.1 + 1e-6 if settings.get("tables", settings.get("uniform")) == 0.1 else 1.9)


@pytest.mark.parametrize("tied", [True, False])
def test_tables_initialises_only_the_word_tables(tied: bool) -> None:
    made, before = make_model(tied), make_model(tied)
    initialise(made, InitialisationSettings(tables=0.1))
    for table in (made["words"], made["classifier"].table):
        assert 0.09 < float(table.weight.detach().abs().max()) <= 0.1
        assert abs(float(table.weight.detach().mean())) < 0.02
    assert torch.equal(made["layer"].weight, before["layer"].weight)
    assert not made["classifier"].bias.any()
    assert torch.equal(made["words"].weight, made["classifier"].table.weight) == tied


def test_tables_initialises_the_bands_of_a_banded_table() -> None:
    table = BandedTable(60, 8, sizes=[20], factor=2)
    initialise(table, InitialisationSettings(tables=0.1))
    assert all(float(band.weight.detach().abs().max()) <= 0.1 for band in table.tables)


def test_tables_and_uniform_can_have_different_ranges() -> None:
    made = make_model()
    initialise(made, InitialisationSettings(uniform=0.01, tables=0.1))
    assert float(made["words"].weight.detach().abs().max()) > 0.09
    assert float(made["layer"].weight.detach().abs().max()) <= 0.01


def test_normal_tables_have_standard_deviation_dim_to_minus_half() -> None:
    """Matrices and clusters of bands are Xavier-uniform, and other parameters do not change."""
    torch.manual_seed(0)
    table = BandedTable(3000, 64, sizes=[1000], factor=4)
    shared = BandProjections(table, 64)
    ends = {"input": AdaptiveLookup(table, shared), "output": AdaptiveSoftmax(table, shared)}
    made = nn.ModuleDict({**ends, "layer": nn.Linear(8, 8)})
    initialise(made, InitialisationSettings(uniform=0.001, tables="normal"))
    for band, dim in zip(table.tables, (64, 16), strict=True):
        assert float(band.weight.detach().std()) == pytest.approx(dim**-0.5, rel=0.05)
        assert float(band.weight.detach().abs().max()) > 3 * dim**-0.5
    for matrix, fans in ((shared.bands[0], 128), (shared.bands[1], 80), (made["output"].clusters, 65)):
        assert 0.8 < float(matrix.detach().abs().max()) / (6 / fans) ** 0.5 <= 1.0
    assert float(made["layer"].weight.detach().abs().max()) <= 0.001


def test_normal_makes_untied_adaptive_bands_xavier_uniform() -> None:
    """The first band is tied, the second is not. The order of the ends does not matter."""
    torch.manual_seed(0)
    table, classes = (BandedTable(3000, 64, sizes=[1000], factor=4) for _ in range(2))
    bands = [Plain(band, bias=False) for band in (table.tables[0], classes.tables[1])]
    output = AdaptiveSoftmax(bands, BandProjections(classes, 64, head=False))
    made = nn.ModuleDict({"output": output, "input": AdaptiveLookup(table, BandProjections(table, 64))})
    initialise(made, InitialisationSettings(tables="normal"))
    for band, dim in zip(table.tables, (64, 16), strict=True):
        assert float(band.weight.detach().std()) == pytest.approx(dim**-0.5, rel=0.05)
    assert 0.99 < float(output.tables()[1].weight.detach().abs().max()) / (6 / 2016) ** 0.5 <= 1.0


def test_normal_works_without_bands_or_clusters() -> None:
    made = make_model()
    initialise(made, InitialisationSettings(tables="normal"))
    for words in (made["words"], made["classifier"].table):  # the table of a plain softmax too
        assert float(words.weight.detach().std()) == pytest.approx(8**-0.5, rel=0.1)
    table = BandedTable(50, 8, sizes=[])
    initialise(AdaptiveSoftmax(table, BandProjections(table, 8, head=False)), InitialisationSettings(tables="normal"))


@pytest.mark.parametrize("value", ["uniform", 0.0, -1.0, float("inf"), True, [0.1]])
def test_invalid_tables_setting_gives_a_one_line_error(value: object) -> None:
    with pytest.raises(SettingsError, match=r"^recipe:\n  tables: must be a number greater than 0, or 'normal'[^\n]*$"):
        check_settings(InitialisationSettings, {"tables": value}, "recipe")


WORDS = ("The", "sea", "<unk>", "SEA", "Été", "nowhere")


def vocabulary_of(words: tuple[str, ...]) -> Vocabulary:
    return Vocabulary(words, tuple(range(len(words), 0, -1)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    write_vectors(WordVectors(("the", "sea", "été", "The"), rows), tmp_path / "v.txt", "glove")
    return tmp_path / "v.txt"


def test_words_get_vectors_by_exact_then_lower_case_match(file: Path) -> None:
    table = WordTable(len(WORDS), 3)
    drawn = table.weight.detach().clone()
    message = fill_table(table, file, vocabulary_of(WORDS))
    assert message == f"{file} has vectors of 4 of the 6 words; the other vectors are random"
    assert table.weight[[0, 1, 3, 4]].tolist() == [[9, 10, 11], [3, 4, 5], [3, 4, 5], [6, 7, 8]]
    assert torch.equal(table.weight[[2, 5]], drawn[[2, 5]])
    assert table.weight.requires_grad


@pytest.fixture(scope="module")
def sub_words() -> Vocabulary:
    """Return a vocabulary with `in` as a prefix of "into" and `in</w>` as a word, but no sub-word "inside"."""
    pytest.importorskip("tokenizers")
    text = {"in": 50, "into": 40, "inning": 30, "to": 20, "inside": 1, "<eos>": 5}
    return Vocabulary.from_counts(text, VocabularySettings(bpe=BPESettings(merges=6)))


def start_from_words(sub_words: Vocabulary, path: Path, *words: str) -> dict[str, list[float]]:
    """Write a file where the n-th word has vector n, and return the tokens of the table that got one."""
    rows = np.repeat(np.arange(1.0, len(words) + 1, dtype=np.float32)[:, None], 3, axis=1)
    write_vectors(WordVectors(words, rows), path, "glove")
    table = WordTable(len(sub_words), 3)
    message = fill_table(table, path, sub_words)
    given = {
        word: row for word, row in zip(sub_words.words, table.weight[:, 0].tolist(), strict=True) if row == int(row)
    }
    assert f"{len(given)} of the {len(sub_words)} words" in message
    return given


def test_vector_of_a_word_goes_to_the_sub_word_equal_to_it(sub_words: Vocabulary, tmp_path: Path) -> None:
    assert {"in", "in</w>", "to</w>", "i", "i</w>"} <= set(sub_words.words)
    # A word that ends in </w> does not turn the file into one of sub-words.
    given = start_from_words(sub_words, tmp_path / "words", "in", "to", "i", "inside", "<eos>", "html</w>")
    assert given == {"in</w>": 1, "to</w>": 2, "i</w>": 3, "<eos>": 5}


def test_sub_words_of_a_file_go_to_the_same_sub_words(sub_words: Vocabulary, tmp_path: Path) -> None:
    given = start_from_words(sub_words, tmp_path / "pieces", *sub_words.words)
    assert given == {word: row for row, word in enumerate(sub_words.words, start=1)}


def test_words_get_vectors_of_sub_words_equal_to_them(sub_words: Vocabulary, tmp_path: Path) -> None:
    words = vocabulary_of(("in", "To", "inside", "<eos>"))
    given = start_from_words(words, tmp_path / "pieces", *sub_words.words)
    row = {word: row for row, word in enumerate(sub_words.words, start=1)}
    assert given == {"in": row["in</w>"], "To": row["to</w>"], "<eos>": row["<eos>"]}


@pytest.mark.parametrize(
    ("arguments", "words", "error", "message"),
    [
        ({"dim": 4}, WORDS, SettingsError, "has vectors of dimension 3 but the table has dim = 4"),
        ({"dim": 3}, WORDS[:5], SettingsError, "5 words for a table of 6"),
        ({"dim": 3}, ("a", "b", "c", "d", "e", "f"), DataError, "has none of the 6 words"),
    ],
)
def test_unsuitable_vectors_file_is_rejected(
    arguments: dict[str, Any], words: tuple[str, ...], error: type[Exception], message: str, file: Path
) -> None:
    with pytest.raises(error, match=message):
        fill_table(WordTable(6, **arguments), file, vocabulary_of(words))


@pytest.mark.parametrize("tied", [True, False])
def test_only_tables_with_a_vectors_setting_are_started(tied: bool, file: Path) -> None:
    table = WordTable(len(WORDS), 3, frozen=True)
    classes = table if tied else WordTable(len(WORDS), 3)
    drawn = classes.weight.detach().clone()
    model = LanguageModel(Lookup(table), LSTM(3, 3), Softmax(Plain(classes)))
    settings = table_settings({"words": {"dim": 3, "vectors": str(file)}, "classes": {"dim": 3}})
    tables = {"words": table, "classes": classes}
    assert len(fill_tables(tables, settings, (), VocabularyPair(vocabulary_of(WORDS), vocabulary_of(WORDS)))) == 1
    assert table.weight[0].tolist() == [9, 10, 11]
    assert torch.equal(classes.weight, drawn) != tied
    model.loss(torch.tensor([[0, 1, 2, 3]])).mean().backward()
    missing = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert missing == {"input.table.weight"}


def table_settings(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    kinds: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, TABLES.entry_type()])  # type: ignore[misc]
    return kinds.validate_python({name: {"kind": "word"} | table for name, table in tables.items()})


def test_vector_files_are_identified_by_their_content(file: Path) -> None:
    tables = table_settings(
        {
            "words": {"dim": 3, "vectors": str(file)},
            "classes": {"dim": 3},
            "bands": {"kind": "banded", "dim": 3, "sizes": [2]},
        }
    )
    known = fingerprint(file)
    assert hash_table_files(tables) == {"words": known}
    assert hash_table_files(tables, {"words": "another"}) == {"words": known}
    file.unlink()
    assert hash_table_files(tables, {"words": "recorded"}) == {"words": "recorded"}
    with pytest.raises(DataError, match="cannot be read"):
        hash_table_files(tables)
