"""Initial weights of a model: one random distribution for all parameters or word tables, or vectors from a file.

`initialise` draws the weights, and `fill_tables` copies word vectors from files into word tables (the parameters of
every word). Without the settings here, every part of a model initialises its own weights.

Shapes: R rows of a table that are in the file, V words, D dimensions.
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
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair, whole_word
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.tables import BandProjections, WordTable
from reefknot.storage.progress import Notify, silent
from reefknot.vectors.word_vectors import WordVectors


def _validate_scale(raw: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Validate a number or a word with one error message. Pydantic would give one message for each alternative."""
    try:
        return validate(raw)
    except ValidationError:
        raise ValueError("must be a number greater than 0, or 'normal'") from None


class InitialisationSettings(Settings):
    """Initial weights. Without these settings, every part initialises its own weights."""

    uniform: Annotated[
        Positive | None,
        Field(description="Draw all parameters, including biases, from [-uniform, uniform] (Zaremba, Inan, Press)."),
    ] = None
    tables: Annotated[
        Positive | Literal["normal"] | None,
        Field(
            description="Draw only the word tables of both ends from [-tables, tables] (0.1 in AWD-LSTM). With normal "
            "(Baevski), draw them with standard deviation dim^-0.5; then projections and clusters of "
            "bands, and tables that an adaptive softmax does not share with the input, are Xavier-uniform."
        ),
        WrapValidator(_validate_scale),
    ] = None


def initialise(model: nn.Module, settings: InitialisationSettings) -> None:
    """Draw all parameters, then the word tables.

    The distribution of an individual table (`WordTable.uniform`) takes precedence over the distribution for all tables.
    """
    with torch.no_grad():
        if settings.uniform is not None:
            for parameter in model.parameters():
                parameter.uniform_(-settings.uniform, settings.uniform)
        if settings.tables == "normal":
            _draw_normal_tables(model)
        for module in model.modules():
            if isinstance(settings.tables, float) and isinstance(module, WordTable):
                module.weight.uniform_(-settings.tables, settings.tables)
            if isinstance(module, WordTable) and module.uniform is not None:
                module.reset_parameters()


def _draw_normal_tables(model: nn.Module) -> None:
    """Draw the word tables, the projections of their bands and the cluster vectors like the code of Baevski & Auli.

    A band is a group of words of similar frequency; the words of a band have vectors of the same dimension.

    In their code, the tables of an adaptive softmax are linear layers. So they are initialised like matrices, unless
    the input shares them.
    """
    from reefknot.nn.outputs.adaptive import AdaptiveSoftmax

    modules = list(model.modules())
    input_tables = {table for end in modules if isinstance(end, InputEnd) for table in end.tables()}
    softmax_tables = {table for end in modules if isinstance(end, AdaptiveSoftmax) for table in end.tables()}
    untied_tables = softmax_tables - input_tables
    for module in modules:
        if isinstance(module, WordTable):
            if module in untied_tables:
                nn.init.xavier_uniform_(module.weight)
            else:
                module.weight.normal_(std=module.dim**-0.5)
        elif isinstance(module, BandProjections):
            for matrix in module.bands:
                nn.init.xavier_uniform_(matrix)
        elif isinstance(module, AdaptiveSoftmax) and module.clusters is not None:
            nn.init.xavier_uniform_(module.clusters)


class TableFileSettings(Settings):
    """The setting of a word table that is not an argument of `WordTable`: the file that its vectors start from.

    The registry adds it to the settings of a word table in a recipe (see `TABLES` in `lab/config/parts.py`).
    """

    before: ClassVar[str] = "frozen"
    """The setting that follows `vectors` in config.json."""
    vectors: Annotated[
        str | None,
        Field(
            min_length=1,
            description="File of word vectors to start from. Words that are not in the file keep random vectors.",
        ),
    ] = None


