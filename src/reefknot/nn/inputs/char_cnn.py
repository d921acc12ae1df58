"""Character CNN: computes word vectors from the bytes of a word (Kim et al. 2016; Baevski & Auli 2019).

Start reading at `CharCNN`, an input end (a module that turns word ids into vectors). A word passes through these steps:

    bytes -> byte vectors -> convolutions of several widths, maximum over the word -> highway layers -> projection

Shapes: B streams (rows of a batch), T steps, N tokens, U distinct words, V all words, L bytes of a word, C dimensions
of a byte's vector, W = C x the width of a filter, F features, D dimensions of a word's vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Count, Dim, Ge, Le, Length, Positive, Probability, check_sizes
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.inputs.lookup import check_scale_and_dropout
from reefknot.nn.inputs.spelling import FIRST_SYMBOL, SYMBOLS, spell
from reefknot.nn.part import FLOPS_PER_WEIGHT, count_matrix_weights

Filter = Annotated[Sequence[Count], Length(2, 2)]
"""A convolution: its width in bytes and its number of features."""
Filters = Annotated[Sequence[Filter], Length(1)]
HighwayLayers = Annotated[int, Ge(0), Le(256)]
PAPER_FILTERS = ((1, 128), (2, 256), (3, 384), (4, 512), (5, 512), (6, 512), (7, 512))
"""Width in bytes and number of features of each convolution of Baevski & Auli (2019)."""
WORDS_PER_CHUNK = 1024
"""Number of words that `vectors` computes at a time, because a whole vocabulary would not fit in memory."""


class Highway(nn.Module):
    """Highway layer (Srivastava et al. 2015), which mixes its input x with a transformed input by a gate g:

        g = sigmoid(B x + b)
        output = g x + (1 - g) relu(A x + a)

    A and B are stored as one matrix, which starts from Xavier's normal distribution. The bias of the gate starts at 1,
    so that most of x is carried through at first.

    Args:
        dim: Dimension of the input and the output.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)
        nn.init.xavier_normal_(self.linear.weight)
        with torch.no_grad():
            self.linear.bias[:dim] = 0.0
            self.linear.bias[dim:] = 1.0

    def forward(self, features_UF: Tensor) -> Tensor:
        """Return the gated sum of the input and the transformed input."""
        transformed_UF, gate_UF = self.linear(features_UF).chunk(2, dim=-1)
        return torch.lerp(transformed_UF.relu(), features_UF, gate_UF.sigmoid())


