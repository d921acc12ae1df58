"""Initialisation of all parameters, of the word tables only, and from files of vectors."""

from __future__ import annotations

from collections.abc import Sequence
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
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.text.vocabulary_settings import BPESettings, VocabularySettings
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable
from reefknot.vectors.files import fingerprint, write_vectors
from reefknot.vectors.word_vectors import WordVectors


def build_modules(tied: bool = False) -> nn.ModuleDict:
    """Return a word table, a classifier with the same or another table, and a linear layer."""
    torch.manual_seed(0)
    words = WordTable(50, 8)
    classes = words if tied else WordTable(50, 8)
    return nn.ModuleDict({"words": words, "classifier": Plain(classes), "layer": nn.Linear(8, 8)})


def max_abs(parameter: torch.Tensor) -> float:
    """Return the largest absolute value of a parameter."""
    return float(parameter.detach().abs().max())


def test_default_initialisation_changes_nothing() -> None:
    modules = build_modules()
    expected_modules = build_modules()
    rng_state = torch.get_rng_state()
    initialise(modules, InitialisationSettings())
    assert torch.equal(torch.get_rng_state(), rng_state)
    for parameter, expected in zip(modules.parameters(), expected_modules.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_uniform_initialises_every_parameter() -> None:
    modules = build_modules()
    initialise(modules, InitialisationSettings(uniform=0.04))
    for parameter in modules.parameters():
        assert 0.0 < max_abs(parameter) <= 0.04
    assert max_abs(modules["classifier"].bias) > 0.01


@pytest.mark.parametrize("settings", [{}, {"uniform": 0.1}, {"tables": 0.1}, {"uniform": 0.1, "tables": "normal"}])
def test_setting_of_a_table_overrides_the_general_setting(settings: dict[str, Any]) -> None:
    table_with_setting = WordTable(50, 8, uniform=2.0)
    other_table = WordTable(50, 8)
    initialise(nn.ModuleList([table_with_setting, other_table]), InitialisationSettings(**settings))
    assert 1.9 < max_abs(table_with_setting.weight) <= 2.0
    is_drawn_from_small_range = settings.get("tables", settings.get("uniform")) == 0.1
    assert max_abs(other_table.weight) < (0.1 + 1e-6 if is_drawn_from_small_range else 1.9)


@pytest.mark.parametrize("tied", [True, False])
def test_tables_initialises_only_the_word_tables(tied: bool) -> None:
    modules = build_modules(tied)
    original_modules = build_modules(tied)
    initialise(modules, InitialisationSettings(tables=0.1))
    for table in (modules["words"], modules["classifier"].table):
        assert 0.09 < max_abs(table.weight) <= 0.1
        assert abs(float(table.weight.detach().mean())) < 0.02
    assert torch.equal(modules["layer"].weight, original_modules["layer"].weight)
    assert not modules["classifier"].bias.any()
    assert torch.equal(modules["words"].weight, modules["classifier"].table.weight) == tied


def test_tables_initialises_the_bands_of_a_banded_table() -> None:
    table = BandedTable(60, 8, sizes=[20], factor=2)
    initialise(table, InitialisationSettings(tables=0.1))
    for band in table.tables:
        assert max_abs(band.weight) <= 0.1


def test_tables_and_uniform_can_have_different_ranges() -> None:
    modules = build_modules()
    initialise(modules, InitialisationSettings(uniform=0.01, tables=0.1))
    assert max_abs(modules["words"].weight) > 0.09
    assert max_abs(modules["layer"].weight) <= 0.01


def test_normal_tables_have_standard_deviation_dim_to_minus_half() -> None:
    """Projections and clusters of bands are Xavier-uniform, and other parameters do not change."""
    torch.manual_seed(0)
    table = BandedTable(3000, 64, sizes=[1000], factor=4)
    projections = BandProjections(table, 64)
    input_end = AdaptiveLookup(table, projections)
    output_end = AdaptiveSoftmax(table, projections)
    layer = nn.Linear(8, 8)
    initialise(nn.ModuleList([input_end, output_end, layer]), InitialisationSettings(uniform=0.001, tables="normal"))
    for band, dim in zip(table.tables, (64, 16), strict=True):
        assert float(band.weight.detach().std()) == pytest.approx(dim**-0.5, rel=0.05)
        assert max_abs(band.weight) > 3 * dim**-0.5
    assert output_end.clusters is not None
    sums_of_dims = ((projections.bands[0], 64 + 64), (projections.bands[1], 64 + 16), (output_end.clusters, 1 + 64))
    for matrix, sum_of_dims in sums_of_dims:
        xavier_bound = (6 / sum_of_dims) ** 0.5
        assert 0.8 < max_abs(matrix) / xavier_bound <= 1.0
    assert max_abs(layer.weight) <= 0.001


def test_normal_makes_untied_adaptive_bands_xavier_uniform() -> None:
    """The first band is tied, the second is not. The order of the ends does not matter."""
    torch.manual_seed(0)
    input_table = BandedTable(3000, 64, sizes=[1000], factor=4)
    output_table = BandedTable(3000, 64, sizes=[1000], factor=4)
    tied_classifier = Plain(input_table.tables[0], bias=False)
    untied_classifier = Plain(output_table.tables[1], bias=False)
    output_projections = BandProjections(output_table, 64, head=False)
    output_end = AdaptiveSoftmax([tied_classifier, untied_classifier], output_projections)
    input_end = AdaptiveLookup(input_table, BandProjections(input_table, 64))
    initialise(nn.ModuleList([output_end, input_end]), InitialisationSettings(tables="normal"))
    for band, dim in zip(input_table.tables, (64, 16), strict=True):
        assert float(band.weight.detach().std()) == pytest.approx(dim**-0.5, rel=0.05)
    xavier_bound = (6 / (2000 + 16)) ** 0.5
    assert 0.99 < max_abs(output_end.tables()[1].weight) / xavier_bound <= 1.0


def test_normal_makes_the_projection_of_a_plain_softmax_xavier_uniform() -> None:
    classifier = Projected(WordTable(50, 100), 300, bias=False, penalty=0.0, projection_bias=False)
    initialise(classifier, InitialisationSettings(tables="normal"))
    assert 0.99 < max_abs(classifier.projection.weight) / (6 / 400) ** 0.5 <= 1.0


def test_glorot_draws_every_matrix_by_its_own_range() -> None:
    """Queries, keys and values, which one layer holds, are separate matrices. Biases and norms do not change."""
    torch.manual_seed(0)
    table = WordTable(700, 64)
    encoder = EncoderDecoder(64, 64, layers=2, heads=4, ffn_dim=256)
    drill = Drill(table, depth=2)
    model = nn.ModuleDict({"table": table, "encoder": encoder, "drill": drill})
    vectors_before = {name: value.clone() for name, value in model.named_parameters() if value.dim() == 1}
    initialise(model, InitialisationSettings(matrices="glorot"))
    square_bound = (6 / (64 + 64)) ** 0.5
    block = encoder.target_blocks[0]
    square = [*block.attention_in.weight.chunk(3), *encoder.source_in.weight.chunk(4), block.cross_in.weight]
    for matrix in [*square, block.attention_out.weight, *(layer.weight for layer in drill.layers)]:
        assert 0.97 < max_abs(matrix) / square_bound <= 1.0
    assert 0.97 < max_abs(table.weight) / (6 / (700 + 64)) ** 0.5 <= 1.0
    assert 0.97 < max_abs(block.ffn_in.weight) / (6 / (64 + 256)) ** 0.5 <= 1.0
    for name, value in vectors_before.items():
        assert torch.equal(model.get_parameter(name), value), name


def test_normal_works_without_bands_or_clusters() -> None:
    modules = build_modules()
    initialise(modules, InitialisationSettings(tables="normal"))
    for word_table in (modules["words"], modules["classifier"].table):  # the table of a plain softmax too
        assert float(word_table.weight.detach().std()) == pytest.approx(8**-0.5, rel=0.1)
    table = BandedTable(50, 8, sizes=[])
    output_end = AdaptiveSoftmax(table, BandProjections(table, 8, head=False))
    initialise(output_end, InitialisationSettings(tables="normal"))


@pytest.mark.parametrize("value", ["uniform", 0.0, -1.0, float("inf"), True, [0.1]])
def test_invalid_tables_setting_gives_a_one_line_error(value: object) -> None:
    with pytest.raises(SettingsError, match=r"^recipe:\n  tables: must be a number greater than 0, or 'normal'[^\n]*$"):
        check_settings(InitialisationSettings, {"tables": value}, "recipe")


WORDS = ("The", "sea", "<unk>", "SEA", "Été", "nowhere")


def build_vocabulary(words: tuple[str, ...]) -> Vocabulary:
    """Return a vocabulary with decreasing counts."""
    return Vocabulary(words, tuple(range(len(words), 0, -1)))


@pytest.fixture
def vectors_file(tmp_path: Path) -> Path:
    """Write a file of four words with vectors of dimension 3: [0, 1, 2], [3, 4, 5] and so on."""
    path = tmp_path / "vectors.txt"
    vectors_VD = np.arange(12, dtype=np.float32).reshape(4, 3)
    write_vectors(WordVectors(("the", "sea", "été", "The"), vectors_VD), path, "glove")
    return path


def test_words_get_vectors_by_exact_then_lower_case_match(vectors_file: Path) -> None:
    table = WordTable(len(WORDS), 3)
    random_weight = table.weight.detach().clone()
    message = fill_table(table, vectors_file, build_vocabulary(WORDS))
    assert message == f"{vectors_file} has vectors of 4 of the 6 words; the other vectors are random"
    assert table.weight[[0, 1, 3, 4]].tolist() == [[9, 10, 11], [3, 4, 5], [3, 4, 5], [6, 7, 8]]
    assert torch.equal(table.weight[[2, 5]], random_weight[[2, 5]])
    assert table.weight.requires_grad


@pytest.fixture(scope="module")
def subword_vocabulary() -> Vocabulary:
    """Return a vocabulary with `in` as a prefix of "into" and `in</w>` as a word, but no sub-word "inside"."""
    pytest.importorskip("tokenizers")
    counts = {"in": 50, "into": 40, "inning": 30, "to": 20, "inside": 1, "<eos>": 5}
    return Vocabulary.from_counts(counts, VocabularySettings(bpe=BPESettings(merges=6)))


def fill_from_words(vocabulary: Vocabulary, path: Path, words: Sequence[str]) -> dict[str, float]:
    """Write a file in which the n-th word has the vector [n, n, n], and fill a table from it.

    Returns:
        For each token of the table that got a vector from the file, the number n of this vector.
    """
    numbers = np.arange(1, len(words) + 1, dtype=np.float32)
    vectors_VD = np.repeat(numbers[:, None], 3, axis=1)
    write_vectors(WordVectors(tuple(words), vectors_VD), path, "glove")
    table = WordTable(len(vocabulary), 3)
    message = fill_table(table, path, vocabulary)

    first_column = table.weight[:, 0].tolist()
    # The random vectors of the other tokens are not integers.
    filled = {token: value for token, value in zip(vocabulary.words, first_column, strict=True) if value == int(value)}
    assert f"{len(filled)} of the {len(vocabulary)} words" in message
    return filled


def test_vector_of_a_word_goes_to_the_sub_word_equal_to_it(subword_vocabulary: Vocabulary, tmp_path: Path) -> None:
    assert {"in", "in</w>", "to</w>", "i", "i</w>"} <= set(subword_vocabulary.words)
    # A single word that ends in </w> does not make it a file of sub-words.
    words = ["in", "to", "i", "inside", "<eos>", "html</w>"]
    filled = fill_from_words(subword_vocabulary, tmp_path / "words", words)
    assert filled == {"in</w>": 1, "to</w>": 2, "i</w>": 3, "<eos>": 5}


def test_sub_words_of_a_file_go_to_the_same_sub_words(subword_vocabulary: Vocabulary, tmp_path: Path) -> None:
    filled = fill_from_words(subword_vocabulary, tmp_path / "subwords", subword_vocabulary.words)
    assert filled == {subword: number for number, subword in enumerate(subword_vocabulary.words, start=1)}


def test_words_get_vectors_of_sub_words_equal_to_them(subword_vocabulary: Vocabulary, tmp_path: Path) -> None:
    word_vocabulary = build_vocabulary(("in", "To", "inside", "<eos>"))
    filled = fill_from_words(word_vocabulary, tmp_path / "subwords", subword_vocabulary.words)
    number_of = {subword: number for number, subword in enumerate(subword_vocabulary.words, start=1)}
    assert filled == {"in": number_of["in</w>"], "To": number_of["to</w>"], "<eos>": number_of["<eos>"]}


@pytest.mark.parametrize(
    ("dim", "words", "error", "message"),
    [
        (4, WORDS, SettingsError, "has vectors of dimension 3 but the table has dim = 4"),
        (3, WORDS[:5], SettingsError, "5 words for a table of 6"),
        (3, ("a", "b", "c", "d", "e", "f"), DataError, "has none of the 6 words"),
    ],
)
def test_unsuitable_vectors_file_is_rejected(
    dim: int, words: tuple[str, ...], error: type[Exception], message: str, vectors_file: Path
) -> None:
    with pytest.raises(error, match=message):
        fill_table(WordTable(6, dim), vectors_file, build_vocabulary(words))


def validate_tables(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the section [tables] of a recipe as settings. Tables without a `kind` are word tables."""
    adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, TABLES.entry_type()])  # type: ignore[misc]
    return adapter.validate_python({name: {"kind": "word"} | table for name, table in tables.items()})


@pytest.mark.parametrize("tied", [True, False])
def test_only_tables_with_a_vectors_setting_are_filled(tied: bool, vectors_file: Path) -> None:
    words = WordTable(len(WORDS), 3, frozen=True)
    classes = words if tied else WordTable(len(WORDS), 3)
    random_weight = classes.weight.detach().clone()
    model = LanguageModel(Lookup(words), LSTM(3, 3), Softmax(Plain(classes)))
    settings = validate_tables({"words": {"dim": 3, "vectors": str(vectors_file)}, "classes": {"dim": 3}})
    vocabulary = build_vocabulary(WORDS)
    messages = fill_tables({"words": words, "classes": classes}, settings, (), VocabularyPair(vocabulary, vocabulary))
    assert len(messages) == 1
    assert words.weight[0].tolist() == [9, 10, 11]
    assert torch.equal(classes.weight, random_weight) != tied

    model.loss(torch.tensor([[0, 1, 2, 3]])).mean().backward()
    frozen_names = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert frozen_names == {"input.table.weight"}


def test_vector_files_are_identified_by_their_content(vectors_file: Path) -> None:
    tables = validate_tables(
        {
            "words": {"dim": 3, "vectors": str(vectors_file)},
            "classes": {"dim": 3},
            "bands": {"kind": "banded", "dim": 3, "sizes": [2]},
        }
    )
    file_hash = fingerprint(vectors_file)
    assert hash_table_files(tables) == {"words": file_hash}
    assert hash_table_files(tables, {"words": "another"}) == {"words": file_hash}
    vectors_file.unlink()
    assert hash_table_files(tables, {"words": "recorded"}) == {"words": "recorded"}
    with pytest.raises(DataError, match="cannot be read"):
        hash_table_files(tables)
