"""Adaptive input projects the vectors of all bands to one dimension and returns them in the order of the ids."""

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

WORDS, TABLE_DIM, DIM = 12, 8, 6
BOUNDS = (0, 3, 7, 12)


def adaptive_input(scale: float = 1.0, dropout: float = 0.0) -> AdaptiveLookup:
    torch.manual_seed(0)
    table = BandedTable(WORDS, TABLE_DIM, cutoffs=BOUNDS[1:-1], factor=2)
    return AdaptiveLookup(table, BandProjections(table, DIM), scale, dropout).double()


def expected_vector(lookup: AdaptiveLookup, word: int) -> Tensor:
    """Return the vector of one word by the definition of the paper."""
    band = sum(word >= start for start in BOUNDS[1:-1])
    row = lookup.table.tables[band].weight[word - BOUNDS[band]]
    return lookup.scale * lookup.projections.bands[band] @ row


@pytest.mark.parametrize("shape", [(), (20,), (4, 5), (2, 2, 5), (3, 0)])
def test_each_id_gives_the_projected_row_of_its_band(shape: tuple[int, ...]) -> None:
    lookup = adaptive_input(scale=3.0)
    ids = torch.randint(WORDS, shape)
    vectors = lookup(ids)
    assert vectors.shape == (*shape, DIM)
    for word, vector in zip(ids.reshape(-1).tolist(), vectors.reshape(-1, DIM), strict=True):
        torch.testing.assert_close(vector, expected_vector(lookup, word))


def test_vectors_equal_lookup_of_all_words() -> None:
    lookup = adaptive_input(scale=3.0)
    torch.testing.assert_close(lookup.vectors(), lookup(torch.arange(WORDS)))
    assert lookup.tables() == lookup.table.tables
    assert (lookup.dim, lookup.vocab_size) == (DIM, WORDS)


def test_one_band_equals_lookup_with_projection() -> None:
    torch.manual_seed(0)
    table = BandedTable(WORDS, TABLE_DIM, sizes=[])
    adaptive_lookup = AdaptiveLookup(table, BandProjections(table, DIM), scale=3.0).double()
    lookup = Lookup(WordTable(WORDS, TABLE_DIM), scale=3.0, project_to=DIM).double()
    with torch.no_grad():
        for copy, parameter in zip(lookup.parameters(), adaptive_lookup.parameters(), strict=True):
            copy.copy_(parameter)
    ids, output_gradient = torch.randint(WORDS, (3, 5)), torch.randn(3, 5, DIM, dtype=torch.float64)
    torch.testing.assert_close(adaptive_lookup(ids), lookup(ids))
    adaptive_lookup(ids).backward(output_gradient)
    lookup(ids).backward(output_gradient)
    for parameter, expected in zip(adaptive_lookup.parameters(), lookup.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_gradients_equal_those_of_indexing_all_vectors() -> None:
    lookup = adaptive_input()
    ids, output_gradient = torch.randint(WORDS, (3, 5)), torch.randn(3, 5, DIM, dtype=torch.float64)
    parameters = list(lookup.parameters())
    actual = torch.autograd.grad(lookup(ids), parameters, output_gradient)
    expected = torch.autograd.grad(lookup.vectors()[ids], parameters, output_gradient)
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("ids", [[0, 2], [11], []])
def test_band_without_words_has_zero_gradient(ids: list[int]) -> None:
    lookup = adaptive_input()
    lookup(torch.tensor(ids, dtype=torch.long)).sum().backward()
    for band, (start, stop) in enumerate(pairwise(BOUNDS)):
        seen = any(start <= word < stop for word in ids)
        for parameter in (lookup.table.tables[band].weight, lookup.projections.bands[band]):
            assert parameter.grad is not None
            assert bool(parameter.grad.abs().sum() > 0) == seen


def test_dropout_acts_last_and_only_in_training() -> None:
    lookup = adaptive_input(scale=3.0, dropout=0.5)
    ids = torch.arange(WORDS)
    whole = lookup.vectors()
    torch.testing.assert_close(lookup.eval()(ids), whole)
    ratio = (lookup.train()(ids) / whole).detach()
    assert set(ratio.round(decimals=9).unique().tolist()) == {0.0, 2.0}


def test_autocast_gives_bfloat16_vectors_close_to_float32() -> None:
    lookup = adaptive_input(scale=3.0).float()
    ids = torch.randint(WORDS, (4, 5))
    with torch.autocast("cpu", torch.bfloat16):
        vectors = lookup(ids)
    assert vectors.dtype == torch.bfloat16
    torch.testing.assert_close(vectors.float(), lookup(ids), rtol=2e-2, atol=2e-2)
    vectors.sum().backward()
    assert all(parameter.grad is not None for parameter in lookup.parameters())


@pytest.mark.parametrize("sizes", [[], [3], [3, 4]])
def test_compiled_lookup_gives_equal_vectors_and_gradients(sizes: list[int]) -> None:
    """A compiled lookup looks up every id in every band; words of other bands must not change values or gradients."""
    torch.manual_seed(0)
    table = BandedTable(WORDS, TABLE_DIM, sizes=sizes, factor=2)
    lookup = AdaptiveLookup(table, BandProjections(table, DIM), scale=3.0).double()
    torch.compiler.reset()
    compiled = torch.compile(deepcopy(lookup), backend="aot_eager", fullgraph=True)
    for ids in (torch.randint(WORDS, (4, 5)), torch.tensor([[0, 1, 2]]), torch.tensor([[WORDS - 1]])):
        output_gradient = torch.randn(*ids.shape, DIM, dtype=torch.float64)
        actual, expected = compiled(ids), lookup(ids)
        torch.testing.assert_close(actual, expected)
        gradients = torch.autograd.grad(actual, list(compiled.parameters()), output_gradient)
        expected_gradients = torch.autograd.grad(expected, list(lookup.parameters()), output_gradient)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient)
            assert torch.equal(gradient == 0, expected_gradient == 0)
    for word in (-1, WORDS):
        for module in (lookup, compiled):
            with pytest.raises(IndexError):
                module(torch.tensor([[1, word]]))


