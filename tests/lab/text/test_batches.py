"""The batching that a recipe names is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from reefknot.errors import SettingsError
from reefknot.lab.text.batches import Batches, Batching, BatchSettings, build_batches
from reefknot.lab.text.blocks import Blocks
from reefknot.lab.text.sentence_batches import Sentences
from reefknot.lab.text.streams import RandomSteps, Streams

EOS = 0
IDS = np.arange(4000, dtype=np.int32) % 20
RANDOM = RandomSteps()


def batch_settings(batching: Batching, **changes: Any) -> BatchSettings:
    return BatchSettings(**{"batching": batching, "batch": 4, "steps": 30, "seed": 3} | changes)


def second_epoch(batches: Batches) -> list[torch.Tensor]:
    batches.set_epoch(2)
    return [tensor for index in range(batches.num_windows) for tensor in batches.window(index)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (batch_settings("streams"), Streams(IDS, 4, 30, IDS + 20, seed=3)),
        (batch_settings("streams", random_steps=RANDOM), Streams(IDS, 4, 30, IDS + 20, random_steps=RANDOM, seed=3)),
        (batch_settings("blocks"), Blocks(IDS, 4, 30, IDS + 20, eos=EOS, seed=3)),
        (batch_settings("sentences"), Sentences(IDS, 4, 30, IDS + 20, eos=EOS, seed=3)),
    ],
    ids=["streams", "random", "blocks", "sentences"],
)
def test_batching_setting_selects_the_batches(settings: BatchSettings, expected: Batches) -> None:
    batches = build_batches(settings, IDS, IDS + 20, EOS)
    assert type(batches) is type(expected)
    assert all(torch.equal(*pair) for pair in zip(second_epoch(batches), second_epoch(expected), strict=True))


@pytest.mark.parametrize("batching", ["blocks", "sentences", "pairs"])
def test_random_steps_need_streams(batching: Batching) -> None:
    with pytest.raises(ValidationError, match=f'random_steps has no meaning with batching = "{batching}"; remove it'):
        batch_settings(batching, random_steps=RANDOM)


@pytest.mark.parametrize("batching", ["streams", "blocks"])
def test_streams_and_blocks_do_not_need_eos(batching: Batching) -> None:
    assert build_batches(batch_settings(batching), IDS).num_targets > 3990


def test_pairs_batching_is_rejected_for_one_text() -> None:
    with pytest.raises(SettingsError, match='batching = "pairs" is for parallel text'):
        build_batches(batch_settings("pairs"), IDS, IDS, EOS)


def test_sentences_batching_needs_eos() -> None:
    with pytest.raises(SettingsError, match='batching = "sentences"'):
        build_batches(batch_settings("sentences"), IDS)
