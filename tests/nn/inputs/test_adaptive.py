"""Adaptive input: every band to one width, in the order of the ids."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

WORDS, WIDTH, DIM = 12, 8, 6
BOUNDS = (0, 3, 7, 12)


def adaptive(scale: float = 1.0, dropout: float = 0.0) -> AdaptiveLookup:
    torch.manual_seed(0)
    table = BandedTable(WORDS, WIDTH, cutoffs=BOUNDS[1:-1], factor=2)
    return AdaptiveLookup(table, BandProjections(table, DIM), scale, dropout).double()


def vector(lookup: AdaptiveLookup, word: int) -> Tensor:
    """The paper's definition for one word."""
    band = sum(word >= start for start in BOUNDS[1:-1])
    row = lookup.table.tables[band].weight[word - BOUNDS[band]]
    return lookup.scale * lookup.projections.bands[band] @ row


@pytest.mark.parametrize("shape", [(), (20,), (4, 5), (2, 2, 5), (3, 0)])
def test_each_word_is_its_row_projected_in_its_place(shape: tuple[int, ...]) -> None:
    lookup = adaptive(scale=3.0)
    ids = torch.randint(WORDS, shape)
    found = lookup(ids)
    assert found.shape == (*shape, DIM)
    for word, given in zip(ids.reshape(-1).tolist(), found.reshape(-1, DIM), strict=True):
        torch.testing.assert_close(given, vector(lookup, word))


def test_vectors_are_those_of_all_words() -> None:
    lookup = adaptive(scale=3.0)
    torch.testing.assert_close(lookup.vectors(), lookup(torch.arange(WORDS)))
    assert lookup.tables() == lookup.table.tables
    assert (lookup.dim, lookup.vocab_size) == (DIM, WORDS)


def test_one_band_is_a_lookup_and_its_projection() -> None:
    torch.manual_seed(0)
    table = BandedTable(WORDS, WIDTH, sizes=[])
    one = AdaptiveLookup(table, BandProjections(table, DIM), scale=3.0).double()
    other = Lookup(WordTable(WORDS, WIDTH), scale=3.0, project_to=DIM).double()
    with torch.no_grad():
        for copy, parameter in zip(other.parameters(), one.parameters(), strict=True):
            copy.copy_(parameter)
    ids, seed = torch.randint(WORDS, (3, 5)), torch.randn(3, 5, DIM, dtype=torch.float64)
    torch.testing.assert_close(one(ids), other(ids))
    one(ids).backward(seed)
    other(ids).backward(seed)
    for found, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_gradients_are_those_of_a_lookup_among_all_vectors() -> None:
    lookup = adaptive()
    ids, seed = torch.randint(WORDS, (3, 5)), torch.randn(3, 5, DIM, dtype=torch.float64)
    parameters = list(lookup.parameters())
    found = torch.autograd.grad(lookup(ids), parameters, seed)
    expected = torch.autograd.grad(lookup.vectors()[ids], parameters, seed)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("ids", [[0, 2], [11], []])
def test_a_band_without_words_has_a_gradient_of_zeros(ids: list[int]) -> None:
    lookup = adaptive()
    lookup(torch.tensor(ids, dtype=torch.long)).sum().backward()
    for band, (start, stop) in enumerate(pairwise(BOUNDS)):
        seen = any(start <= word < stop for word in ids)
        for parameter in (lookup.table.tables[band].weight, lookup.projections.bands[band]):
            assert parameter.grad is not None
            assert bool(parameter.grad.abs().sum() > 0) == seen


def test_dropout_is_last_and_only_in_training() -> None:
    lookup = adaptive(scale=3.0, dropout=0.5)
    ids = torch.arange(WORDS)
    whole = lookup.vectors()
    torch.testing.assert_close(lookup.eval()(ids), whole)
    ratio = (lookup.train()(ids) / whole).detach()
    assert set(ratio.round(decimals=9).unique().tolist()) == {0.0, 2.0}


def test_autocast_gives_what_the_projections_give() -> None:
    lookup = adaptive(scale=3.0).float()
    ids = torch.randint(WORDS, (4, 5))
    with torch.autocast("cpu", torch.bfloat16):
        found = lookup(ids)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), lookup(ids), rtol=2e-2, atol=2e-2)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in lookup.parameters())


