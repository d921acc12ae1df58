"""Translates old names of settings, weights and command-line options to their current names.

Recipes, run folders and commands with old names keep working: the names are translated on reading, and files stay
unchanged.

    what                                    old name            current name
    setting                                 output.labels       output.classifier
    weights of an output                    output.labels.*     output.classifier.*
    weights of an adaptive softmax          output.labels.0.*   output.classifiers.0.*
    option (see `RENAMED_OPTIONS`)          evaluate --eta      evaluate --dynamic-rate
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

RENAMED_OPTIONS = {
    "evaluate": {
        "--eta": "--dynamic-rate",
        "--lambda": "--dynamic-decay",
        "--epsilon": "--dynamic-epsilon",
        "--scale": "--dynamic-scale",
        "--segment": "--dynamic-segment",
        "--weight": "--cache-weight",
        "--theta": "--cache-theta",
        "--window": "--cache-window",
        "--fill": "--cache-fill",
        "--mc": "--monte-carlo",
        "--seed": "--monte-carlo-seed",
    },
    "train": {"--tensorboard": "--track tensorboard"},
}
"""Current names of options, by verb and old name."""

_OLD_BAND_WEIGHT = re.compile(r"^((?:iterate\.)?output\.)labels\.(\d+)\.")
_OLD_WEIGHT = re.compile(r"^((?:iterate\.)?output\.)labels\.")


class RenamedSetting(FutureWarning):
    """A recipe or an override uses the old name of a setting."""


def upgrade_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a recipe or a run with their current names."""
    output = settings.get("output")
    if not isinstance(output, Mapping) or "labels" not in output or "classifier" in output:
        return dict(settings)
    upgraded_output = {}
    for key, value in output.items():
        new_key = "classifier" if key == "labels" else key
        upgraded_output[new_key] = value
    return {**settings, "output": upgraded_output}


def detect_task(settings: Mapping[str, Any]) -> str:
    """Return the task (kind of experiment) that settings describe: "language_model", "translation" or "skip_gram".

    Recipes and old config.json files do not name the task, so it follows from their sections.
    """
    if "skip_gram" in settings:
        return "skip_gram"
    corpus = settings.get("corpus")
    training = settings.get("training")
    has_sentence_pairs = isinstance(corpus, Mapping) and corpus.get("pairs") is not None
    has_pair_batches = isinstance(training, Mapping) and training.get("batching") == "pairs"
    has_source = settings.get("source") is not None
    if has_sentence_pairs or has_pair_batches or has_source:
        return "translation"
    return "language_model"


def upgrade_key(key: str) -> str:
    """Return the current name of a dotted key: `output.classifier.bias` for `output.labels.bias`."""
    if key == "output.labels" or key.startswith("output.labels."):
        return f"output.classifier{key.removeprefix('output.labels')}"
    return key


def upgrade_command(command: str) -> str:
    """Return a recorded command `reefknot VERB ...` with the current names of its options."""
    words = command.split(" ")
    if len(words) < 2:
        return command
    verb = words[1]
    new_name_by_option = RENAMED_OPTIONS.get(verb, {})
    return " ".join(new_name_by_option.get(word, word) for word in words)


def upgrade_weight_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a checkpoint with their current names."""
    upgraded = {}
    for name, tensor in tensors.items():
        new_name = _OLD_BAND_WEIGHT.sub(r"\1classifiers.\2.", name)
        new_name = _OLD_WEIGHT.sub(r"\1classifier.", new_name)
        upgraded[new_name] = tensor
    return upgraded


def warn_renamed(source: str) -> None:
    """Warn that a recipe or an override (`source`) uses an old name."""
    warnings.warn(
        f"{source}: `labels` is now called `classifier`; the old name still works", RenamedSetting, stacklevel=2
    )
