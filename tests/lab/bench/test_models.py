"""`reefknot bench models`: competitors compute the same loss and gradients, and the search for the largest batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

from torch import Tensor

from reefknot.lab.bench import models
from reefknot.lab.bench.measure import Unavailable
from reefknot.lab.bench.models import Bench, Competitor, find_largest_batch, measure_competitor

BENCH = Bench("cpu", batch=2, length=16, seconds=0.0)


@pytest.mark.parametrize("competitor", [Competitor("transformers"), Competitor("reefknot"), Competitor("reefknot", 1)])
def test_loss_and_gradients_are_those_of_the_model(competitor: Competitor) -> None:
    row = measure_competitor(BENCH, "tiny", competitor)
    assert row.note == ""
    assert row.loss_error is not None
    assert row.loss_error < 1e-6
    assert row.errors is not None
    assert set(row.errors) == {"embedding", "first layer"}
    assert max(row.errors.values()) < 1e-5
    assert row.ms is not None
    assert row.tokens_per_second == pytest.approx(1e3 * 2 * 16 / row.ms)
    assert (row.layers, row.attention) == (2, "sdpa")


def test_wrong_competitor_has_large_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_half(device: str) -> Callable[[Any], Callable[[Tensor], Tensor]]:
        return lambda model: lambda tokens_BT: model(input_ids=tokens_BT, labels=tokens_BT).loss / 2

    monkeypatch.setitem(models.FAMILIES, "half", load_half)
    row = measure_competitor(BENCH, "tiny", Competitor("half"))
    assert row.loss_error == pytest.approx(0.5)
    assert row.worst_error == pytest.approx(0.5, abs=1e-5)


def test_number_of_layers_is_changed() -> None:
    config = models.build_model(Bench("cpu", layers=1), "tiny").config
    assert config.num_hidden_layers == 1


def test_unavailable_competitor_gets_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(device: str) -> Any:
        raise Unavailable("needs a GPU")

    monkeypatch.setitem(models.FAMILIES, "absent", load)
    row = measure_competitor(BENCH, "tiny", Competitor("absent"))
    assert (row.ms, row.note) == (None, "needs a GPU")


@pytest.mark.parametrize("limit", [0, 1, 3, 8, 13, 37, 100, 255, 256, 1000])
@pytest.mark.parametrize("start", [1, 8, 300])
def test_largest_batch_is_exact_to_an_eighth(limit: int, start: int) -> None:
    tried = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    largest = find_largest_batch(fits, start, 256)
    assert max(tried) <= 256
    expected = min(limit, 256)
    assert largest <= expected
    assert largest + max(1, largest // 8) > expected
    assert len(tried) <= 20
