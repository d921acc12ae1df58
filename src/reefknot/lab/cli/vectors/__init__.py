"""`reefknot vectors`: a group of verbs (subcommands) that read the word vectors of runs and of files."""

from __future__ import annotations

HELP = """Inspect, compare and export word vectors.

The vectors are the tables of a run (one table for the input and one for the output, or a tied table for both), or the
vectors in a file.
"""

EXAMPLES = """\b
Examples:
  reefknot vectors neighbors runs/demo/untied/seed0 file string
  reefknot vectors analogy vectors.txt man king woman
  reefknot vectors similarity runs/demo/untied/seed0 vectors.txt --data DIR
  reefknot vectors export runs/demo/tied/seed0 --format word2vec -o demo.vec
"""

VERBS = ("neighbors", "analogy", "similarity", "export")
