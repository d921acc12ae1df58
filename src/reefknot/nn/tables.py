"""Word tables: the embedding parameters that the input and the output of a language model can share.

    words = WordTable(10_000, 200)
    model = LanguageModel(Lookup(words), LSTM(200, 200), Softmax(Plain(words)))

The modules that read tables are called ends: an input end (`nn/inputs`) turns ids into vectors, and an output end
(`nn/outputs`) is a classifier and its loss. Two ends that hold the same table object, as above, are tied.

    WordTable           one matrix with a vector per word
    EmbeddingTable      the same with the matrix of your own `nn.Embedding` or `nn.Linear`
    BandedTable         one matrix per band (group of words of similar frequency), with smaller vectors for rarer words
    BandProjections     maps the vectors of a banded table to the dimension of the model

Shapes: V words, D dimensions, N ids or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import ArgumentError, SettingsError, describe_type
from reefknot.nn.bounds import Count, Dim, Positive
from reefknot.nn.constants import NO_TABLE_TO_SHARE
from reefknot.nn.part import RecordsArguments

if TYPE_CHECKING:
    from reefknot.kernels.parallel import ClassShard


class WordTable(nn.Module, RecordsArguments):
    """A table with one vector for every word of the vocabulary.

    To tie two ends, give the same table to the input end and to the classifier of the output end.

    Args:
        vocab_size: Number of words, V.
        dim: Dimension of the word vectors, D.
        unit_norm: Scale every vector to length 1 wherever the table is read (Inan et al. 2017, validation experiment).
        uniform: Draw the initial weights uniformly from [-uniform, uniform], even if a recipe initialises the other
            parameters differently. With `unit_norm`, a larger range makes the vectors turn more slowly in training.
        frozen: Keep the initial weights: neither updates nor weight decay change them.
    """

    shard: ClassShard | None = None
    """Where the rows of `weight` lie, if other processes have the others. `lab/training/vocabulary.py` sets it."""

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

    @staticmethod
    def from_embedding(module: nn.Embedding | nn.Linear, unit_norm: bool = False) -> EmbeddingTable:
        """Return a table that holds your own `nn.Embedding` or `nn.Linear`, so that an end is tied to it.

            end = Softmax(Plain(WordTable.from_embedding(model.embedding)))

        The table holds the module itself, not a copy of its weight. So the tie stays through `.to()`, `to_empty()`,
        `copy.deepcopy`, loading, DDP and FSDP.

        Args:
            module: An embedding with one row per word, or a linear layer without bias with one output per word.
            unit_norm: Scale every vector to length 1 wherever the table is read. The module itself does not scale.
        """
        return EmbeddingTable(module, unit_norm)

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

        If the table is divided among processes, "all words" are those of this process.

        Args:
            ids: Word ids, with any shape. By default all words.
        """
        if ids is None:
            vectors: Tensor = self.weight
        elif self.shard is None:
            vectors = F.embedding(ids, self.weight)
        else:
            from reefknot.kernels.parallel_rows import parallel_embedding  # few models divide their vocabulary

            vectors = parallel_embedding(ids, self.weight, self.shard)
        if self.unit_norm:
            return F.normalize(vectors, dim=-1)
        return vectors

    def extra_repr(self) -> str:
        """Return the arguments that `print(model)` shows."""
        unit_norm = ", unit_norm=True" if self.unit_norm else ""
        frozen = ", frozen=True" if self.frozen else ""
        return f"{self.vocab_size}, {self.dim}{unit_norm}{frozen}"


class EmbeddingTable(WordTable):
    """A word table that holds the caller's `nn.Embedding` or `nn.Linear`. `WordTable.from_embedding` makes it.

    Every row is read alike. The `padding_idx` of an embedding has an effect only where the embedding itself is called.

    Args:
        module: An embedding with one row per word, or a linear layer without bias with one output per word.
        unit_norm: Scale every vector to length 1 wherever the table is read.
    """

    def __init__(self, module: nn.Embedding | nn.Linear, unit_norm: bool = False) -> None:
        nn.Module.__init__(self)
        _check_embedding(module)
        self.vocab_size, self.dim = module.weight.shape
        self.unit_norm = unit_norm
        self.uniform = None
        self.layer = module

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """The weight of the held module, with shape (V, D)."""
        return cast(nn.Parameter, self.layer.weight)

    def reset_parameters(self) -> None:
        """Draw the initial weights as the held module does."""
        self.layer.reset_parameters()


