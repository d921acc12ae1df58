"""Turn tokens into ordinary text again, by the rules of Moses: `yes , it is .` becomes `yes, it is.`.

A model trained on tokenised text produces tokens: a comma is separated from its word, and a quotation mark may be
`&quot;`. The rules come from the optional package sacremoses. They depend on the language; the English rules are used
for unknown languages.
"""

from __future__ import annotations

from collections.abc import Callable

from reefknot.extras import import_extra


def build_detokenizer(language: str) -> Callable[[str], str]:
    """Return a function that detokenises a line of tokens separated by spaces."""
    moses = import_extra("sacremoses", "detokenising").MosesDetokenizer(lang=language)

    def detokenize(line: str) -> str:
        detokenized_line: str = moses.detokenize(line.split(" "))
        return detokenized_line

    return detokenize
