"""Names, files and sizes of the word-similarity benchmarks, which `similarity.py` reads and scores.

A benchmark is a list of word pairs with human similarity scores. This file does not import numpy, so reports and
recipes can read the names quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BenchmarkFile:
    """A published benchmark file."""

    file: str
    pairs: int
    """Number of word pairs in the published file."""


BENCHMARKS: Mapping[str, BenchmarkFile] = {
    "SimLex-999": BenchmarkFile("EN-SIMLEX-999.txt", 999),
    "Verb-143": BenchmarkFile("EN-VERB-143.txt", 144),
    "MEN": BenchmarkFile("EN-MEN-TR-3k.txt", 3_000),
    "Rare-Word": BenchmarkFile("EN-RW-STANFORD.txt", 2_034),
    "MTurk-771": BenchmarkFile("EN-MTurk-771.txt", 771),
    "MTurk-287": BenchmarkFile("EN-MTurk-287.txt", 287),
    "WordSim-353": BenchmarkFile("EN-WS-353-ALL.txt", 353),
    "WordSim-353-sim": BenchmarkFile("EN-WS-353-SIM.txt", 203),
    "WordSim-353-rel": BenchmarkFile("EN-WS-353-REL.txt", 252),
    "SimVerb-3500": BenchmarkFile("EN-SimVerb-3500.txt", 3_500),
    "RG-65": BenchmarkFile("EN-RG-65.txt", 65),
    "MC-30": BenchmarkFile("EN-MC-30.txt", 30),
    "YP-130": BenchmarkFile("EN-YP-130.txt", 130),
}
"""The published benchmarks by name: the five of Press & Wolf 2017 first, then the others."""
PRESS = ("SimLex-999", "Verb-143", "MEN", "Rare-Word", "MTurk-771")
"""The benchmarks of Press & Wolf 2017, which tables and figures show."""