def _check_embedding(module: Any) -> None:
    """Raise an `ArgumentError` unless a table can hold the module."""
    name = type(module).__name__
    if not isinstance(module, nn.Embedding | nn.Linear):
        raise ArgumentError(
            f"from_embedding: needs an nn.Embedding or an nn.Linear; {describe_type(module)} is not one"
        )
    weight = module.weight
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise ArgumentError(f"from_embedding: the {name} has no shape yet; call it once before you make the table")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ArgumentError(
            f"from_embedding: the weight of the {name} is {tuple(weight.shape)} and {weight.dtype}; it must be a "
            "matrix of floating-point numbers with one row per word"
        )
    if isinstance(module, nn.Linear):
        if module.bias is not None:
            raise ArgumentError(
                f"from_embedding: the {name} has a bias, and a table does not; use nn.Linear(..., bias=False), and "
                "let the classifier hold the bias: Plain(table, bias=True)"
            )
    elif module.sparse:
        raise ArgumentError(
            "from_embedding: the embedding has sparse = True, but an output end gives every row a gradient; make it "
            "with sparse=False"
        )
    elif module.max_norm is not None:
        raise ArgumentError(
            f"from_embedding: the embedding has max_norm = {module.max_norm}, which changes rows whenever they are "
            "looked up; make it with max_norm=None, or use unit_norm=True of the table"
        )


def hint_for_torch_layer(module: Any, wrapper: str | None = None) -> str:
    """Return the end of an error message for a torch layer that was passed instead of a table, or an empty string.

    Args:
        module: The argument that was passed.
        wrapper: Name of a class to put around the table, such as `Plain`.
    """
    if not isinstance(module, nn.Embedding | nn.Linear):
        return ""
    call = f"WordTable.from_embedding({'embedding' if isinstance(module, nn.Embedding) else 'linear'})"
    if wrapper is not None:
        call = f"{wrapper}({call})"
    return f"; pass {call}"


