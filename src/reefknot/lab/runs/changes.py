"""Settings that differ between two configurations: key, old value and new value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from reefknot.lab.runs.stored import Stored

_ABSENT = object()
_LONGEST = 60  # a message shows at most this many characters of a value


class Change(Stored):
    """One changed setting. `old` or `new` is not set if the setting does not exist on that side."""

    key: str
    """The dotted name, such as `training.epochs`."""
    old: Any = None
    new: Any = None

    @property
    def section(self) -> str:
        """The first part of the key."""
        return self.key.partition(".")[0]

    def __str__(self) -> str:
        return self.describe()

    def describe(self, null: str = "null") -> str:
        """Return `key: old -> new`, with `null` for a value of None."""
        return f"{self.key}: {self._shown('old', null)} -> {self._shown('new', null)}"

    def _shown(self, side: str, null: str) -> str:
        if side not in self.model_fields_set:
            return "not set"
        value = getattr(self, side)
        text = null if value is None else json.dumps(value, ensure_ascii=False)
        return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."

    def __hash__(self) -> int:
        return hash((self.key, canonical(self.old), canonical(self.new)))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return the differences between two nested settings, in the order of the old settings."""
    return list(_differences(old, new, ""))


def canonical(value: Any) -> str:
    """Return a value as JSON that does not depend on the order of keys."""
    return json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":"))


def _differences(old: Any, new: Any, key: str) -> Iterator[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*old, *(name for name in new if name not in old)]:
            dotted = f"{key}.{name}" if key else str(name)
            yield from _differences(old.get(name, _ABSENT), new.get(name, _ABSENT), dotted)
    elif old is _ABSENT or new is _ABSENT or canonical(old) != canonical(new):
        yield Change(key=key, **{side: value for side, value in (("old", old), ("new", new)) if value is not _ABSENT})
