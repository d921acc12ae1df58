"""Batches as a recipe names them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from reefknot.errors import SettingsError
from reefknot.lab.text.batches import Batches, Batching, BatchSettings, batches_of
from reefknot.lab.text.blocks import Blocks
from reefknot.lab.text.sentence_batches import Sentences
from reefknot.lab.text.streams import RandomSteps, Streams

EOS = 0
IDS = np.arange(4000, dtype=np.int32) % 20
RANDOM = RandomSteps()


def reading(batching: Batching, **changes: Any) -> BatchSettings:
    return BatchSettings(**{"batching": batching, "batch": 4, "steps": 30, "seed": 3} | changes)


def windows(batches: Batches) -> list[torch.Tensor]:
    batches.begin(2)
    return [each for index in range(batches.windows) for each in batches.window(index)]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (reading("streams"), Streams(IDS, 4, 30, IDS + 20, seed=3)),
        (reading("streams", random_steps=RANDOM), Streams(IDS, 4, 30, IDS + 20, random_steps=RANDOM, seed=3)),
        (reading("blocks"), Blocks(IDS, 4, 30, IDS + 20, eos=EOS, seed=3)),
        (reading("sentences"), Sentences(IDS, 4, 30, IDS + 20, eos=EOS, seed=3)),
    ],
    ids=["streams", "random", "blocks", "sentences"],
)
def test_a_text_is_read_as_a_recipe_says(said: BatchSettings, expected: Batches) -> None:
    found = batches_of(said, IDS, IDS + 20, EOS)
    assert type(found) is type(expected)
    assert all(torch.equal(*pair) for pair in zip(windows(found), windows(expected), strict=True))


@pytest.mark.parametrize("batching", ["blocks", "sentences", "pairs"])
def test_random_lengths_are_for_streams(batching: Batching) -> None:
    with pytest.raises(ValidationError, match=f'random_steps has no meaning with batching = "{batching}"; remove it'):
        reading(batching, random_steps=RANDOM)


@pytest.mark.parametrize("batching", ["streams", "blocks"])
def test_lines_without_ends_are_no_hindrance(batching: Batching) -> None:
    assert batches_of(reading(batching), IDS).tokens > 3990


def test_one_text_is_not_read_as_pairs() -> None:
    with pytest.raises(SettingsError, match='batching = "pairs" is for sources with their translations'):
        batches_of(reading("pairs"), IDS, IDS, EOS)


def test_sentences_are_refused_where_lines_have_no_ends() -> None:
    with pytest.raises(SettingsError, match='batching = "sentences"'):
        batches_of(reading("sentences"), IDS)
