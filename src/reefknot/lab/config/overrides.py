"""Overrides: `key=value` arguments that change settings of a recipe, and the merging of nested settings.

`apply_overrides` applies overrides to the settings of a row (one experiment of a recipe). Examples of overrides:

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
from typing import Any, NamedTuple

from reefknot.errors import SettingsError, shorten
from reefknot.lab.config.parts import FAMILIES
from reefknot.lab.config.registry import Registry
from reefknot.lab.config.upgrade import upgrade_key, warn_renamed

DEFAULT = "default"
"""The value that removes a setting from the recipe, so that its default applies."""


def apply_overrides(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the settings with all overrides applied as one change.

    The order of overrides matters only if two of them set the same key; then the last one counts. A whole table is set
    before the keys inside it. A table in braces replaces the whole table, both in the settings and in earlier overrides
    of the same table. A new kind keeps the settings that the old and the new part have in common. For example, with
    settings {"encoder": {"kind": "lstm", "layers": 2}}:

        encoder.layers=3                     {"kind": "lstm", "layers": 3}
        encoder.kind=gru                     {"kind": "gru", "layers": 2}
        encoder={kind="gru"}                 {"kind": "gru"}
    """
    parsed_overrides = [parse_override(text) for text in overrides]
    parsed_overrides.sort(key=lambda parsed: len(parsed.keys))  # shorter keys first: a table before its entries

    changes: dict[str, Any] = {}
    for keys, value in parsed_overrides:
        if isinstance(value, Mapping):
            settings = _clear_table(settings, keys)
            changes = _clear_table(changes, keys)
        if keys[-1] == "kind" and len(keys) > 1:
            part_keys = keys[:-1]
            new_part = _change_kind(settings, part_keys, value)
            settings = merge_settings(settings, _nest(part_keys, new_part))
        else:
            changes = _combine_changes(changes, _nest(keys, value))
    return merge_settings(settings, changes)


class ParsedOverride(NamedTuple):
    """One override: `training.epochs=3` has the keys ["training", "epochs"] and the value 3."""

    keys: list[str]
    value: Any


def parse_override(text: str) -> ParsedOverride:
    """Parse an override. Its value is TOML; a bare word is a string."""
    dotted_key, equals_sign, value_text = text.partition("=")
    dotted_key = dotted_key.strip()
    current_key = upgrade_key(dotted_key)
    if current_key != dotted_key:
        warn_renamed(f"'{shorten(text)}'")
    keys = current_key.split(".")
    if not equals_sign or not all(keys):
        raise SettingsError(f"'{shorten(text)}' is not key=value, such as training.epochs=3")

    if "\n" in value_text:  # TOML would read further lines as more settings
        return ParsedOverride(keys, value_text)
    try:
        return ParsedOverride(keys, tomllib.loads(f"value = {value_text}")["value"])
    except (ValueError, RecursionError):  # not TOML, or a number with thousands of digits
        return ParsedOverride(keys, value_text)


def merge_settings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with changes merged into them.

    For example, {"training": {"epochs": 3}} changes one setting of the section `training` and keeps the others. A
    table with a `kind` replaces the old table. `DEFAULT` removes a setting. If there is no setting to remove, the
    value "default" stays and is rejected later like any other wrong value.
    """
    merged = dict(base)
    for key, value in changes.items():
        if value == DEFAULT and key in merged:
            del merged[key]
        elif isinstance(value, Mapping):
            old_table = merged.get(key)
            if not isinstance(old_table, Mapping) or "kind" in value:
                old_table = {}
            merged[key] = merge_settings(old_table, value)
        else:
            merged[key] = value
    return merged


def _clear_table(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the settings with an empty table at `keys`.

    The table keeps its position, because the weights of word tables are drawn in the order of the settings.
    """
    first_key, *inner_keys = keys
    table = settings.get(first_key)
    if not isinstance(table, Mapping):
        return dict(settings)
    cleared_table = _clear_table(table, inner_keys) if inner_keys else {}
    return {**settings, first_key: cleared_table}


def _change_kind(settings: Mapping[str, Any], keys: Sequence[str], kind: Any) -> dict[str, Any]:
    """Return the part at `keys` with another kind, and with the settings that the new kind has too."""
    old_part: Any = settings
    for key in keys:
        old_part = old_part.get(key, {}) if isinstance(old_part, Mapping) else {}

    registry = _find_registry(keys)
    if registry is None or not isinstance(kind, str) or kind not in registry or not isinstance(old_part, Mapping):
        return {"kind": kind}
    new_names = registry.setting_names(kind)
    common_settings = {name: value for name, value in old_part.items() if name in new_names}
    return common_settings | {"kind": kind}


def _find_registry(keys: Sequence[str]) -> Registry | None:
    """Return the registry of the part at `keys`, or None if there is no such family of parts.

    tables.NAME belongs to the family `tables`, encoder to `encoders`, output.classifier to `classifiers`.
    """
    section = keys[-2:-1]  # empty if there is only one key
    candidates = (*section, f"{keys[-1]}s", keys[-1])
    for candidate in candidates:
        for registry in FAMILIES:
            if registry.family == candidate:
                return registry
    return None


def _nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return {"a": {"b": 1}} for ["a", "b"] and 1."""
    for key in reversed(keys):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _combine_changes(changes: dict[str, Any], later_changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return two nested changes as one. If both set a key, the later change counts."""
    combined = dict(changes)
    for key, value in later_changes.items():
        old_value = combined.get(key)
        if isinstance(old_value, dict) and isinstance(value, Mapping):
            combined[key] = _combine_changes(old_value, value)
        else:
            combined[key] = value
    return combined
