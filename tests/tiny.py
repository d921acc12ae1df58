"""Parts of a small recipe for several tests: a tied LSTM with 8 dimensions, and a row without tying."""

PATIENCE = 240
"""Seconds to wait for another process. A busy machine may take a minute to start one."""

MODEL = """
[base.corpus]
name = {corpus}

[base.tables.words]
kind = "word"
dim = 8

[base.input]
kind = "lookup"
table = "words"

[base.encoder]
kind = "lstm"
hidden_dim = 8
layers = {layers}
dropout = {dropout}

[base.output]
kind = "softmax"
classifier = {{ kind = "{classifier}", table = "words" }}
"""

UNTIED = """
[[rows]]
name = "untied"
[rows.set]
tables.classes = { kind = "word", dim = 8 }
output.classifier.table = "classes"
"""

DROPOUT_SETTINGS = {
    "lstm": "hidden_dim = 8, dropout = 0.3",
    "gru": "hidden_dim = 8, dropout = 0.3",
    "rnn": "hidden_dim = 8, dropout = 0.3",
    "variational_lstm": "hidden_dim = 8, dropout = 0.3, dropout_input = 0.2",
    "bayesian_lstm": "hidden_dim = 8, dropout_input = 0.2, dropout_hidden = 0.3, dropout_output = 0.4",
    "awd_lstm": "hidden_dim = 12, dropout_input = 0.2, dropout_hidden = 0.3, dropout_output = 0.4, weight_drop = 0.5",
    "highway": "hidden_dim = 8, depth = 2, dropout_input = 0.2, dropout_hidden = 0.3, dropout_output = 0.4",
    "transformer": "layers = 2, heads = 2, ffn_dim = 12, dropout = 0.3, dropout_attention = 0.2, dropout_relu = 0.4",
}
"""Settings of every encoder that fit the recipe above, with all kinds of dropout."""


def encoder(kind: str) -> str:
    """Return the override that uses this encoder."""
    return f'encoder={{kind = "{kind}", {DROPOUT_SETTINGS[kind]}}}'
