"""How parameters start: all of them at once, or the word tables alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reefknot.models.initialisation import InitialisationSettings, initialise
from reefknot.outputs.labels.plain import Plain
from reefknot.tables import BandedTable, WordTable


def model(tied: bool = False) -> nn.ModuleDict:
    torch.manual_seed(0)
    words = WordTable(50, 8)
    classes = words if tied else WordTable(50, 8)
    return nn.ModuleDict({"words": words, "labels": Plain(classes), "layer": nn.Linear(8, 8)})


def test_left_out_nothing_is_drawn() -> None:
    made, same = model(), model()
    state = torch.get_rng_state()
    initialise(made, InitialisationSettings())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), same.parameters(), strict=True))


def test_uniform_draws_everything() -> None:
    made = model()
    initialise(made, InitialisationSettings(uniform=0.04))
    for parameter in made.parameters():
        assert 0.0 < float(parameter.detach().abs().max()) <= 0.04
    assert float(made["labels"].bias.detach().abs().max()) > 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_tables_draws_the_word_tables_of_both_ends_and_nothing_else(tied: bool) -> None:
    made, before = model(tied), model(tied)
    initialise(made, InitialisationSettings(tables=0.1))
    for table in (made["words"], made["labels"].table):
        assert 0.09 < float(table.weight.detach().abs().max()) <= 0.1
        assert abs(float(table.weight.detach().mean())) < 0.02
    assert torch.equal(made["layer"].weight, before["layer"].weight)
    assert not made["labels"].bias.any()
    assert torch.equal(made["words"].weight, made["labels"].table.weight) == tied


def test_the_bands_of_a_table_are_word_tables_too() -> None:
    table = BandedTable(60, 8, sizes=[20], factor=2)
    initialise(table, InitialisationSettings(tables=0.1))
    assert all(float(band.weight.detach().abs().max()) <= 0.1 for band in table.tables)


def test_tables_may_have_another_range_than_the_rest() -> None:
    made = model()
    initialise(made, InitialisationSettings(uniform=0.01, tables=0.1))
    assert float(made["words"].weight.detach().abs().max()) > 0.09
    assert float(made["layer"].weight.detach().abs().max()) <= 0.01
