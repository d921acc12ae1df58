"""Overrides: settings of a recipe that `key=value` changes, and the merging of tables of settings.

training.epochs=3                       changes one setting
encoder.kind=gru                        selects another part, which keeps the settings that both kinds have
encoder={kind="gru", hidden_dim=200}    selects another part with only these settings
evaluation.search={beam=4}              replaces the whole table
vocabulary.max_size=default             removes the recipe's setting, so that the default applies
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reefknot.errors import SettingsError, shorten
from reefknot.lab.config.parts import FAMILIES
from reefknot.lab.config.upgrade import upgrade_key, warn_renamed

DEFAULT = "default"
"""The value that removes a setting."""


def parse_override(text: str) -> tuple[list[str], Any]:
    """Parse `training.epochs=3` into ["training", "epochs"] and 3. The value is TOML; a bare word is a string."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if upgrade_key(key) != key:
        warn_renamed(f"'{shorten(text)}'")
    names = upgrade_key(key).split(".")
    if not equals or not all(names):
        raise SettingsError(f"'{shorten(text)}' is not key=value, such as training.epochs=3")
    try:
        return names, tomllib.loads(f"value = {value}")["value"] if "\n" not in value else value
    except (ValueError, RecursionError):  # not TOML, or a number with thousands of digits
        return names, value


def override(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the settings with all overrides applied as one change.

    The order of overrides matters only if two of them set the same key; then the last one counts. A whole table is set
    before the keys inside it. A table in braces replaces the table of the settings and of other overrides.
    """
    changes: dict[str, Any] = {}
    for names, value in sorted(map(parse_override, overrides), key=lambda parsed: len(parsed[0])):
        if isinstance(value, Mapping):
            settings, changes = _cleared(settings, names), _cleared(changes, names)
        if names[-1] == "kind" and len(names) > 1:
            settings = merge(settings, _nest(names[:-1], _change_kind(settings, names[:-1], value)))
        else:
            changes = _combine(changes, _nest(names, value))
    return merge(settings, changes)


def _cleared(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the settings with an empty table at `names`.

    The table keeps its position, because the weights of word tables are drawn in the order of the settings.
    """
    first, *inner = names
    old = settings.get(first)
    if not isinstance(old, Mapping):
        return dict(settings)
    return {**settings, first: _cleared(old, inner) if inner else {}}


def _change_kind(settings: Mapping[str, Any], names: Sequence[str], kind: Any) -> dict[str, Any]:
    """Return the part at `names` with another kind, and with the settings that the new kind has too."""
    old: Any = settings
    for name in names:
        old = old.get(name, {}) if isinstance(old, Mapping) else {}
    # tables.NAME belongs to the family `tables`, encoder to `encoders`, classifier to `classifiers`.
    candidates = (*names[-2:-1], f"{names[-1]}s", names[-1])
    family = next((family for name in candidates for family in FAMILIES if family.family == name), None)
    known = family.names(kind) if family and isinstance(kind, str) and kind in family else frozenset()
    common = {name: value for name, value in old.items() if name in known} if isinstance(old, Mapping) else {}
    return common | {"kind": kind}


def _nest(names: Sequence[str], value: Any) -> dict[str, Any]:
    """Return {"a": {"b": 1}} for ["a", "b"] and 1."""
    for name in reversed(names):
        value = {name: value}
    nested: dict[str, Any] = value
    return nested


def _combine(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return two changes as one. If both set a key, the second one counts."""
    combined = dict(first)
    for key, value in second.items():
        old = combined.get(key)
        combined[key] = _combine(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return combined


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `change` merged into it.

    A table with a `kind` replaces the old table. `DEFAULT` removes a setting. If there is no setting to remove, the
    value "default" stays and is rejected later like any other wrong value.
    """
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if value == DEFAULT and key in merged:
            del merged[key]
        elif isinstance(value, Mapping):
            merged[key] = merge(old if isinstance(old, Mapping) and "kind" not in value else {}, value)
        else:
            merged[key] = value
    return merged
