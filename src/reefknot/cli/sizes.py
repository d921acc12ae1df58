"""How large an experiment's model is, found without building it in memory; so for every row of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from reefknot.errors import CorpusNotHere, ReefknotError, SettingsError
from reefknot.models.language_model import LanguageModel
from reefknot.recipe import Experiment, Recipe, Row, build_model
from reefknot.text.corpora import KNOWN
from reefknot.text.dataset import open_dataset
from reefknot.text.vocabulary import VocabularySettings, fairseq_size

Found = TypeVar("Found")


def for_each_row(name: str, recipe: Recipe, find: Callable[[Row, Experiment], Found]) -> dict[str, Found]:
    """What `find` gives for each row that can be trained, or one error with every mistake and the rows that have it.

    `name` is what the user calls the recipe.
    """
    found: dict[str, Found] = {}
    mistakes: dict[tuple[type[ReefknotError], str], list[str]] = {}
    for row in recipe.rows:
        if row.name not in recipe.experiments:
            continue
        try:
            found[row.name] = find(row, recipe.experiments[row.name])
        except ReefknotError as error:
            mistakes.setdefault((type(error), str(error)), []).append(f'"{row.name}"')
    if mistakes:
        kind, _ = next(iter(mistakes))
        raise kind("\n".join(f"{name}, {_rows(rows)}: {mistake}" for (_, mistake), rows in mistakes.items()))
    return found


def _rows(names: list[str]) -> str:
    return f"row {names[0]}" if len(names) == 1 else f"rows {', '.join(names)}"


def checked_size(row: Row, experiment: Experiment, data: Path | None) -> int | None:
    """Parameters of a row that can be built; None where only the text of a known corpus could tell and it is not here.

    A number that is not the paper's is an error.
    """
    try:
        total = sum(unbuilt_model(experiment, data).parameter_counts().values())
    except CorpusNotHere:
        return None
    if row.parameters not in (None, total):
        raise SettingsError(f"{total:,} parameters, not {row.parameters:,}")
    return total


def unbuilt_model(experiment: Experiment, data: Path | None) -> LanguageModel:
    """The model with shapes but without numbers, for counting its parameters."""
    with torch.device("meta"):
        return build_model(experiment, vocabulary_size(experiment, data))


def vocabulary_size(experiment: Experiment, data: Path | None) -> int:
    """Types of the corpus: as published where nothing was cut, else by reading the text."""
    corpus, vocabulary = experiment.corpus, experiment.vocabulary
    words = vocabulary.model_copy(update={"dictionary": "own", "keep_spellings": False})
    whole = corpus.part is None and corpus.tokens is None and words == VocabularySettings()
    if whole and corpus.name in KNOWN:
        types = KNOWN[corpus.name].types
        return fairseq_size(types) if vocabulary.dictionary == "fairseq" else types
    return len(open_dataset(corpus, vocabulary, data=data).vocabulary)
