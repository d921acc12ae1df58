"""Tables of word vectors with one dimension or with bands, and the projections of bands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import TABLES
from reefknot.nn.tables import BandedTable, BandProjections, WordTable, group_by_band


def test_word_table_returns_rows_of_its_weight() -> None:
    table = WordTable(11, 4)
    ids = torch.tensor([[3, 0], [3, 10]])
    assert table.vectors() is table.weight
    assert torch.equal(table.vectors(ids), table.weight[ids])


def test_unit_norm_vectors_have_length_one() -> None:
    table = WordTable(11, 4, unit_norm=True).double()
    ids = torch.tensor([3, 0])
    torch.testing.assert_close(table.vectors().norm(dim=-1), torch.ones(11, dtype=torch.float64))
    torch.testing.assert_close(table.vectors(ids), table.vectors()[ids])
    # Only directions count, so no gradient points along the vector.
    (table.vectors(ids) * torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad[ids].abs().sum() > 0
    torch.testing.assert_close((table.weight.grad * table.weight).sum(-1), torch.zeros(11, dtype=torch.float64))


def test_sizes_and_cutoffs_define_the_same_bands() -> None:
    with torch.device("meta"):
        by_size = BandedTable(267_744, 1024, sizes=[20_000, 40_000])
        by_cutoff = BandedTable(267_744, 1024, cutoffs=[20_000, 60_000])
    assert by_size.bounds == by_cutoff.bounds == (0, 20_000, 60_000, 267_744)
    assert by_size.sizes == by_cutoff.sizes == (20_000, 40_000, 207_744)
    shapes = [(band.vocab_size, band.dim) for band in by_size.tables]
    assert shapes == [(20_000, 1024), (40_000, 256), (207_744, 64)]
    for text in ("[20000, 40000, 207744]", "cutoffs=[20000, 60000]"):
        assert text in by_size.extra_repr()


@pytest.mark.parametrize(
    ("dim", "factor", "dims"), [(10, 4, [10, 2]), (9, 2, [9, 4, 2]), (6, 1, [6, 6, 6]), (5, 7, [5])]
)
def test_dimensions_of_bands_are_rounded_down(dim: int, factor: int, dims: list[int]) -> None:
    table = BandedTable(10, dim, sizes=[2] * (len(dims) - 1), factor=factor)
    assert [band.dim for band in table.tables] == dims


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "sizes .* or cutoffs .*; neither is given"),
        ({"sizes": [2], "cutoffs": [2]}, "sizes .* or cutoffs .*; both are given"),
        ({"sizes": [2, 0]}, r"sizes = \[2, 0\]: every band needs at least one word"),
        ({"sizes": [6, 5]}, "leave none of the vocabulary's 11 for the last band"),
        ({"sizes": [20]}, "have 20 words"),
        ({"cutoffs": [5, 3]}, r"cutoffs = \[5, 3\] must increase"),
        ({"cutoffs": [3, 3]}, "no band may be empty"),
        ({"cutoffs": [0, 3]}, "from 1 to less than the vocabulary's 11"),
        ({"cutoffs": [11]}, r"cutoffs = \[11\] must increase"),
        ({"cutoffs": [2, 4, 6], "factor": 3}, "leave band 3 with dimension 0"),
        ({"sizes": [2], "factor": 0}, "factor = 0: must be at least 1"),
    ],
)
def test_invalid_bands_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        BandedTable(11, 8, **arguments)


def test_recipe_lists_the_sizes_of_bands() -> None:
    settings = TypeAdapter(TABLES.entry_type()).validate_python({"kind": "banded", "dim": 16, "sizes": [2, 3]})
    assert TABLES.build(settings, {"vocab_size": 11}).sizes == (2, 3, 6)


def test_words_are_routed_to_their_bands_and_ignored_ids_to_none() -> None:
    table = BandedTable(10, 8, cutoffs=[2, 5], factor=2)
    rows = group_by_band(torch.tensor([9, 0, 5, -100, 4, 1, 2]), table.bounds)
    assert [positions.tolist() for positions, _ in rows] == [[1, 5], [4, 6], [0, 2]]
    assert [words.tolist() for _, words in rows] == [[0, 1], [2, 0], [4, 0]]


@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 0)])
def test_bands_of_equal_dimension_act_like_one_table(shape: tuple[int, ...]) -> None:
    table = BandedTable(10, 4, sizes=[2, 3], factor=1).double()
    ids = torch.randint(10, shape)
    weights = [band.weight for band in table.tables]
    whole = torch.cat(weights)
    output_gradient = torch.randn(*shape, 4, dtype=torch.float64)
    assert torch.equal(table.vectors(), whole)
    assert torch.equal(table.vectors(ids), whole[ids])
    actual = torch.autograd.grad(table.vectors(ids), weights, output_gradient)
    expected = torch.autograd.grad(whole[ids], weights, output_gradient)
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_id_outside_the_vocabulary_is_rejected() -> None:
    table = BandedTable(10, 4, sizes=[2, 3], factor=1)
    for word in (10, -1):
        with pytest.raises(IndexError, match="outside the vocabulary, 0 to 9"):
            table.vectors(torch.tensor([1, word]))


def test_bands_of_different_dimensions_have_no_common_vectors() -> None:
    table = BandedTable(10, 8, sizes=[2, 3], factor=2)
    with pytest.raises(SettingsError, match=r"dimensions 8, 4, 2.*adaptive lookup"):
        table.vectors()
    one_band = BandedTable(10, 8, sizes=[], factor=4)
    assert one_band.vectors() is not None


def test_map_to_band_dim_is_the_transpose_of_map_to_model_dim() -> None:
    table = BandedTable(10, 8, sizes=[2, 3], factor=2)
    projections = BandProjections(table, 6).double()
    assert [tuple(matrix.shape) for matrix in projections.bands] == [(6, 8), (6, 4), (6, 2)]
    for band, dim in enumerate((8, 4, 2)):
        vectors = torch.randn(3, dim, dtype=torch.float64)
        hidden_ND = torch.randn(3, 6, dtype=torch.float64)
        products_in_model_dim = projections.to_model_dim(band, vectors) * hidden_ND
        products_in_band_dim = vectors * projections.to_band_dim(band, hidden_ND)
        torch.testing.assert_close(products_in_model_dim.sum(), products_in_band_dim.sum())


def test_projections_without_head_skip_the_first_band() -> None:
    table = BandedTable(10, 8, sizes=[2, 3], factor=2)
    tails = BandProjections(table, 6, head=False)
    assert list(tails.state_dict()) == ["bands.0", "bands.1"]
    assert list(BandProjections(table, 6).state_dict()) == ["bands.0", "bands.1", "bands.2"]
    assert torch.equal(tails.to_model_dim(1, torch.eye(4)), tails.bands[0].T)
    assert torch.equal(tails.to_band_dim(2, torch.eye(6)), tails.bands[1])
    with pytest.raises(SettingsError, match="no matrix for the first band"):
        tails.to_model_dim(0, torch.eye(2))


def test_projections_need_a_banded_table() -> None:
    with pytest.raises(SettingsError, match=r"band projections: .*banded"):
        BandProjections(WordTable(10, 8), 6)  # type: ignore[arg-type]


def test_table_state_dict_keys() -> None:
    assert list(WordTable(3, 2).state_dict()) == ["weight"]
    assert list(BandedTable(10, 8, sizes=[2]).state_dict()) == ["bands.0.weight", "bands.1.weight"]


def test_frozen_table_requires_no_gradient() -> None:
    table = WordTable(3, 2, frozen=True)
    assert table.frozen
    assert not table.weight.requires_grad
    assert table.extra_repr() == "3, 2, frozen=True"
    assert not WordTable(3, 2).frozen
    torch.manual_seed(0)
    drawn = WordTable(3, 2).weight
    torch.manual_seed(0)
    assert torch.equal(WordTable(3, 2, frozen=True).weight, drawn)


def test_recipe_names_a_vector_file_and_freezes_the_table() -> None:
    kinds = TypeAdapter(TABLES.entry_type())
    settings = kinds.validate_python({"kind": "word", "dim": 4, "vectors": "v.txt", "frozen": True})
    assert settings.vectors == "v.txt"
    assert TABLES.build(settings, {"vocab_size": 11}).frozen
    with pytest.raises(ValidationError, match="at least 1 character"):
        kinds.validate_python({"kind": "word", "dim": 4, "vectors": ""})
