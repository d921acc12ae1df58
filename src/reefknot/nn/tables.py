"""Word tables: the embedding parameters that the input and the output of a language model can share.

`WordTable` is one matrix with a vector per word. `BandedTable` cuts the vocabulary into bands (clusters of words of
similar frequency) and gives rarer words smaller vectors; `BandProjections` maps them to the dimension of the model. Two
modules that hold the same table object are tied. The modules that read tables are called ends: an input end turns ids
into vectors (`nn/inputs`), an output end is a classifier and its loss (`nn/outputs`).

Shapes: V words, D dimensions, N ids or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Count, Dim, Positive
from reefknot.nn.constants import NO_TABLE_TO_SHARE


class WordTable(nn.Module):
    """A table with one vector for every word of the vocabulary.

    Give one table to an input end and to a classifier to tie the two ends:

        words = WordTable(10_000, 200)
        model = LanguageModel(Lookup(words), LSTM(200, 200), Softmax(Plain(words)))

    Args:
        vocab_size: Number of words, V.
        dim: Dimension of the word vectors, D.
        unit_norm: Scale every vector to length 1 wherever the table is read (Inan et al. 2017, validation experiment).
        uniform: Draw the initial weights uniformly from [-uniform, uniform], even if a recipe initialises the other
            parameters differently. With `unit_norm`, a larger range makes the vectors turn more slowly in training.
        frozen: Keep the initial weights: neither updates nor weight decay change them.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: Dim,
        unit_norm: bool = False,
        uniform: Positive | None = None,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        if vocab_size < 1 or dim < 1:
            raise SettingsError(f"word table: {vocab_size} words of dimension {dim}: both must be at least 1")
        if uniform is not None and not uniform > 0:
            raise SettingsError(f"word table: uniform = {uniform}: must be greater than 0")
        self.vocab_size = vocab_size
        self.dim = dim
        self.unit_norm = unit_norm
        self.uniform = uniform
        self.weight = nn.Parameter(torch.empty(vocab_size, dim), requires_grad=not frozen)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        if self.uniform is not None:
            self.weight.uniform_(-self.uniform, self.uniform)
        else:
            # Rows have an expected norm of 1, so the logits of a tied classifier start at the scale of the context.
            self.weight.normal_(std=self.dim**-0.5)

    @property
    def frozen(self) -> bool:
        """Whether training leaves the weights unchanged."""
        return not self.weight.requires_grad

    def vectors(self, ids: Tensor | None = None) -> Tensor:
        """Return the vectors of some words, with shape (*ids.shape, D), or of all words, with shape (V, D).

        Args:
            ids: Word ids, with any shape. By default all words.
        """
        vectors = self.weight if ids is None else F.embedding(ids, self.weight)
        return F.normalize(vectors, dim=-1) if self.unit_norm else vectors

    def extra_repr(self) -> str:
        """Return the arguments that `print(model)` shows."""
        unit_norm = ", unit_norm=True" if self.unit_norm else ""
        frozen = ", frozen=True" if self.frozen else ""
        return f"{self.vocab_size}, {self.dim}{unit_norm}{frozen}"


