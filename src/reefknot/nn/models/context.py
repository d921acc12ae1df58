"""How much of a text a model reads to generate the next token."""

from __future__ import annotations


def context_length(num_tokens: int, window: int | None) -> int:
    """Return how many of the last tokens of a text are read to generate the next token.

    A transformer has learned only positions up to the length of its training samples. So its context is limited to a
    window. When a text outgrows the window, the context starts again with the last half window. With window = 4:

        tokens of the text    1  2  3  4  5  6  7  8  9
        context               1  2  3  4  2  3  4  2  3

    The context depends only on the length of the text. So it is the same whether the text is read at once or token by
    token, with a KV cache.

    Args:
        num_tokens: Number of tokens of the text, at least 1.
        window: Maximum number of tokens. None, as for recurrent encoders, stands for the whole text.
    """
    if window is None or num_tokens <= window:
        return num_tokens
    half_window = max(1, window // 2)
    return half_window + (num_tokens - window - 1) % (window - half_window + 1)
