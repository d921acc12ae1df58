"""Benchmarks: everything that `reefknot bench` and `reefknot advise` measure.

Each subcommand of `reefknot bench` has a module with a function `measure_all`, which yields one table of measurements
after another:

    heads           output ends: classifiers with their losses
    encoders        LSTM encoders
    steps           complete training steps of language models
    translation     training and decoding of translation models
    skip_gram       skip-gram word vectors

`advise` is the module of `reefknot advise`. The other modules support these: `measure` times and checks a training
step, `problems` and `competitors` define what `heads` compares, and `plain_ends` and `plain_translation` are baselines
in plain torch.
"""
