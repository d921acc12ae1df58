"""A small text with unknown words and empty lines, and small models whose predictions are far from uniform."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.encoders.transformer import Transformer
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

TRAIN = "the cat sat on the mat\nthe dog sat\n\na cat saw the dog and the dog ran\nthe mat\n" * 30
TEST = "the cat saw a zebra\n\na dog sat on the zürich mat\nand ran\n\n" * 12


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Dataset]:
    """Return a function that opens the text; keywords are vocabulary settings, `test` another held-out text."""

    def open_text(test: str = TEST, **settings: object) -> Dataset:
        for name, text in (("train", TRAIN), ("valid", TEST), ("test", test)):
            (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
        chosen = VocabularySettings.model_validate(settings)
        return open_dataset(CorpusSettings(name=str(tmp_path)), chosen, cache=tmp_path / "cache")

    return open_text


@pytest.fixture
def model_for() -> Callable[[int], LanguageModel]:
    """Return a function that builds a tied LSTM model, with dropout that evaluation must switch off."""

    def build(words: int) -> LanguageModel:
        torch.manual_seed(0)
        table = WordTable(words, 8)
        encoder = LSTM(8, 8, layers=2, dropout=0.5)
        model = LanguageModel(Lookup(table), encoder, Softmax(Plain(table)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.8)
        return model

    return build


@pytest.fixture
def transformer_for() -> Callable[[int], LanguageModel]:
    """Return a function that builds a float64 transformer, which carries no state."""

    def build(words: int) -> LanguageModel:
        torch.manual_seed(0)
        table = WordTable(words, 8)
        model = LanguageModel(Lookup(table), Transformer(8, 2, 2, 16, dropout=0.5), Softmax(Plain(table)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.5)
        return model.double()

    return build
