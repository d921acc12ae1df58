"""How large an experiment's model is, found without building it in memory."""

from __future__ import annotations

from pathlib import Path

import torch

from reefknot.recipe import Experiment, build_model
from reefknot.text.corpora import KNOWN
from reefknot.text.dataset import open_dataset
from reefknot.text.vocabulary import VocabularySettings


def model_size(experiment: Experiment, data: Path | None) -> dict[str, int]:
    """Parameters by part; a tensor that ends share counts once."""
    with torch.device("meta"):
        return build_model(experiment, vocabulary_size(experiment, data)).parameter_counts()


def vocabulary_size(experiment: Experiment, data: Path | None) -> int:
    """Types of the corpus: as published where nothing was cut, else by reading the text."""
    corpus = experiment.corpus
    whole = corpus.part is None and corpus.tokens is None and experiment.vocabulary == VocabularySettings()
    if whole and corpus.name in KNOWN:
        return KNOWN[corpus.name].types
    return len(open_dataset(corpus, experiment.vocabulary, data=data).vocabulary)
