"""Overrides: settings of a recipe changed by `key=value`, and the rules by which settings are laid over settings.

training.epochs=3                       one setting
encoder.kind=gru                        another part, with those settings of the old one that it has too
encoder={kind="gru", hidden_dim=200}    another part, with these settings alone
evaluation.search={beam=4}              likewise: a table in braces is the whole of it
vocabulary.max_size=default             what the recipe says is taken away
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reefknot.errors import SettingsError, shortened
from reefknot.lab.config.parts import FAMILIES
from reefknot.lab.config.upgrade import upgrade_key, warn_renamed

DEFAULT = "default"
"""The value that takes a setting away."""


def parse_override(text: str) -> tuple[list[str], Any]:
    """`training.epochs=3` -> ["training", "epochs"], 3. The value is TOML; a bare word is a string."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if upgrade_key(key) != key:
        warn_renamed(f"'{shortened(text)}'")
    names = upgrade_key(key).split(".")
    if not equals or not all(names):
        raise SettingsError(f"'{shortened(text)}' is not key=value, such as training.epochs=3")
    try:
        return names, tomllib.loads(f"value = {value}")["value"] if "\n" not in value else value
    except (ValueError, RecursionError):  # not TOML, or a number of thousands of digits
        return names, value


def override(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Settings with overrides, which are one change whatever their order: a part of a table is set after the whole of
    it, and a table in braces replaces what either the settings or an override had in its place. Of two of one name the
    last counts."""
    changes: dict[str, Any] = {}
    for names, value in sorted(map(parse_override, overrides), key=lambda parsed: len(parsed[0])):
        if isinstance(value, Mapping):
            settings, changes = _emptied(settings, names), _emptied(changes, names)
        if names[-1] == "kind" and len(names) > 1:
            settings = merge(settings, _nest(names[:-1], _of_kind(settings, names[:-1], value)))
        else:
            changes = _lay_over(changes, _nest(names, value))
    return merge(settings, changes)


def _emptied(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Settings with nothing left of the table at `names`, which keeps its place: tables are drawn in their order."""
    first, *rest = names
    old = settings.get(first)
    if not isinstance(old, Mapping):
        return dict(settings)
    return {**settings, first: _emptied(old, rest) if rest else {}}


def _of_kind(settings: Mapping[str, Any], names: Sequence[str], kind: Any) -> dict[str, Any]:
    """The part at `names` as one of another kind: with those of its settings that this kind has too."""
    old: Any = settings
    for name in names:
        old = old.get(name, {}) if isinstance(old, Mapping) else {}
    # tables.NAME are tables, encoder is one of the encoders, classifier one of the classifiers.
    called = (*names[-2:-1], f"{names[-1]}s", names[-1])
    family = next((family for name in called for family in FAMILIES if family.family == name), None)
    known = family.names(kind) if family and isinstance(kind, str) and kind in family else frozenset()
    kept = {name: value for name, value in old.items() if name in known} if isinstance(old, Mapping) else {}
    return kept | {"kind": kind}


def _nest(names: Sequence[str], value: Any) -> dict[str, Any]:
    """["a", "b"], 1 -> {"a": {"b": 1}}."""
    for name in reversed(names):
        value = {name: value}
    nested: dict[str, Any] = value
    return nested


def _lay_over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two changes as one."""
    together = dict(below)
    for key, value in above.items():
        old = together.get(key)
        together[key] = _lay_over(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return together


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`change` laid over `base`: a table that states its `kind` replaces the old one, `DEFAULT` takes a value away.

    Where there is nothing to take away it stays, and is refused like any other wrong value.
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
