"""Parse the settings of a sweep, `key=a,b,c`, and combine their values.

A comma separates values, but not inside quotes, brackets or braces: `sizes=[100,200],[300]` has two values.
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

LARGEST = 1000
"""Maximum number of combinations. More combinations are probably a typing mistake."""


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

        It has whole keys in a fixed order, so that a later sweep with more settings finds the folder again.
        """
        text = ",".join(sorted(self.overrides))
        readable = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)
        if readable == text and len(text) <= 120:
            return text
        return f"{readable[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def parse(settings: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the settings that are the same for all runs, and the values of every setting that is varied."""
    fixed: list[str] = []
    varied: dict[str, list[str]] = {}
    keys = [text.partition("=")[0].strip() for text in settings]
    for text, key in zip(settings, keys, strict=True):
        values = _values(text.partition("=")[2])
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


def _values(text: str) -> list[str]:
    """Split a text at its commas, except at commas inside quotes, brackets and braces."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def combine(varied: Mapping[str, Sequence[str]]) -> list[Combination]:
    """Return every combination of the values; the last setting varies fastest."""
    count = math.prod(map(len, varied.values()))
    if count > LARGEST:
        raise SettingsError(f"{count:,} combinations: a sweep has at most {LARGEST:,}; list fewer values")
    for key, texts in varied.items():
        values = [parse_override(f"{key}={text}")[1] for text in texts]
        # Values are compared, not their texts: 0.5 and 0.50 would train the same run twice.
        if repeated := [text for n, text in enumerate(texts) if values.index(values[n]) < n]:
            raise SettingsError(f"{key}: {repeated[0]} is listed twice; leave one out")
    last_parts = [key.rpartition(".")[2] for key in varied]
    short_keys = [last if last_parts.count(last) == 1 else key for key, last in zip(varied, last_parts, strict=True)]
    return [
        Combination(
            tuple(f"{key}={text}" for key, text in zip(varied, texts, strict=True)),
            ", ".join(f"{key}={text}" for key, text in zip(short_keys, texts, strict=True)),
            {key: parse_override(f"{key}={text}")[1] for key, text in zip(varied, texts, strict=True)},
        )
        for texts in product(*varied.values())
    ]
