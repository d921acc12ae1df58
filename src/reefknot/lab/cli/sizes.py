"""What is known about the rows of a recipe before they are trained: their texts, and the sizes of their models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from reefknot.errors import CorpusNotFound, ReefknotError, SettingsError
from reefknot.lab.recipes.recipe import Recipe, Row
from reefknot.lab.tasks import build_model, task_of
from reefknot.lab.tasks.contract import Data, Experiment
from reefknot.lab.text.corpora import known_corpus
from reefknot.lab.text.vocabulary import VocabularySettings, fairseq_size
from reefknot.storage.progress import Say, silent

Item = TypeVar("Item")
Found = TypeVar("Found")


def for_each_row(name: str, recipe: Recipe, find: Callable[[Row, Experiment], Found]) -> dict[str, Found]:
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


class Texts:
    """The texts of a recipe's rows. Rows that read the same text share it, so that it is opened once."""

    def __init__(self, data: Path | None, say: Say = silent) -> None:
        self._data, self._say = data, say
        self._opened: dict[tuple[str, str, str], Data] = {}

    def open(self, experiment: Experiment) -> Data:
        """The text of an experiment."""
        key = (experiment.task, experiment.corpus.model_dump_json(), experiment.vocabulary.model_dump_json())
        if key not in self._opened:
            self._opened[key] = task_of(experiment).open_data(self._data, say=self._say)
        return self._opened[key]

    def open_checked(self, row: Row, experiment: Experiment) -> Data:
        """The text of a row whose model has the size that the recipe states: a mistake is reported before any row is
        trained."""
        dataset = self.open(experiment)
        _check_size(row, experiment, dataset.words)
        return dataset

    def checked_size(self, row: Row, experiment: Experiment) -> int | None:
        """The number of parameters of a row, which must be the recipe's; None if it depends on a text that is not on
        this machine."""
        try:
            return _check_size(row, experiment, self.vocabulary_size(experiment))
        except CorpusNotFound:
            return None

    def unbuilt_model(self, experiment: Experiment) -> Any:
        """A model with shapes but without numbers, for counting its parameters."""
        with torch.device("meta"):
            return build_model(experiment, self.vocabulary_size(experiment))

    def vocabulary_size(self, experiment: Experiment) -> Any:
        """The number of words of a corpus as published, if nothing was cut; otherwise the words of the text itself."""
        corpus, vocabulary = experiment.corpus, experiment.vocabulary
        words = vocabulary.model_copy(update={"dictionary": "own", "keep_spellings": False})
        whole = corpus.part is None and corpus.tokens is None and words == VocabularySettings()
        known = known_corpus(corpus.name)
        if whole and known is not None and known.types is not None:
            types = known.types
            return fairseq_size(types) if vocabulary.dictionary == "fairseq" else types
        return self.open(experiment).words


def _check_size(row: Row, experiment: Experiment, words: Any) -> int:
    with torch.device("meta"):
        model = build_model(experiment, words)
    total: int = sum(model.parameter_counts().values())
    if row.parameters not in (None, total):
        raise SettingsError(f"{total:,} parameters, not {row.parameters:,}")
    return total
