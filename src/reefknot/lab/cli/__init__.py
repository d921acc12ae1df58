"""The command line. `main.py` is the entry point.

Every verb (subcommand) has its own file: `train.py` is `reefknot train`. Verbs import heavy modules, such as torch,
inside their functions, so that `reefknot --help` is fast and mistakes in the arguments are reported at once.
"""
