"""Decide whether two perplexities may be compared.

The probability of a word under a sub-word model is the product over its sub-words, so perplexities per word can be
compared even if the tokens differ. Four conditions must hold: the text is the same, both scores include line ends or
neither does, the same words are scored as <unk>, and the amount of context is similar. `difference` checks them on the
fields of two scores. A fact that is not known, as in old results, is assumed to be equal.

Losses of single tokens can be paired only if the tokens are also the same (`same_tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from reefknot.lab.runs.definition import cut
from reefknot.lab.runs.scores import ScoredText, TextScore

LONG_STREAM = 1_000
"""In a stream of at least this many tokens, the missing context at its beginning hardly affects the score."""


class Aspect(StrEnum):
    """The aspects in which two scores can differ, the most serious first."""

    TEXT = "text"
    LINE_ENDS = "line ends"
    WORDS = "words"
    UNKNOWN_WORDS = "unknown words"
    MODE = "mode"
    STREAMS = "streams"
    WINDOWS = "windows"


@dataclass(frozen=True)
class Difference:
    """The most serious difference between two scores."""

    aspect: Aspect
    here: TextScore
    there: TextScore
    prevents: bool = True
    """Whether the scores must not be compared; False if they may be, with a note about the difference."""


def difference(here: TextScore, there: TextScore, *, paired: bool = False) -> Difference | None:
    """Return the most serious known difference between two scores, or None if there is no known difference.

    Args:
        here: The first score.
        there: The score that it is compared with.
        paired: Whether losses are compared token by token. If so, a different number of streams prevents the
            comparison, because more streams mean less context. In a table, it does so only if streams are short.
    """
    ours, theirs = _facts(here), _facts(there)
    for aspect in Aspect:
        if any(_unequal(*facts) for facts in zip(ours[aspect], theirs[aspect], strict=True)):
            return Difference(aspect, here, there, _prevents(aspect, here, there, paired=paired))
    return None


def same_tokens(here: TextScore, there: TextScore) -> bool:
    """Return whether two scores are known to be of the same tokens."""
    ours, theirs = here.text, there.text
    if ours is None or theirs is None or not ours.complete:
        return False
    return (ours.sha256, ours.vocabulary_sha256) == (theirs.sha256, theirs.vocabulary_sha256)


def in_table(difference: Difference, name: str) -> str:
    """Explain a difference between a row of a table and the row `name`, for readers of the table."""
    aspect, here, there = difference.aspect, difference.here, difference.there
    if aspect is Aspect.TEXT:
        if here.bytes is not None and there.bytes is not None and here.bytes != there.bytes:
            return f"the text has {here.bytes:,} bytes here, {there.bytes:,} in {name}"
        return f"the text differs from the text of {name}"
    if aspect is Aspect.LINE_ENDS:
        scored = here.text is not None and here.text.line_ends
        return f"line ends are scored here, not in {name}" if scored else f"line ends are scored in {name}, not here"
    if aspect is Aspect.WORDS:
        return f"{here.words:,} words and line ends scored here, {there.words:,} in {name}"
    if aspect is Aspect.UNKNOWN_WORDS:
        ours, theirs = _unknown(here), _unknown(there)
        if ours == theirs:
            return f"{_number(ours, 'no')} unknown words scored as <unk> here, but other words than in {name}"
        return f"{_number(ours, 'no')} unknown words scored as <unk> here, {_number(theirs, 'none')} in {name}"
    if aspect is Aspect.MODE:
        return f"evaluation mode {_mode(here)} here, {_mode(there)} in {name}"
    return f"context differs: here {cut(here)}; in {name} {cut(there)}"


def in_comparison(difference: Difference, split: str) -> str:
    """Explain a difference between two runs that are compared, and suggest what to do about it."""
    aspect, here, there = difference.aspect, difference.here, difference.there
    if aspect in (Aspect.TEXT, Aspect.WORDS):
        return f"their {split} texts differ; compare runs of the same corpus"
    if aspect is Aspect.LINE_ENDS:
        return "one scores line ends, the other does not; compare runs with the same vocabulary.end_of_line"
    if aspect is Aspect.UNKNOWN_WORDS:
        ours, theirs = (f"{_unknown(score) or 0:,}" for score in (here, there))
        against = f"against {theirs}" if ours != theirs else "but other words"
        return (
            f"{ours} unknown words, scored as <unk>, {against}; "
            "compare runs whose vocabularies know the same words (vocabulary.min_count, max_size, bpe)"
        )
    if aspect is Aspect.MODE:
        return f"their evaluation modes are {_mode(here)} and {_mode(there)}; compare runs with the same mode"
    if aspect is Aspect.STREAMS:
        return f"scored in {here.streams} and in {there.streams} streams; train both with the same evaluation.streams"
    return f"scored with different context: {here.windows or 'one stream'} and {there.windows or 'one stream'}"


def _facts(score: TextScore) -> dict[Aspect, tuple[object | None, ...]]:
    """Return the facts that are compared, by aspect. A fact that is not known is None."""
    text = score.text or ScoredText(split="")
    return {
        Aspect.TEXT: (score.bytes, text.sha256),
        Aspect.LINE_ENDS: (text.line_ends,),
        Aspect.WORDS: (score.words,),
        Aspect.UNKNOWN_WORDS: (text.unknown, text.unknown_sha256),
        Aspect.MODE: (_mode(score),),
        Aspect.STREAMS: (score.streams,),
        Aspect.WINDOWS: (None if score.streams is None else score.windows or "",),
    }


def _prevents(aspect: Aspect, here: TextScore, there: TextScore, *, paired: bool) -> bool:
    if aspect not in (Aspect.STREAMS, Aspect.WINDOWS):
        return True
    if paired:
        return aspect is Aspect.STREAMS
    return not all(score.tokens >= LONG_STREAM * (score.streams or 1) for score in (here, there))


def _unequal(here: object | None, there: object | None) -> bool:
    return None not in (here, there) and here != there


def _unknown(score: TextScore) -> int | None:
    return score.text.unknown if score.text else None


def _number(count: int | None, none: str) -> str:
    return f"{count:,}" if count else none


def _mode(score: TextScore) -> str:
    return score.mode.kind if score.mode else "plain"
