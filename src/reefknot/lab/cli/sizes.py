"""The texts and the model sizes of a recipe's rows, for checks before training."""

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
from reefknot.lab.text.vocabulary import VocabularySettings, fairseq_dictionary_size
from reefknot.storage.progress import Notify, silent

Item = TypeVar("Item")
Result = TypeVar("Result")


def for_each_row(recipe: Recipe, function: Callable[[Row, Experiment], Result]) -> dict[str, Result]:
    """Apply a function to every row that can be trained and return the results by row."""
    trained = {row.name: row for row in recipe.rows if row.name in recipe.experiments}
    return for_each(recipe.given_name, "row", trained, lambda row: function(row, recipe.experiments[row.name]))


def for_each(
    recipe: str, kind: str, items: Mapping[str, Item], function: Callable[[Item], Result]
) -> dict[str, Result]:
    """Apply a function to every item and return the results.

    Raises:
        ReefknotError: The function failed for some items. One error lists all messages, with the items concerned.
    """
    results: dict[str, Result] = {}
    mistakes: dict[tuple[type[ReefknotError], str], list[str]] = {}
    for name, item in items.items():
        try:
            results[name] = function(item)
        except ReefknotError as error:
            mistakes.setdefault((type(error), str(error)), []).append(f'"{name}"')
    if mistakes:
        error_kind, _ = next(iter(mistakes))
        lines = [
            f"{recipe}, {kind}{'s' * (len(names) > 1)} {', '.join(names)}: {mistake}"
            for (_, mistake), names in mistakes.items()
        ]
        raise error_kind("\n".join(lines))
    return results


def for_rows_with_text(
    recipe: Recipe, function: Callable[[Row, Experiment], Result], required: Collection[str] = ()
) -> tuple[dict[str, Result], dict[str, str]]:
    """Apply a function to the rows whose corpus is on this machine, or that do not need it.

    Args:
        recipe: The recipe that has the rows.
        function: Function of a row. It raises `CorpusNotFound` if the row needs a missing corpus.
        required: Names of rows whose missing corpus is an error.

    Returns:
        The results by row, and for each row without a result the error message about its corpus.
    """
    missing: dict[str, str] = {}

    def try_row(row: Row, experiment: Experiment) -> Result | None:
        try:
            return function(row, experiment)
        except CorpusNotFound as error:
            if row.name in required:
                raise
            missing[row.name] = str(error)
            return None

    results = for_each_row(recipe, try_row)
    return {row: result for row, result in results.items() if result is not None}, missing


def describe_missing(heading: str, missing: Mapping[str, str]) -> list[str]:
    """Return one line per message, with the rows that have this message."""
    rows_of: dict[str, list[str]] = {}
    for row, message in missing.items():
        rows_of.setdefault(message, []).append(f'"{row}"')
    return [f"{heading}: {', '.join(rows)}: {message}" for message, rows in rows_of.items()]


class Texts:
    """The texts of a recipe's rows. A text that several rows read is opened once."""

    def __init__(self, data: Path | None, notify: Notify = silent) -> None:
        self._data, self._notify = data, notify
        self._opened: dict[tuple[str, str, str], Data] = {}

    def open(self, experiment: Experiment) -> Data:
        """Return the text of an experiment."""
        key = (experiment.task, experiment.corpus.model_dump_json(), experiment.vocabulary.model_dump_json())
        if key not in self._opened:
            self._opened[key] = create_task(experiment).open_data(self._data, notify=self._notify)
        return self._opened[key]

    def open_checked(self, row: Row, experiment: Experiment) -> Data:
        """Return the text of a row after checking that its model has the size that the recipe states.

        So a wrong size is reported before any row is trained.
        """
        dataset = self.open(experiment)
        _check_size(row, experiment, dataset.vocabulary_pair)
        return dataset

    def checked_size(self, row: Row, experiment: Experiment) -> int | None:
        """Return the number of parameters of a row after checking that the recipe states the same number.

        Returns None if the number depends on a text that is not on this machine.
        """
        try:
            return _check_size(row, experiment, self.vocabulary_size(experiment))
        except CorpusNotFound:
            return None

    def unbuilt_model(self, experiment: Experiment) -> Any:
        """Return a model on the meta device, whose parameters can be counted but have no values."""
        with torch.device("meta"):
            return build_model(experiment, self.vocabulary_size(experiment))

    def vocabulary_size(self, experiment: Experiment) -> Any:
        """Return the published vocabulary size if the whole corpus is used, or else the vocabulary of the text."""
        corpus, vocabulary = experiment.corpus, experiment.vocabulary
        words = vocabulary.model_copy(update={"dictionary": "own", "keep_spellings": False})
        whole = corpus.part is None and corpus.tokens is None and words == VocabularySettings()
        known = known_corpus(corpus.name)
        if whole and known is not None and known.types is not None:
            types = known.types
            return fairseq_dictionary_size(types) if vocabulary.dictionary == "fairseq" else types
        return self.open(experiment).vocabulary_pair


def _check_size(row: Row, experiment: Experiment, words: Any) -> int:
    with torch.device("meta"):
        model = build_model(experiment, words)
    total: int = sum(model.parameter_counts().values())
    if row.parameters not in (None, total):
        raise SettingsError(f"{total:,} parameters, expected {row.parameters:,}")
    return total
