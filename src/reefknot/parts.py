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
    },
)

INPUTS = Registry(
    "inputs",
    {
        "lookup": "reefknot.inputs.lookup:Lookup",
    },
)

ENCODERS = Registry(
    "encoders",
    {
        "lstm": "reefknot.encoders.lstm:LSTM",
    },
)

LABELS = Registry(
    "labels",
    {
        "plain": "reefknot.outputs.labels.plain:Plain",
        "projected": "reefknot.outputs.labels.projected:Projected",
    },
)

OUTPUTS = Registry(
    "outputs",
    {
        "softmax": "reefknot.outputs.softmax:Softmax",
    },
)

OPTIMISERS = Registry(
    "optimisers",
    {
        "sgd": "reefknot.training.optimisers:sgd",
    },
)

SCHEDULES = Registry(
    "schedules",
    {
        "constant": "reefknot.training.schedules:Constant",
        "decay": "reefknot.training.schedules:Decay",
    },
)

FAMILIES = (TABLES, INPUTS, ENCODERS, LABELS, OUTPUTS, OPTIMISERS, SCHEDULES)
