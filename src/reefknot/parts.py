"""The index of everything a recipe can name: one line per part, and what `reefknot ls` prints.

To add a part, write its file and add its line here; its settings are read off its constructor (see `registry.py`) and
the contract tests pick it up. Nothing is imported until a part is used.
"""

from __future__ import annotations

from reefknot.registry import Registry

TABLES = Registry(
    "tables",
    {
        "word": "reefknot.tables:WordTable",
        "banded": "reefknot.tables:BandedTable",
    },
)

PROJECTIONS = Registry(
    "projections",
    {
        "bands": "reefknot.tables:BandProjections",
    },
)

INPUTS = Registry(
    "inputs",
    {
        "lookup": "reefknot.inputs.lookup:Lookup",
        "adaptive": "reefknot.inputs.adaptive:AdaptiveLookup",
        "char_cnn": "reefknot.inputs.char_cnn:CharCNN",
    },
)

ENCODERS = Registry(
    "encoders",
    {
        "lstm": "reefknot.encoders.stacked:LSTM",
        "gru": "reefknot.encoders.stacked:GRU",
        "rnn": "reefknot.encoders.stacked:RNN",
        "variational_lstm": "reefknot.encoders.variational_lstm:VariationalLSTM",
        "bayesian_lstm": "reefknot.encoders.bayesian_lstm:BayesianLSTM",
        "awd_lstm": "reefknot.encoders.awd_lstm:AWDLSTM",
        "highway": "reefknot.encoders.highway:RecurrentHighway",
        "transformer": "reefknot.encoders.transformer:Transformer",
        "attention_gru": "reefknot.encoders.attention_gru:AttentionGRU",
        "encoder_decoder": "reefknot.encoders.encoder_decoder:EncoderDecoder",
    },
)

LABELS = Registry(
    "labels",
    {
        "plain": "reefknot.outputs.labels.plain:Plain",
        "projected": "reefknot.outputs.labels.projected:Projected",
        "bilinear": "reefknot.outputs.labels.bilinear:Bilinear",
        "dual": "reefknot.outputs.labels.dual:Dual",
        "drill": "reefknot.outputs.labels.drill:Drill",
    },
)

OUTPUTS = Registry(
    "outputs",
    {
        "softmax": "reefknot.outputs.softmax:Softmax",
        "augmented": "reefknot.outputs.augmented:Augmented",
        "adaptive": "reefknot.outputs.adaptive:AdaptiveSoftmax",
        "mixture": "reefknot.outputs.mixture:MixtureOfSoftmaxes",
        "sampled": "reefknot.outputs.sampled:SampledSoftmax",
    },
)

OPTIMISERS = Registry(
    "optimisers",
    {
        "sgd": "reefknot.training.optimisers:SGD",
        "adamw": "reefknot.training.optimisers:AdamW",
        "adam": "reefknot.training.optimisers:Adam",
        "adadelta": "reefknot.training.optimisers:Adadelta",
    },
)

SCHEDULES = Registry(
    "schedules",
    {
        "constant": "reefknot.training.schedules:Constant",
        "decay": "reefknot.training.schedules:Decay",
        "cosine": "reefknot.training.schedules:Cosine",
        "inverse_sqrt": "reefknot.training.schedules:InverseSqrt",
    },
)

WINDOWS = Registry(
    "windows",
    {
        "sliding": "reefknot.evaluation.windows:Sliding",
        "complete": "reefknot.evaluation.windows:Complete",
        "lines": "reefknot.evaluation.windows:Lines",
    },
)

FAMILIES = (TABLES, PROJECTIONS, INPUTS, ENCODERS, LABELS, OUTPUTS, OPTIMISERS, SCHEDULES, WINDOWS)

NOTHING_TO_TIE = (
    "a char-CNN makes its vectors from spellings and holds no table, so there is nothing that classes could share: "
    "give them a table of their own"
)
KEPT_IN_BANDS = (
    "the classes of one softmax are rows of a word table, but this table keeps its words in bands: "
    "use the adaptive output with it, or give these labels a word table"
)
WITHOUT_MEANING: tuple[tuple[dict[str, object], str], ...] = (
    ({"input": "char_cnn", "tied": True}, NOTHING_TO_TIE),
    *(({"input": "adaptive", "output": kind, "tied": True}, KEPT_IN_BANDS) for kind in OUTPUTS if kind != "adaptive"),
)
"""Combinations that have no meaning, as kinds that must all match, and the sentence that building one raises. Every
other combination of an input, labels, an output and a tie works."""
