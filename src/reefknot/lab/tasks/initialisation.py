"""Initial weights of a model: random weights from one distribution, or word vectors from a file.

    initialise(model, InitialisationSettings(tables=0.1))                # draw all word tables from [-0.1, 0.1]
    fill_table(table, Path("glove.6B.200d.txt"), vocabulary)             # copy word vectors from a file

A word table holds the vectors of all words, one row per word. Without the settings here, every part of a model
initialises its own weights.

Shapes: R words that are both in the table and in the file, V words in the file, D dimensions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from torch import nn

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.settings import Positive, Settings
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.tables import BandProjections, WordTable
from reefknot.storage.progress import Notify, silent
from reefknot.vectors.word_vectors import WordVectors


def _validate_tables(raw_setting: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Validate the setting `tables`, and replace pydantic's two error messages (number, "normal") by one message."""
    try:
        return validate(raw_setting)
    except ValidationError:
        raise ValueError("must be a number greater than 0, or 'normal'") from None


class InitialisationSettings(Settings):
    """Initial weights. Without these settings, every part initialises its own weights."""

    uniform: Annotated[
        Positive | None,
        Field(
            description="Initialise all parameters, including biases, uniformly from [-uniform, uniform] "
            "(Zaremba, Inan, Press)."
        ),
    ] = None
    tables: Annotated[
        Positive | Literal["normal"] | None,
        Field(
            description="Draw only the word tables of both ends from [-tables, tables] (0.1 in AWD-LSTM). With normal "
            "(Baevski), draw them with standard deviation dim^-0.5; then projections and clusters of "
            "bands, the matrix of a projected classifier, and tables that an adaptive softmax does not share with the "
            "input, are Xavier-uniform."
        ),
        WrapValidator(_validate_tables),
    ] = None
    matrices: Annotated[
        Literal["glorot"] | None,
        Field(
            description="With glorot, draw every matrix of the model, including the word tables, Xavier-uniform "
            "(OpenNMT-py). Queries, keys and values are separate matrices."
        ),
    ] = None


def initialise(model: nn.Module, settings: InitialisationSettings) -> None:
    """Initialise all parameters at random, then the matrices, then the word tables.

    The distribution of an individual table (`WordTable.uniform`) takes precedence over the distribution for all tables.
    """
    with torch.no_grad():
        if settings.uniform is not None:
            for parameter in model.parameters():
                parameter.uniform_(-settings.uniform, settings.uniform)
        if settings.matrices == "glorot":
            _draw_glorot_matrices(model)
        if settings.tables == "normal":
            _draw_normal_tables(model)
        for module in model.modules():
            if not isinstance(module, WordTable):
                continue
            if isinstance(settings.tables, float):
                module.weight.uniform_(-settings.tables, settings.tables)
            if module.uniform is not None:
                module.reset_parameters()


def _draw_glorot_matrices(model: nn.Module) -> None:
    """Draw every matrix Xavier-uniform, and each matrix of a `JoinedLinear` by itself."""
    from reefknot.nn.encoders.transformer import JoinedLinear

    for module in model.modules():
        if isinstance(module, JoinedLinear):
            module.draw()
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)


def _draw_normal_tables(model: nn.Module) -> None:
    """Draw the word tables, their projections and the cluster vectors like the code of Baevski & Auli.

    A band is a group of words of similar frequency. The words of a band have vectors of the same dimension, and the
    projection of a band maps this dimension to the dimension of the model. In an adaptive softmax, a cluster vector is
    the class vector that stands for all words of one band.

    In the code of Baevski & Auli, the tables of an adaptive softmax are linear layers. So they are initialised like
    other matrices, unless the input end shares them.
    """
    from reefknot.nn.classifiers.projected import Projected
    from reefknot.nn.outputs.adaptive import AdaptiveSoftmax

    modules = list(model.modules())
    input_tables: set[WordTable] = set()
    softmax_tables: set[WordTable] = set()
    for module in modules:
        if isinstance(module, InputEnd):
            input_tables.update(module.tables())
        elif isinstance(module, AdaptiveSoftmax):
            softmax_tables.update(module.tables())
    untied_tables = softmax_tables - input_tables

    for module in modules:
        if isinstance(module, WordTable):
            if module in untied_tables:
                nn.init.xavier_uniform_(module.weight)
            else:
                module.weight.normal_(std=module.dim**-0.5)
        elif isinstance(module, BandProjections):
            for projection in module.bands:
                nn.init.xavier_uniform_(projection)
        elif isinstance(module, Projected):
            nn.init.xavier_uniform_(module.projection.weight)
        elif isinstance(module, AdaptiveSoftmax) and module.clusters is not None:
            nn.init.xavier_uniform_(module.clusters)


class TableFileSettings(Settings):
    """The setting of a word table that is not an argument of `WordTable`: the file that its vectors start from.

    The registry adds it to the settings of a word table in a recipe (see `TABLES` in `lab/config/parts.py`).
    """

    before: ClassVar[str] = "frozen"
    """The registry puts `vectors` before this setting."""
    vectors: Annotated[
        str | None,
        Field(
            min_length=1,
            description="File of word vectors to start from. Words that are not in the file keep random vectors.",
        ),
    ] = None


