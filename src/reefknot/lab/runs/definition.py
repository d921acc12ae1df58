"""Format a perplexity, and describe in words how it was measured, from the fields of its score.

No code parses the description. Facts that an old result does not have are left out. Reports use this module, so it does
not import torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reefknot.lab.runs.scores import Cache, Dynamic, MonteCarlo, ScoredText, TextScore

_MAX_LOSS = 700.0
"""exp() overflows a little above this."""


def perplexity(nll: float) -> float:
    """Return exp of a mean loss, clamped so that it is finite."""
    return math.exp(min(nll, _MAX_LOSS))


def shown(perplexity: float) -> str:
    """Format a perplexity for people. A very large perplexity is rounded to two digits."""
    if perplexity >= math.exp(_MAX_LOSS):
        return ">1e304"
    return f"{perplexity:,.2f}" if perplexity < 1e7 else f"{perplexity:.1e}"


def seen(low: int, high: int | None) -> str:
    """Format a band of training counts for tables and plots, such as "10-99" or "10,000+"."""
    return f"{low:,}" if low == high else f"{low:,}+" if high is None else f"{low:,}-{high:,}"


def define(score: TextScore) -> str:
    """Describe the tokens that a perplexity was measured over, and how it was computed."""
    lines = [
        "perplexity = exp(total negative log-likelihood / tokens), natural logarithm, temperature 1",
        _tokens(score),
        context(score),
        _special_tokens(score.text),
        _units(score),
        _computation(score),
    ]
    return "\n".join(line for line in lines if line)


def context(score: TextScore) -> str:
    """Describe the context in which tokens are scored. The string is empty if the context is not known."""
    parts = cut(score)
    if not parts:
        return ""
    if score.pairs is not None:
        parts += ", each computed independently, target tokens given the source and the target tokens before them"
    elif score.windows is not None:
        from reefknot.lab.runs.modes import windows_in_full

        parts = windows_in_full(score.windows)
    else:
        parts += f"{', each' * (score.streams != 1)} from an empty state that is carried to its end"
    return f"context: {parts}{_start(score.text)}"


def cut(score: TextScore) -> str:
    """Describe the parts that a text was divided into. The description is empty if they are not known."""
    if score.pairs is not None:
        return f"{score.pairs:,} pairs"
    if score.windows is not None:
        from reefknot.lab.runs.modes import window_description

        return window_description(score.windows)
    if score.streams is None:
        return ""
    return "one stream" if score.streams == 1 else f"{score.streams:,} contiguous streams"


def _start(text: ScoredText | None) -> str:
    if text is None or text.line_ends is None:
        return ""
    if text.line_ends:
        return "; <eos> precedes the first token, and every token is scored"
    return "; the first token is not scored, because it has no context"


def _tokens(score: TextScore) -> str:
    text = score.text
    if text is None or text.tokens is None:
        return f"tokens: {score.tokens:,} scored once each" if score.tokens else ""
    return f"tokens: {score.tokens:,} scored once each, of {text.tokens:,} in the {text.split} text"


def _special_tokens(text: ScoredText | None) -> str:
    if text is None:
        return ""
    facts = []
    if text.unknown is not None:
        count = f"{text.unknown:,} here, scored as the token <unk>" if text.unknown else "none in this text"
        facts.append(f"unknown words: {count}")
    if text.line_ends is not None:
        scored = "every line ends with the token <eos>, which is scored"
        facts.append(f"end of line: {scored if text.line_ends else 'line ends are not tokens'}")
    return "; ".join(facts)


def _units(score: TextScore) -> str:
    facts = []
    text = score.text
    if score.words is not None:
        counted = "words" if text and text.line_ends is False else "words and line ends"
        if text and text.tokenisation == "pieces":
            counted += f" in {score.tokens:,} sub-words; the probability of a word is the product over its sub-words"
        facts.append(f"word perplexity: the same total over {score.words:,} {counted}")
    if score.bytes is not None:
        facts.append(f"bits per byte: over {score.bytes:,} bytes of UTF-8 text, unknown words included")
    return "; ".join(facts)


def _computation(score: TextScore) -> str:
    """Describe the precision and the mode of evaluation. For plain scores, state what they do not depend on."""
    precision = [f"computed in {score.precision}"] if score.precision else []
    mode = score.mode
    if mode is None:
        facts = [_invariance(score)]
    elif mode.kind == "cache":
        return "\n".join(["; ".join([*precision, _invariance(score)]), _cache(mode) + _without(score)])
    elif mode.kind == "dynamic":
        facts = [_dynamic(mode) + _without(score)]
    else:
        facts = [_monte_carlo(mode) + _without(score)]
    return "; ".join([*precision, *facts])


def _invariance(score: TextScore) -> str:
    if score.pairs is not None:
        return "independent of which pairs are computed together"
    divided = "the text is divided into windows" if score.windows is None else "windows are computed together"
    return f"independent of how {divided}"


def _without(score: TextScore) -> str:
    """Describe the perplexity without the mode, and whether it is better."""
    mode = score.mode
    if mode is None or mode.plain is None:
        return ""
    mechanism = "dropout" if mode.kind == "mc" else "it"
    better = ", which is better" if mode.plain < score.perplexity else ""
    return f"; without {mechanism}: perplexity {shown(mode.plain)}{better}"


def _dynamic(mode: Dynamic) -> str:
    statistics = ""
    if mode.gradients is not None:
        statistics = f"; statistics of {mode.gradients:,} gradients of the training text without dropout"
    return (
        f"dynamic evaluation: segments of {mode.segment} tokens are scored, then trained on, so the score depends on "
        f"the segments; eta {mode.eta:.4g}, lambda {mode.decay:.4g}, epsilon {mode.epsilon:.4g} on the scale "
        f"{mode.scale!r}{statistics}"
    )


def _cache(mode: Cache) -> str:
    since = "from the start" if mode.fill == "partial" else "only once the cache is full"
    return (
        f"continuous cache: weight {mode.weight:.4g}, theta {mode.theta:.4g}, over the last {mode.window:,} positions, "
        f"used {since}"
    )


def _monte_carlo(mode: MonteCarlo) -> str:
    if not mode.drops:
        return "Monte-Carlo dropout: this model has no dropout, so there is one pass, and the score is the plain score"
    masks = f"{mode.window:,} tokens" if mode.window else "window"
    alone = ""
    if mode.lowest is not None and mode.highest is not None:
        alone = f"; single passes: perplexity {shown(mode.lowest)} to {shown(mode.highest)}"
    return (
        f"Monte-Carlo dropout: mean probability of {mode.passes:,} pass{'es' * (mode.passes > 1)}, masks drawn for "
        f"every {masks} (seed {mode.seed}), so the score depends on both{alone}"
    )
