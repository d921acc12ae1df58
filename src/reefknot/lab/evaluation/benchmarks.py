"""Names, files and sizes of the word-similarity benchmarks, which reports and recipes read without numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """The file name of a benchmark and its number of word pairs."""

    file: str
    pairs: int


BENCHMARKS: Mapping[str, Published] = {
    "SimLex-999": Published("EN-SIMLEX-999.txt", 999),
    "Verb-143": Published("EN-VERB-143.txt", 144),
    "MEN": Published("EN-MEN-TR-3k.txt", 3_000),
    "Rare-Word": Published("EN-RW-STANFORD.txt", 2_034),
    "MTurk-771": Published("EN-MTurk-771.txt", 771),
    "MTurk-287": Published("EN-MTurk-287.txt", 287),
    "WordSim-353": Published("EN-WS-353-ALL.txt", 353),
    "WordSim-353-sim": Published("EN-WS-353-SIM.txt", 203),
    "WordSim-353-rel": Published("EN-WS-353-REL.txt", 252),
    "SimVerb-3500": Published("EN-SimVerb-3500.txt", 3_500),
    "RG-65": Published("EN-RG-65.txt", 65),
    "MC-30": Published("EN-MC-30.txt", 30),
    "YP-130": Published("EN-YP-130.txt", 130),
}
"""The benchmarks of Press & Wolf first, then the others."""
PRESS = ("SimLex-999", "Verb-143", "MEN", "Rare-Word", "MTurk-771")
"""The benchmarks of Press & Wolf, which tables and figures show."""
