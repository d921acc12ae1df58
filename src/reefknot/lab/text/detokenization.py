"""Words and marks of punctuation put back together, as a person writes them, by the rules of Moses.

A translator of tokenised text writes tokens: a comma stands apart from its word, a quotation mark may be `&quot;`. The
rules are sacremoses' own, an extra; they depend on the language, and unknown ones take those of English.
"""

from __future__ import annotations

from collections.abc import Callable

from reefknot.errors import SettingsError


def detokenizer(language: str) -> Callable[[str], str]:
    """What puts the tokens of a line together; blanks part them."""
    try:
        from sacremoses import MosesDetokenizer
    except ImportError as error:
        raise SettingsError(
            "detokenising needs sacremoses, which is not here: pip install 'reefknot[moses]'"
        ) from error
    joined = MosesDetokenizer(lang=language).detokenize

    def put_together(line: str) -> str:
        text: str = joined(line.split(" "))
        return text

    return put_together
