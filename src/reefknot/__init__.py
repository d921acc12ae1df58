"""Reefknot: the two ends of a language model, and how to tie them.

    import reefknot as rk

    words = rk.WordTable(10_000, 200)
    model = rk.LanguageModel(rk.Lookup(words), rk.LSTM(200, 200), rk.Softmax(rk.Plain(words)))   # one table: tied
    model.loss(tokens).mean().backward()

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AWDLSTM": "encoders.awd_lstm",
    "AdaptiveLookup": "inputs.adaptive",
    "AdaptiveSoftmax": "outputs.adaptive",
    "ArgumentError": "errors",
    "AttentionGRU": "encoders.attention_gru",
    "Augmented": "outputs.augmented",
    "BandProjections": "tables",
    "BandedTable": "tables",
    "BayesianLSTM": "encoders.bayesian_lstm",
    "Bilinear": "outputs.labels.bilinear",
    "CharCNN": "inputs.char_cnn",
    "CorpusSettings": "text.corpora",
    "DataError": "errors",
    "Drill": "outputs.labels.drill",
    "Dual": "outputs.labels.dual",
    "EncoderDecoder": "encoders.encoder_decoder",
    "GRU": "encoders.stacked",
    "LSTM": "encoders.stacked",
    "LanguageModel": "models.language_model",
    "Lookup": "inputs.lookup",
    "MixtureOfSoftmaxes": "outputs.mixture",
    "NonFiniteError": "errors",
    "Plain": "outputs.labels.plain",
    "Projected": "outputs.labels.projected",
    "RNN": "encoders.stacked",
    "RecurrentHighway": "encoders.highway",
    "ReefknotError": "errors",
    "RegularisationSettings": "models.regularisation",
    "ResourceError": "errors",
    "SampledSoftmax": "outputs.sampled",
    "SettingsError": "errors",
    "SkipGram": "models.skip_gram",
    "Softmax": "outputs.softmax",
    "Stopped": "errors",
    "Transformer": "encoders.transformer",
    "Translator": "models.translator",
    "VariationalLSTM": "encoders.variational_lstm",
    "VocabularySettings": "text.vocabulary",
    "WordTable": "tables",
    "WordVectors": "vectors.word_vectors",
    "linear_cross_entropy": "kernels.linear_cross_entropy",
    "load_recipe": "recipe",
    "open_dataset": "text.dataset",
    "open_run": "trained_run",
    "open_vectors": "opened_vectors",
    "read_vectors": "vectors.files",
    "spell": "text.spelling",
    "using": "kernels.choice",
    "write_vectors": "vectors.files",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from reefknot.encoders.attention_gru import AttentionGRU as AttentionGRU
    from reefknot.encoders.awd_lstm import AWDLSTM as AWDLSTM
    from reefknot.encoders.bayesian_lstm import BayesianLSTM as BayesianLSTM
    from reefknot.encoders.encoder_decoder import EncoderDecoder as EncoderDecoder
    from reefknot.encoders.highway import RecurrentHighway as RecurrentHighway
    from reefknot.encoders.stacked import GRU as GRU
    from reefknot.encoders.stacked import LSTM as LSTM
    from reefknot.encoders.stacked import RNN as RNN
    from reefknot.encoders.transformer import Transformer as Transformer
    from reefknot.encoders.variational_lstm import VariationalLSTM as VariationalLSTM
    from reefknot.errors import ArgumentError as ArgumentError
    from reefknot.errors import DataError as DataError
    from reefknot.errors import NonFiniteError as NonFiniteError
    from reefknot.errors import ReefknotError as ReefknotError
    from reefknot.errors import ResourceError as ResourceError
    from reefknot.errors import SettingsError as SettingsError
    from reefknot.errors import Stopped as Stopped
    from reefknot.inputs.adaptive import AdaptiveLookup as AdaptiveLookup
    from reefknot.inputs.char_cnn import CharCNN as CharCNN
    from reefknot.inputs.lookup import Lookup as Lookup
    from reefknot.kernels.choice import using as using
    from reefknot.kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from reefknot.models.language_model import LanguageModel as LanguageModel
    from reefknot.models.regularisation import RegularisationSettings as RegularisationSettings
    from reefknot.models.skip_gram import SkipGram as SkipGram
    from reefknot.models.translator import Translator as Translator
    from reefknot.opened_vectors import open_vectors as open_vectors
    from reefknot.outputs.adaptive import AdaptiveSoftmax as AdaptiveSoftmax
    from reefknot.outputs.augmented import Augmented as Augmented
    from reefknot.outputs.labels.bilinear import Bilinear as Bilinear
    from reefknot.outputs.labels.drill import Drill as Drill
    from reefknot.outputs.labels.dual import Dual as Dual
    from reefknot.outputs.labels.plain import Plain as Plain
    from reefknot.outputs.labels.projected import Projected as Projected
    from reefknot.outputs.mixture import MixtureOfSoftmaxes as MixtureOfSoftmaxes
    from reefknot.outputs.sampled import SampledSoftmax as SampledSoftmax
    from reefknot.outputs.softmax import Softmax as Softmax
    from reefknot.recipe import load_recipe as load_recipe
    from reefknot.tables import BandedTable as BandedTable
    from reefknot.tables import BandProjections as BandProjections
    from reefknot.tables import WordTable as WordTable
    from reefknot.text.corpora import CorpusSettings as CorpusSettings
    from reefknot.text.dataset import open_dataset as open_dataset
    from reefknot.text.spelling import spell as spell
    from reefknot.text.vocabulary import VocabularySettings as VocabularySettings
    from reefknot.trained_run import open_run as open_run
    from reefknot.vectors.files import read_vectors as read_vectors
    from reefknot.vectors.files import write_vectors as write_vectors
    from reefknot.vectors.word_vectors import WordVectors as WordVectors


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'reefknot' has no attribute '{name}'")
    return getattr(importlib.import_module(f"reefknot.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
