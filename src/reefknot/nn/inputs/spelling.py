"""Spellings of words as rows of UTF-8 bytes, which the character CNN reads (Baevski & Auli 2019).

    spell(["be", "<unk>"], max_bytes=3)     # [[99, 102, 0], [258, 0, 0]]

A number is a byte plus 1, or stands for a whole symbol such as `<unk>`. Zeros follow after the end of a word.

Shapes: V words, L bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.constants import END_OF_LINE, UNKNOWN

SYMBOLS = (END_OF_LINE, UNKNOWN)
"""Words whose meaning does not follow from their spelling. Each is represented by one number instead of its bytes."""
FIRST_SYMBOL = 257
"""The number of the first symbol: 0 is padding, and 1 to 256 are the bytes."""


def spell(words: Sequence[str], max_bytes: int = 50, symbols: Sequence[str] = SYMBOLS) -> Tensor:
    """Return the spellings of words, for `CharCNN`, as an int16 tensor with shape (V, L).

    A row has the UTF-8 bytes of the word, each plus 1, and zeros after the end of the word.

    Args:
        words: The words to spell.
        max_bytes: Number of columns, L. Longer words are truncated.
        symbols: Words that are not spelled. Symbol n, counted from 0, is represented by the number 257 + n.
    """
    if max_bytes < 1:
        raise SettingsError(f"max_bytes = {max_bytes}: spellings need at least 1 byte")
    symbol_numbers = {symbol: FIRST_SYMBOL + index for index, symbol in enumerate(symbols)}
    spellings_VL = np.zeros((len(words), max_bytes), dtype=np.int16)
    for spelling_L, word in zip(spellings_VL, words, strict=True):
        if word in symbol_numbers:
            spelling_L[0] = symbol_numbers[word]
        else:
            word_bytes = np.frombuffer(word.encode()[:max_bytes], dtype=np.uint8)
            spelling_L[: len(word_bytes)] = word_bytes.astype(np.int16) + 1
    return torch.from_numpy(spellings_VL)
