"""Words that stand for something other than themselves, as they are written in a vocabulary."""

from __future__ import annotations

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
START = "<s>"
PADDING = "<pad>"
"""This and `START` are in fairseq's dictionaries only; no text here uses them."""
END_OF_WORD = "</w>"
"""Closes the last piece of a word that is cut into pieces."""
