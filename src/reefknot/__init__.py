"""Reefknot: input embeddings and output classifiers of language models, and how to tie them.

    import reefknot as rk

    words = rk.WordTable(10_000, 200)
    model = rk.LanguageModel(rk.Lookup(words), rk.LSTM(200, 200), rk.Softmax(rk.Plain(words)))   # one table: tied
    model.loss(tokens).mean().backward()

A language model has three stages. The input end turns word ids into vectors, the encoder turns vectors into hidden
states, and the output end, a classifier and its loss, predicts the next word. The two ends are tied if they hold the
same word table (the module with the embeddings).

Tensor names end in their shape: `hidden_ND` is a matrix with N rows and D columns. Most files use these letters, and
each file explains its own:

    B streams (rows of a batch)   T steps   N = B x T tokens   D dimensions   V words or classes

Names are imported when they are first used, so `import reefknot` is fast. The names of the laboratory (`open_run`,
`load_recipe` and others) need the extra `lab`, and `rk.hf`, for Hugging Face models, needs the extra `hf`:
`pip install 'reefknot[lab,hf]'`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Public names and the modules that define them. Type checkers read the imports under TYPE_CHECKING instead.
_MODULE_OF_NAME = {
    "AWDLSTM": "nn.encoders.awd_lstm",
    "AdaptiveLookup": "nn.inputs.adaptive",
    "AdaptiveSoftmax": "nn.outputs.adaptive",
    "ArgumentError": "errors",
    "AttentionGRU": "nn.encoders.attention_gru",
    "Augmented": "nn.outputs.augmented",
    "BandProjections": "nn.tables",
    "BandedTable": "nn.tables",
    "BayesianLSTM": "nn.encoders.bayesian_lstm",
    "Bilinear": "nn.classifiers.bilinear",
    "CharCNN": "nn.inputs.char_cnn",
    "CorpusSettings": "lab.text.corpus",
    "DataError": "errors",
    "Drill": "nn.classifiers.drill",
    "Dual": "nn.classifiers.dual",
    "EncoderDecoder": "nn.encoders.encoder_decoder",
    "GRU": "nn.encoders.stacked",
    "LSTM": "nn.encoders.stacked",
    "LanguageModel": "nn.models.language_model",
    "LinearCrossEntropyLoss": "nn.linear_cross_entropy_loss",
    "Lookup": "nn.inputs.lookup",
    "MixtureOfSoftmaxes": "nn.outputs.mixture",
    "NonFiniteError": "errors",
    "Plain": "nn.classifiers.plain",
    "Projected": "nn.classifiers.projected",
    "RNN": "nn.encoders.stacked",
    "RecurrentHighway": "nn.encoders.highway",
    "ReefknotError": "errors",
    "RegularisationSettings": "nn.models.regularisation",
    "ResourceError": "errors",
    "SampledSoftmax": "nn.outputs.sampled",
    "Scorer": "nn.models.scorer",
    "SettingsError": "errors",
    "SkipGram": "nn.models.skip_gram",
    "Softmax": "nn.outputs.softmax",
    "Stopped": "errors",
    "Transformer": "nn.encoders.transformer",
    "Translator": "nn.models.translator",
    "VariationalLSTM": "nn.encoders.variational_lstm",
    "VocabularySettings": "lab.text.vocabulary_settings",
    "WordTable": "nn.tables",
    "WordVectors": "vectors.word_vectors",
    "linear_cross_entropy": "kernels.linear_cross_entropy",
    "linear_divergence": "kernels.divergence",
    "linear_log_probs": "kernels.log_probs",
    "linear_topk": "kernels.topk",
    "load_recipe": "lab.recipes.recipe",
    "open_dataset": "lab.text.dataset",
    "open_run": "lab.tasks",
    "open_vectors": "lab.tasks.word_vectors",
    "read_vectors": "vectors.files",
    "spell": "nn.inputs.spelling",
    "using": "kernels.choice",
    "write_vectors": "vectors.files",
}

__all__ = sorted(_MODULE_OF_NAME)

if TYPE_CHECKING:
    from reefknot import hf as hf
    from reefknot.errors import ArgumentError as ArgumentError
    from reefknot.errors import DataError as DataError
    from reefknot.errors import NonFiniteError as NonFiniteError
    from reefknot.errors import ReefknotError as ReefknotError
    from reefknot.errors import ResourceError as ResourceError
    from reefknot.errors import SettingsError as SettingsError
    from reefknot.errors import Stopped as Stopped
    from reefknot.kernels.choice import using as using
    from reefknot.kernels.divergence import linear_divergence as linear_divergence
    from reefknot.kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from reefknot.kernels.log_probs import linear_log_probs as linear_log_probs
    from reefknot.kernels.topk import linear_topk as linear_topk
    from reefknot.lab.recipes.recipe import load_recipe as load_recipe
    from reefknot.lab.tasks import open_run as open_run
    from reefknot.lab.tasks.word_vectors import open_vectors as open_vectors
    from reefknot.lab.text.corpus import CorpusSettings as CorpusSettings
    from reefknot.lab.text.dataset import open_dataset as open_dataset
    from reefknot.lab.text.vocabulary_settings import VocabularySettings as VocabularySettings
    from reefknot.nn.classifiers.bilinear import Bilinear as Bilinear
    from reefknot.nn.classifiers.drill import Drill as Drill
    from reefknot.nn.classifiers.dual import Dual as Dual
    from reefknot.nn.classifiers.plain import Plain as Plain
    from reefknot.nn.classifiers.projected import Projected as Projected
    from reefknot.nn.encoders.attention_gru import AttentionGRU as AttentionGRU
    from reefknot.nn.encoders.awd_lstm import AWDLSTM as AWDLSTM
    from reefknot.nn.encoders.bayesian_lstm import BayesianLSTM as BayesianLSTM
    from reefknot.nn.encoders.encoder_decoder import EncoderDecoder as EncoderDecoder
    from reefknot.nn.encoders.highway import RecurrentHighway as RecurrentHighway
    from reefknot.nn.encoders.stacked import GRU as GRU
    from reefknot.nn.encoders.stacked import LSTM as LSTM
    from reefknot.nn.encoders.stacked import RNN as RNN
    from reefknot.nn.encoders.transformer import Transformer as Transformer
    from reefknot.nn.encoders.variational_lstm import VariationalLSTM as VariationalLSTM
    from reefknot.nn.inputs.adaptive import AdaptiveLookup as AdaptiveLookup
    from reefknot.nn.inputs.char_cnn import CharCNN as CharCNN
    from reefknot.nn.inputs.lookup import Lookup as Lookup
    from reefknot.nn.inputs.spelling import spell as spell
    from reefknot.nn.linear_cross_entropy_loss import LinearCrossEntropyLoss as LinearCrossEntropyLoss
    from reefknot.nn.models.language_model import LanguageModel as LanguageModel
    from reefknot.nn.models.regularisation import RegularisationSettings as RegularisationSettings
    from reefknot.nn.models.scorer import Scorer as Scorer
    from reefknot.nn.models.skip_gram import SkipGram as SkipGram
    from reefknot.nn.models.translator import Translator as Translator
    from reefknot.nn.outputs.adaptive import AdaptiveSoftmax as AdaptiveSoftmax
    from reefknot.nn.outputs.augmented import Augmented as Augmented
    from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes as MixtureOfSoftmaxes
    from reefknot.nn.outputs.sampled import SampledSoftmax as SampledSoftmax
    from reefknot.nn.outputs.softmax import Softmax as Softmax
    from reefknot.nn.tables import BandedTable as BandedTable
    from reefknot.nn.tables import BandProjections as BandProjections
    from reefknot.nn.tables import WordTable as WordTable
    from reefknot.vectors.files import read_vectors as read_vectors
    from reefknot.vectors.files import write_vectors as write_vectors
    from reefknot.vectors.word_vectors import WordVectors as WordVectors


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "hf":
        return importlib.import_module("reefknot.hf")
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'reefknot' has no attribute '{name}'")
    module = importlib.import_module(f"reefknot.{_MODULE_OF_NAME[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    """Return the public names, for tab completion."""
    return __all__