def list_table_files(tables: Mapping[str, Settings]) -> dict[str, Path]:
    """Return the vector files that tables start from, by table name."""
    files = {name: getattr(settings, "vectors", None) for name, settings in tables.items()}
    return {name: Path(file).expanduser() for name, file in files.items() if file is not None}


def hash_table_files(tables: Mapping[str, Settings], recorded: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of every vector file, by table name.

    If a file is gone, the recorded hash is returned. The hashes are part of config.json, because a run with other
    vectors is a different run.
    """
    files, recorded = list_table_files(tables), recorded or {}
    if not files:
        return {}
    from reefknot.vectors.files import fingerprint

    hashes = {}
    for name, file in files.items():
        is_gone = name in recorded and not file.exists()
        hashes[name] = recorded[name] if is_gone else fingerprint(file)
    return hashes


def fill_tables(
    tables: Mapping[str, nn.Module],
    settings: Mapping[str, Settings],
    source_tables: Collection[str],
    words: VocabularyPair,
    notify: Notify = silent,
) -> list[str]:
    """Fill the tables that start from vector files, and return one message per table.

    Only a model that will be trained needs this. A trained model has its weights, and the files may be gone.

    Args:
        tables: The tables of the model by name.
        settings: The settings of the tables by name.
        source_tables: Names of the tables that hold the words of the source language, in translation.
        words: The vocabularies of the source and of the target.
        notify: Called with messages about the progress of reading a file.
    """
    source_vocabulary, target_vocabulary = words.vocabularies
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
    tokens = vocabulary.words
    if len(tokens) != table.vocab_size:
        raise SettingsError(f"{len(tokens):,} words for a table of {table.vocab_size:,}; pass the table's vocabulary")
    vectors = _read_vectors_for(vocabulary, file, notify)
    if vectors.dim != table.dim:
        raise SettingsError(
            f"{file} has vectors of dimension {vectors.dim:,} but the table has dim = {table.dim}; make them equal"
        )
    table_rows, file_rows = [], []
    for table_row, token in enumerate(tokens):
        file_row = _find_file_row(token, vocabulary, vectors)
        if file_row is not None:
            table_rows.append(table_row)
            file_rows.append(file_row)
    if not table_rows:
        raise DataError(f"{file} has none of the {len(tokens):,} words; use a file of vectors of the same language")
    vectors_RD = vectors.vectors_VD[file_rows]
    with torch.no_grad():
        table.weight[table_rows] = torch.from_numpy(vectors_RD).to(table.weight)
    return f"{file} has vectors of {len(table_rows):,} of the {len(tokens):,} words; the other vectors are random"


def _read_vectors_for(vocabulary: Vocabulary, file: Path, notify: Notify) -> WordVectors:
    """Read the vectors of a vocabulary's words, and decide whether the file has sub-words.

    A file has sub-words, as exports of sub-word models do, if more words occur in it with the ending `</w>` than
    without. A single word that happens to end in `</w>` is not enough.
    """
    from reefknot.vectors.files import read_vectors
    from reefknot.vectors.lookup import as_subword

    words = set()
    for token in vocabulary.words:
        word = whole_word(token, vocabulary)
        if word is not None:
            words |= {word, word.lower()}
    subwords = {as_subword(word) for word in words}
    vectors = read_vectors(file, only={*vocabulary.words, *words, *subwords}, notify=notify)
    num_subwords = sum(subword in vectors for subword in subwords)
    num_words = sum(word in vectors for word in words)
    return replace(vectors, subwords=num_subwords > num_words)


def _find_file_row(token: str, vocabulary: Vocabulary, vectors: WordVectors) -> int | None:
    """Return the row of a token's vector in the file; None if the file does not have it."""
    from reefknot.vectors.lookup import Lookup

    word = whole_word(token, vocabulary)
    if word is not None:
        return Lookup(vectors).find(word)
    return vectors.id_of(token) if vectors.subwords and token in vectors else None
