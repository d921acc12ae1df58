"""How parameters start, where a paper says so for the whole model, or for its word tables, at once; and tables that
start from a file of word vectors."""

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
from reefknot.lab.text.vocabulary import Sides, Vocabulary, whole_word
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.tables import BandProjections, WordTable
from reefknot.storage.progress import Say, silent
from reefknot.vectors.word_vectors import WordVectors


def _as_one(raw: object, check: ValidatorFunctionWrapHandler) -> object:
    """One complaint where a number and a word would each have theirs."""
    try:
        return check(raw)
    except ValidationError:
        raise ValueError("must be a number greater than 0, or 'normal'") from None


class InitialisationSettings(Settings):
    """Left out, every part starts its own way."""

    uniform: Annotated[
        Positive | None,
        Field(description="draw every parameter, biases too, from [-uniform, uniform] (Zaremba, Inan, Press)"),
    ] = None
    tables: Annotated[
        Positive | Literal["normal"] | None,
        Field(
            description="draw the word tables alone, at either end, from [-tables, tables] (AWD-LSTM: 0.1), or normal: "
            "with the deviation width^-0.5; Xavier-uniform the matrices and clusters of bands, and the tables that an "
            "adaptive softmax does not share with the input (Baevski)"
        ),
        WrapValidator(_as_one),
    ] = None


def initialise(model: nn.Module, settings: InitialisationSettings) -> None:
    """Draw the parameters, then the tables where they have a start of their own. What is said of one table counts more
    than what is said of all."""
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
    """Draw the word tables, and what stands between their bands and the model, as the program of Baevski & Auli does.

    There an adaptive softmax is made of linear layers, whose tables are drawn like matrices unless it shares them with
    the input.
    """
    from reefknot.nn.outputs.adaptive import AdaptiveSoftmax

    modules = list(model.modules())
    read = {table for end in modules if isinstance(end, InputEnd) for table in end.tables()}
    untied = {table for end in modules if isinstance(end, AdaptiveSoftmax) for table in end.tables()} - read
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
    """The settings of a word table that the registry adds to the arguments of `WordTable`."""

    before: ClassVar[str] = "frozen"
    """The setting that `vectors` precedes in config.json."""
    vectors: Annotated[
        str | None,
        Field(
            min_length=1,
            description="file of word vectors to start from; the vectors of words that it does not have are drawn",
        ),
    ] = None


def table_files(tables: Mapping[str, Settings]) -> dict[str, Path]:
    """Return the files that tables start from, by the name of the table."""
    files = {name: getattr(settings, "vectors", None) for name, settings in tables.items()}
    return {name: Path(file).expanduser() for name, file in files.items() if file is not None}


def file_hashes(tables: Mapping[str, Settings], recorded: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of each of these files: other vectors would make another run. If a file is gone, return the
    recorded hash."""
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
    of_source: Collection[str],
    words: Sides,
    say: Say = silent,
) -> list[str]:
    """Fill the tables that start from files with the vectors there, and return a message about each.

    Only a model that is to be trained needs this. A trained model has its weights, and the files may be gone.

    Args:
        tables: The tables of the model by name.
        settings: The settings of the tables by name.
        of_source: The names of the tables that hold the words of a source.
        words: The words of both sides.
        say: Called with messages about the progress of reading a file.
    """
    source, target = words.vocabularies
    messages = []
    for name, file in table_files(settings).items():
        table = tables[name]
        assert isinstance(table, WordTable)  # only the settings of word tables name a file
        messages.append(start_table(table, file, source if name in of_source else target, say))
    return messages


def start_table(table: WordTable, file: Path, vocabulary: Vocabulary, say: Say = silent) -> str:
    """Fill a table with the vectors of a file, and return a message that says how many words have one.

    Words are looked up as `Lookup` does. Words that are not in the file keep their initial vectors. A sub-word that
    does not end a word takes a vector only from a file of sub-words, because a word with its spelling is another.
    """
    tokens = vocabulary.words
    if len(tokens) != table.vocab_size:
        raise SettingsError(f"{len(tokens):,} words for a table of {table.vocab_size:,}; give the table's own words")
    vectors = _read_for(vocabulary, file, say)
    if vectors.dim != table.dim:
        raise SettingsError(
            f"{file} has vectors of {vectors.dim:,} numbers but the table has dim = {table.dim}; make them equal"
        )
    sources = [_row(token, vocabulary, vectors) for token in tokens]
    rows = [row for row, source in enumerate(sources) if source is not None]
    if not rows:
        raise DataError(f"{file} has none of the {len(tokens):,} words; start from vectors of the same language")
    vectors_RD = vectors.vectors_VD[[source for source in sources if source is not None]]
    with torch.no_grad():
        table.weight[rows] = torch.from_numpy(vectors_RD).to(table.weight)
    return f"{file} has vectors of {len(rows):,} of the {len(tokens):,} words; the others are drawn"


def _read_for(vocabulary: Vocabulary, file: Path, say: Say) -> WordVectors:
    """What a file has for a vocabulary. It holds pieces where more of the words stand there as their last piece than
    plainly: exports of a run do, and no word that merely ends in `</w>` makes them."""
    from reefknot.vectors.files import read_vectors
    from reefknot.vectors.lookup import as_piece

    words = {word for token in vocabulary.words if (word := whole_word(token, vocabulary)) is not None}
    words |= {word.lower() for word in words}
    pieces = {as_piece(word) for word in words}
    found = read_vectors(file, only={*vocabulary.words, *words, *pieces}, say=say)
    return replace(found, pieces=sum(map(found.__contains__, pieces)) > sum(map(found.__contains__, words)))


def _row(token: str, vocabulary: Vocabulary, found: WordVectors) -> int | None:
    """Where the vector of a token stands in the file."""
    from reefknot.vectors.lookup import Lookup

    word = whole_word(token, vocabulary)
    if word is not None:
        return Lookup(found).find(word)
    return found.id_of(token) if found.pieces and token in found else None
