"""Initial weights: one distribution for the whole model or for all word tables, and tables that start from a file.

Without these settings, every part initialises its own weights.
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


def _one_message(raw: object, check: ValidatorFunctionWrapHandler) -> object:
    """Validate a number or a word with one error message. Pydantic would give one message for each alternative."""
    try:
        return check(raw)
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
        WrapValidator(_one_message),
    ] = None


def initialise(model: nn.Module, settings: InitialisationSettings) -> None:
    """Draw all parameters, then the word tables.

    The distribution of a single table (`WordTable.uniform`) takes precedence over the distribution for all tables.
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

    In that code, the tables of an adaptive softmax are linear layers. So they are initialised like matrices, unless the
    input shares them.
    """
    from reefknot.nn.outputs.adaptive import AdaptiveSoftmax

    modules = list(model.modules())
    input_tables = {table for end in modules if isinstance(end, InputEnd) for table in end.tables()}
    untied = {table for end in modules if isinstance(end, AdaptiveSoftmax) for table in end.tables()} - input_tables
    for module in modules:
        if isinstance(module, WordTable):
            if module in untied:
                nn.init.xavier_uniform_(module.weight)
            else:
                module.weight.normal_(std=module.dim**-0.5)
        elif isinstance(module, BandProjections):
            for matrix in module.bands:
                nn.init.xavier_uniform_(matrix)
        elif isinstance(module, AdaptiveSoftmax) and module.clusters is not None:
            nn.init.xavier_uniform_(module.clusters)


class TableStart(Settings):
    """Settings of a word table in a recipe that are not arguments of `WordTable`. The registry adds them."""

    before: ClassVar[str] = "frozen"
    """The setting that follows `vectors` in config.json."""
    vectors: Annotated[
        str | None,
        Field(
            min_length=1,
            description="File of word vectors to start from. Words that are not in the file keep random vectors.",
        ),
    ] = None


def table_files(tables: Mapping[str, Settings]) -> dict[str, Path]:
    """Return the vector files that tables start from, by table name."""
    files = {name: getattr(settings, "vectors", None) for name, settings in tables.items()}
    return {name: Path(file).expanduser() for name, file in files.items() if file is not None}


def file_hashes(tables: Mapping[str, Settings], recorded: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of every vector file, by table name.

    If a file is gone, the recorded hash is returned. The hashes are part of config.json, because a run with other
    vectors is a different run.
    """
    files, recorded = table_files(tables), recorded or {}
    if not files:
        return {}
    from reefknot.vectors.files import fingerprint

    return {
        name: recorded[name] if name in recorded and not file.exists() else fingerprint(file)
        for name, file in files.items()
    }


def start_tables(
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
        source_tables: Names of the tables that hold the words of a source.
        words: The words of both sides.
        notify: Called with messages about the progress of reading a file.
    """
    source, target = words.vocabularies
    messages = []
    for name, file in table_files(settings).items():
        table = tables[name]
        assert isinstance(table, WordTable)  # only the settings of word tables name a file
        messages.append(start_table(table, file, source if name in source_tables else target, notify))
    return messages


def start_table(table: WordTable, file: Path, vocabulary: Vocabulary, notify: Notify = silent) -> str:
    """Fill a table with the vectors of a file, and return a message with the number of words in the file.

    Words are looked up with `Lookup`. Words that are not in the file keep their initial vectors. A sub-word that does
    not end a word gets a vector only from a file of sub-words, because a whole word with the same spelling has another
    meaning.
    """
    tokens = vocabulary.words
    if len(tokens) != table.vocab_size:
        raise SettingsError(f"{len(tokens):,} words for a table of {table.vocab_size:,}; pass the table's vocabulary")
    vectors = _read_for(vocabulary, file, notify)
    if vectors.dim != table.dim:
        raise SettingsError(
            f"{file} has vectors of dimension {vectors.dim:,} but the table has dim = {table.dim}; make them equal"
        )
    sources = [_row(token, vocabulary, vectors) for token in tokens]
    rows = [row for row, source in enumerate(sources) if source is not None]
    if not rows:
        raise DataError(f"{file} has none of the {len(tokens):,} words; use a file of vectors of the same language")
    vectors_RD = vectors.vectors_VD[[source for source in sources if source is not None]]
    with torch.no_grad():
        table.weight[rows] = torch.from_numpy(vectors_RD).to(table.weight)
    return f"{file} has vectors of {len(rows):,} of the {len(tokens):,} words; the other vectors are random"


def _read_for(vocabulary: Vocabulary, file: Path, notify: Notify) -> WordVectors:
    """Read the vectors of a vocabulary's words, and decide whether the file has sub-words.

    A file has sub-words, as exports of sub-word models do, if more words occur in it with the ending `</w>` than
    without. A single word that happens to end in `</w>` is not enough.
    """
    from reefknot.vectors.files import read_vectors
    from reefknot.vectors.lookup import as_subword

    words = {word for token in vocabulary.words if (word := whole_word(token, vocabulary)) is not None}
    words |= {word.lower() for word in words}
    subwords = {as_subword(word) for word in words}
    vectors = read_vectors(file, only={*vocabulary.words, *words, *subwords}, notify=notify)
    return replace(vectors, subwords=sum(map(vectors.__contains__, subwords)) > sum(map(vectors.__contains__, words)))


def _row(token: str, vocabulary: Vocabulary, vectors: WordVectors) -> int | None:
    """Return the row of a token's vector in the file; None if the file does not have it."""
    from reefknot.vectors.lookup import Lookup

    word = whole_word(token, vocabulary)
    if word is not None:
        return Lookup(vectors).find(word)
    return vectors.id_of(token) if vectors.subwords and token in vectors else None
