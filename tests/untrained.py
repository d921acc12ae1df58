"""Make run folders without training: random weights as the best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from reefknot.lab.runs.folder import RunFolder, config_hash
from reefknot.lab.tasks import build_model, check_experiment
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.training.state import named_weights


def make_run(folder: Path, settings: dict[str, Any], words: Vocabulary | VocabularyPair) -> Path:
    """Write a run folder with random weights, large enough that probabilities differ."""
    experiment = check_experiment(settings, "test")
    torch.manual_seed(0)
    model = build_model(experiment, words)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.8, 0.8)
    config = {
        "recipe": "untrained",
        "row": folder.name,
        "task": experiment.task,
        "corpus": None,
        "settings": experiment.model_dump(mode="json"),
    }
    with RunFolder.open_for_training(folder, config) as run:
        if isinstance(words, VocabularyPair):
            source, target = words.vocabularies
            if source is not target:
                run.source_vocabulary_path.parent.mkdir()
                source.save(run.source_vocabulary_path)
            target.save(run.vocabulary_path)
        else:
            words.save(run.vocabulary_path)
        run.checkpoints.save(
            step=0, weights=named_weights(model), state_tensors={}, state_values={}, fingerprint=config_hash(config)
        )
        run.checkpoints.mark_best(0)
    return folder
