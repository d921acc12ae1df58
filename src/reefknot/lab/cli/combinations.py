"""The settings of a sweep: `key=a,b,c` taken apart, and every combination of the values.

A comma parts values, but not inside quotes, brackets or braces: `sizes=[100,200],[300]` are two lists.
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
"""Combinations; a sweep of more was mistyped."""


@dataclass(frozen=True)
class Combination:
    """One value for each setting that is varied."""

    overrides: tuple[str, ...]
    name: str
    """Its settings for people: short keys where they are clear."""
    settings: dict[str, Any]

    @property
    def folder(self) -> str:
        """Its settings as the name of a folder: whole keys in a fixed order, so that a later sweep finds it again."""
        text = ",".join(sorted(self.overrides))
        readable = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)
        if readable == text and len(text) <= 120:
            return text
        return f"{readable[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def parse(settings: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The overrides that hold for all, and the values of each setting that is varied."""
    fixed: list[str] = []
    varied: dict[str, list[str]] = {}
    keys = [text.partition("=")[0].strip() for text in settings]
    for text, key in zip(settings, keys, strict=True):
        values = _values(text.partition("=")[2])
        if keys.count(key) > 1:
            raise SettingsError(f"{key}: is given twice; list all of its values once, as {key}=a,b,c")
        if key == "training.seed":
            raise SettingsError("training.seed: every combination is run with seeds 0 to N-1; use --seeds N")
        if not all(values):
            raise SettingsError(f"'{text}': a value is missing; list all of them, as {key}=a,b,c")
        if len(values) == 1:
            fixed.append(text)
        else:
            varied[key] = values
    if not varied:
        raise SettingsError("nothing is varied; list the values of a setting with commas, as training.clip=1,5")
    return fixed, varied


def _values(text: str) -> list[str]:
    """The parts of a text between commas, but for those inside quotes, brackets and braces."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def combine(varied: Mapping[str, Sequence[str]]) -> list[Combination]:
    """Every combination of the values, the last setting varying fastest."""
    count = math.prod(map(len, varied.values()))
    if count > LARGEST:
        raise SettingsError(f"{count:,} combinations are more than the {LARGEST:,} a sweep may have; list fewer values")
    for key, texts in varied.items():
        values = [parse_override(f"{key}={text}")[1] for text in texts]
        if twins := [text for n, text in enumerate(texts) if values.index(values[n]) < n]:
            raise SettingsError(f"{key}: {twins[0]} is listed twice; leave one out")
    lasts = [key.rpartition(".")[2] for key in varied]
    short = [last if lasts.count(last) == 1 else key for key, last in zip(varied, lasts, strict=True)]
    return [
        Combination(
            tuple(f"{key}={text}" for key, text in zip(varied, texts, strict=True)),
            ", ".join(f"{key}={text}" for key, text in zip(short, texts, strict=True)),
            {key: parse_override(f"{key}={text}")[1] for key, text in zip(varied, texts, strict=True)},
        )
        for texts in product(*varied.values())
    ]
