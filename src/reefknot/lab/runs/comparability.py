"""Decide whether two perplexities may be compared.

    difference = find_difference(score, other)    # the most serious difference between two scores, or None
    if difference is not None and difference.prevents:
        print(explain_in_table(difference, "the row of the other score"))

The probability of a word under a sub-word model is the product of the probabilities of its sub-words, so perplexities
per word can be compared even if the tokens differ. Four conditions must hold: the text is the same, both scores include
line ends or neither does, the same words are scored as <unk>, and the amount of context is similar. A value that is not
known, as in old results, is assumed to be equal.

Losses of individual tokens can be paired only if the tokens are the same, too (`have_same_tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from reefknot.lab.runs.definition import BITS_PER_UNPREDICTED_BYTE, describe_division
from reefknot.lab.runs.scores import ScoredText, TextScore

LONG_STREAM = 1_000
"""Minimum number of tokens of a long stream. A stream is a contiguous part of a text that is read in order. In a long
stream, the missing context at the beginning hardly affects the score."""


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
    score: TextScore
    other: TextScore
    prevents: bool = True
    """Whether the scores must not be compared; False if they may be, with a note about the difference."""


def find_difference(score: TextScore, other: TextScore, *, paired: bool = False) -> Difference | None:
    """Return the most serious known difference between two scores, or None if there is no known difference.

    Args:
        score: The first score.
        other: The score that it is compared with.
        paired: Whether losses are compared token by token. If so, a different number of streams prevents the
            comparison, because more streams mean less context. In a table, it does so only if streams are short.
    """
    score_values = _compared_values(score)
    other_values = _compared_values(other)
    for aspect in Aspect:
        if _are_known_to_differ(score_values[aspect], other_values[aspect]):
            prevents = _prevents_comparison(aspect, score, other, paired=paired)
            return Difference(aspect, score, other, prevents)
    return None


def have_same_tokens(score: TextScore, other: TextScore) -> bool:
    """Return whether two scores are known to be of the same tokens."""
    text = score.text
    other_text = other.text
    if text is None or other_text is None or not text.complete:
        return False
    return text.sha256 == other_text.sha256 and text.vocabulary_sha256 == other_text.vocabulary_sha256


def explain_in_table(difference: Difference, other_row: str) -> str:
    """Explain a difference between the scores of two rows of a table, for a footnote of the first row.

    Args:
        difference: The difference between the score of the first row and the score of the other row.
        other_row: The name of the other row.
    """
    score = difference.score
    other = difference.other
    match difference.aspect:
        case Aspect.TEXT:
            if score.bytes is not None and other.bytes is not None and score.bytes != other.bytes:
                return f"the text has {score.bytes:,} bytes here, {other.bytes:,} in {other_row}"
            return f"the text differs from the text of {other_row}"
        case Aspect.LINE_ENDS:
            if score.text is not None and score.text.line_ends:
                return f"line ends are scored here, not in {other_row}"
            return f"line ends are scored in {other_row}, not here"
        case Aspect.WORDS:
            return f"{score.words:,} words and line ends scored here, {other.words:,} in {other_row}"
        case Aspect.UNKNOWN_WORDS:
            count = _unknown_words(score)
            other_count = _unknown_words(other)
            explanation = f"{_format_count(count, zero='no')} unknown words scored as <unk> here"
            if count == other_count:
                return f"{explanation}, but not the same words as in {other_row}"
            return f"{explanation}, {_format_count(other_count, zero='none')} in {other_row}"
        case Aspect.MODE:
            return f"evaluation mode {_mode_name(score)} here, {_mode_name(other)} in {other_row}"
        case Aspect.STREAMS | Aspect.WINDOWS:
            return f"context differs: here {describe_division(score)}; in {other_row} {describe_division(other)}"


def explain_in_comparison(difference: Difference, split: str) -> str:
    """Explain a difference between the scores of two runs on a split, and suggest what to do about it."""
    score = difference.score
    other = difference.other
    match difference.aspect:
        case Aspect.WORDS if _have_same_text(score, other):
            division = (
                f"they divide the same {split} text into {score.words:,} and {other.words:,} words and line ends; "
                "vocabulary.bpe.unknown=character divides words at unknown characters, so compare runs with the same "
                "characters in their training texts"
            )
            return f"{division}{_mention_bits_per_byte(score, other)}"
        case Aspect.TEXT | Aspect.WORDS:
            return f"their {split} texts differ; compare runs of the same corpus"
        case Aspect.LINE_ENDS:
            return "one scores line ends, the other does not; compare runs with the same vocabulary.end_of_line"
        case Aspect.UNKNOWN_WORDS:
            count = _unknown_words(score) or 0
            other_count = _unknown_words(other) or 0
            if count != other_count:
                contrast = f"one scores {count:,} unknown words as <unk>, the other {other_count:,}"
            else:
                contrast = f"both score {count:,} unknown words as <unk>, but not the same words"
            return (
                f"{contrast}; compare runs whose vocabularies contain the same words "
                f"(vocabulary.min_count, max_size, bpe){_mention_bits_per_byte(score, other)}"
            )
        case Aspect.MODE:
            modes = f"{_mode_name(score)} and {_mode_name(other)}"
            return f"their evaluation modes are {modes}; compare runs with the same mode"
        case Aspect.STREAMS:
            streams = f"in {score.streams} and in {other.streams} streams"
            return f"scored {streams}; train both with the same evaluation.streams"
        case Aspect.WINDOWS:
            windows = score.windows or "one stream"
            other_windows = other.windows or "one stream"
            return f"scored with different context: {windows} and {other_windows}"


def _compared_values(score: TextScore) -> dict[Aspect, tuple[object | None, ...]]:
    """Return the values that are compared, by aspect. A value that is not known is None."""
    text = score.text or ScoredText(split="")
    windows = None
    if score.streams is not None:
        windows = score.windows or ""  # "" means that the state was carried; this is a known value, unlike None
    return {
        Aspect.TEXT: (score.bytes, text.sha256),
        Aspect.LINE_ENDS: (text.line_ends,),
        Aspect.WORDS: (score.words,),
        Aspect.UNKNOWN_WORDS: (text.unknown, text.unknown_sha256),
        Aspect.MODE: (_mode_name(score),),
        Aspect.STREAMS: (score.streams,),
        Aspect.WINDOWS: (windows,),
    }


def _are_known_to_differ(values: tuple[object | None, ...], other_values: tuple[object | None, ...]) -> bool:
    """Return whether two values differ at any position where both are known."""
    for value, other_value in zip(values, other_values, strict=True):
        both_known = value is not None and other_value is not None
        if both_known and value != other_value:
            return True
    return False


def _prevents_comparison(aspect: Aspect, score: TextScore, other: TextScore, *, paired: bool) -> bool:
    """Return whether a difference in an aspect prevents the comparison. See `find_difference` for `paired`."""
    if aspect not in (Aspect.STREAMS, Aspect.WINDOWS):
        return True
    if paired:
        return aspect is Aspect.STREAMS
    return not (_has_long_streams(score) and _has_long_streams(other))


def _mention_bits_per_byte(score: TextScore, other: TextScore) -> str:
    """Return the bits per byte of two models that do not score the same words; they can be compared nevertheless."""
    bits = score.fair_bits_per_byte
    other_bits = other.fair_bits_per_byte
    if bits is None or other_bits is None:
        return ""
    return (
        f", or compare their bits per byte, {bits:.4f} and {other_bits:.4f}, which charge {BITS_PER_UNPREDICTED_BYTE} "
        "bits for each byte of an unknown word"
    )


def _have_same_text(score: TextScore, other: TextScore) -> bool:
    """Return whether two scores are known to be of the same text."""
    if score.text is None or other.text is None or score.text.sha256 is None:
        return False
    return score.text.sha256 == other.text.sha256


def _has_long_streams(score: TextScore) -> bool:
    num_streams = score.streams or 1
    return score.tokens >= LONG_STREAM * num_streams


def _unknown_words(score: TextScore) -> int | None:
    return score.text.unknown if score.text else None


def _format_count(count: int | None, zero: str) -> str:
    """Format a count, with the word `zero` if it is 0 or not known."""
    return f"{count:,}" if count else zero


def _mode_name(score: TextScore) -> str:
    return score.mode.kind if score.mode else "plain"
