"""Old names of settings, weights and options, translated to their current names.

Recipes, run folders and commands with old names keep working: the names are translated on reading, and files stay
unchanged. Old and current names:

    output.labels              output.classifier
    output.labels.0 (weights)  output.classifiers.0, in an adaptive softmax
    evaluate --eta             evaluate --dynamic-rate; `RENAMED_OPTIONS` lists all options
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
    }
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
    renamed_output = {("classifier" if key == "labels" else key): value for key, value in output.items()}
    return {**settings, "output": renamed_output}


def detect_task(settings: Mapping[str, Any]) -> str:
    """Return the name of the task that settings describe: "language_model", "translation" or "skip_gram".

    Recipes and old config.json files do not name the task, so it follows from their sections.
    """
    if "skip_gram" in settings:
        return "skip_gram"
    corpus, training = settings.get("corpus"), settings.get("training")
    has_pairs = isinstance(corpus, Mapping) and corpus.get("pairs") is not None
    has_pair_batches = isinstance(training, Mapping) and training.get("batching") == "pairs"
    has_source = settings.get("source") is not None
    return "translation" if has_pairs or has_pair_batches or has_source else "language_model"


def upgrade_key(key: str) -> str:
    """Return a dotted setting with its current name: `output.classifier.bias` for `output.labels.bias`."""
    if key == "output.labels" or key.startswith("output.labels."):
        return f"output.classifier{key.removeprefix('output.labels')}"
    return key


def upgrade_command(command: str) -> str:
    """Return a recorded command `reefknot VERB ...` with the current names of its options."""
    words = command.split(" ")
    new_names = RENAMED_OPTIONS.get(words[1], {}) if len(words) > 1 else {}
    return " ".join(new_names.get(word, word) for word in words)


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