@pytest.mark.gpu
def test_gpu_lookup_does_not_synchronise() -> None:
    lookup = adaptive_input(scale=3.0)
    ids = torch.randint(WORDS, (4, 5))
    expected = lookup(ids).detach()
    expected_gradients = torch.autograd.grad(lookup(ids).square().sum(), list(lookup.parameters()))
    lookup, ids = lookup.cuda(), ids.cuda()
    lookup(ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = lookup(ids)
        gradients = torch.autograd.grad(actual.square().sum(), list(lookup.parameters()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(actual.cpu(), expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.cpu(), expected_gradient)


def test_copy_gives_equal_vectors() -> None:
    lookup = adaptive_input()
    ids = torch.randint(WORDS, (4, 5))
    assert torch.equal(deepcopy(lookup)(ids), lookup(ids))


def test_state_dict_keys_on_the_meta_device() -> None:
    with torch.device("meta"):
        table = BandedTable(WORDS, TABLE_DIM, sizes=[3, 4], factor=2)
        lookup = AdaptiveLookup(table, BandProjections(table, DIM))
    assert {parameter.device.type for parameter in lookup.parameters()} == {"meta"}
    assert list(lookup.state_dict()) == list(adaptive_input().state_dict())
    tables = [f"table.bands.{band}.weight" for band in range(3)]
    assert list(lookup.state_dict()) == tables + [f"projections.bands.{band}" for band in range(3)]


def test_parameter_count_includes_projection_of_first_band() -> None:
    with torch.device("meta"):
        table = BandedTable(267_744, 1024, sizes=[20_000, 40_000])
        lookup = AdaptiveLookup(table, BandProjections(table, 1024))
    words = 20_000 * 1024 + 40_000 * 256 + 207_744 * 64
    assert sum(parameter.numel() for parameter in lookup.parameters()) == words + 1024 * (1024 + 256 + 64)


def test_mismatched_tables_and_projections_are_rejected() -> None:
    table = BandedTable(WORDS, TABLE_DIM, sizes=[3, 4], factor=2)
    others = BandProjections(BandedTable(WORDS, TABLE_DIM, sizes=[3], factor=2), DIM)
    with pytest.raises(SettingsError, match=r"the dimensions \[8, 4\] but the table has \[8, 4, 2\]"):
        AdaptiveLookup(table, others)
    with pytest.raises(SettingsError, match="no matrix for it; set head = true"):
        AdaptiveLookup(table, BandProjections(table, DIM, head=False))
    with pytest.raises(SettingsError, match=r"adaptive lookup: .*banded"):
        AdaptiveLookup(WordTable(WORDS, TABLE_DIM), others)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"adaptive lookup: dropout = 1\.5"):
        AdaptiveLookup(table, BandProjections(table, DIM), dropout=1.5)
