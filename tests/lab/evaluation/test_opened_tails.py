"""The share of an adaptive softmax that an exact search opens, measured on the hidden states of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reefknot as rk
from reefknot.lab.evaluation.opened_tails import measure_opened_tails
from reefknot.lab.evaluation.windows import Sliding
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.vocabulary_settings import VocabularySettings


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    folder = tmp_path / "text"
    folder.mkdir()
    words = " ".join(f"w{number * number % 23}" for number in range(60))
    for name in ("train", "valid", "test"):
        (folder / f"{name}.txt").write_text(f"{words}\n")
    return open_dataset(CorpusSettings(name=str(folder)), VocabularySettings(), cache=tmp_path / "cache")


def make_model(words: int) -> rk.LanguageModel:
    torch.manual_seed(0)
    bands = rk.BandedTable(words, dim=8, sizes=[3, 4], factor=2)
    matrices = rk.BandProjections(bands, 8)
    body = rk.Transformer(8, layers=1, heads=2, ffn_dim=16)
    return rk.LanguageModel(rk.AdaptiveLookup(bands, matrices), body, rk.AdaptiveSoftmax(bands, matrices, 8))


def test_hidden_states_come_from_the_windows_of_the_run(dataset: Dataset) -> None:
    model = make_model(len(dataset.vocabulary))
    test = dataset.splits["test"]
    lengths: list[int] = []
    model.encoder.register_forward_pre_hook(lambda _, arguments: lengths.append(arguments[0].shape[1]))
    opened = measure_opened_tails(model, test, dataset.vocabulary, Sliding(context=4, stride=6), k=3, tokens=40)
    assert opened is not None
    assert (opened.k, opened.tokens) == (3, 40)
    assert 0.0 < opened.share <= 1.0
    assert max(lengths) == 10


def test_text_without_context_has_no_result(dataset: Dataset) -> None:
    model = make_model(len(dataset.vocabulary))
    test = dataset.splits["test"]
    assert measure_opened_tails(model, test, dataset.vocabulary, Sliding(context=4, stride=6), tokens=0) is None


def test_output_end_without_tails_has_no_result(dataset: Dataset) -> None:
    table = rk.WordTable(len(dataset.vocabulary), 8)
    plain = rk.LanguageModel(rk.Lookup(table), rk.LSTM(8, 8), rk.Softmax(rk.Plain(table)))
    assert measure_opened_tails(plain, dataset.splits["test"], dataset.vocabulary) is None
