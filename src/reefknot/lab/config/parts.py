"""The index of all parts that a recipe can name, one line each; `reefknot ls` prints it.

To add a part, write its file and add its line here. Its settings are derived from its constructor (see `registry.py`),
and the contract tests cover it. Nothing is imported until a part is used.
"""

from __future__ import annotations

from reefknot.lab.config.registry import Registry
from reefknot.nn.constants import KEPT_IN_BANDS, NOTHING_TO_TIE

SHARED = {
    "reefknot.nn.tables:WordTable": "tables",
    "reefknot.nn.tables:BandedTable": "tables",
    "reefknot.nn.tables:BandProjections": "projections",
}
"""The classes whose objects several parts may hold. Each object has a name in a section of the recipe."""

TABLES = Registry(
    "tables",
    {
        "word": "reefknot.nn.tables:WordTable",
        "banded": "reefknot.nn.tables:BandedTable",
    },
    added={"word": "reefknot.lab.tasks.initialisation:TableStart"},
)

PROJECTIONS = Registry(
    "projections",
    {
        "bands": "reefknot.nn.tables:BandProjections",
    },
    shared=SHARED,
)

INPUTS = Registry(
    "inputs",
    {
        "lookup": "reefknot.nn.inputs.lookup:Lookup",
        "adaptive": "reefknot.nn.inputs.adaptive:AdaptiveLookup",
        "char_cnn": "reefknot.nn.inputs.char_cnn:CharCNN",
    },
    shared=SHARED,
)

ENCODERS = Registry(
    "encoders",
    {
        "lstm": "reefknot.nn.encoders.stacked:LSTM",
        "gru": "reefknot.nn.encoders.stacked:GRU",
        "rnn": "reefknot.nn.encoders.stacked:RNN",
        "variational_lstm": "reefknot.nn.encoders.variational_lstm:VariationalLSTM",
        "bayesian_lstm": "reefknot.nn.encoders.bayesian_lstm:BayesianLSTM",
        "awd_lstm": "reefknot.nn.encoders.awd_lstm:AWDLSTM",
        "highway": "reefknot.nn.encoders.highway:RecurrentHighway",
        "transformer": "reefknot.nn.encoders.transformer:Transformer",
        "attention_gru": "reefknot.nn.encoders.attention_gru:AttentionGRU",
        "encoder_decoder": "reefknot.nn.encoders.encoder_decoder:EncoderDecoder",
    },
)

CLASSIFIERS = Registry(
    "classifiers",
    {
        "plain": "reefknot.nn.classifiers.plain:Plain",
        "projected": "reefknot.nn.classifiers.projected:Projected",
        "bilinear": "reefknot.nn.classifiers.bilinear:Bilinear",
        "dual": "reefknot.nn.classifiers.dual:Dual",
        "drill": "reefknot.nn.classifiers.drill:Drill",
    },
    shared=SHARED,
)

OUTPUTS = Registry(
    "outputs",
    {
        "softmax": "reefknot.nn.outputs.softmax:Softmax",
        "augmented": "reefknot.nn.outputs.augmented:Augmented",
        "adaptive": "reefknot.nn.outputs.adaptive:AdaptiveSoftmax",
        "mixture": "reefknot.nn.outputs.mixture:MixtureOfSoftmaxes",
        "sampled": "reefknot.nn.outputs.sampled:SampledSoftmax",
    },
    nested={"reefknot.nn.classifiers.contract:Classifier": CLASSIFIERS},
    shared=SHARED,
    scopes={
        "adaptive": "reefknot.lab.config.scopes:one_classifier_per_band",
        "mixture": "reefknot.lab.config.scopes:latent_as_context",
    },
)

OPTIMISERS = Registry(
    "optimisers",
    {
        "sgd": "reefknot.lab.training.optimisers:SGD",
        "adamw": "reefknot.lab.training.optimisers:AdamW",
        "adam": "reefknot.lab.training.optimisers:Adam",
        "adadelta": "reefknot.lab.training.optimisers:Adadelta",
    },
)

SCHEDULES = Registry(
    "schedules",
    {
        "constant": "reefknot.lab.training.schedules:Constant",
        "decay": "reefknot.lab.training.schedules:Decay",
        "cosine": "reefknot.lab.training.schedules:Cosine",
        "inverse_sqrt": "reefknot.lab.training.schedules:InverseSqrt",
    },
)

WINDOWS = Registry(
    "windows",
    {
        "sliding": "reefknot.lab.evaluation.windows:Sliding",
        "complete": "reefknot.lab.evaluation.windows:Complete",
        "lines": "reefknot.lab.evaluation.windows:Lines",
    },
)

VALUES = {
    "evaluation.protocol": {
        "definition": "every token counts, as `reefknot evaluate` says",
        "zaremba": "also as Zaremba et al. (2014) count: validation in the streams and whole windows of training",
        "awd": "also as the AWD-LSTM's program counts: validation in 10 streams, divided by their first tokens too",
    },
    "training.averaging.start": {
        "nonmonotone": "once a validation loss is worse than the best of more than `interval` validations ago",
        "at_once": "from the first step, as a finetuned AWD-LSTM does",
    },
    "training.stop.rule": {
        "nonmonotone": "once a validation loss is worse than the best of more than `interval` validations ago",
        "patience": "once `interval` validations have not improved on the best",
    },
}
"""Settings with a fixed set of values that are not parts, and the meaning of each value."""


def describe_values(setting: str) -> str:
    """Return the description of such a setting, for its field."""
    return "; ".join(f"{value}: {meaning}" for value, meaning in VALUES[setting].items())


FAMILIES = (TABLES, PROJECTIONS, INPUTS, ENCODERS, CLASSIFIERS, OUTPUTS, OPTIMISERS, SCHEDULES, WINDOWS)

WITHOUT_MEANING: tuple[tuple[dict[str, object], str], ...] = (
    ({"input": "char_cnn", "tied": True}, NOTHING_TO_TIE),
    *(({"input": "adaptive", "output": kind, "tied": True}, KEPT_IN_BANDS) for kind in OUTPUTS if kind != "adaptive"),
)
"""Combinations that cannot be built: the kinds that must all match, and the message of the error. Every other
combination of an input, a classifier, an output and a tie works."""
