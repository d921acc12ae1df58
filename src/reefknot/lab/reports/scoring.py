"""What a perplexity was counted over, and whether two of them may stand side by side.

A word's probability under a model of pieces of words is the product over its pieces, so perplexities per word compare
whatever the tokens are: on one text, with its line ends scored or not, with the same words scored as <unk>.
"""

from __future__ import annotations

import re

from reefknot.lab.reports.records import Score
from reefknot.lab.reports.results import Result, flatten

_LONG = 1_000
"""Tokens of a stream that hardly notice that it began without context."""


def pieces(score: Score) -> float:
    """Tokens per word: 1 where the tokens are the words."""
    return score.tokens / score.words if score.words else 1.0


def pieces_in_validation(result: Result) -> float | None:
    """Tokens per word of the validation text; None where words are cut and no record says into how many."""
    if result.record and result.record.valid:
        return pieces(result.record.valid)
    return None if cuts_words(result) else 1.0


def cuts_words(result: Result) -> bool:
    """Whether the tokens of a run are pieces of words."""
    return flatten(result.settings).get("vocabulary.bpe.merges") is not None


def obstacle(here: Score, there: Score, name: str) -> str | None:
    """Why a perplexity cannot be compared with the one of the row `name`, in words; None where it can."""
    if _differ(here.bytes, there.bytes):
        return f"a text of {here.bytes:,} bytes here, of {there.bytes:,} in {name}"
    if _differ(here.words, there.words):
        return f"{here.words:,} words and line ends scored here, {there.words:,} in {name}"
    unknown, elsewhere = _unknown(here), _unknown(there)
    if _differ(unknown, elsewhere):
        return f"{_number(unknown, 'no')} unknown words scored as <unk> here, {_number(elsewhere, 'none')} in {name}"
    return None if _long_streams(here) and _long_streams(there) else reservation(here, there, name)


def reservation(here: Score, there: Score, name: str) -> str | None:
    """What is not alike in two perplexities, though they may be compared."""
    if _differ(_cut(here), _cut(there)):
        return f"scored in {_cut(here)} here, in {_cut(there)} in {name}"
    return None


def _differ(here: object | None, there: object | None) -> bool:
    """Whether both are known and not the same: an old record may not say."""
    return None not in (here, there) and here != there


def _number(count: int | None, none: str) -> str:
    return f"{count:,}" if count else none


def _unknown(score: Score) -> int | None:
    """How many words were scored as <unk>, as the definition says it."""
    found = re.search(r"^unknown words: (?:([\d,]+) here|none)", score.definition, re.MULTILINE)
    return int((found[1] or "0").replace(",", "")) if found else None


def _long_streams(score: Score) -> bool:
    """Whether hardly a token notices where a stream began; windows are no streams, and are compared as they are."""
    several = re.match(r"([\d,]+) contiguous streams", _cut(score) or "")
    return score.tokens >= _LONG * (int(several[1].replace(",", "")) if several else 1)


def _cut(score: Score) -> str | None:
    """The streams or windows that a text was scored in, as the definition says it."""
    found = re.search(r"^context: (.+?)(?: from an empty state|, each |;)", score.definition, re.MULTILINE)
    return found[1] if found else None
