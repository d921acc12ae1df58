"""The command line, `reefknot VERB`. `main.py` is the entry point.

Every verb (subcommand) has its own file: `train.py` is `reefknot train`, and `bench/heads.py` is
`reefknot bench heads`. `options.py` has the arguments and options that several verbs share. Verbs import heavy modules,
such as torch, inside their functions, so that `reefknot --help` is fast and mistakes in the arguments are reported at
once.
"""
