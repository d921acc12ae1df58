"""The lookup input end: scale, projection, dropout and word dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.tables import BandedTable, WordTable

WORDS, DIM = 11, 4


def word_table() -> WordTable:
    torch.manual_seed(0)
    return WordTable(WORDS, DIM).double()


def test_lookup_without_options_returns_rows_of_the_table() -> None:
    table = word_table()
    lookup = Lookup(table)
    ids = torch.tensor([[3, 0, 3], [10, 1, 2]])
    assert torch.equal(lookup(ids), table.weight[ids])
    assert torch.equal(lookup.vectors(), table.weight)
    assert lookup.tables() == [table]
    assert list(lookup.state_dict()) == ["table.weight"]


def test_vectors_are_scaled_then_projected() -> None:
    lookup = Lookup(word_table(), scale=3.0, project_to=6).double()
    ids = torch.tensor([[3, 0], [10, 3]])
    (matrix,) = lookup.projection.parameters()
    assert matrix.shape == (6, DIM)
    assert lookup.dim == 6
    torch.testing.assert_close(lookup.vectors(), 3.0 * lookup.table.weight @ matrix.T)
    torch.testing.assert_close(lookup(ids), lookup.vectors()[ids])
    assert list(lookup.state_dict()) == ["table.weight", "projection.weight"]


def test_projection_is_initialised_xavier_uniform() -> None:
    lookup = Lookup(WordTable(WORDS, 30), project_to=60)
    (matrix,) = lookup.projection.parameters()
    bound = (6 / (30 + 60)) ** 0.5
    assert 0.95 * bound < matrix.abs().max() <= bound


def test_bands_of_equal_dimension_can_be_looked_up() -> None:
    bands = BandedTable(WORDS, DIM, sizes=[2, 3], factor=1)
    lookup = Lookup(bands, scale=2.0)
    ids = torch.tensor([[10, 0], [4, 3]])
    assert torch.equal(lookup(ids), 2.0 * torch.cat([band.weight for band in bands.tables])[ids])
    assert lookup.tables() == bands.tables


def test_word_dropout_drops_whole_words_and_keeps_the_table() -> None:
    table = word_table()
    before = table.vectors().clone()
    lookup = Lookup(table, word_dropout=0.5)
    ids = torch.arange(WORDS).repeat(3, 1)
    ratios = []
    for _ in range(20):
        ratio = (lookup(ids) / before[ids]).detach()
        assert torch.equal(ratio, ratio[:1, :, :1].expand_as(ratio)), (
            "all dimensions and occurrences of a word share a mask value"
        )
        assert set(ratio.round(decimals=9).unique().tolist()) <= {0.0, 2.0}
        assert torch.equal(table.vectors(), before)
        assert torch.equal(lookup.vectors(), before)
        ratios.append(ratio[0, :, 0])
    dropped = (torch.stack(ratios) == 0).double()
    assert len(dropped.unique(dim=0)) > 1, "a new mask for every forward pass"
    assert 0.3 < dropped.mean() < 0.7


def test_word_dropout_draws_one_value_per_word_of_the_vocabulary() -> None:
    lookup = Lookup(word_table(), word_dropout=0.5)
    torch.manual_seed(3)
    expected = torch.empty(WORDS, dtype=torch.float64).bernoulli_(0.5)
    torch.manual_seed(3)
    vectors = lookup(torch.arange(WORDS))
    assert torch.equal((vectors != 0).all(-1), expected == 1)


def test_word_dropout_by_stream_drops_a_word_at_all_its_positions_in_a_stream() -> None:
    lookup = Lookup(word_table(), word_dropout=0.5, word_dropout_by="stream")
    streams = 64
    ids_BT = torch.tensor([[4, 2, 4, 4, 2]]).repeat(streams, 1)
    kept_BT = (lookup(ids_BT) != 0).all(-1)
    assert torch.equal(kept_BT[:, [0, 0, 1]], kept_BT[:, [2, 3, 4]])
    assert len(kept_BT.unique(dim=0)) == 4, "streams and words are independent"
    torch.manual_seed(3)
    expected_BV = torch.empty(streams, WORDS, dtype=torch.float64).bernoulli_(0.5) / 0.5
    torch.manual_seed(3)
    expected_BTD = lookup.vectors()[ids_BT] * expected_BV.gather(1, ids_BT)[..., None]
    torch.testing.assert_close(lookup(ids_BT), expected_BTD)


def test_word_dropout_by_token_is_independent_at_every_position() -> None:
    lookup = Lookup(word_table(), word_dropout=0.25, word_dropout_by="token")
    torch.manual_seed(0)
    ratio_BTD = lookup(torch.full((50, 40), 4)) / lookup.vectors()[4]
    assert set(ratio_BTD.detach().round(decimals=6).unique().tolist()) == {0.0, round(4 / 3, 6)}
    dropped_BT = (ratio_BTD == 0).all(-1)
    assert torch.equal(dropped_BT, (ratio_BTD == 0).any(-1)), "whole vectors are dropped"
    assert 0.2 < dropped_BT.double().mean() < 0.3
    assert len(dropped_BT.unique(dim=0)) > 40


def test_dropout_acts_last_and_only_in_training() -> None:
    lookup = Lookup(word_table(), scale=3.0, dropout=0.5, word_dropout=0.5, project_to=6).double()
    ids = torch.arange(WORDS)
    whole = lookup.vectors()
    assert torch.equal(lookup.eval()(ids), whole)
    torch.manual_seed(0)
    ratio = (lookup.train()(ids) / whole).detach()
    assert set(ratio.round(decimals=9).unique().tolist()) == {0.0, 4.0}, "scaled by both masks, or dropped by one"
    nonzero = (ratio != 0).sum(-1)
    assert ((nonzero > 0) & (nonzero < 6)).any(), "single dimensions are dropped, not only whole words"


def test_unit_norm_table_gives_vectors_of_equal_length() -> None:
    lookup = Lookup(WordTable(WORDS, DIM, unit_norm=True), scale=3.0)
    torch.testing.assert_close(lookup(torch.arange(WORDS)).norm(dim=-1), torch.full((WORDS,), 3.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.0}, "lookup: scale = 0.0: must be greater than 0"),
        ({"scale": float("nan")}, "lookup: scale = nan"),
        ({"dropout": 1.0}, "lookup: dropout = 1.0: must be at least 0 and less than 1"),
        ({"word_dropout_by": "line"}, "lookup: word_dropout_by = 'line': must be type, stream or token"),
        ({"word_dropout": -0.1}, "lookup: word_dropout = -0.1: must be at least 0 and less than 1"),
        ({"project_to": 0}, "lookup: project_to = 0: must be at least 1"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Lookup(word_table(), **arguments)


def test_bands_of_different_dimensions_are_rejected() -> None:
    with pytest.raises(SettingsError, match=r"dimensions 8, 2.*use an adaptive lookup"):
        Lookup(BandedTable(WORDS, 8, sizes=[2]))
