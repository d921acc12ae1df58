"""A word goes in as its spelling: convolutions over its bytes (Kim et al. 2016; Baevski & Auli 2019).

Shapes: U distinct words, V all words, L bytes, C width of a byte's vector, W = C x width of a filter, F features,
D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Annotated, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Count, Dim
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.inputs.lookup import Dropout, Scale, check_scale_and_dropout
from reefknot.nn.inputs.spelling import FIRST_SYMBOL, SYMBOLS, spell

Filter = Annotated[Sequence[Count], Field(min_length=2, max_length=2)]
PAPER_FILTERS = ((1, 128), (2, 256), (3, 384), (4, 512), (5, 512), (6, 512), (7, 512))
WORDS_AT_ONCE = 1024
"""How many words `vectors` spells at a time: all of a vocabulary's windows would not fit in memory."""


class Highway(nn.Module):
    """g x + (1 - g) relu(A x + a), with the gate g = sigmoid(B x + b) (Srivastava et al. 2015).

    A and B are one matrix. The gate's bias starts at 1, so that at first most of x is carried through.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)
        with torch.no_grad():
            self.linear.bias[dim:] = 1.0

    def forward(self, x_UF: Tensor) -> Tensor:
        new_UF, gate_UF = self.linear(x_UF).chunk(2, dim=-1)
        return torch.lerp(new_UF.relu(), x_UF, gate_UF.sigmoid())


class CharCNN(InputEnd):
    """Vectors made from the bytes of a word by convolutions and highway layers; without a table.

    A window starts at each byte of the word and sees zeros beyond its end, so a word's vector depends on nothing but
    the word. The symbols of `spelling.py` have vectors of their own. There may be more spellings than classes, so that
    words unknown to the output keep theirs. Vectors of bytes and symbols and the projection start as in the authors'
    code (Xavier).
    """

    spellings: Tensor
    # It spells each distinct word of a window once, and how many there are the device alone knows.
    waits = True

    def __init__(
        self,
        spellings: Tensor,
        dim: Annotated[Dim, Field(description="width of a word's vector")],
        filters: Annotated[
            Sequence[Filter], Field(min_length=1, description="[width in bytes, features] of each convolution")
        ] = PAPER_FILTERS,
        byte_dim: Annotated[Dim, Field(description="width of a byte's vector")] = 128,
        highway: Annotated[
            int, Field(ge=0, le=256, description="highway layers; the paper has 1 on WikiText-103, 2 on Billion Word")
        ] = 1,
        scale: Scale = 1.0,
        dropout: Dropout = 0.0,
    ) -> None:
        super().__init__()
        check_scale_and_dropout("char-CNN", scale, dropout)
        _check_filters(filters)
        for name, value, least in (("dim", dim, 1), ("byte_dim", byte_dim, 1), ("highway", highway, 0)):
            if value < least:
                raise SettingsError(f"char-CNN: {name} = {value}: must be at least {least}")
        self.vocab_size = len(spellings)
        self.dim = dim
        self.scale = scale
        self.dropout = dropout
        # They follow from the vocabulary, so no checkpoint needs them; int32, because NCCL does not send int16.
        self.register_buffer("spellings", spellings.int(), persistent=False)
        self.bytes = nn.Embedding(FIRST_SYMBOL, byte_dim, padding_idx=0)
        self.widths = [width for width, _ in filters]
        self.convolutions = nn.ModuleList(nn.Conv1d(byte_dim, features, width) for width, features in filters)
        features = sum(features for _, features in filters)
        self.highway = nn.Sequential(*(Highway(features) for _ in range(highway)))
        self.projection = nn.Linear(features, dim)
        self.symbols = nn.Parameter(nn.init.xavier_normal_(torch.empty(len(SYMBOLS), dim)))
        nn.init.xavier_normal_(self.bytes.weight[1:])
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def forward(self, ids_BT: Tensor) -> Tensor:
        distinct_U, which_BT = torch.unique(ids_BT, return_inverse=True)
        words_UD = self._words(F.embedding(distinct_U, self.spellings))
        return F.dropout(self.scale * F.embedding(which_BT, words_UD), self.dropout, self.training)

    def vectors(self) -> Tensor:
        return self.scale * torch.cat([self._words(some_UL) for some_UL in torch.split(self.spellings, WORDS_AT_ONCE)])

    def spelling(self, words: Sequence[str]) -> CharCNN:
        """This end, with the same weights, that spells more words: their ids follow those of the words it has."""
        shared = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        more = deepcopy(self, shared)
        _, max_bytes = self.spellings.shape
        more.spellings = torch.cat([self.spellings, spell(words, max_bytes).to(self.spellings)])
        more.vocab_size = len(more.spellings)
        return more

    def _words(self, spelled_UL: Tensor) -> Tensor:
        """The vectors of words spelled so."""
        symbol_U = spelled_UL[:, 0] - FIRST_SYMBOL
        spelled_UD = self.projection(self.highway(self._features(spelled_UL.where(spelled_UL < FIRST_SYMBOL, 0))))
        symbol_UD = F.embedding(symbol_U.clamp(min=0), self.symbols).to(spelled_UD.dtype)
        return torch.where((symbol_U >= 0)[:, None], symbol_UD, spelled_UD)

    def _features(self, bytes_UL: Tensor) -> Tensor:
        """For each filter, its greatest response to a window that starts inside the word."""
        used_L = (bytes_UL > 0).any(dim=0)
        used_L[0] = True
        bytes_UL = bytes_UL[:, used_L]
        padding_UL = bytes_UL == 0
        # Not left to the padding row: an initialisation of the whole model draws that one too.
        x_ULC = self.bytes(bytes_UL).masked_fill(padding_UL[..., None], 0.0)
        # A word without bytes counts as one byte long: the greatest of no windows would be minus infinity.
        outside_UL = F.pad(padding_UL[:, 1:], (1, 0), value=False)
        features = []
        for width, convolution in zip(self.widths, cast(Iterable[nn.Conv1d], self.convolutions), strict=True):
            # A plain product. cuDNN prepares its convolutions for each size, and no two windows have as many words.
            windows_ULW = F.pad(x_ULC, (0, 0, 0, width - 1)).unfold(1, width, 1).flatten(2)
            found_ULF = F.linear(windows_ULW, convolution.weight.flatten(1), convolution.bias)
            features.append(found_ULF.masked_fill(outside_UL[..., None], -torch.inf).max(dim=1).values.relu())
        return torch.cat(features, dim=-1)


def _check_filters(filters: Sequence[Sequence[int]]) -> None:
    if not filters:
        raise SettingsError("char-CNN: filters is empty: give at least one [width in bytes, features]")
    for each in filters:
        if len(each) != 2 or min(each) < 1:
            raise SettingsError(
                f"char-CNN: filters has {list(each)}: each must be [width in bytes, features], both at least 1"
            )
