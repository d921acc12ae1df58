"""Compare two configurations, and list the settings that differ.

    changes = find_changes({"training": {"epochs": 60}}, {"training": {"epochs": 25}})
    # changes is [Change(key="training.epochs", old=60, new=25)]
    print(changes[0])    # training.epochs: 60 -> 25

Error messages list the changes, and results store them in the field `changed`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from reefknot.lab.runs.stored import Stored

_NOT_SET = object()  # stands for the value of a setting that does not exist
_MAX_VALUE_LENGTH = 60  # a message shows at most this many characters of a value


class Change(Stored):
    """One changed setting. `old` or `new` is not set if the setting does not exist on that side."""

    key: str
    """The dotted name, such as `training.epochs`."""
    old: Any = None
    """The value in the recipe."""
    new: Any = None
    """The value of the run."""

    @property
    def section(self) -> str:
        """The first part of the key, such as `training`."""
        return self.key.partition(".")[0]

    def __str__(self) -> str:
        return self.describe()

    def describe(self, null: str = "null") -> str:
        """Return `key: old -> new`, with `null` for a value of None."""
        old_text = self._format_value("old", null)
        new_text = self._format_value("new", null)
        return f"{self.key}: {old_text} -> {new_text}"

    def _format_value(self, side: str, null: str) -> str:
        """Format the value of a side, `old` or `new`."""
        if side not in self.model_fields_set:
            return "not set"
        value = getattr(self, side)
        if value is None:
            value_text = null
        else:
            value_text = json.dumps(value, ensure_ascii=False)
        if len(value_text) > _MAX_VALUE_LENGTH:
            value_text = value_text[: _MAX_VALUE_LENGTH - 3] + "..."
        return value_text

    def __hash__(self) -> int:
        return hash((self.key, canonical_json(self.old), canonical_json(self.new)))


def find_changes(old_settings: Mapping[str, Any], new_settings: Mapping[str, Any]) -> list[Change]:
    """Return the differences between two nested settings, in the order of the old settings."""
    return list(_iterate_changes(old_settings, new_settings, key=""))


def canonical_json(value: Any) -> str:
    """Return a value as JSON that does not depend on the order of keys."""
    return json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":"))


def _iterate_changes(old: Any, new: Any, key: str) -> Iterator[Change]:
    """Yield the changes between two values, which may be nested settings.

    Args:
        old: The old value, or `_NOT_SET`.
        new: The new value, or `_NOT_SET`.
        key: The dotted name of the value; empty for the settings as a whole.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        added_names = [name for name in new if name not in old]
        for name in [*old, *added_names]:
            inner_key = f"{key}.{name}" if key else str(name)
            yield from _iterate_changes(old.get(name, _NOT_SET), new.get(name, _NOT_SET), inner_key)
    elif old is _NOT_SET:
        yield Change(key=key, new=new)
    elif new is _NOT_SET:
        yield Change(key=key, old=old)
    elif canonical_json(old) != canonical_json(new):
        yield Change(key=key, old=old, new=new)
