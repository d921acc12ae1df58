"""May two perplexities be compared?

The probability of a word under a model of pieces of words is the product over its pieces, so perplexities per word
compare whatever the tokens are: on one text, with its line ends scored or not, with the same words scored as <unk>, and
with a like amount of context. `difference` decides that from the fields of two scores. A fact that is not known, as in
old results, is taken to be the same.

Losses of single tokens can be paired only where the tokens are the same too (`same_tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from reefknot.lab.runs.definition import cut
from reefknot.lab.runs.scores import ScoredText, TextScore

LONG_STREAM = 1_000
"""Tokens of a stream that hardly notice that it began without context."""


class Aspect(StrEnum):
    """In what two scores differ, the most serious first."""

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
    """False if the figures may be compared with the difference in mind."""


def difference(here: TextScore, there: TextScore, *, paired: bool = False) -> Difference | None:
    """Return the most serious known difference between two scores, or None if there is none.

    Args:
        paired: whether losses are to be compared token by token. Then any other number of streams prevents it, because
            more streams leave less context. In a table it does so only where the streams are short.
    """
    ours, theirs = _facts(here), _facts(there)
    for aspect in Aspect:
        if any(_unequal(*facts) for facts in zip(ours[aspect], theirs[aspect], strict=True)):
            return Difference(aspect, here, there, _prevents(aspect, here, there, paired=paired))
    return None


def same_tokens(here: TextScore, there: TextScore) -> bool:
    """Whether two scores are known to be of the same tokens."""
    one, other = here.text, there.text
    if one is None or other is None or not one.complete:
        return False
    return (one.sha256, one.vocabulary_sha256) == (other.sha256, other.vocabulary_sha256)


def in_table(difference: Difference, name: str) -> str:
    """Explain a difference to readers of a table: this row against the row `name`."""
    aspect, here, there = difference.aspect, difference.here, difference.there
    if aspect is Aspect.TEXT:
        if here.bytes is not None and there.bytes is not None and here.bytes != there.bytes:
            return f"a text of {here.bytes:,} bytes here, of {there.bytes:,} in {name}"
        return f"not the text of {name}"
    if aspect is Aspect.LINE_ENDS:
        scored = here.text is not None and here.text.line_ends
        return f"line ends are scored here, not in {name}" if scored else f"line ends are scored in {name}, not here"
    if aspect is Aspect.WORDS:
        return f"{here.words:,} words and line ends scored here, {there.words:,} in {name}"
    if aspect is Aspect.UNKNOWN_WORDS:
        ours, theirs = _unknown(here), _unknown(there)
        if ours == theirs:
            return f"{_number(ours, 'no')} unknown words scored as <unk> here, but not the same ones as in {name}"
        return f"{_number(ours, 'no')} unknown words scored as <unk> here, {_number(theirs, 'none')} in {name}"
    if aspect is Aspect.MODE:
        return f"scored by {_mode(here)} here, by {_mode(there)} in {name}"
    return f"scored in {cut(here)} here, in {cut(there)} in {name}"


def in_comparison(difference: Difference, split: str) -> str:
    """Explain a difference to someone who compares two runs, and say what to do about it."""
    aspect, here, there = difference.aspect, difference.here, difference.there
    if aspect in (Aspect.TEXT, Aspect.WORDS):
        return f"their {split} texts differ; compare runs of one corpus"
    if aspect is Aspect.LINE_ENDS:
        return "one scores the ends of lines, the other does not; compare runs with the same vocabulary.end_of_line"
    if aspect is Aspect.UNKNOWN_WORDS:
        ours, theirs = (f"{_unknown(score) or 0:,}" for score in (here, there))
        against = f"against {theirs}" if ours != theirs else "but not the same words"
        return (
            f"{ours} unknown words, scored as <unk>, {against}; "
            "compare runs whose vocabularies know the same words (vocabulary.min_count, max_size, bpe)"
        )
    if aspect is Aspect.MODE:
        return f"scored by {_mode(here)} and by {_mode(there)}; compare runs that are scored in one mode"
    if aspect is Aspect.STREAMS:
        return f"scored in {here.streams} and in {there.streams} streams; train both with one evaluation.streams"
    return f"scored with other context, {here.windows or 'one stream'} and {there.windows or 'one stream'}"


def _facts(score: TextScore) -> dict[Aspect, tuple[object | None, ...]]:
    """What decides, by aspect; None where it is not known."""
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
