"""Turn tokens into ordinary text again, by the rules of Moses: `yes , it is .` becomes `yes, it is.`.

A model trained on tokenised text produces tokens: a comma is separated from its word, and a quotation mark may be
`&quot;`. The rules come from the optional package sacremoses. They depend on the language; the English rules are used
for unknown languages.
"""

from __future__ import annotations

from collections.abc import Callable

from reefknot.errors import SettingsError


def build_detokenizer(language: str) -> Callable[[str], str]:
    """Return a function that detokenises a line of tokens separated by spaces."""
    try:
        from sacremoses import MosesDetokenizer
    except ImportError as error:
        raise SettingsError(
            "detokenising needs sacremoses, which is not installed: pip install 'reefknot[moses]'"
        ) from error
    moses = MosesDetokenizer(lang=language)

    def detokenize(line: str) -> str:
        detokenized_line: str = moses.detokenize(line.split(" "))
        return detokenized_line

    return detokenize
