"""A run folder opened as something to use: its model with its words, and the texts that it was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from reefknot.errors import DataError, SettingsError
from reefknot.lab.findings import vectors_by_end
from reefknot.lab.recipes.recipe import Experiment, any_experiment, build_model
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks.skip_gram import SkipGramExperiment
from reefknot.lab.text.corpora import CORPORA
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.pair_dataset import PairDataset, open_pairs
from reefknot.lab.text.vocabulary import Sides, Vocabulary
from reefknot.lab.training.state import load_weights
from reefknot.nn.inputs.char_cnn import CharCNN
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.skip_gram import SkipGram
from reefknot.vectors.word_vectors import WordVectors

Opened = TypeVar("Opened", Dataset, PairDataset)


def choose_device(name: str) -> str:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda: torch sees no GPU here; use --device cpu")
    if name not in ("cpu", "cuda"):
        raise SettingsError(f"--device {name}: must be auto, cpu or cuda")
    return name


def best_weights(run: RunFolder) -> dict[str, torch.Tensor]:
    """The weights that did best on the validation text."""
    return run.checkpoints.load(_best(run)).model


def _best(run: RunFolder) -> Path:
    """Where these lie; a sentence where there are none."""
    if run.result is not None and not (run.path / "best").exists():
        if not run.vocabulary_path.exists():
            raise DataError(f"{run.path} is the record of a run, without weights; name the folder it was trained in")
        raise DataError(
            f"{run.path} is finished, but its weights are gone: there is no checkpoint that best leads to; restore "
            "best and checkpoints, or train it again with another --out"
        )
    best = run.checkpoints.best()
    if best is None:
        raise DataError(f"{run.path} has no trained weights yet: finish its training first (reefknot train)")
    return best


@dataclass(frozen=True)
class TrainedRun:
    """A run folder as something to use."""

    run: RunFolder
    experiment: Experiment
    vocabulary: Vocabulary
    model: LanguageModel
    source: Vocabulary | None = None
    """That of a translator's source, where it has one of its own."""

    @property
    def words(self) -> Sides:
        """The words that go in as a source, and those that are written."""
        return Sides(self.source or self.vocabulary, self.vocabulary)

    def vectors(self) -> dict[str, WordVectors]:
        """Its words' vectors at either end, or the one table that both hold."""
        return vectors_by_end(self.model, self.vocabulary)

    def dataset(self, data: Path | None) -> Dataset:
        """The texts a language model was trained on and scored with."""
        return open_texts(self.run, data)

    def pairs(self, data: Path | None) -> PairDataset:
        """The pairs a translator was trained on and scored with."""
        return open_run_pairs(self.run, data)

    def knowing(self, words: Iterable[str]) -> TrainedRun:
        """This run, with an input end that spells these words too; itself unless it was trained to keep spellings."""
        source = self.model.input
        if not (self.experiment.vocabulary.keep_spellings and isinstance(source, CharCNN)):
            return self
        vocabulary = self.vocabulary.spelling(words)
        source = source.spelling(vocabulary.spelled[len(self.vocabulary.spelled) :])
        model = LanguageModel(source, self.model.encoder, self.model.output, self.model.regularisation)
        return replace(self, vocabulary=vocabulary, model=model.eval())


@dataclass(frozen=True)
class TrainedVectors:
    """A run folder of skip-gram as something to use."""

    run: RunFolder
    experiment: SkipGramExperiment
    vocabulary: Vocabulary
    model: SkipGram

    def vectors(self) -> dict[str, WordVectors]:
        """Its words' vectors at either end, or the one table that both hold."""
        return vectors_by_end(self.model, self.vocabulary)


def open_texts(run: RunFolder, data: Path | None) -> Dataset:
    """The texts a language model was trained on and scored with, or an error if they are others by now.

    Where the folder of a text has been moved, `data` is its new place.
    """
    experiment = model_settings(run)
    if run.imported and run.config.get("corpus") is None:
        raise DataError(f"{run.path} was imported without a text; import it again with --corpus NAME to score one")
    if experiment.corpus.pairs is not None:
        raise DataError(f"{run.path} is a translator, which has pairs of texts; use reefknot evaluate or translate")
    words = Vocabulary.load(run.vocabulary_path) if run.imported else None
    return _unchanged(run, open_dataset(_moved(run, experiment, data), experiment.vocabulary, data=data, words=words))


def open_run_pairs(run: RunFolder, data: Path | None) -> PairDataset:
    """The pairs a translator was trained on and scored with, likewise."""
    experiment = model_settings(run)
    if experiment.corpus.pairs is None:
        raise DataError(f"{run.path} is a language model, which has no pairs of texts; name the run of a translator")
    return _unchanged(run, open_pairs(_moved(run, experiment, data), experiment.vocabulary, data=data))


def _moved(run: RunFolder, experiment: Experiment, data: Path | None) -> CorpusSettings:
    """The corpus of a run; `data` in place of a folder that is not there."""
    corpus = experiment.corpus
    if corpus.name in CORPORA or Path(corpus.name).expanduser().is_dir():
        return corpus
    if data is None:
        raise DataError(
            f"{run.path}: its text was in {corpus.name}, and there is no such folder here; "
            "say with --data which folder holds train, valid and test text now"
        )
    return corpus.model_copy(update={"name": str(data)})


def _unchanged(run: RunFolder, dataset: Opened) -> Opened:
    if dataset.fingerprint != run.config.get("corpus"):
        raise DataError(f"the corpus is not the one that {run.path} was trained on: its text has changed; restore it")
    return dataset


def model_settings(run: RunFolder) -> Experiment:
    """The settings of a language model or a translator; a run of skip-gram is refused."""
    found = settings_of(run)
    if not isinstance(found, Experiment):
        raise SettingsError(
            f"{run.path} is a run of skip-gram, whose vectors give no text a probability; use `reefknot neighbors`, "
            "`similarity`, `analogy`, `export` or `report` with it"
        )
    return found


def settings_of(run: RunFolder) -> Experiment | SkipGramExperiment:
    """What a run was trained with."""
    return any_experiment(run.config.get("settings", {}), f"{run.path}/config.json")


def open_any(path: Path, device: str = "cpu") -> TrainedRun | TrainedVectors:
    """A run of either kind with its best weights, ready to use."""
    run = RunFolder.open(path)
    experiment = settings_of(run)
    if isinstance(experiment, Experiment):
        return open_run(path, device)
    best = _best(run)  # first: a record has no vocabulary either
    vocabulary = Vocabulary.load(run.vocabulary_path)
    model = experiment.build(vocabulary)
    load_weights(model, run.checkpoints.load(best).model)
    return TrainedVectors(run, experiment, vocabulary, model.to(choose_device(device)).eval())


def open_run(path: Path, device: str = "cpu") -> TrainedRun:
    """The language model or translator of a run with its best weights, ready to use."""
    run = RunFolder.open(path)
    experiment = model_settings(run)
    best = _best(run)
    vocabulary = Vocabulary.load(run.vocabulary_path)
    source = None
    if experiment.corpus.pairs is not None and experiment.vocabulary.sides != "joint":
        source = Vocabulary.load(run.source_vocabulary_path)
    model = build_model(experiment, Sides(source or vocabulary, vocabulary))
    load_weights(model, run.checkpoints.load(best).model)
    return TrainedRun(run, experiment, vocabulary, model.to(choose_device(device)).eval(), source)
