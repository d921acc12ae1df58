"""Parse the settings of a sweep and combine their values.

The user writes every setting as `key=a,b,c`. `parse_settings` splits the values, and `combine` returns one
`Combination` per run:

    parse_settings(["training.clip=1,5", "training.epochs=2"])
        -> fixed: ["training.epochs=2"], varied: {"training.clip": ["1", "5"]}
    combine({"training.clip": ["1", "5"]})
        -> one combination with training.clip=1, and one with training.clip=5

A comma inside quotes, brackets or braces does not separate values: `sizes=[100,200],[300]` has two values.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from reefknot.errors import SettingsError
from reefknot.lab.config.overrides import parse_override

MAX_COMBINATIONS = 1000
"""More combinations than this are probably a typing mistake."""
MAX_FOLDER_NAME = 120
"""Maximum number of characters of a folder name that shows all settings. A longer name is cut and gets a hash."""


@dataclass(frozen=True)
class Combination:
    """One value for every setting that is varied."""

    overrides: tuple[str, ...]
    """The settings as the user writes them."""
    name: str
    """The settings as they are printed, with short keys if these are unambiguous."""
    settings: dict[str, Any]
    """The parsed values by key."""

    @property
    def folder(self) -> str:
        """A folder name made from the settings.

        It has the full keys in alphabetical order, so that a later sweep with more settings finds the folder again.
        """
        text = ",".join(sorted(self.overrides))
        safe_text = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)
        if safe_text == text and len(text) <= MAX_FOLDER_NAME:
            return text
        return f"{safe_text[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def parse_settings(settings: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the settings that are the same for all runs, and the values of every setting that is varied."""
    fixed: list[str] = []
    varied: dict[str, list[str]] = {}
    keys = [text.partition("=")[0].strip() for text in settings]
    for text, key in zip(settings, keys, strict=True):
        values = _split_values(text.partition("=")[2])
        if keys.count(key) > 1:
            raise SettingsError(f"{key} is given twice; list all of its values once, as {key}=a,b,c")
        if key == "training.seed":
            raise SettingsError("training.seed: every combination is trained with seeds 0 to N-1; use --seeds N")
        if not all(values):
            raise SettingsError(f"'{text}': a value is missing; list all values, as {key}=a,b,c")
        if len(values) == 1:
            fixed.append(text)
        else:
            varied[key] = values
    if not varied:
        raise SettingsError("no setting has several values; list values with commas, such as training.clip=1,5")
    return fixed, varied


def _split_values(text: str) -> list[str]:
    """Split a text at its commas, except at commas inside quotes, brackets and braces.

    For example, `1, [2, 3], "a,b"` has the values `1`, `[2, 3]` and `"a,b"`.
    """
    values = [""]
    bracket_depth = 0
    open_quote = ""
    for character in text:
        if open_quote:
            if character == open_quote:
                open_quote = ""
        elif character in "\"'":
            open_quote = character
        elif character in "[{":
            bracket_depth += 1
        elif character in "]}":
            bracket_depth -= 1
        if character == "," and not bracket_depth and not open_quote:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def combine(varied: Mapping[str, Sequence[str]]) -> list[Combination]:
    """Return every combination of the values. The last setting varies fastest."""
    count = math.prod(map(len, varied.values()))
    if count > MAX_COMBINATIONS:
        raise SettingsError(f"{count:,} combinations: a sweep has at most {MAX_COMBINATIONS:,}; list fewer values")
    for key, texts in varied.items():
        _check_distinct(key, texts)
    short_keys = _shorten_keys(list(varied))
    combinations = []
    for texts in product(*varied.values()):
        text_by_key = dict(zip(varied, texts, strict=True))
        overrides = tuple(f"{key}={text}" for key, text in text_by_key.items())
        name = ", ".join(f"{key}={text}" for key, text in zip(short_keys, texts, strict=True))
        settings = {key: _parse_value(key, text) for key, text in text_by_key.items()}
        combinations.append(Combination(overrides, name, settings))
    return combinations


def _parse_value(key: str, text: str) -> Any:
    return parse_override(f"{key}={text}")[1]


def _check_distinct(key: str, texts: Sequence[str]) -> None:
    """Raise an error if a value is listed twice. 0.5 and 0.50 are the same value and would train the same run twice."""
    values: list[Any] = []
    for text in texts:
        value = _parse_value(key, text)
        if value in values:
            raise SettingsError(f"{key}: {text} is listed twice; leave one out")
        values.append(value)


def _shorten_keys(keys: Sequence[str]) -> list[str]:
    """Return the last part of every key, or the whole key if two keys have the same last part."""
    last_parts = [key.rpartition(".")[2] for key in keys]
    return [last if last_parts.count(last) == 1 else key for key, last in zip(keys, last_parts, strict=True)]
