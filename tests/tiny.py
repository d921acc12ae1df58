"""The parts of a small recipe that several tests write: a tied LSTM of width 8, and the row that unties it."""

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
labels = {{ kind = "{labels}", table = "words" }}
"""

UNTIED = """
[[rows]]
name = "untied"
[rows.set]
tables.classes = { kind = "word", dim = 8 }
output.labels.table = "classes"
"""
