"""Error messages about ends that cannot be combined. Importing this module does not import torch."""

from __future__ import annotations

NOTHING_TO_TIE = (
    "a char-CNN computes its vectors from spellings and has no table that the classes could share: "
    "give the classes a table of their own"
)
KEPT_IN_BANDS = (
    "this classifier needs a word table, but the words of this table are kept in bands: "
    "use the adaptive output with it, or give the classifier a word table"
)
