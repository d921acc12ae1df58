"""What is found out about an experiment before it is trained: its text, and how large its model is without building it
in memory; so for every row of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import typer

from reefknot.errors import CorpusNotFound, ReefknotError, SettingsError
from reefknot.lab.experiment import Texts, open_experiment
from reefknot.lab.recipes.recipe import Experiment, Recipe, Row
from reefknot.lab.tasks.skip_gram import SkipGramExperiment
from reefknot.lab.text.corpora import known_corpus
from reefknot.lab.text.vocabulary import Sides, Vocabulary, VocabularySettings, fairseq_size
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.skip_gram import SkipGram

Item = TypeVar("Item")
Found = TypeVar("Found")


def for_each_row(
    name: str, recipe: Recipe, find: Callable[[Row, Experiment | SkipGramExperiment], Found]
) -> dict[str, Found]:
    """What `find` gives for each row that can be trained; `name` is what the user calls the recipe."""
    trained = {row.name: row for row in recipe.rows if row.name in recipe.experiments}
    return for_each(name, "row", trained, lambda row: find(row, recipe.experiments[row.name]))


def for_each(name: str, kind: str, items: Mapping[str, Item], find: Callable[[Item], Found]) -> dict[str, Found]:
    """What `find` gives for each item, or one error with every mistake and the items of that kind that have it."""
    found: dict[str, Found] = {}
    mistakes: dict[tuple[type[ReefknotError], str], list[str]] = {}
    for key, item in items.items():
        try:
            found[key] = find(item)
        except ReefknotError as error:
            mistakes.setdefault((type(error), str(error)), []).append(f'"{key}"')
    if mistakes:
        error_kind, _ = next(iter(mistakes))
        lines = [
            f"{name}, {kind}{'s' * (len(keys) > 1)} {', '.join(keys)}: {mistake}"
            for (_, mistake), keys in mistakes.items()
        ]
        raise error_kind("\n".join(lines))
    return found


def open_checked(row: Row, experiment: Experiment | SkipGramExperiment, data: Path | None) -> Texts:
    """The text of a row that can be trained: what cannot is told before others are trained for hours."""
    dataset = open_experiment(experiment, data=data, say=typer.echo)
    checked_size(row, experiment, data)
    return dataset


def checked_size(row: Row, experiment: Experiment | SkipGramExperiment, data: Path | None) -> int | None:
    """Parameters of a row that can be built; None where only the text of a known corpus could tell and it is not here.

    A number that is not the paper's is an error.
    """
    try:
        total = sum(unbuilt_model(experiment, data).parameter_counts().values())
    except CorpusNotFound:
        return None
    if row.parameters not in (None, total):
        raise SettingsError(f"{total:,} parameters, not {row.parameters:,}")
    return total


def unbuilt_model(experiment: Experiment | SkipGramExperiment, data: Path | None) -> LanguageModel | SkipGram:
    """The model with shapes but without numbers, for counting its parameters."""
    with torch.device("meta"):
        return experiment.build(vocabulary_size(experiment, data))


def vocabulary_size(experiment: Experiment | SkipGramExperiment, data: Path | None) -> int | Sides:
    """Types of the corpus, of each side where there are two: as published where nothing was cut, else by reading the
    text."""
    corpus, vocabulary = experiment.corpus, experiment.vocabulary
    words = vocabulary.model_copy(update={"dictionary": "own", "keep_spellings": False})
    whole = corpus.part is None and corpus.tokens is None and words == VocabularySettings()
    known = known_corpus(corpus.name)
    if whole and known is not None and known.types is not None:
        types = known.types
        return fairseq_size(types) if vocabulary.dictionary == "fairseq" else types
    found = open_experiment(experiment, data=data).words
    return len(found) if isinstance(found, Vocabulary) else found
