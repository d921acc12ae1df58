"""Parts of small recipes for several tests: a tied LSTM with 8 dimensions, a row without tying, and a translator."""

from pathlib import Path

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


PAIRS = """
title = "Pairs"
[base]
corpus = {{ name = '{folder}', pairs = {{ source = "en", target = "de" }} }}
vocabulary = {{ sides = "separate", bpe = {{ merges = 5 }} }}
tables.words = {{ kind = "word", dim = 8 }}
tables.source = {{ kind = "word", dim = 8 }}
source = {{ kind = "lookup", table = "source" }}
input = {{ kind = "lookup", table = "words" }}
encoder = {{ kind = "encoder_decoder", layers = 1, heads = 2, ffn_dim = 8, dropout = 0.1 }}
output = {{ kind = "softmax", classifier = {{ kind = "plain", table = "words" }} }}
[base.training]
batching = "pairs"
batch = 8
steps = 8
epochs = 1
optimiser = {{ kind = "sgd", learning_rate = 0.1 }}
schedule = {{ kind = "constant" }}
[[rows]]
name = "tied"
"""


def write_pairs_recipe(folder: Path, num_pairs: int = 30) -> Path:
    """Write a parallel text and a recipe of a translator with two vocabularies of sub-words."""
    text = folder / "pairs"
    text.mkdir()
    for split, count in (("train", num_pairs), ("valid", 6), ("test", 6)):
        lines = [f"the dog {number} sees a bird" for number in range(count)]
        (text / f"{split}.en").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (text / f"{split}.de").write_text("\n".join(lines).replace("the", "der") + "\n", encoding="utf-8")
    path = folder / "pairs.toml"
    path.write_text(PAIRS.format(folder=text), encoding="utf-8")
    return path
