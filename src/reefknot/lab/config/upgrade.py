"""Old names in recipes, run folders, checkpoints and commands. They are translated on reading; files stay unchanged.

output.labels              is now output.classifier
output.labels.0 (weights)  is now output.classifiers.0, in an adaptive softmax
evaluate --eta             is now evaluate --dynamic-rate; `RENAMED_OPTIONS` lists all options
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

_NUMBERED = re.compile(r"^((?:iterate\.)?output\.)labels\.(\d+)\.")
_NAMED = re.compile(r"^((?:iterate\.)?output\.)labels\.")


class RenamedSetting(FutureWarning):
    """A recipe or an override uses the old name of a setting."""


def upgrade_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a recipe or a run with their current names."""
    output = settings.get("output")
    if not isinstance(output, Mapping) or "labels" not in output or "classifier" in output:
        return dict(settings)
    renamed = {("classifier" if key == "labels" else key): value for key, value in output.items()}
    return {**settings, "output": renamed}


def task_of_settings(settings: Mapping[str, Any]) -> str:
    """Return the task that settings describe. Recipes and old config.json files do not name the task."""
    if "skip_gram" in settings:
        return "skip_gram"
    corpus, training = settings.get("corpus"), settings.get("training")
    pairs = isinstance(corpus, Mapping) and corpus.get("pairs") is not None
    batches_pairs = isinstance(training, Mapping) and training.get("batching") == "pairs"
    return "translation" if pairs or batches_pairs or settings.get("source") is not None else "language_model"


def upgrade_key(key: str) -> str:
    """Return a dotted setting with its current name."""
    return f"output.classifier{key.removeprefix('output.labels')}" if _is_old(key) else key


def upgrade_command(command: str) -> str:
    """Return a recorded command `reefknot VERB ...` with the current names of its options."""
    words = command.split(" ")
    renamed = RENAMED_OPTIONS.get(words[1], {}) if len(words) > 1 else {}
    return " ".join(renamed.get(word, word) for word in words)


def _is_old(key: str) -> bool:
    return key == "output.labels" or key.startswith("output.labels.")


def upgrade_weight_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a checkpoint with their current names."""
    return {
        _NAMED.sub(r"\1classifier.", _NUMBERED.sub(r"\1classifiers.\2.", name)): tensor
        for name, tensor in tensors.items()
    }


def warn_renamed(where: str) -> None:
    """Warn that a recipe or an override uses the old name."""
    warnings.warn(
        f"{where}: `labels` is now called `classifier`; the old name still works", RenamedSetting, stacklevel=2
    )
