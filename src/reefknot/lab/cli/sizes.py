"""Check the rows of a recipe before training: open their texts and count the parameters of their models.

A row is one experiment of a recipe. `TextCache` has the checks: it opens the text of a row and counts parameters on
torch's meta device, where a model takes no memory. `map_rows` applies a check to every row and collects the errors of
all rows, so that the user sees all mistakes at once:

    num_parameters = map_rows(load_recipe("demo"), TextCache(data=None).check_size)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from reefknot.errors import CorpusNotFound, ReefknotError, SettingsError
from reefknot.lab.recipes.recipe import Recipe, Row
from reefknot.lab.tasks import build_model, create_task
from reefknot.lab.tasks.contract import Data, Experiment
from reefknot.lab.text.corpora import known_corpus
from reefknot.lab.text.vocabulary_settings import VocabularySettings, fairseq_dictionary_size
from reefknot.storage.progress import Notify, silent

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_rows(recipe: Recipe, function: Callable[[Row, Experiment], Result]) -> dict[str, Result]:
    """Apply a function to every row that can be trained and return the results by row."""
    trainable_rows = {row.name: row for row in recipe.rows if row.name in recipe.experiments}

    def call_with_experiment(row: Row) -> Result:
        return function(row, recipe.experiments[row.name])

    return map_items(recipe.given_name, "row", trainable_rows, call_with_experiment)


def map_items(
    recipe: str, noun: str, items: Mapping[str, Item], function: Callable[[Item], Result]
) -> dict[str, Result]:
    """Apply a function to every item and return the results by name.

    Args:
        recipe: Name of the recipe, for error messages.
        noun: What an item is, for error messages: "row" or "combination".
        items: The items by name.
        function: The function of an item.

    Raises:
        ReefknotError: The function failed for some items. One error lists all messages, each with the names of its
            items. It has the type of the first error.
    """
    results: dict[str, Result] = {}
    names_by_message: dict[str, list[str]] = {}
    first_error: ReefknotError | None = None
    for name, item in items.items():
        try:
            results[name] = function(item)
        except ReefknotError as error:
            if first_error is None:
                first_error = error
            names_by_message.setdefault(str(error), []).append(f'"{name}"')

    if first_error is not None:
        error_lines = []
        for message, names in names_by_message.items():
            plural = "s" if len(names) > 1 else ""
            error_lines.append(f"{recipe}, {noun}{plural} {', '.join(names)}: {message}")
        raise type(first_error)("\n".join(error_lines))
    return results


def map_rows_with_text(
    recipe: Recipe, function: Callable[[Row, Experiment], Result], required: Collection[str] = ()
) -> tuple[dict[str, Result], dict[str, str]]:
    """Apply a function to the rows whose corpus is on this machine, or that do not need it.

    Args:
        recipe: The recipe that has the rows.
        function: The function of a row. It raises `CorpusNotFound` if the row needs a missing corpus.
        required: Names of the rows for which a missing corpus is an error.

    Returns:
        A dict with the results by row, and a dict with the error message about the corpus, by row, of the rows
        without a result.
    """
    missing: dict[str, str] = {}

    def call_or_record_missing(row: Row, experiment: Experiment) -> Result | None:
        try:
            return function(row, experiment)
        except CorpusNotFound as error:
            if row.name in required:
                raise
            missing[row.name] = str(error)
            return None

    results_or_none = map_rows(recipe, call_or_record_missing)
    results = {row: result for row, result in results_or_none.items() if result is not None}
    return results, missing


def format_missing(heading: str, missing: Mapping[str, str]) -> list[str]:
    """Return one line per message, with the names of its rows: `not run: "A", "B": ptb not found`."""
    rows_by_message: dict[str, list[str]] = {}
    for row, message in missing.items():
        rows_by_message.setdefault(message, []).append(f'"{row}"')
    return [f"{heading}: {', '.join(rows)}: {message}" for message, rows in rows_by_message.items()]


class TextCache:
    """Opens the texts of a recipe's rows. A text that several rows read is opened once.

    Args:
        data: The value of `--data`.
        notify: Called with messages about the preparation of a text.
    """

    def __init__(self, data: Path | None, notify: Notify = silent) -> None:
        self._data = data
        self._notify = notify
        # By task, settings of the corpus and settings of the vocabulary.
        self._opened: dict[tuple[str, str, str], Data] = {}

    def open(self, experiment: Experiment) -> Data:
        """Return the text of an experiment."""
        key = (experiment.task, experiment.corpus.model_dump_json(), experiment.vocabulary.model_dump_json())
        if key not in self._opened:
            task = create_task(experiment)
            self._opened[key] = task.open_data(self._data, notify=self._notify)
        return self._opened[key]

    def open_and_check_size(self, row: Row, experiment: Experiment) -> Data:
        """Return the text of a row; raise an error if its model does not have the size that the recipe states."""
        dataset = self.open(experiment)
        _check_size(row, experiment, dataset.vocabulary_pair)
        return dataset

    def check_size(self, row: Row, experiment: Experiment) -> int | None:
        """Return the number of parameters of a row; raise an error if the recipe states another number.

        Returns None if the number depends on a text that is not on this machine.
        """
        try:
            return _check_size(row, experiment, self.vocabulary_size(experiment))
        except CorpusNotFound:
            return None

    def build_meta_model(self, experiment: Experiment) -> Any:
        """Return a model on the meta device, whose parameters can be counted but have no values."""
        with torch.device("meta"):
            return build_model(experiment, self.vocabulary_size(experiment))

    def vocabulary_size(self, experiment: Experiment) -> Any:
        """Return what the model needs to know about the vocabulary: its size, or the vocabulary itself.

        The size of a published corpus is known without opening it, unless only a part of the corpus is used or the
        settings change its words.
        """
        corpus = experiment.corpus
        vocabulary = experiment.vocabulary
        # These two settings do not change which words the text has.
        word_settings = vocabulary.model_copy(update={"dictionary": "own", "keep_spellings": False})
        is_unchanged = corpus.part is None and corpus.tokens is None and word_settings == VocabularySettings()
        published = known_corpus(corpus.name)
        if is_unchanged and published is not None and published.types is not None:
            if vocabulary.dictionary == "fairseq":
                return fairseq_dictionary_size(published.types)
            return published.types
        return self.open(experiment).vocabulary_pair


def _check_size(row: Row, experiment: Experiment, vocabulary: Any) -> int:
    """Return the number of parameters of a row; raise an error if the recipe states another number.

    `vocabulary` is the size of the vocabulary, or the vocabulary itself.
    """
    with torch.device("meta"):
        model = build_model(experiment, vocabulary)
    num_parameters: int = sum(model.parameter_counts().values())
    if row.parameters not in (None, num_parameters):
        raise SettingsError(f"{num_parameters:,} parameters, expected {row.parameters:,}")
    return num_parameters