def list_table_files(tables: Mapping[str, Settings]) -> dict[str, Path]:
    """Return the files of word vectors that tables start from, by table name.

    Args:
        tables: The settings of the tables by name.
    """
    files = {}
    for name, settings in tables.items():
        file_name = getattr(settings, "vectors", None)  # only the settings of word tables have this setting
        if file_name is not None:
            files[name] = Path(file_name).expanduser()
    return files


def hash_table_files(
    tables: Mapping[str, Settings], recorded_hashes: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the SHA-256 of every file of word vectors, by table name.

    The hashes are part of config.json, because a run with other vectors is a different run.

    Args:
        tables: The settings of the tables by name.
        recorded_hashes: Hashes to return for files that are gone, by table name.
    """
    files = list_table_files(tables)
    recorded_hashes = recorded_hashes or {}
    if not files:
        return {}
    from reefknot.vectors.files import fingerprint

    hashes = {}
    for name, file in files.items():
        if name in recorded_hashes and not file.exists():
            hashes[name] = recorded_hashes[name]
        else:
            hashes[name] = fingerprint(file)
    return hashes


def fill_tables(
    tables: Mapping[str, nn.Module],
    settings: Mapping[str, Settings],
    source_tables: Collection[str],
    vocabulary_pair: VocabularyPair,
    notify: Notify = silent,
) -> list[str]:
    """Fill the tables that start from files of word vectors, and return one message per table.

    Only a model that will be trained needs this. A trained model has its weights, and the files may be gone.

    Args:
        tables: The tables of the model by name.
        settings: The settings of the tables by name.
        source_tables: Names of the tables that hold the words of the source language, in translation.
        vocabulary_pair: The vocabularies of the source and of the target.
        notify: Called with messages about the progress of reading a file.
    """
    source_vocabulary, target_vocabulary = vocabulary_pair.vocabularies
    messages = []
    for name, file in list_table_files(settings).items():
        table = tables[name]
        assert isinstance(table, WordTable)  # only the settings of word tables name a file
        vocabulary = source_vocabulary if name in source_tables else target_vocabulary
        messages.append(fill_table(table, file, vocabulary, notify))
    return messages


def fill_table(table: WordTable, file: Path, vocabulary: Vocabulary, notify: Notify = silent) -> str:
    """Fill a table with the vectors of a file, and return a message with the number of words in the file.

    Words are looked up with `Lookup`. Words that are not in the file keep their initial vectors. A sub-word that does
    not end a word gets a vector only from a file of sub-words, because a whole word with the same spelling has another
    meaning.
    """
    # Read the file, and check that it fits the table.
    tokens = vocabulary.words
    if len(tokens) != table.vocab_size:
        raise SettingsError(f"{len(tokens):,} words for a table of {table.vocab_size:,}; pass the table's vocabulary")
    vectors = _read_vectors_for(vocabulary, file, notify)
    if vectors.dim != table.dim:
        raise SettingsError(
            f"{file} has vectors of dimension {vectors.dim:,} but the table has dim = {table.dim}; make them equal"
        )

    # Match the rows of the table with the rows of the file.
    table_rows: list[int] = []
    file_rows: list[int] = []
    for table_row, token in enumerate(tokens):
        file_row = _find_file_row(token, vocabulary, vectors)
        if file_row is not None:
            table_rows.append(table_row)
            file_rows.append(file_row)
    if not table_rows:
        raise DataError(f"{file} has none of the {len(tokens):,} words; use a file of vectors of the same language")

    vectors_RD = torch.from_numpy(vectors.vectors_VD[file_rows])
    with torch.no_grad():
        table.weight[table_rows] = vectors_RD.to(table.weight)
    return f"{file} has vectors of {len(table_rows):,} of the {len(tokens):,} words; the other vectors are random"


def _read_vectors_for(vocabulary: Vocabulary, file: Path, notify: Notify) -> WordVectors:
    """Read the vectors of a vocabulary's words, and set `subwords` if the file has vectors of sub-words.

    A file has sub-words, as exports of sub-word models do, if more words occur in it with the ending `</w>` than
    without. A single word that happens to end in `</w>` is not enough.
    """
    from reefknot.vectors.files import read_vectors
    from reefknot.vectors.lookup import as_subword

    words = set()
    for token in vocabulary.words:
        word = vocabulary.whole_word(token)
        if word is not None:
            words |= {word, word.lower()}
    subwords = {as_subword(word) for word in words}
    vectors = read_vectors(file, only={*vocabulary.words, *words, *subwords}, notify=notify)

    num_subwords = sum(subword in vectors for subword in subwords)
    num_words = sum(word in vectors for word in words)
    return replace(vectors, subwords=num_subwords > num_words)


def _find_file_row(token: str, vocabulary: Vocabulary, vectors: WordVectors) -> int | None:
    """Return the row of a token's vector in the file; None if the file does not have the token."""
    from reefknot.vectors.lookup import Lookup

    word = vocabulary.whole_word(token)
    if word is not None:
        return Lookup(vectors).find(word)
    if vectors.subwords and token in vectors:
        return vectors.id_of(token)
    return None
