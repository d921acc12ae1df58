"""Parse the settings of `reefknot sweep`, which trains a model with every combination of their values.

The user writes every setting as `key=a,b,c`. `parse_settings` splits the values, and `combine` returns one
`Combination` for each model to train:

    parse_settings(["training.clip=1,5", "training.epochs=2"])
        -> SweepSettings(fixed=["training.epochs=2"], varied={"training.clip": ["1", "5"]})
    combine({"training.clip": ["1", "5"]})
        -> one combination with training.clip=1, and one with training.clip=5
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from reefknot.errors import SettingsError
from reefknot.lab.config.overrides import parse_override

MAX_COMBINATIONS = 1000
"""More combinations than this are probably a typing mistake."""
MAX_FOLDER_NAME = 120
"""Maximum number of characters of a folder name that shows all settings. A longer name is cut and gets a hash."""


class SweepSettings(NamedTuple):
    """The settings of a sweep."""

    fixed: list[str]
    """The settings that are the same for all runs, as the user writes them: `key=value`."""
    varied: dict[str, list[str]]
    """The values of every setting that is varied, by key."""


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
        name = ",".join(sorted(self.overrides))
        safe_name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", name)
        if safe_name == name and len(name) <= MAX_FOLDER_NAME:
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()
        return f"{safe_name[:100]}-{digest[:8]}"


def parse_settings(settings: Sequence[str]) -> SweepSettings:
    """Split the values of the settings, which are written as `key=a,b,c`."""
    fixed: list[str] = []
    varied: dict[str, list[str]] = {}
    keys = [setting.partition("=")[0].strip() for setting in settings]
    for setting, key in zip(settings, keys, strict=True):
        values = _split_values(setting.partition("=")[2])
        if keys.count(key) > 1:
            raise SettingsError(f"{key} is given twice; list all of its values once, as {key}=a,b,c")
        if key == "training.seed":
            raise SettingsError(
                "training.seed: every combination is trained with the same seeds; use --seeds N, and --first-seed for "
                "the first of them"
            )
        if not all(values):
            raise SettingsError(f"'{setting}': a value is missing; list all values, as {key}=a,b,c")
        if len(values) == 1:
            fixed.append(setting)
        else:
            varied[key] = values
    if not varied:
        raise SettingsError("no setting has several values; list values with commas, such as training.clip=1,5")
    return SweepSettings(fixed, varied)


def _split_values(joined_values: str) -> list[str]:
    """Split values at commas, except at commas inside quotes, brackets and braces.

    For example, `1, [2, 3], "a,b"` has the values `1`, `[2, 3]` and `"a,b"`.
    """
    values = [""]
    bracket_depth = 0
    open_quote = ""
    for character in joined_values:
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
    """Return every combination of the values, which are written as in TOML. The last setting varies fastest."""
    num_combinations = math.prod(len(values) for values in varied.values())
    if num_combinations > MAX_COMBINATIONS:
        raise SettingsError(
            f"{num_combinations:,} combinations: a sweep has at most {MAX_COMBINATIONS:,}; list fewer values"
        )
    for key, values in varied.items():
        _check_distinct(key, values)

    short_keys = _shorten_keys(list(varied))
    combinations = []
    for chosen_values in product(*varied.values()):
        value_by_key = dict(zip(varied, chosen_values, strict=True))
        overrides = tuple(f"{key}={value}" for key, value in value_by_key.items())
        name = ", ".join(f"{key}={value}" for key, value in zip(short_keys, chosen_values, strict=True))
        settings = {key: _parse_value(key, value) for key, value in value_by_key.items()}
        combinations.append(Combination(overrides, name, settings))
    return combinations


def _check_distinct(key: str, values: Sequence[str]) -> None:
    """Raise an error if a value is listed twice. 0.5 and 0.50 are the same value and would train the same run twice."""
    parsed_values: list[Any] = []
    for value in values:
        parsed_value = _parse_value(key, value)
        if parsed_value in parsed_values:
            raise SettingsError(f"{key}: {value} is listed twice; leave one out")
        parsed_values.append(parsed_value)


def _parse_value(key: str, value: str) -> Any:
    """Return a value that is written as in TOML."""
    _, parsed_value = parse_override(f"{key}={value}")
    return parsed_value


def _shorten_keys(keys: Sequence[str]) -> list[str]:
    """Return the last part of every key, or the whole key if two keys have the same last part."""
    last_parts = [key.rpartition(".")[2] for key in keys]
    short_keys = []
    for key, last_part in zip(keys, last_parts, strict=True):
        is_unambiguous = last_parts.count(last_part) == 1
        short_keys.append(last_part if is_unambiguous else key)
    return short_keys
