"""How large an experiment's model is, found without building it in memory."""

from __future__ import annotations

from pathlib import Path

import torch

from reefknot.models.language_model import LanguageModel
from reefknot.recipe import Experiment, build_model
from reefknot.text.corpora import KNOWN
from reefknot.text.dataset import open_dataset
from reefknot.text.vocabulary import VocabularySettings, fairseq_size


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
