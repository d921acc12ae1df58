"""Spellings are rows of bytes, padded with zeros."""

from __future__ import annotations

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.nn.inputs.spelling import spell


def test_word_is_spelled_as_bytes_plus_one_and_zero_padding() -> None:
    spelled = spell(["ab", "c", "\x00\xff"], max_bytes=4)
    assert spelled.dtype == torch.int16
    assert spelled.tolist() == [[98, 99, 0, 0], [100, 0, 0, 0], [1, 0xC3 + 1, 0xBF + 1, 0]]


def test_long_word_is_truncated_even_inside_a_character() -> None:
    assert spell(["añb"], max_bytes=2).tolist() == [[ord("a") + 1, 0xC3 + 1]]
    assert spell(["x" * 60]).shape == (1, 50)


def test_symbols_have_ids_above_the_bytes() -> None:
    assert spell(["<unk>", "unk", "<eos>"], max_bytes=3).tolist() == [[258, 0, 0], [118, 111, 108], [257, 0, 0]]
    assert spell(["<eos>", "<pad>"], max_bytes=2, symbols=["<pad>"]).tolist() == [[61, 102], [257, 0]]


def test_empty_word_is_all_padding_and_empty_list_has_no_rows() -> None:
    assert spell([""], max_bytes=2).tolist() == [[0, 0]]
    assert spell([], max_bytes=2).shape == (0, 2)


def test_max_bytes_of_zero_is_rejected() -> None:
    with pytest.raises(SettingsError, match="at least 1"):
        spell(["a"], max_bytes=0)
