"""The list of all parts (components of an experiment) that a recipe can choose by a `kind`.

In a recipe, `encoder.kind = "lstm"` means the class `LSTM`. Each family of parts, such as `ENCODERS`, is a `Registry`
(see `registry.py`), which derives the settings of a part from its constructor. `reefknot ls` prints the list. To add a
part, write its class and add one line here; the contract tests then cover it. A part is imported when it is first used.

Words used below:

    input end      turns token ids into vectors            output end   computes the distribution and the loss
    encoder        turns vectors into hidden states        classifier   has the vectors of the output classes
    table          the parameters of every word            band         a group of words of similar frequency
    window         the tokens that are scored at once      tied         input and output end share one table
"""

from __future__ import annotations

from reefknot.lab.config.registry import Registry
from reefknot.nn.constants import NEEDS_WORD_TABLE, NO_TABLE_TO_SHARE

SHARED = {
    "reefknot.nn.tables:WordTable": "tables",
    "reefknot.nn.tables:BandedTable": "tables",
    "reefknot.nn.tables:BandProjections": "projections",
}
"""Classes whose objects several parts can share, such as tied ends. The value is the section of the recipe that names
these objects."""

TABLES = Registry(
    "tables",
    {
        "word": "reefknot.nn.tables:WordTable",
        "banded": "reefknot.nn.tables:BandedTable",
    },
    extra_settings={"word": "reefknot.lab.tasks.initialisation:TableFileSettings"},
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

SETTING_CHOICES = {
    "evaluation.protocol": {
        "definition": "Score every token, as `reefknot evaluate` does.",
        "zaremba": "Also score like Zaremba et al. (2014): validation in the streams and whole windows of training.",
        "awd": "Also score like AWD-LSTM's code: validation in 10 streams; first tokens count in the divisor only.",
    },
    "training.averaging.start": {
        "nonmonotone": "Start when a validation loss is worse than the best before the last `interval` validations.",
        "at_once": "Start at the first step, as in the finetuning of AWD-LSTM.",
    },
    "training.stop.rule": {
        "nonmonotone": "Stop when a validation loss is worse than the best one before the last `interval` validations.",
        "patience": "Stop when `interval` validations in a row have not improved on the best loss.",
    },
}
"""Settings with a fixed set of values that are not parts, and the meaning of each value."""


def describe_choices(setting: str) -> str:
    """Return a description of a setting in `SETTING_CHOICES`: its possible values and their meanings."""
    meaning_by_value = SETTING_CHOICES[setting]
    return " ".join(f"{value}: {meaning}" for value, meaning in meaning_by_value.items())


FAMILIES = (TABLES, PROJECTIONS, INPUTS, ENCODERS, CLASSIFIERS, OUTPUTS, OPTIMISERS, SCHEDULES, WINDOWS)
"""The registries of all families."""

UNSUPPORTED_COMBINATIONS: tuple[tuple[dict[str, object], str], ...] = (
    ({"input": "char_cnn", "tied": True}, NO_TABLE_TO_SHARE),
    *(
        ({"input": "adaptive", "output": output_kind, "tied": True}, NEEDS_WORD_TABLE)
        for output_kind in OUTPUTS
        if output_kind != "adaptive"
    ),
)
"""Combinations of parts that cannot be built. Each entry pairs some choices with an error message: a combination that
matches all of the choices is rejected. Every other combination of input, classifier and output works, tied or not."""
