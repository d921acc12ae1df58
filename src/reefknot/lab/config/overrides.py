"""Overrides: `key=value` arguments that change settings of a recipe, and the merging of nested settings.

`override` applies overrides to the settings of a row (one experiment of a recipe). Examples of overrides:

    training.epochs=3                       changes one setting
    encoder.kind=gru                        selects another part, which keeps the settings that both kinds have
    encoder={kind="gru", hidden_dim=200}    selects another part with only these settings
    evaluation.search={beam=4}              replaces the whole table
    vocabulary.max_size=default             removes the recipe's setting, so that the default applies

A table here is a TOML table, a dictionary of settings. A part is a component of the experiment that is chosen by its
`kind`, such as the encoder or the optimiser; a table describes it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reefknot.errors import SettingsError, shorten
from reefknot.lab.config.parts import FAMILIES
from reefknot.lab.config.registry import Registry
from reefknot.lab.config.upgrade import upgrade_key, warn_renamed

DEFAULT = "default"
"""The value that removes a setting from the recipe, so that its default applies."""


def parse_override(text: str) -> tuple[list[str], Any]:
    """Parse `training.epochs=3` into ["training", "epochs"] and 3. The value is TOML; a bare word is a string."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if upgrade_key(key) != key:
        warn_renamed(f"'{shorten(text)}'")
    names = upgrade_key(key).split(".")
    if not equals or not all(names):
        raise SettingsError(f"'{shorten(text)}' is not key=value, such as training.epochs=3")
    if "\n" in value:  # TOML would read further lines as more settings
        return names, value
    try:
        return names, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # not TOML, or a number with thousands of digits
        return names, value


def override(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the settings with all overrides applied as one change.

    The order of overrides matters only if two of them set the same key; then the last one counts. A whole table is set
    before the keys inside it. A table in braces replaces the whole table, both in the settings and in
    earlier overrides of the same table. A new kind
    keeps the settings that the old and the new part have in common. For example, with settings {"encoder": {"kind":
    "lstm", "layers": 2}}:

        encoder.layers=3                     {"kind": "lstm", "layers": 3}
        encoder.kind=gru                     {"kind": "gru", "layers": 2}
        encoder={kind="gru"}                 {"kind": "gru"}
    """
    parsed_overrides = [parse_override(text) for text in overrides]
    parsed_overrides.sort(key=lambda parsed: len(parsed[0]))  # shorter keys first: a table before its entries
    changes: dict[str, Any] = {}
    for names, value in parsed_overrides:
        if isinstance(value, Mapping):
            settings, changes = _clear_table(settings, names), _clear_table(changes, names)
        if names[-1] == "kind" and len(names) > 1:
            part_names = names[:-1]
            settings = merge(settings, _nest(part_names, _change_kind(settings, part_names, value)))
        else:
            changes = _combine(changes, _nest(names, value))
    return merge(settings, changes)


def _clear_table(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the settings with an empty table at `names`.

    The table keeps its position, because the weights of word tables are drawn in the order of the settings.
    """
    name, *inner_names = names
    table = settings.get(name)
    if not isinstance(table, Mapping):
        return dict(settings)
    return {**settings, name: _clear_table(table, inner_names) if inner_names else {}}


def _change_kind(settings: Mapping[str, Any], names: Sequence[str], kind: Any) -> dict[str, Any]:
    """Return the part at `names` with another kind, and with the settings that the new kind has too."""
    old_part: Any = settings
    for name in names:
        old_part = old_part.get(name, {}) if isinstance(old_part, Mapping) else {}
    common: dict[str, Any] = {}
    registry = _find_registry(names)
    if registry is not None and isinstance(kind, str) and kind in registry and isinstance(old_part, Mapping):
        new_names = registry.setting_names(kind)
        common = {name: value for name, value in old_part.items() if name in new_names}
    return common | {"kind": kind}


def _find_registry(names: Sequence[str]) -> Registry | None:
    """Return the registry of the part at `names`, or None if there is no such family of parts.

    tables.NAME belongs to the family `tables`, encoder to `encoders`, output.classifier to `classifiers`.
    """
    candidates = (*names[-2:-1], f"{names[-1]}s", names[-1])
    for candidate in candidates:
        for registry in FAMILIES:
            if registry.family == candidate:
                return registry
    return None


def _nest(names: Sequence[str], value: Any) -> dict[str, Any]:
    """Return {"a": {"b": 1}} for ["a", "b"] and 1."""
    for name in reversed(names):
        value = {name: value}
    nested: dict[str, Any] = value
    return nested


def _combine(changes: dict[str, Any], later_changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return two nested changes as one. If both set a key, the later change counts."""
    combined = dict(changes)
    for key, value in later_changes.items():
        old_value = combined.get(key)
        if isinstance(old_value, dict) and isinstance(value, Mapping):
            combined[key] = _combine(old_value, value)
        else:
            combined[key] = value
    return combined


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `change` merged into it.

    For example, {"training": {"epochs": 3}} changes one setting of the section `training` and keeps the others. A
    table with a `kind` replaces the old table. `DEFAULT` removes a setting. If there is no setting to remove, the
    value "default" stays and is rejected later like any other wrong value.
    """
    merged = dict(base)
    for key, value in change.items():
        old_value = merged.get(key)
        if value == DEFAULT and key in merged:
            del merged[key]
        elif isinstance(value, Mapping):
            old_table = old_value if isinstance(old_value, Mapping) and "kind" not in value else {}
            merged[key] = merge(old_table, value)
        else:
            merged[key] = value
    return merged
