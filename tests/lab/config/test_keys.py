"""The keys of recipes are frozen: a key may be added, but a recipe that works today must keep working."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reefknot.lab.config.parts import FAMILIES
from reefknot.lab.tasks.language_model import LanguageModelExperiment
from reefknot.lab.tasks.skip_gram import SkipGramExperiment
from reefknot.lab.tasks.translation import TranslationExperiment

Frozen = Callable[[Path, dict[str, Any]], dict[str, Any]]
EXPERIMENTS = {
    "language_model": LanguageModelExperiment,
    "skip_gram": SkipGramExperiment,
    "translation": TranslationExperiment,
}


def collect_keys() -> dict[str, list[str]]:
    """Return the keys of every section of every task, and of every part."""
    keys = {}
    for task, experiment in EXPERIMENTS.items():
        for section, field in experiment.model_fields.items():
            keys[f"{task}.{section}"] = sorted(getattr(field.annotation, "model_fields", ()))
    for registry in FAMILIES:
        for kind in registry:
            keys[f"{registry.family}.{kind}"] = sorted(registry.setting_names(kind))
    return keys


def test_keys_of_recipes_are_frozen(frozen: Frozen) -> None:
    """`pytest tests/lab/config --freeze` adds new keys to the list."""
    keys = {name: set(names) for name, names in collect_keys().items()}
    stored = frozen(Path(__file__).with_name("keys.json"), collect_keys())
    assert [name for name in stored if name not in keys] == []
    assert {name: set(names) - keys[name] for name, names in stored.items() if set(names) - keys[name]} == {}
