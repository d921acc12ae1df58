"""Words for tests of the formats of word vectors: every format can store `PLAIN`, only some can store `STRANGE`."""

from __future__ import annotations

PLAIN = (
    "the",
    "</s>",
    "<unk>",
    "caf\u00e9",
    "日本",
    "1",
    "-0.5",
    "a\u00a0b",
    "\x01\x7f",
    "\x85",
    "\u2028",
    "back\\slash",
    "\U0001f600",
    '"',
)
STRANGE = ("a b", " ", "a\tb", "a\nb", "\n", "a\rb", "", "\ufeff", "\x0b", "a\x0bb")
