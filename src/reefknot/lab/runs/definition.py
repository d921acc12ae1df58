"""Format a perplexity, and describe in words how it was measured.

`describe_score` makes the description from the fields of a score (`scores.py`). It is stored in result.json under the
key `definition`, for people who read the file. No code parses it. Its first lines are, for example:

    perplexity = exp(total negative log-likelihood / tokens), natural logarithm, temperature 1
    tokens: 82,430 scored once each, of 82,430 in the test text
    context: one stream; the state is empty at its start and is carried to its end; <eos> precedes ...

Details that an old result does not have are left out. Reports use this module, so it does not import torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reefknot.lab.runs.scores import Cache, Dynamic, MonteCarlo, ScoredText, TextScore

_MAX_LOSS = 700.0
"""exp() overflows a little above this."""
MAX_UNKNOWN_SHARE = 0.05
"""If the share of unknown words is larger, a warning is printed."""
BITS_PER_UNPREDICTED_BYTE = 8
"""What bits per byte charge for a byte that no token predicts: the cost of a uniform choice among all bytes."""


def perplexity(nll: float) -> float:
    """Return the perplexity, exp(nll), of a mean negative log-likelihood. It is clamped so that it is finite."""
    return math.exp(min(nll, _MAX_LOSS))


def format_perplexity(perplexity: float) -> str:
    """Return a readable form of a perplexity. A very large perplexity is rounded to two digits."""
    if perplexity >= math.exp(_MAX_LOSS):
        return ">1e304"
    if perplexity >= 1e7:
        return f"{perplexity:.1e}"
    return f"{perplexity:,.2f}"


def format_unknown_share(share: float | None) -> str:
    """Return a readable form of the share of unknown words, such as "4.8 %"."""
    if share is None:
        return "not recorded"
    if share == 0:
        return "0 %"
    if share < 0.0005:
        return "<0.1 %"
    return f"{share:.1%}".replace("%", " %")


def describe_unknown_share(share: float | None) -> str:
    """Describe the share of unknown words in a few words, to be printed next to a perplexity."""
    if share is None:
        return "unknown words not recorded"
    return f"{format_unknown_share(share)} unknown words"


def warn_of_unknown_words(share: float | None, split: str, *, subwords: bool) -> str | None:
    """Return a warning if so many words of a split are unknown that its perplexity is misleading; otherwise None.

    Args:
        share: The share of unknown words, if it is known.
        split: Name of the text.
        subwords: Whether the tokens are sub-words. If so, a word is unknown because of its characters.
    """
    if share is None or share <= MAX_UNKNOWN_SHARE:
        return None
    warning = f"warning: {format_unknown_share(share)} of the words of the {split} text are unknown and scored as <unk>"
    if subwords:
        return (
            f"{warning}, such as words with characters that are not in the training text; compare this perplexity only "
            "with models that have the same unknown words, or compare bits per byte, which charge 8 bits for each "
            "unknown byte"
        )
    return (
        f"{warning}, which is easier to predict than a word; compare this perplexity only with models that have the "
        "same unknown words; sub-words (vocabulary.bpe) have fewer"
    )


def format_count_range(start: int, end: int | None) -> str:
    """Format a range of training counts for tables and plots, such as "10-99" or "10,000+" if there is no end."""
    if end is None:
        return f"{start:,}+"
    if start == end:
        return f"{start:,}"
    return f"{start:,}-{end:,}"


def describe_score(score: TextScore) -> str:
    """Describe the tokens that a perplexity was measured over, and how it was computed."""
    lines = [
        "perplexity = exp(total negative log-likelihood / tokens), natural logarithm, temperature 1",
        _describe_tokens(score),
        describe_context(score),
        _describe_special_tokens(score),
        _describe_units(score),
        _describe_computation(score),
    ]
    return "\n".join(line for line in lines if line)


def describe_context(score: TextScore) -> str:
    """Describe the context in which tokens are scored. The string is empty if the context is not known."""
    context = describe_division(score)
    if not context:
        return ""
    if score.pairs is not None:
        context += ", each computed independently, target tokens given the source and the target tokens before them"
    elif score.windows is not None:
        from reefknot.lab.runs.modes import describe_windows_in_full

        context = describe_windows_in_full(score.windows)
    elif score.streams == 1:
        context += "; the state is empty at its start and is carried to its end"
    else:
        context += "; each starts with an empty state, which is carried to its end"
    return f"context: {context}{_describe_first_token(score.text)}"


def describe_division(score: TextScore) -> str:
    """Describe the parts that a text was divided into: pairs, windows, or streams (contiguous parts of the text).

    The description is empty if the parts are not known.
    """
    if score.pairs is not None:
        return f"{score.pairs:,} pairs"
    if score.windows is not None:
        from reefknot.lab.runs.modes import describe_windows

        return describe_windows(score.windows)
    if score.streams is None:
        return ""
    if score.streams == 1:
        return "one stream"
    return f"{score.streams:,} contiguous streams"


def _describe_first_token(text: ScoredText | None) -> str:
    """Describe whether the first token of a text is scored. The string is empty if this is not known."""
    if text is None or text.line_ends is None:
        return ""
    if text.line_ends:
        return "; <eos> precedes the first token, and every token is scored"
    return "; the first token is not scored, because it has no context"


def _describe_tokens(score: TextScore) -> str:
    """Describe how many tokens are scored, and how many tokens the text has."""
    text = score.text
    if text is None or text.tokens is None:
        if not score.tokens:
            return ""
        return f"tokens: {score.tokens:,} scored once each"
    return f"tokens: {score.tokens:,} scored once each, of {text.tokens:,} in the {text.split} text"


def _describe_special_tokens(score: TextScore) -> str:
    """Describe how unknown words (<unk>) and line ends (<eos>) are scored."""
    text = score.text
    if text is None:
        return ""
    details = []
    if text.unknown:
        share = ""
        if score.unknown_share is not None:
            share = f" ({format_unknown_share(score.unknown_share)} of the words and line ends)"
        details.append(f"unknown words: {text.unknown:,} here{share}, scored as the token <unk>")
    elif text.unknown is not None:
        details.append("unknown words: none in this text")
    if text.line_ends is not None:
        if text.line_ends:
            details.append("end of line: every line ends with the token <eos>, which is scored")
        else:
            details.append("end of line: line ends are not tokens")
    return "; ".join(details)


def _describe_units(score: TextScore) -> str:
    """Describe the words and the bytes that the total loss is divided by."""
    details = []
    text = score.text
    if score.words is not None:
        units = "words and line ends"
        if text and text.line_ends is False:
            units = "words"
        if text and text.tokenisation == "pieces":
            units += (
                f" in {score.tokens:,} sub-words; the probability of a word is the product of the probabilities of its "
                "sub-words"
            )
        details.append(f"word perplexity: the same total over {score.words:,} {units}")
    if score.bytes is not None and score.fair_bits_per_byte is not None:
        details.append(f"bits per byte: over {score.bytes:,} bytes of UTF-8 text{_describe_charge(score)}")
    return "; ".join(details)


def _describe_charge(score: TextScore) -> str:
    """Describe what bits per byte charge for bytes that no token predicts."""
    if not score.unpredicted_bytes:
        return ""
    return (
        f", of which {score.unpredicted_bytes:,} that no token predicts (of unknown words and additional white space) "
        f"are charged with {BITS_PER_UNPREDICTED_BYTE} bits each"
    )


def _describe_computation(score: TextScore) -> str:
    """Describe the precision and the mode of evaluation. For plain scores, state what they do not depend on."""
    mode = score.mode
    details = []
    if score.precision:
        details.append(f"computed in {score.precision}")
    if mode is None or mode.kind == "cache":
        details.append(_describe_invariance(score))
    elif mode.kind == "dynamic":
        details.append(_describe_dynamic(mode) + _describe_plain_score(score))
    else:
        details.append(_describe_monte_carlo(mode) + _describe_plain_score(score))

    lines = ["; ".join(details)]
    if mode is not None and mode.kind == "cache":
        lines.append(_describe_cache(mode) + _describe_plain_score(score))
    return "\n".join(lines)


def _describe_invariance(score: TextScore) -> str:
    """Describe what the score does not depend on."""
    if score.pairs is not None:
        return "independent of which pairs are computed together"
    if score.windows is None:
        return "independent of how the text is divided into windows"
    return "independent of how windows are computed together"


def _describe_plain_score(score: TextScore) -> str:
    """Describe the perplexity without the mode, and whether it is better than the perplexity with it."""
    mode = score.mode
    if mode is None or mode.plain is None:
        return ""
    mechanism = "dropout" if mode.kind == "mc" else "it"
    description = f"; without {mechanism}: perplexity {format_perplexity(mode.plain)}"
    if mode.plain < score.perplexity:
        description += ", which is better"
    return description


def _describe_dynamic(mode: Dynamic) -> str:
    statistics = ""
    if mode.gradients is not None:
        statistics = f"; statistics of {mode.gradients:,} gradients of the training text without dropout"
    return (
        f"dynamic evaluation: segments of {mode.segment} tokens are scored, then trained on, so the score depends on "
        f"the segments; eta {mode.eta:.4g}, lambda {mode.decay:.4g}, epsilon {mode.epsilon:.4g} on the scale "
        f"{mode.scale!r}{statistics}"
    )


def _describe_cache(mode: Cache) -> str:
    used_from = "from the start" if mode.fill == "partial" else "only once the cache is full"
    return (
        f"continuous cache: weight {mode.weight:.4g}, theta {mode.theta:.4g}, over the last {mode.window:,} positions, "
        f"used {used_from}"
    )


def _describe_monte_carlo(mode: MonteCarlo) -> str:
    if not mode.drops:
        return "Monte-Carlo dropout: this model has no dropout, so there is one pass, and the score is the plain score"
    mask_unit = f"{mode.window:,} tokens" if mode.window else "window"
    single_passes = ""
    if mode.lowest is not None and mode.highest is not None:
        single_passes = (
            f"; individual passes: perplexity {format_perplexity(mode.lowest)} to {format_perplexity(mode.highest)}"
        )
    passes = f"{mode.passes:,} passes" if mode.passes > 1 else f"{mode.passes:,} pass"
    return (
        f"Monte-Carlo dropout: mean probability of {passes}, masks drawn for every {mask_unit} (seed {mode.seed}), "
        f"so the score depends on both{single_passes}"
    )