@pytest.mark.parametrize("sizes", [[], [3], [3, 4]])
def test_in_one_graph_it_gives_the_same(sizes: list[int]) -> None:
    """There every band looks up every id, and words of other bands must not show, in the gradient either."""
    torch.manual_seed(0)
    table = BandedTable(WORDS, WIDTH, sizes=sizes, factor=2)
    lookup = AdaptiveLookup(table, BandProjections(table, DIM), scale=3.0).double()
    torch.compiler.reset()
    compiled = torch.compile(deepcopy(lookup), backend="aot_eager", fullgraph=True)
    for ids in (torch.randint(WORDS, (4, 5)), torch.tensor([[0, 1, 2]]), torch.tensor([[WORDS - 1]])):
        seed = torch.randn(*ids.shape, DIM, dtype=torch.float64)
        found, expected = compiled(ids), lookup(ids)
        torch.testing.assert_close(found, expected)
        given = torch.autograd.grad(found, list(compiled.parameters()), seed)
        wanted = torch.autograd.grad(expected, list(lookup.parameters()), seed)
        for one, other in zip(given, wanted, strict=True):
            torch.testing.assert_close(one, other)
            assert torch.equal(one == 0, other == 0)
    for wrong in (-1, WORDS):
        for refusing in (lookup, compiled):
            with pytest.raises(IndexError):
                refusing(torch.tensor([[1, wrong]]))


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits() -> None:
    lookup = adaptive(scale=3.0)
    ids = torch.randint(WORDS, (4, 5))
    expected = lookup(ids).detach()
    expected_gradients = torch.autograd.grad(lookup(ids).square().sum(), list(lookup.parameters()))
    lookup, ids = lookup.cuda(), ids.cuda()
    lookup(ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = lookup(ids)
        gradients = torch.autograd.grad(found.square().sum(), list(lookup.parameters()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.cpu(), expected)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_a_copy_gives_the_same() -> None:
    lookup = adaptive()
    ids = torch.randint(WORDS, (4, 5))
    assert torch.equal(deepcopy(lookup)(ids), lookup(ids))


def test_state_dict_keys_and_the_meta_device() -> None:
    with torch.device("meta"):
        table = BandedTable(WORDS, WIDTH, sizes=[3, 4], factor=2)
        lookup = AdaptiveLookup(table, BandProjections(table, DIM))
    assert {parameter.device.type for parameter in lookup.parameters()} == {"meta"}
    assert list(lookup.state_dict()) == list(adaptive().state_dict())
    tables = [f"table.bands.{band}.weight" for band in range(3)]
    assert list(lookup.state_dict()) == tables + [f"projections.bands.{band}" for band in range(3)]


def test_the_papers_first_band_has_a_projection_too() -> None:
    with torch.device("meta"):
        table = BandedTable(267_744, 1024, sizes=[20_000, 40_000])
        lookup = AdaptiveLookup(table, BandProjections(table, 1024))
    words = 20_000 * 1024 + 40_000 * 256 + 207_744 * 64
    assert sum(p.numel() for p in lookup.parameters()) == words + 1024 * (1024 + 256 + 64)


def test_what_does_not_fit_is_refused() -> None:
    table = BandedTable(WORDS, WIDTH, sizes=[3, 4], factor=2)
    others = BandProjections(BandedTable(WORDS, WIDTH, sizes=[3], factor=2), DIM)
    with pytest.raises(SettingsError, match=r"the dimensions \[8, 4\] but the table has \[8, 4, 2\]"):
        AdaptiveLookup(table, others)
    with pytest.raises(SettingsError, match="no matrix for it; set head = true"):
        AdaptiveLookup(table, BandProjections(table, DIM, head=False))
    with pytest.raises(SettingsError, match=r"adaptive lookup: .*banded"):
        AdaptiveLookup(WordTable(WORDS, WIDTH), others)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"adaptive lookup: dropout = 1\.5"):
        AdaptiveLookup(table, BandProjections(table, DIM), dropout=1.5)
