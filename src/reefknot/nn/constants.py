"""Special words of a vocabulary, and error messages about parts that cannot be combined.

This module does not import torch, so that the reader of recipes can import it quickly.
"""

from __future__ import annotations

UNKNOWN = "<unk>"
"""Stands for every word that is not in the vocabulary."""
END_OF_LINE = "<eos>"
"""Ends every line of a text."""
START = "<s>"
PADDING = "<pad>"
"""`PADDING` and `START` occur only in fairseq's dictionaries, never in a text."""
END_OF_WORD = "</w>"
"""Ends the last sub-word of a word."""

# Error messages.
NO_TABLE_TO_SHARE = (
    "a char-CNN computes its vectors from spellings and has no table that the classes could share: "
    "give the classes a table of their own"
)
NEEDS_WORD_TABLE = (
    "this classifier needs a word table, but the words of this table are kept in bands: "
    "use the adaptive output with it, or give the classifier a word table"
)