class BandedTable(nn.Module, RecordsArguments):
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
        # The first id of every band, and the end of the last band.
        self.bounds = compute_bounds(vocab_size, sizes, cutoffs)
        if factor < 1:
            raise SettingsError(f"banded table: factor = {factor}: must be at least 1")
        band_dims = [dim // factor**band for band in range(len(self.sizes))]
        if not band_dims[-1]:
            raise SettingsError(
                f"banded table: {len(band_dims)} bands from dim = {dim}, each divided by factor = {factor}, leave band "
                f"{band_dims.index(0) + 1} with dimension 0; use fewer bands, a smaller factor or a larger dim"
            )
        self.bands = nn.ModuleList()
        for size, band_dim in zip(self.sizes, band_dims, strict=True):
            self.bands.append(WordTable(size, band_dim))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of words of each band, including the last."""
        return tuple(end_id - first_id for first_id, end_id in pairwise(self.bounds))

    @property
    def tables(self) -> list[WordTable]:
        """The bands, each as a table of its words."""
        return list(self.bands)  # type: ignore[arg-type]

    def compute_by_band(self, ids: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return one vector per id, with shape (*ids.shape, D), computed by a function for each band.

        On the CPU, `compute` receives only the words of its band. On a GPU, selecting these words would synchronise
        with the host, and in compiled code it would break the graph. So there `compute` receives all ids, and masks
        select the results.

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
        ids_N = ids.reshape(-1)
        positions_by_band = []
        vectors_by_band = []
        for band, (band_positions, band_ids) in enumerate(group_by_band(ids_N, self.bounds)):
            positions_by_band.append(band_positions)
            vectors_by_band.append(compute(band, band_ids))
        positions_N = torch.cat(positions_by_band)
        if len(positions_N) != len(ids_N):
            raise IndexError(f"an id is outside the vocabulary, 0 to {self.vocab_size - 1}")
        vectors_ND = torch.cat(vectors_by_band)

        # The vectors are in the order of the bands. Put them into the order of the ids.
        ordered_ND = torch.empty_like(vectors_ND).index_copy(0, positions_N, vectors_ND)
        return ordered_ND.view(*ids.shape, vectors_ND.shape[-1])

    def _compute_masked(self, ids: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Call `compute` for each band with all ids, clamped into the band, and select the results with masks."""
        # Ids outside the vocabulary stay outside the first or the last band, where the lookup itself rejects them.
        first_band_ids = ids
        if len(self.sizes) > 1:
            first_band_ids = ids.clamp(max=self.bounds[1] - 1)
        vectors = compute(0, first_band_ids)
        for band, (first_id, end_id) in enumerate(pairwise(self.bounds[1:]), start=1):
            is_last_band = end_id == self.vocab_size
            max_band_id = None if is_last_band else end_id - first_id - 1
            band_ids = (ids - first_id).clamp(0, max_band_id)
            is_in_later_band = (ids >= first_id)[..., None]
            vectors = torch.where(is_in_later_band, compute(band, band_ids), vectors)
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

        def look_up(band: int, band_ids: Tensor) -> Tensor:
            return self.tables[band].vectors(band_ids)

        return self.compute_by_band(ids, look_up)

    def check_equal_dims(self) -> None:
        """Raise a `SettingsError` unless all bands have the same dimension."""
        if self.factor != 1 and len(self.sizes) > 1:
            band_dims = ", ".join(str(table.dim) for table in self.tables)
            raise SettingsError(
                f"the bands have different dimensions {band_dims}; use an adaptive lookup, which projects them, or "
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
    for first_id, end_id in pairwise(bounds):
        is_in_band_N = (ids_N >= first_id) & (ids_N < end_id)
        positions = is_in_band_N.nonzero().squeeze(-1)
        band_ids = ids_N[positions] - first_id
        groups.append((positions, band_ids))
    return groups


def compute_bounds(vocab_size: int, sizes: Sequence[int] | None, cutoffs: Sequence[int] | None) -> tuple[int, ...]:
    """Return the first id of every band, and the end of the last band."""
    if sizes is not None and cutoffs is None:
        return _bounds_from_sizes(vocab_size, sizes)
    if cutoffs is not None and sizes is None:
        return _bounds_from_cutoffs(vocab_size, cutoffs)
    problem = "neither is given" if sizes is None else "both are given"
    raise SettingsError(
        f"banded table: give sizes (words per band) or cutoffs (first ids of the later bands); {problem}"
    )


def _bounds_from_sizes(vocab_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the bounds of bands of these sizes and a last band. For 100 words, [10, 20] gives 0, 10, 30, 100."""
    if any(size < 1 for size in sizes):
        raise SettingsError(f"banded table: sizes = {list(sizes)}: every band needs at least one word")
    total = sum(sizes)
    if sizes and total >= vocab_size:
        raise SettingsError(
            f"banded table: the bands of sizes = {list(sizes)} have {total:,} words and leave none of the "
            f"vocabulary's {vocab_size:,} for the last band; use smaller bands"
        )
    return (0, *accumulate(sizes), vocab_size)


def _bounds_from_cutoffs(vocab_size: int, cutoffs: Sequence[int]) -> tuple[int, ...]:
    """Return the bounds of bands with these first ids. For 100 words, [10, 30] gives 0, 10, 30, 100."""
    bounds = (0, *cutoffs, vocab_size)
    if any(first_id >= end_id for first_id, end_id in pairwise(bounds)):
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
    if is_input_end(table):
        raise SettingsError(NO_TABLE_TO_SHARE)
    if not isinstance(table, WordTable):
        raise SettingsError(
            f"{module}: needs a table with bands; {describe_type(table)} is not one; pass a BandedTable"
        )
    raise SettingsError(f"{module}: needs a table with bands; use a table of kind = 'banded'")


def is_input_end(module: Any) -> bool:
    """Return whether an input end was passed in place of a table, as a char-CNN that has no table."""
    from reefknot.nn.inputs.contract import InputEnd

    return isinstance(module, InputEnd)


class BandProjections(nn.Module, RecordsArguments):
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
        self.bands = nn.ParameterList(nn.Parameter(torch.empty(dim, band_dim)) for band_dim in projected_dims)
        for matrix in self.bands:
            nn.init.xavier_uniform_(matrix)

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
        """Return the matrix of a band, with shape (dimension of the model, dimension of the band)."""
        if band == 0 and not self.has_head:
            raise SettingsError("band projections: there is no matrix for the first band; set head = true")
        index = band if self.has_head else band - 1
        matrix: Tensor = self.bands[index]
        return matrix

    def extra_repr(self) -> str:
        """Return the dimensions that `print(model)` shows."""
        return f"{list(self.band_dims)} <-> {self.dim}"
