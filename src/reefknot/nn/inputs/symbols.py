"""Special words of a vocabulary."""

from __future__ import annotations

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
START = "<s>"
PADDING = "<pad>"
"""`PADDING` and `START` occur only in fairseq's dictionaries, never in a text."""
END_OF_WORD = "</w>"
"""Ends the last sub-word of a word."""
