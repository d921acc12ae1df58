"""How words are written: a row of UTF-8 bytes each, for an input end that reads them (Baevski & Auli 2019).

Shapes: V words, L bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.inputs.symbols import END_OF_LINE, UNKNOWN

SYMBOLS = (END_OF_LINE, UNKNOWN)
"""Words that stand for something other than their spelling."""
FIRST_SYMBOL = 257
"""The number of the first symbol: 0 is padding, 1 to 256 are the bytes."""


def spell(words: Sequence[str], max_bytes: int = 50, symbols: Sequence[str] = SYMBOLS) -> Tensor:
    """Spellings as int16, s_VL: each byte + 1, cut at `max_bytes`, zeros beyond the end of the word.

    The n-th symbol is not spelled: it has the one number `FIRST_SYMBOL` + n.
    """
    if max_bytes < 1:
        raise SettingsError(f"spellings of at most {max_bytes} bytes say nothing; give max_bytes at least 1")
    spelled_VL = np.zeros((len(words), max_bytes), dtype=np.int16)
    numbers = {symbol: FIRST_SYMBOL + index for index, symbol in enumerate(symbols)}
    for row, word in zip(spelled_VL, words, strict=True):
        if word in numbers:
            row[0] = numbers[word]
        else:
            written = np.frombuffer(word.encode()[:max_bytes], dtype=np.uint8)
            row[: len(written)] = written.astype(np.int16) + 1
    return torch.from_numpy(spelled_VL)
