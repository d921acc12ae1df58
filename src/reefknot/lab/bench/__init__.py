"""Benchmarks: everything that `reefknot bench` and `reefknot advise` measure.

Each verb has a module with a function `measure_all` that yields tables: `heads` (output ends), `encoders`, `steps`
(complete training steps), `translation` and `skip_gram`. `advise` is the module of `reefknot advise`. The others
support them: `measure` times and checks a step, `problems` and `competitors` define what `heads` compares, and
`plain_ends` and `plain_translation` are baselines in plain torch.
"""