class BandedTable(nn.Module):
    """A table in bands of decreasing word frequency, in which the vectors of rarer words have fewer dimensions.

        table = BandedTable(267_744, 1024, sizes=[20_000, 40_000])      # 1024, 256 and 64 dimensions

    Give the bands either by `sizes`, as papers do, or by `cutoffs`, the first ids of the second and later bands
    (20,000 and 60,000 for the bands above). Ids must be sorted by decreasing frequency, as in our vocabularies.

    Args:
        vocab_size: Number of words, V.
        dim: Dimension of the first band.
        sizes: Number of words of every band except the last, which has all remaining words.
        cutoffs: Instead of `sizes`: the first ids of the second and later bands.
        factor: Each band has the dimension of the previous band divided by this factor, rounded down.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: Dim,
        sizes: Sequence[Count] | None = None,
        cutoffs: Sequence[Count] | None = None,
        factor: Count = 4,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.dim = dim
        self.factor = factor
        self.bounds = _compute_bounds(vocab_size, sizes, cutoffs)
        if factor < 1:
            raise SettingsError(f"banded table: factor = {factor}: must be at least 1")
        dims = [dim // factor**band for band in range(len(self.sizes))]
        if not dims[-1]:
            raise SettingsError(
                f"banded table: {len(dims)} bands from dim = {dim}, each divided by factor = {factor}, leave band "
                f"{dims.index(0) + 1} with dimension 0; use fewer bands, a smaller factor or a larger dim"
            )
        self.bands = nn.ModuleList(WordTable(size, band_dim) for size, band_dim in zip(self.sizes, dims, strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of words of each band, including the last."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    @property
    def tables(self) -> list[WordTable]:
        """The bands, each as a table of its words."""
        return list(self.bands)  # type: ignore[arg-type]

    def compute_by_band(self, ids: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return one vector per id, with shape (*ids.shape, D), computed by a function for each band.

        On the CPU each band looks up its own words only. On a GPU, selecting them would synchronise with the host, and
        inside a compiled graph it would break the graph. So there each band looks up all ids, and masks select the
        results.

        Args:
            ids: Word ids, with any shape.
            compute: Called as `compute(band, band_ids)`, where `band_ids` are counted from the first id of the band. It
                returns one vector per id. The vectors of all bands have the same dimension.
        """
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            return self._compute_selected(ids, compute)
        return self._compute_masked(ids, compute)

    def _compute_selected(self, ids: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Call `compute` for each band with its own words only."""
        flat_ids = ids.reshape(-1)
        groups = group_by_band(flat_ids, self.bounds)
        positions = torch.cat([band_positions for band_positions, _ in groups])
        if len(positions) != len(flat_ids):
            raise IndexError(f"an id is outside the vocabulary, 0 to {self.vocab_size - 1}")
        vectors = torch.cat([compute(band, band_ids) for band, (_, band_ids) in enumerate(groups)])
        # The vectors are in the order of the bands; put them into the order of the ids.
        ordered = torch.empty_like(vectors).index_copy(0, positions, vectors)
        return ordered.view(*ids.shape, vectors.shape[-1])

    def _compute_masked(self, ids: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Call `compute` for each band with all ids, clamped into the band, and select the results with masks."""
        # Ids outside the vocabulary stay outside the first or the last band, where the lookup itself rejects them.
        first_band_ids = ids.clamp(max=self.bounds[1] - 1) if len(self.sizes) > 1 else ids
        vectors = compute(0, first_band_ids)
        for band, (start, stop) in enumerate(pairwise(self.bounds[1:]), start=1):
            last_band_id = stop - start - 1 if stop < self.vocab_size else None
            band_ids = (ids - start).clamp(0, last_band_id)
            vectors = torch.where((ids >= start)[..., None], compute(band, band_ids), vectors)
        return vectors

    def vectors(self, ids: Tensor | None = None) -> Tensor:
        """Return the vectors of some words, with shape (*ids.shape, D), or of all words, with shape (V, D).

        Raise a `SettingsError` unless all bands have the same dimension.

        Args:
            ids: Word ids, with any shape. By default all words.
        """
        self.check_equal_dims()
        if ids is None:
            return torch.cat([table.vectors() for table in self.tables])
        return self.compute_by_band(ids, lambda band, band_ids: self.tables[band].vectors(band_ids))

    def check_equal_dims(self) -> None:
        """Raise a `SettingsError` unless all bands have the same dimension."""
        if self.factor != 1 and len(self.sizes) > 1:
            dims = ", ".join(str(table.dim) for table in self.tables)
            raise SettingsError(
                f"the bands have different dimensions {dims}; use an adaptive lookup, which projects them, or "
                "factor = 1"
            )

    def extra_repr(self) -> str:
        """Return the arguments that `print(model)` shows."""
        return f"{self.vocab_size}, sizes={list(self.sizes)}, cutoffs={list(self.bounds[1:-1])}"


def group_by_band(ids_N: Tensor, bounds: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return for each band the positions of its ids in `ids_N`, and these ids, counted from the band's first id.

    With the bounds 0, 10 and 100, the ids 3, 42, 7 give ([0, 2], [3, 7]) and ([1], [32]).
    """
    groups = []
    for start, stop in pairwise(bounds):
        positions = ((ids_N >= start) & (ids_N < stop)).nonzero().squeeze(-1)
        groups.append((positions, ids_N[positions] - start))
    return groups


def _compute_bounds(vocab_size: int, sizes: Sequence[int] | None, cutoffs: Sequence[int] | None) -> tuple[int, ...]:
    """Return the first id of every band, and the end of the last band."""
    if (sizes is None) == (cutoffs is None):
        error = "both are given" if sizes is not None else "neither is given"
        raise SettingsError(
            f"banded table: give sizes (words per band) or cutoffs (first ids of the later bands); {error}"
        )
    if sizes is not None:
        return _bounds_from_sizes(vocab_size, sizes)
    return _bounds_from_cutoffs(vocab_size, cutoffs or ())


def _bounds_from_sizes(vocab_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the bounds of bands of these sizes and a last band. For 100 words, [10, 20] gives 0, 10, 30, 100."""
    if any(size < 1 for size in sizes):
        raise SettingsError(f"banded table: sizes = {list(sizes)}: every band needs at least one word")
    starts = list(accumulate(sizes))
    if starts and starts[-1] >= vocab_size:
        raise SettingsError(
            f"banded table: the bands of sizes = {list(sizes)} have {starts[-1]:,} words and leave none of the "
            f"vocabulary's {vocab_size:,} for the last band; use smaller bands"
        )
    return (0, *starts, vocab_size)


def _bounds_from_cutoffs(vocab_size: int, cutoffs: Sequence[int]) -> tuple[int, ...]:
    """Return the bounds of bands with these first ids. For 100 words, [10, 30] gives 0, 10, 30, 100."""
    bounds = (0, *cutoffs, vocab_size)
    if any(start >= stop for start, stop in pairwise(bounds)):
        raise SettingsError(
            f"banded table: cutoffs = {list(cutoffs)} must increase, from 1 to less than the vocabulary's "
            f"{vocab_size:,} words: each is the first id of a band, and no band may be empty"
        )
    return bounds


def build_projection(input_dim: int, dim: int) -> nn.Linear:
    """Return a linear layer without bias and with Xavier weights, which maps vectors to another dimension."""
    layer = nn.Linear(input_dim, dim, bias=False)
    nn.init.xavier_uniform_(layer.weight)
    return layer


def check_banded(table: nn.Module, module: str) -> None:
    """Raise a `SettingsError` unless the table is a `BandedTable`. The message names `module`."""
    if isinstance(table, BandedTable):
        return
    if not isinstance(table, WordTable):
        raise SettingsError(NO_TABLE_TO_SHARE)
    raise SettingsError(f"{module}: needs a table with bands; use a table of kind = 'banded'")


class BandProjections(nn.Module):
    """One matrix per band that maps between the dimension of the band and the dimension of the model.

    An adaptive lookup maps the vectors of a band to the dimension of the model. An adaptive softmax maps the hidden
    state to the dimension of the band, with the transpose of the same matrix. Both ends can share one object.

    Args:
        table: The banded table that gives the dimensions of the bands.
        dim: Dimension of the model.
        head: Include a matrix for the first band. An adaptive lookup needs it. An adaptive softmax needs it only with
            `head_projection = "shared"`.
    """

    def __init__(self, table: BandedTable, dim: Dim, head: bool = True) -> None:
        super().__init__()
        check_banded(table, "band projections")
        self.dim = dim
        self.has_head = head
        self.band_dims = tuple(band.dim for band in table.tables)
        projected_dims = self.band_dims if head else self.band_dims[1:]
        self.bands = nn.ParameterList(
            nn.Parameter(nn.init.xavier_uniform_(torch.empty(dim, band_dim))) for band_dim in projected_dims
        )

    def to_model_dim(self, band: int, vectors: Tensor) -> Tensor:
        """Map vectors from the dimension of a band to the dimension of the model.

        Args:
            band: Index of the band, from 0.
            vectors: Vectors with shape (..., dimension of the band).
        """
        return F.linear(vectors, self._matrix(band))

    def to_band_dim(self, band: int, hidden_ND: Tensor) -> Tensor:
        """Map hidden states from the dimension of the model to the dimension of a band.

        Args:
            band: Index of the band, from 0.
            hidden_ND: Hidden states, with shape (N, dim).
        """
        return F.linear(hidden_ND, self._matrix(band).T)

    def _matrix(self, band: int) -> Tensor:
        if band == 0 and not self.has_head:
            raise SettingsError("band projections: there is no matrix for the first band; set head = true")
        matrix: Tensor = self.bands[band if self.has_head else band - 1]
        return matrix

    def extra_repr(self) -> str:
        """Return the dimensions that `print(model)` shows."""
        return f"{list(self.band_dims)} <-> {self.dim}"
