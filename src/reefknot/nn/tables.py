"""What is learned per word. Two ends that hold the same table object are tied; there is no flag for it.

Shapes: V words, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import NOTHING_TO_TIE
from reefknot.lab.config.registry import Shared
from reefknot.lab.config.settings import Count, Dim, Positive


class WordTable(nn.Module):
    """One vector of the same width for every word of the vocabulary."""

    def __init__(
        self,
        vocab_size: int,
        dim: Annotated[Dim, Field(description="width of a word's vector")],
        unit_norm: Annotated[
            bool, Field(description="scale every vector to length 1 wherever it is used (Inan's validation experiment)")
        ] = False,
        uniform: Annotated[
            Positive | None,
            Field(
                description="draw it from [-uniform, uniform], whatever [init] says; with unit_norm, longer vectors "
                "turn more slowly"
            ),
        ] = None,
        vectors: Annotated[
            str | None,
            Field(min_length=1, description="file of word vectors to start from; words that it has not are drawn"),
        ] = None,
        frozen: Annotated[bool, Field(description="stay as it starts: no update and no decay changes it")] = False,
    ) -> None:
        super().__init__()
        if vocab_size < 1 or dim < 1:
            raise SettingsError(f"word table: {vocab_size} words of width {dim}: both must be at least 1")
        if uniform is not None and not uniform > 0:
            raise SettingsError(f"word table: uniform = {uniform}: must be greater than 0")
        self.vocab_size = vocab_size
        self.dim = dim
        self.unit_norm = unit_norm
        self.uniform = uniform
        self.weight = nn.Parameter(torch.empty(vocab_size, dim), requires_grad=not frozen)
        self.draw()
        self.file = vectors
        """What the first update finds is read from here, by who knows the words (see `lab/tasks/initialisation.py`)."""

    @torch.no_grad()
    def draw(self) -> None:
        """Start as the table itself does where nobody else says how."""
        if self.uniform is not None:
            self.weight.uniform_(-self.uniform, self.uniform)
        else:
            # Rows of unit expected norm: a tied classifier then starts with logits of the size of the context.
            self.weight.normal_(std=self.dim**-0.5)

    @property
    def frozen(self) -> bool:
        """Whether training leaves the table as it starts."""
        return not self.weight.requires_grad

    def vectors(self, ids: Tensor | None = None) -> Tensor:
        """The vectors of these words, or of all."""
        found = self.weight if ids is None else F.embedding(ids, self.weight)
        return F.normalize(found, dim=-1) if self.unit_norm else found

    def extra_repr(self) -> str:
        told = [f"{self.vocab_size}, {self.dim}"]
        told += ["unit_norm=True"] if self.unit_norm else []
        told += [f"vectors={self.file!r}"] if self.file is not None else []
        return ", ".join(told + (["frozen=True"] if self.frozen else []))


class BandedTable(nn.Module):
    """Words in bands of falling frequency, each band `factor` times narrower than the one before it.

    Where the bands begin and end is said in one of two ways: `sizes`, as papers do (20,000 and 40,000 words, the last
    band takes the rest), or `cutoffs`, the ids at which the second and later bands begin (20,000 and 60,000: the same
    bands). Ids must fall in frequency, as those of our vocabularies do.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: Annotated[Dim, Field(description="width of the first band")],
        sizes: Annotated[
            Sequence[Count] | None, Field(description="words per band; the last band, not listed, takes the rest")
        ] = None,
        cutoffs: Annotated[
            Sequence[Count] | None, Field(description="instead of sizes: first ids of the second and later bands")
        ] = None,
        factor: Annotated[Count, Field(description="each band is so many times narrower than the one before")] = 4,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.dim = dim
        self.factor = factor
        self.bounds = _bounds(vocab_size, sizes, cutoffs)
        if factor < 1:
            raise SettingsError(f"banded table: factor = {factor}: must be at least 1")
        widths = [dim // factor**band for band in range(len(self.sizes))]
        if not widths[-1]:
            raise SettingsError(
                f"banded table: {len(widths)} bands from width {dim}, each divided by {factor}, leave band "
                f"{widths.index(0) + 1} no width; use fewer bands, a smaller factor or a larger dim"
            )
        self.bands = nn.ModuleList(WordTable(size, width) for size, width in zip(self.sizes, widths, strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words per band, the last one too."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    @property
    def tables(self) -> list[WordTable]:
        """The bands, each a table of its own words."""
        return list(self.bands)  # type: ignore[arg-type]

    def by_band(self, ids: Tensor, vectors: Callable[[int, Tensor], Tensor]) -> Tensor:
        """One vector per id: what `vectors(band, words)` gives for the band that the id lies in.

        On the CPU each band is asked for its own words only. On a GPU to find them would make the host wait, and in a
        graph it would break it: there each band is asked for all ids, and what is not its own is passed over.
        """
        on_host = ids.device.type == "cpu" and not torch.compiler.is_compiling()
        return self._by_rows(ids, vectors) if on_host else self._by_masks(ids, vectors)

    def _by_rows(self, ids: Tensor, vectors: Callable[[int, Tensor], Tensor]) -> Tensor:
        flat = ids.reshape(-1)
        rows = rows_by_band(flat, self.bounds)
        where = torch.cat([where for where, _ in rows])
        if len(where) != len(flat):
            raise IndexError(f"an id is outside the vocabulary, 0 to {self.vocab_size - 1}")
        found = torch.cat([vectors(band, words) for band, (_, words) in enumerate(rows)])
        return torch.empty_like(found).index_copy(0, where, found).view(*ids.shape, found.shape[-1])

    def _by_masks(self, ids: Tensor, vectors: Callable[[int, Tensor], Tensor]) -> Tensor:
        # Ids outside the vocabulary stay outside the first or the last band, where the lookup itself refuses them.
        found = vectors(0, ids.clamp(max=self.bounds[1] - 1) if len(self.sizes) > 1 else ids)
        for band, (start, stop) in enumerate(pairwise(self.bounds[1:]), start=1):
            words = (ids - start).clamp(0, stop - start - 1 if stop < self.vocab_size else None)
            found = torch.where((ids >= start)[..., None], vectors(band, words), found)
        return found

    def vectors(self, ids: Tensor | None = None) -> Tensor:
        """The vectors of these words, or of all; only where all bands have one width."""
        self.check_one_width()
        if ids is None:
            return torch.cat([table.vectors() for table in self.tables])
        return self.by_band(ids, lambda band, words: self.tables[band].vectors(words))

    def check_one_width(self) -> None:
        """Refuse to be read as a table of one width where the bands have several."""
        if self.factor != 1 and len(self.sizes) > 1:
            widths = ", ".join(str(table.dim) for table in self.tables)
            raise SettingsError(
                f"the bands have the widths {widths}, so their words have no common width: use an adaptive lookup, "
                "or factor = 1"
            )

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, sizes={list(self.sizes)}, cutoffs={list(self.bounds[1:-1])}"


def rows_by_band(ids_N: Tensor, bounds: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """For each band, which of the rows hold its words, and those words counted from the band's first."""
    found = []
    for start, stop in pairwise(bounds):
        where = ((ids_N >= start) & (ids_N < stop)).nonzero().squeeze(-1)
        found.append((where, ids_N[where] - start))
    return found


def _bounds(vocab_size: int, sizes: Sequence[int] | None, cutoffs: Sequence[int] | None) -> tuple[int, ...]:
    """First id of every band, and the end of the last."""
    if (sizes is None) == (cutoffs is None):
        fault = "both are given" if sizes is not None else "neither is given"
        raise SettingsError(
            f"banded table: give sizes (words per band) or cutoffs (first ids of the later bands); {fault}"
        )
    if sizes is not None:
        if any(size < 1 for size in sizes):
            raise SettingsError(f"banded table: sizes = {list(sizes)}: every band needs at least one word")
        starts = list(accumulate(sizes))
        if starts and starts[-1] >= vocab_size:
            raise SettingsError(
                f"banded table: the bands of sizes = {list(sizes)} take {starts[-1]:,} words and leave the last band "
                f"none of the vocabulary's {vocab_size:,}; use smaller bands"
            )
        return (0, *starts, vocab_size)
    bounds = (0, *(cutoffs or ()), vocab_size)
    if any(start >= stop for start, stop in pairwise(bounds)):
        raise SettingsError(
            f"banded table: cutoffs = {list(cutoffs or ())} must rise, from 1 to less than the vocabulary's "
            f"{vocab_size:,} words: each is the first id of a band, and no band may be empty"
        )
    return bounds


def projection(input_dim: int, dim: int) -> nn.Linear:
    """A matrix without a bias between a table's width and the model's, started as the matrices of bands are."""
    matrix = nn.Linear(input_dim, dim, bias=False)
    nn.init.xavier_uniform_(matrix.weight)
    return matrix


def check_banded(table: nn.Module, who: str) -> None:
    """Refuse a table without bands where bands are needed."""
    if isinstance(table, BandedTable):
        return
    if not isinstance(table, WordTable):
        raise SettingsError(NOTHING_TO_TIE)
    raise SettingsError(f"{who}: needs a table with bands; give it one of kind = 'banded'")


class BandProjections(nn.Module):
    """One matrix per band between the band's width and the model's; an object of its own, so that ends can share it.

    The input end maps a band's vectors up with it; the adaptive softmax maps the hidden state down with its transpose.
    """

    def __init__(
        self,
        table: NamedBands,
        dim: Annotated[Dim, Field(description="width of the model's side")],
        head: Annotated[
            bool, Field(description="a matrix for the first band too: an input end needs it, an output end may not")
        ] = True,
    ) -> None:
        super().__init__()
        check_banded(table, "band projections")
        self.dim = dim
        self.head = head
        self.widths = tuple(band.dim for band in table.tables)
        self.bands = nn.ParameterList(
            nn.Parameter(nn.init.xavier_uniform_(torch.empty(dim, width))) for width in self.widths[0 if head else 1 :]
        )

    def _matrix(self, band: int) -> Tensor:
        if band == 0 and not self.head:
            raise SettingsError("band projections: there is no matrix for the first band; set head = true")
        matrix: Tensor = self.bands[band if self.head else band - 1]
        return matrix

    def up(self, band: int, vectors: Tensor) -> Tensor:
        """From a band's width to the model's."""
        return F.linear(vectors, self._matrix(band))

    def down(self, band: int, h_ND: Tensor) -> Tensor:
        """From the model's width to a band's."""
        return F.linear(h_ND, self._matrix(band).T)

    def extra_repr(self) -> str:
        return f"{list(self.widths)} <-> {self.dim}"


NamedTable = Annotated[WordTable, Shared("tables")]
"""A table in a constructor's signature: in a recipe, the name of an entry of [tables]."""
NamedBands = Annotated[BandedTable, Shared("tables")]
AnyTable = Annotated[WordTable | BandedTable, Shared("tables")]
NamedProjections = Annotated[BandProjections, Shared("projections")]
