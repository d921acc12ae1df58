"""`reefknot bench`: a group of verbs (subcommands) that measure reefknot and other implementations on this machine."""

from __future__ import annotations

HELP = "Measure the speed and memory of reefknot and of other implementations, on this machine."

EXAMPLES = """\b
Examples:
  reefknot bench heads --end plain --shape 2048,256,50000 --competitor reefknot --competitor eager
  reefknot bench encoders --shape 20,35,200-200-200
  reefknot bench steps press2017/table6 --data DIR
  reefknot bench translation --data DIR
  reefknot bench skip-gram --workers 1,2 --data DIR
  reefknot bench models --model qwen2.5-0.5b --largest 256
"""

VERBS = ("heads", "encoders", "steps", "translation", "skip-gram", "models")