class CharCNN(InputEnd):
    """An input end that computes word vectors from the bytes of a word, by convolutions and highway layers.

    It does not have a word table. A filter is applied at each byte of the word and reads zeros after the end of the
    word, so a word's vector depends on the word only. Symbols such as `<eos>` (see `spelling.py`) have learned vectors.
    Words that the model reads but cannot predict also have spellings, so there may be more spellings than classes. All
    weights are initialised as in the authors' code: by Xavier, except the convolutions, which start as in torch.

    Args:
        spellings: Spellings of all words, with shape (V, L), as `spell` returns them.
        dim: Dimension of the word vectors, D.
        filters: For each convolution, its width in bytes and its number of features.
        byte_dim: Dimension of the byte vectors, C.
        highway: Number of highway layers. The paper uses 1 on WikiText-103 and 2 on Billion Word.
        scale: Factor of every vector, often the square root of the model's dimension.
        dropout: Dropout rate of the elements of the resulting vectors.
        padding_windows: As in the authors' code, apply a filter at each place of the padded spelling where it fits. So
            the maximum includes windows of padding alone, whose response is the filter's bias. No filter may be wider
            than the spellings.
    """

    # `forward` makes the host wait for the GPU: it computes each distinct word of a batch once, and the number of
    # distinct words is known only on the GPU.
    synchronizes = True

    def __init__(
        self,
        spellings: Tensor,
        dim: Dim,
        filters: Filters = PAPER_FILTERS,
        byte_dim: Dim = 128,
        highway: HighwayLayers = 1,
        scale: Positive = 1.0,
        dropout: Probability = 0.0,
        padding_windows: bool = False,
    ) -> None:
        super().__init__()
        check_scale_and_dropout("char-CNN", scale, dropout)
        _check_filters(filters)
        if padding_windows:
            _check_widths(filters, spellings.shape[1])
        check_sizes("char-CNN", dim=dim, byte_dim=byte_dim)
        if highway < 0:
            raise SettingsError(f"char-CNN: highway = {highway}: must be at least 0")
        self._spellings = _SpellingTable(spellings)
        self.vocab_size = len(spellings)
        self.dim = dim
        self.scale = scale
        self.dropout = dropout
        self.padding_windows = padding_windows
        self.bytes = nn.Embedding(FIRST_SYMBOL, byte_dim, padding_idx=0)
        self.filter_widths = [width for width, _ in filters]
        self.convolutions = nn.ModuleList(nn.Conv1d(byte_dim, features, width) for width, features in filters)
        total_features = sum(features for _, features in filters)
        num_highway_layers = highway
        self.highway = nn.Sequential(*(Highway(total_features) for _ in range(num_highway_layers)))
        self.projection = nn.Linear(total_features, dim)
        self.symbols = nn.Parameter(nn.init.xavier_normal_(torch.empty(len(SYMBOLS), dim)))
        nn.init.xavier_normal_(self.bytes.weight[1:])
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    @property
    def spellings(self) -> Tensor:
        """The spellings of all words, with shape (V, L), on the host."""
        return self._spellings.rows

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return one vector per token, with shape (B, T, D). Each distinct word is computed once.

        Args:
            ids_BT: Token ids, with shape (B, T).
        """
        distinct_ids_U, indices_BT = torch.unique(ids_BT, return_inverse=True)
        spellings_UL = F.embedding(distinct_ids_U, self._spellings.on(ids_BT.device))
        vectors_UD = self._compute_vectors(spellings_UL)
        vectors_BTD = self.scale * F.embedding(indices_BT, vectors_UD)
        return F.dropout(vectors_BTD, self.dropout, self.training)

    def vectors(self) -> Tensor:
        """Return one vector per word, (V, D)."""
        chunks = []
        for spellings_UL in torch.split(self._spellings.on(self.symbols.device), WORDS_PER_CHUNK):
            chunks.append(self._compute_vectors(spellings_UL))
        return self.scale * torch.cat(chunks)

    def with_spelled_words(self, words: Sequence[str]) -> CharCNN:
        """Return a copy of this end for more words. The copy shares the weights.

        Args:
            words: The additional words. Their ids follow the ids of the present words.
        """
        # deepcopy() does not copy the tensors that are already in its memo.
        memo: dict[int, Any] = {id(tensor): tensor for tensor in self.parameters()}
        memo[id(self._spellings)] = self._spellings
        extended = deepcopy(self, memo)
        max_bytes = self.spellings.shape[1]
        extended._spellings = _SpellingTable(torch.cat([self.spellings, spell(words, max_bytes).int()]))
        extended.vocab_size = len(extended.spellings)
        return extended

    def flops(self, ids_N: Tensor) -> int:
        """Return the number of floating-point operations of a training step. Each distinct word counts once.

        Args:
            ids_N: Token ids, with shape (N,).
        """
        distinct_ids_U = torch.unique(ids_N).cpu()
        is_byte_UL = self.spellings[distinct_ids_U] > 0
        num_bytes = int(is_byte_UL.sum(dim=1).clamp(min=1).sum())
        weights_per_byte = count_matrix_weights(self.convolutions)
        weights_per_word = count_matrix_weights(self.highway) + count_matrix_weights(self.projection)
        products = num_bytes * weights_per_byte + len(distinct_ids_U) * weights_per_word
        return FLOPS_PER_WEIGHT * products

    def _compute_vectors(self, spellings_UL: Tensor) -> Tensor:
        """Return the vectors of words with these spellings, (U, D)."""
        bytes_UL = spellings_UL.where(spellings_UL < FIRST_SYMBOL, 0)
        features_UF = self.highway(self._compute_features(bytes_UL))
        word_vectors_UD = self.projection(features_UF)

        symbol_index_U = spellings_UL[:, 0] - FIRST_SYMBOL  # negative unless the word is a symbol
        symbol_vectors_UD = F.embedding(symbol_index_U.clamp(min=0), self.symbols).to(word_vectors_UD.dtype)
        is_symbol_U1 = (symbol_index_U >= 0)[:, None]
        return torch.where(is_symbol_U1, symbol_vectors_UD, word_vectors_UD)

    def _compute_features(self, bytes_UL: Tensor) -> Tensor:
        """Return the maximum of each filter over its windows, (U, F)."""
        max_bytes = bytes_UL.shape[1]
        # Leave out columns that are padding in every word, but always keep the first column.
        is_used_L = (bytes_UL > 0).any(dim=0)
        is_used_L[0] = True
        bytes_UL = bytes_UL[:, is_used_L]

        is_padding_UL = bytes_UL == 0
        # The padding row is not always zero, because `init.uniform` initialises it like every other parameter.
        vectors_ULC = self.bytes(bytes_UL).masked_fill(is_padding_UL[..., None], 0.0)
        # A word without bytes counts as one byte long, because the maximum over no positions would be minus infinity.
        is_outside_UL = F.pad(is_padding_UL[:, 1:], (1, 0), value=False)
        lengths_U1 = (~is_outside_UL).sum(dim=1, keepdim=True)
        positions_L = torch.arange(bytes_UL.shape[1], device=bytes_UL.device)

        features = []
        for width, convolution in zip(self.filter_widths, cast(Iterable[nn.Conv1d], self.convolutions), strict=True):
            # A plain matrix product, because cuDNN prepares a convolution for each input size, and the number of words
            # differs from batch to batch.
            patches_ULW = F.pad(vectors_ULC, (0, 0, 0, width - 1)).unfold(1, width, 1).flatten(2)
            responses_ULF = F.linear(patches_ULW, convolution.weight.flatten(1), convolution.bias)
            is_left_out_UL = is_outside_UL
            last_start = max_bytes - width
            if self.padding_windows:
                is_left_out_UL = is_outside_UL | (positions_L > last_start)
            maxima_UF = responses_ULF.masked_fill(is_left_out_UL[..., None], -torch.inf).max(dim=1).values
            if self.padding_windows:
                # A window of padding alone starts after the word and ends before the spelling does.
                has_padding_window_U1 = lengths_U1 <= last_start
                assert convolution.bias is not None
                with_padding_UF = torch.maximum(maxima_UF, convolution.bias.to(maxima_UF.dtype))
                maxima_UF = torch.where(has_padding_window_U1, with_padding_UF, maxima_UF)
            features.append(maxima_UF.relu())
        return torch.cat(features, dim=-1)


class _SpellingTable:
    """The spellings of all words on the host, and a copy on each device that reads them.

    Spellings follow from the vocabulary, so checkpoints do not need them. They are not a buffer, because `to_empty`,
    which gives memory to a model that was built on the meta device, would erase them.

    Args:
        spellings_VL: Spellings of all words, on any device that holds values.
    """

    def __init__(self, spellings_VL: Tensor) -> None:
        if spellings_VL.is_meta:
            raise SettingsError(
                "char-CNN: the spellings are on the meta device, which does not store values; "
                "pass the result of spell() itself, also if the model is built on the meta device"
            )
        self.rows = spellings_VL.int().cpu()
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the spellings on a device."""
        if device == self.rows.device or torch.compiler.is_compiling():
            return self.rows.to(device)
        if device not in self._copies:
            self._copies[device] = self.rows.to(device)
        return self._copies[device]


def _check_filters(filters: Sequence[Sequence[int]]) -> None:
    if not filters:
        raise SettingsError("char-CNN: filters is empty: give at least one [width in bytes, features]")
    for width_and_features in filters:
        if len(width_and_features) != 2 or min(width_and_features) < 1:
            raise SettingsError(
                f"char-CNN: filters has {list(width_and_features)}: each must be [width in bytes, features], "
                "both at least 1"
            )


def _check_widths(filters: Sequence[Sequence[int]], max_bytes: int) -> None:
    widest = max(width for width, _ in filters)
    if widest > max_bytes:
        raise SettingsError(
            f"char-CNN: a filter of width {widest} does not fit into spellings of {max_bytes} bytes, which "
            "padding_windows needs; use narrower filters, longer spellings or padding_windows = false"
        )
